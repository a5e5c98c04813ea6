"""``polyshard config`` shows where values come from, and what a file may hold."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from polyshard.config.files import read_config
from polyshard.training.config import TrainingConfig

Polyshard = Callable[..., "subprocess.CompletedProcess[str]"]
Install = Callable[..., Path]

FILE = """\
distributed:
  strategy: fsdp
  mp_policy:
    param_dtype: fp16
  tp_plan:
    blocks.*.up: colwise
optimizer:
  lr: 1e-5
max_grad_norm: none
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(FILE)
    return path


def test_show_tells_the_origin_of_every_value(polyshard: Polyshard, file: Path) -> None:
    ran = polyshard(
        "config", "show", "run.yaml", "optimizer.name=adamw", "distributed.tp_plan=none"
    )
    assert ran.returncode == 0, ran.stderr
    shown = [" ".join(line.split()) for line in ran.stdout.splitlines()]
    for line in (
        'strategy: "fsdp2" # run.yaml:2',
        'param_dtype: "float16" # run.yaml:4',
        'reduce_dtype: "float32" # default',
        "tp_plan: null # command line",
        'name: "adamw" # command line',
        "lr: 1e-05 # run.yaml:8",
        "max_grad_norm: null # run.yaml:9",
        "steps: 20 # default",
    ):
        assert line in shown


@pytest.mark.parametrize("place", ["distributed", "parallelism"])
def test_show_takes_sizes_in_both_places(polyshard: Polyshard, file: Path, place: str) -> None:
    file.write_text("distributed: fsdp2\n")
    ran = polyshard("config", "show", "run.yaml", f"{place}.tp_size=2")
    assert ran.returncode == 0, ran.stderr
    shown = [" ".join(line.split()) for line in ran.stdout.splitlines()]
    assert {'strategy: "fsdp2" # run.yaml:1', "tp_size: 2 # command line"} <= {*shown}
    assert "dp_size: null # default" in shown


def test_what_show_prints_is_a_file_with_the_same_values(polyshard: Polyshard, file: Path) -> None:
    shown = file.with_name("shown.yaml")
    shown.write_text(polyshard("config", "show", file, "data.path='#1: a'").stdout)
    assert '"blocks.*.up": "colwise"' in shown.read_text()
    expected = read_config(file).assign(["data.path='#1: a'"]).structure(TrainingConfig)
    assert read_config(shown).structure(TrainingConfig) == expected


def test_nothing_but_file_and_command_line_sets_a_value(
    polyshard: Polyshard, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No settings that lie where programs look for some, and no variable of the environment."""
    expected = polyshard("config", "show", "run.yaml").stdout
    home = file.parent / "home"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / ".config"))
    for folder in (file.parent, home, home / ".config", home / ".config" / "polyshard"):
        folder.mkdir(exist_ok=True)
        for name in ("polyshard", ".polyshard", "config", "default", "defaults"):
            (folder / f"{name}.yaml").write_text("distributed: ddp\nsteps: 7\n")
            (folder / f"{name}.toml").write_text("steps = 7\n")
    (file.parent / "pyproject.toml").write_text("[tool.polyshard]\nsteps = 7\n")
    for name in ("STEPS", "POLYSHARD_STEPS", "POLYSHARD_TRAIN_STEPS", "POLYSHARD__STEPS"):
        monkeypatch.setenv(name, "7")
    for name in ("POLYSHARD_CONFIG", "POLYSHARD_CONFIG_FILE", "POLYSHARD_CONFIG_SHOW_CONFIG_FILE"):
        monkeypatch.setenv(name, str(file.parent / "polyshard.yaml"))
    monkeypatch.setenv("POLYSHARD_CONFIG_SHOW_ASSIGNMENTS", "steps=7")
    shown = polyshard("config", "show", "run.yaml")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout == expected
    assert polyshard("config", "show").returncode == 2, (
        "expected no file to stand for a missing one"
    )


@pytest.mark.parametrize(
    ("assignment", "problem"),
    [
        ("distributed.tp_sise=2", "command line: distributed.tp_sise: FSDP2Config"),
        ("optimizer.lr=fast", "command line: optimizer.lr: "),
        ("steps", "expected key=value"),
    ],
)
def test_show_checks_the_file(
    polyshard: Polyshard, file: Path, assignment: str, problem: str
) -> None:
    ran = polyshard("config", "show", file, assignment)
    assert ran.returncode == 2
    assert problem in ran.stderr
    assert ran.stdout == ""


def test_the_schema_describes_each_strategy_that_works(
    polyshard: Polyshard, install: Install, file: Path
) -> None:
    broken = install(
        "acme",
        modules={"acme": "import no_such_module"},
        entry_points={
            "polyshard.strategies": {"acme": "acme"},
            "polyshard.configs": {"acme": "acme:Config"},
        },
    )
    ran = polyshard("config", "schema", path=(broken,))
    assert ran.returncode == 0, ran.stderr
    assert "warning: left out: strategy 'acme' (acme 1.0) cannot be loaded" in ran.stderr
    schema = json.loads(ran.stdout)
    assert {"DDPConfig", "FSDP2Config"} <= schema["$defs"].keys()
    assert Draft202012Validator(schema).is_valid(read_config(file).values)
    assert polyshard("config", "schema", "--strategy", "acme", path=(broken,)).returncode == 1


def test_the_schema_of_one_strategy_has_no_other(polyshard: Polyshard) -> None:
    ran = polyshard("config", "schema", "--strategy", "FSDP")
    definitions = json.loads(ran.stdout)["$defs"]
    assert "FSDP2Config" in definitions
    assert "DDPConfig" not in definitions
    assert polyshard("config", "schema", "--strategy", "nosuch").returncode == 2


@pytest.mark.parametrize("command", [("show", "run.yaml"), ("schema",)])
def test_neither_imports_torch(file: Path, command: tuple[str, ...]) -> None:
    script = """
import sys
from polyshard.cli import main
try:
    main(["config", *sys.argv[1:]])
except SystemExit as end:
    sys.exit(end.code or "torch" in sys.modules)
"""
    ran = subprocess.run(
        [sys.executable, "-c", script, *command], cwd=file.parent, capture_output=True
    )
    assert ran.returncode == 0, ran.stderr
