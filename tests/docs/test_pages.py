"""The documentation: its Python examples run, and its links lead to files.

The examples of a page are one script, run in one process, or on two ranks if it starts a process
group. An example that cannot stand alone is fenced as ``python no-run`` and need only compile.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("plugins/*/*.md")])
FENCE = re.compile(r"^```python( no-run)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# gloo now and then aborts a process that leaves its group by exiting.
SAFE_END = "\nimport os\ntorch.distributed.barrier()\nos._exit(0)\n"
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)")


def _id(page):
    return str(page.relative_to(ROOT))


def _script(page, *, to_run):
    """Return a page's examples as one source whose line numbers are those of the page."""
    text = page.read_text()
    script = ""
    for fence in FENCE.finditer(text):
        if not (to_run and fence[1]):
            above = text.count("\n", 0, fence.start(2))
            script += "\n" * (above - script.count("\n")) + fence[2]
    return script


def _marks(page):
    """Mark a page whose examples need more than the core."""
    needs_plugin = "megatron_fsdp" in _script(page, to_run=False)
    return pytest.mark.strategy("megatron_fsdp") if needs_plugin else ()


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=_marks(page), id=_id(page))
        for page in PAGES
        if FENCE.search(page.read_text())
    ],
)
def test_examples_run(page, tmp_path):
    compile(_script(page, to_run=False), page, "exec")
    source = _script(page, to_run=True)
    command = [sys.executable]
    if "init_process_group" in source:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        source += SAFE_END
    script = tmp_path / f"{page.stem}.py"
    script.write_text(source)
    ran = subprocess.run(
        [*command, script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_links_lead_to_files(page):
    links = LINK.findall(page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []
