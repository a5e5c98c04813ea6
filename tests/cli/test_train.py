"""``polyshard train`` makes the run that a file describes, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from polyshard.cli import main

Polyshard = Callable[..., "subprocess.CompletedProcess[str]"]
Install = Callable[..., Path]

EXAMPLE = Path(__file__).parents[2] / "examples" / "train.yaml"
TEXT = "It was the best of times, it was the worst of times. " * 20
CONFIG = """\
distributed:
  strategy: ddp
  static_graph: true
model: {layers: 1, width: 8}
data:
  path: text.txt
  sequence_length: 16
steps: 2
batch_size: 4
"""

#: A strategy that loads a checkpoint, which torch reports by a BaseException if it fails.
SPOILT = """
    from typing import ClassVar

    import torch.distributed.checkpoint as dcp
    from attrs import frozen

    from polyshard import DistributedConfig, hookimpl


    @frozen(kw_only=True)
    class Config(DistributedConfig):
        strategy: ClassVar[str] = "spoilt"


    class Plugin:
        @hookimpl
        def parallelize(model, optimizer):
            dcp.load({"model": model.state_dict()}, checkpoint_id="gone")
            return model, optimizer
"""


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with a text and a config."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    Path("run.yaml").write_text(CONFIG)


def test_it_starts_processes_and_tells_the_config_and_the_loss(polyshard: Polyshard) -> None:
    done = polyshard("train", "run.yaml", "--nproc", 2, "--device", "cpu", "steps=3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("strategy: ddp") == 1
    assert "static_graph: true" in done.stdout
    assert "steps: 3" in done.stdout
    assert "final loss" in done.stdout
    assert "ddp: step 3 of 3, loss" in done.stderr


def test_sizes_may_be_set_beside_the_strategy(polyshard: Polyshard) -> None:
    changes = ("distributed=fsdp2", "distributed.tp_size=2", "steps=1")
    done = polyshard("train", "run.yaml", "--nproc", 2, "--device", "cpu", *changes)
    assert done.returncode == 0, done.stderr
    assert "  tp_size: 2" in done.stdout
    assert "final loss" in done.stdout
    assert "arning" not in done.stderr


def test_under_torchrun_it_joins_the_group() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = ["-m", "polyshard.cli", "train", "run.yaml", "--device", "cpu"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", *command],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("final loss") == 1
    assert done.stdout.count("strategy: ddp") == 1


def test_under_torchrun_an_error_that_is_no_exception_is_told_by_rank(install: Install) -> None:
    path = install(
        "spoilt",
        modules={"spoilt": SPOILT},
        entry_points={
            "polyshard.strategies": {"spoilt": "spoilt:Plugin"},
            "polyshard.configs": {"spoilt": "spoilt:Config"},
        },
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = ["-m", "polyshard.cli", "train", "run.yaml", "--device", "cpu", "distributed=spoilt"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", *command],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"PYTHONPATH": str(path)},
    )
    assert done.returncode == 1
    for rank in (0, 1):
        assert f"polyshard: error: rank {rank} of 2 failed: CheckpointException: " in done.stderr
    assert "FileNotFoundError" in done.stderr


def test_the_example_in_the_repository_is_right(polyshard: Polyshard) -> None:
    small = ("model.layers=1", "model.width=8", "steps=1", "batch_size=2")
    done = polyshard("train", EXAMPLE, "--device", "cpu", *small)
    assert done.returncode == 0, done.stderr
    assert "final loss" in done.stdout


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (("static_graph", "static_grap"), (), "run.yaml:3: distributed.static_grap: DDPConfig"),
        (("sequence_length: 16", "sequence_length: 400"), (), "run.yaml:6: data.path: expected"),
        (("text.txt", "gone.txt"), (), "run.yaml:6: data.path: expected a text file, found /"),
        (("strategy: ddp", "strategy: dpp"), (), "run.yaml:2: distributed.strategy: no installed"),
        (("steps: 2", "steps: 2\nsteps: 3"), (), 'run.yaml:9: found duplicate key "steps"'),
        (("steps: 2", "steps: '2'"), (), "run.yaml:8: steps: "),
        (("", ""), ("--nproc", "3"), "run.yaml:9: batch_size: expected a multiple of 3"),
        (("", ""), ("stepz=3",), "command line: stepz: "),
        (("", ""), ("steps",), "expected key=value"),
        (("", ""), ("distributed.tp_size=2",), "command line: distributed.tp_size: strategy 'ddp'"),
        (("", ""), ("distributed.pp_size=2",), "command line: distributed.pp_size: strategy 'ddp'"),
        (("", ""), ("parallelism.ep_size=2",), "command line: parallelism.ep_size: strategy 'ddp'"),
        (("", ""), ("distributed=none", "--nproc", "2"), "expected a strategy for 2 processes"),
    ],
)
def test_a_fault_in_the_config_is_told_with_its_line_before_anything_starts(
    change: tuple[str, str],
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("run.yaml").write_text(CONFIG.replace(*change))
    with pytest.raises(SystemExit) as end:
        main(["train", "run.yaml", "--device", "cpu", *arguments])
    told = capsys.readouterr()
    assert end.value.code == 2
    assert message in told.err
    assert "Traceback" not in told.err
    assert told.out == ""


def test_a_missing_config_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", "gone.yaml"])
    assert end.value.code == 2
    assert "gone.yaml: cannot be read: No such file" in capsys.readouterr().err


def test_a_bad_environment_is_told_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "two")
    for name, value in {"LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        main(["train", "run.yaml"])
    assert end.value.code == 1
    assert "environment variable WORLD_SIZE" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nproc", "3"],
        ["distributed.static_grap=true"],
        ["distributed.strategy=nosuch"],
        ["distributed=fsdp2", "distributed.mp_policy.param_dtype=bf61"],
        ["distributed.tp_size=2"],
        ["distributed=fsdp2", "distributed.tp_size=3", "--nproc", "2"],
        pytest.param(
            ["distributed=megatron_fsdp", "distributed.zero_dp_strategy=4"],
            marks=pytest.mark.strategy("megatron_fsdp"),
        ),
    ],
)
def test_a_config_is_checked_without_torch(arguments: list[str]) -> None:
    script = (
        "import sys\n"
        "from polyshard.cli import main\n"
        "try:\n"
        f"    main(['train', 'run.yaml', *{arguments}])\n"
        "except SystemExit as end:\n"
        "    assert end.code == 2\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 128 + signal.SIGINT), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_an_interruption_leaves_nothing_running(number: signal.Signals, status: int) -> None:
    command = ["-m", "polyshard.cli", "train", "run.yaml", "--device", "cpu", "steps=1000000"]
    with subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stderr is not None
        assert launcher.stderr.readline() == "ddp: starting\n"
        children = _wait_for_children(launcher.pid)
        launcher.send_signal(number)
        told = launcher.stderr.read()
        assert launcher.wait(timeout=60) == status
    if number == signal.SIGINT:
        assert told.endswith("interrupted by SIGINT; nothing is left running\n")
    for child in children:
        _wait_until_gone(child)


def _wait_for_children(pid: int) -> list[int]:
    while True:
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
        children = [int(child) for text in lists for child in text.split()]
        if children:
            return children
        time.sleep(0.05)


def _wait_until_gone(pid: int) -> None:
    """Return once a process has ended; the timeout of the test is the limit."""
    while True:
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except (ProcessLookupError, FileNotFoundError):
            return
        time.sleep(0.05)


def test_it_trains_a_model_of_hugging_face(polyshard: Polyshard, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra polyshard[hf]")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(
        '{"model_type": "gpt2", "vocab_size": 256, "n_positions": 16, "n_embd": 16, "n_layer": 2, '
        '"n_head": 2}'
    )
    Path("run.yaml").write_text(
        CONFIG.replace("{layers: 1, width: 8}", "{hf: model}").replace("  static_graph: true\n", "")
    )
    done = polyshard("train", "run.yaml", "--nproc", 2, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "final loss" in done.stdout
