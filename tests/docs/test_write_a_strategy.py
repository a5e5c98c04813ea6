"""The distribution in docs/how-to/write-a-strategy.md, installed: found, and right by the kit."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "write-a-strategy.md"
FILE = re.compile(r"^`([\w./]+)`:\n\n```[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def distribution(tmp_path, install):
    """The page's files below a folder, and the environment of a process that has it installed."""
    files = dict(FILE.findall(PAGE.read_text()))
    for name, text in files.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    project = tomllib.loads(files["pyproject.toml"])["project"]
    site = install(
        project["name"],
        version=project["version"],
        requires=project["dependencies"],
        entry_points=project["entry-points"],
        modules={
            name.removeprefix("src/").removesuffix(".py").replace("/", "."): text
            for name, text in files.items()
            if name.startswith("src/")
        },
    )
    return tmp_path / "project", {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}


def run(arguments, folder, environment):
    ran = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_it_is_listed_without_being_imported(distribution):
    script = """
import sys, polyshard
average = polyshard.available_strategies()["average"]
print(average.origin, average.aliases, average.summary, average.problem)
print(polyshard.resolve_config("avg"))
assert "torch" not in sys.modules and "polyshard_average.plugin" not in sys.modules
"""
    assert run(["-c", script], *distribution).splitlines() == [
        "polyshard-average 1.0 ('avg',) Average each gradient over the ranks as soon as it is "
        "complete. None",
        "AverageConfig(reduce_dtype='bfloat16')",
    ]


def test_it_passes_the_kit(distribution):
    output = run(["-m", "pytest", "-q", "--world-size", "2"], *distribution)
    assert re.search(r"\d{3} passed", output)
