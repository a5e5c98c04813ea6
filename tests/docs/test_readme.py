"""README.md: its training script trains what it says, and its commands and table hold."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

from polyshard import FSDP2Config

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EVIDENCE = (ROOT / "docs" / "explanation" / "compared-with.md").read_text(encoding="utf-8")
COMMAND = re.compile(r"^python3 -m venv .*$", re.MULTILINE)

SEED = "import os, torch\ntorch.manual_seed(int(os.environ['RANK']))\n"
# gloo now and then aborts a process that leaves its group by exiting.
SAVE = """
rank = torch.distributed.get_rank()
assert bool(state) == (rank == 0)
if rank == 0:
    torch.save(state, "state.pt")
torch.distributed.barrier()
os._exit(0)
"""
FULL_PRECISION = {"strategy": "fsdp2", "mp_policy": None}


def _script() -> str:
    return re.search(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)[1]


def _train(source: str, folder: Path, processes: int) -> dict[str, torch.Tensor]:
    """Run the script under torchrun, each rank with its number as seed; return what it saved."""
    script = folder / "script.py"
    script.write_text(SEED + source + SAVE)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    ran = subprocess.run(
        [sys.executable, *torchrun, script],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    return torch.load(folder / "state.pt")


def _train_in_plain_torch(ranks: int) -> dict[str, torch.Tensor]:
    """Train the script's model on the batches of all ranks, in this process."""
    models, batches = [], []
    for rank in range(ranks):
        with torch.random.fork_rng():
            torch.manual_seed(rank)
            models.append(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
            batches.append([torch.randn(4, 8) for _ in range(10)])
    model = models[0]
    optimizer = torch.optim.AdamW(model.parameters())
    for parts in zip(*batches, strict=True):
        model(torch.cat(parts)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.strategy("fsdp2")
@pytest.mark.parametrize("processes", [1, 2])
def test_the_training_script_runs_as_it_stands(tmp_path, processes):
    state = _train(_script(), tmp_path, processes)
    expected = _train_in_plain_torch(processes)
    assert {name: (value.shape, value.dtype) for name, value in state.items()} == {
        name: (value.shape, value.dtype) for name, value in expected.items()
    }


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("ddp", marks=pytest.mark.strategy("ddp")),
        pytest.param(FULL_PRECISION, marks=pytest.mark.strategy("fsdp2"), id="fsdp2"),
        pytest.param("megatron_fsdp", marks=pytest.mark.strategy("megatron_fsdp")),
    ],
)
def test_every_strategy_trains_the_weights_of_plain_torch(tmp_path, strategy, processes):
    source = _script()
    assert source.count('build("fsdp2")') == 1
    source = source.replace('build("fsdp2")', f"build({strategy!r})")
    state = _train(source, tmp_path, processes)
    expected = _train_in_plain_torch(processes)
    assert list(state) == list(expected)
    for name, value in expected.items():
        # AdamW makes larger steps of rounding where a gradient is close to zero.
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-5, msg=name)


def test_it_says_whose_default_precision_is_lower():
    assert ('`"fsdp2"` computes in bfloat16' in README) == (FSDP2Config().mp_policy is not None)
    assert ('"mp_policy": None' in README) == (FSDP2Config().mp_policy is not None)


def _sessions() -> set[str]:
    """Return the names of the sessions in noxfile.py; nox itself is not among the tests' needs."""
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any("nox.session" in ast.unparse(decorator) for decorator in node.decorator_list)
    }


def _steps(command: str) -> list[list[str]]:
    """Return the programs of a command line with their arguments."""
    return [shlex.split(step) for step in command.split(" && ")]


def test_each_command_makes_the_environment_that_it_uses():
    commands = COMMAND.findall(README)
    assert len(commands) == 2
    for command in commands:
        (*venv, folder), *others = _steps(command)
        assert venv == ["python3", "-m", "venv"]
        assert {str(Path(program).parent) for program, *_ in others} == {f"{folder}/bin"}
        ignored = (ROOT / ".gitignore").read_text().splitlines()
        assert f"{folder.split('/')[0]}/" in ignored


def test_the_install_command_names_what_is_here():
    install, _ = COMMAND.findall(README)
    _, (program, verb, option, constraints, core, plugin) = _steps(install)
    assert (Path(program).name, verb, option) == ("pip", "install", "-c")
    assert (ROOT / constraints).is_file()
    assert (ROOT / plugin / "pyproject.toml").is_file()
    where, extras = re.fullmatch(r"(.+)\[(.+)\]", core).groups()
    project = tomllib.loads((ROOT / where / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])


def test_the_test_command_runs_a_session_and_ci_runs_the_command():
    _, test = COMMAND.findall(README)
    _, install, nox = _steps(test)
    assert [Path(install[0]).name, *install[1:]] == ["pip", "install", "nox"]
    assert [Path(nox[0]).name, nox[1]] == ["nox", "-s"]
    assert nox[2:] == ["tests"]
    assert set(nox[2:]) <= _sessions()
    assert f"uvx {shlex.join(['nox', *nox[1:]])}" in README
    assert test in (ROOT / ".ci" / "run").read_text().splitlines()


def _table() -> tuple[list[str], list[list[str]]]:
    """Return the headings of the comparison with other libraries, and its rows."""
    section = README.split("\n## Beside other libraries\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    headings, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return headings[1:], rows


def test_the_page_of_evidence_has_every_cell_of_the_table_and_no_other():
    libraries, rows = _table()
    assert all(f"| {library} |" in EVIDENCE for library in libraries)
    names = [library.rsplit(" ", 1)[0] for library in libraries]
    filled = {
        row[0]: [name for name, cell in zip(names, row[1:], strict=True) if cell] for row in rows
    }
    sections = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", EVIDENCE, re.MULTILINE | re.DOTALL)
    shown = {
        heading: re.findall(r"^- \*\*(.+?)\*\*: ", body, re.MULTILINE)
        for heading, body in sections
        if heading != "What was read"
    }
    assert shown == filled
