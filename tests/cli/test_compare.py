"""``polyshard compare`` proves strategies equal, and finds those that are not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyshard.cli import main

Polyshard = Callable[..., "subprocess.CompletedProcess[str]"]
Install = Callable[..., Path]

#: A training so small that starting the processes is all that takes time.
TINY = ("--steps", "2", "--layers", "1", "--width", "8", "--device", "cpu", "--data", "text.txt")

FIELDS = {
    "distribution",
    "equal",
    "losses",
    "max_loss_diff",
    "max_weight_diff",
    "median_step_seconds",
    "optimizer_bytes_per_rank",
    "parameter_bytes_per_rank",
    "peak_rss_bytes",
    "reference_losses",
    "strategy",
    "version",
    "world_size",
}


def test_torchs_own_strategies_are_equal_to_plain_torch(
    polyshard: Polyshard, tmp_path: Path
) -> None:
    chosen = ("--strategy", "ddp", "--strategy", "fsdp:reshard_after_forward=true")
    done = polyshard("compare", *TINY, *chosen, "--json", "out.json", "--microbatches", "2")
    assert done.returncode == 0, done.stderr
    assert "2 of 2 trials are equal to the reference." in done.stdout
    assert "arning" not in done.stderr
    written = json.loads((tmp_path / "out.json").read_text())
    ddp, fsdp2 = written["trials"]
    assert (ddp["strategy"], fsdp2["strategy"]) == ("ddp", "fsdp2")
    assert fsdp2["options"] == {"reshard_after_forward": True}
    for trial in (ddp, fsdp2):
        assert trial.keys() >= FIELDS
        assert trial["equal"]
        assert trial["world_size"] == len(trial["ranks"]) == 2
        assert trial["losses"] == pytest.approx(written["reference"]["losses"], rel=1e-6)
    assert ddp["parameter_bytes_per_rank"] == written["reference"]["parameter_bytes_per_rank"]
    assert fsdp2["parameter_bytes_per_rank"] < 0.6 * ddp["parameter_bytes_per_rank"]
    assert fsdp2["optimizer_bytes_per_rank"] < 0.6 * ddp["optimizer_bytes_per_rank"]


CONFIG = """
    from typing import ClassVar

    from attrs import frozen

    from polyshard import DistributedConfig


    @frozen(kw_only=True)
    class Config(DistributedConfig):
        strategy: ClassVar[str] = "{name}"
"""
PLUGINS = {
    "unsynchronized": '''
        """Each rank trains on its own."""
        from polyshard import hookimpl


        @hookimpl
        def parallelize(model, optimizer):
            return model, optimizer
    ''',
    "failing": '''
        """Fails on rank 1 while rank 0 waits for it."""
        import torch.distributed as dist

        from polyshard import hookimpl


        @hookimpl
        def parallelize(model, optimizer):
            if dist.get_rank() == 1:
                raise ZeroDivisionError("the fault of rank 1")
            dist.barrier()
            return model, optimizer
    ''',
    "unimportable": '''
        """Needs what is not there."""
        import acme_kernels
    ''',
}


@pytest.fixture
def crooked(install: Install) -> Path:
    """Install a distribution with three strategies, each wrong in its own way."""
    modules = {f"crooked_{name}": source for name, source in PLUGINS.items()}
    modules |= {f"crooked_{name}_config": CONFIG.format(name=name) for name in PLUGINS}
    return install(
        "crooked",
        modules=modules,
        entry_points={
            "polyshard.strategies": {name: f"crooked_{name}" for name in PLUGINS},
            "polyshard.configs": {name: f"crooked_{name}_config:Config" for name in PLUGINS},
        },
    )


def test_strategies_that_are_wrong_or_fail_are_told_apart(
    polyshard: Polyshard, crooked: Path, tmp_path: Path
) -> None:
    chosen = (argument for name in PLUGINS for argument in ("--strategy", name))
    done = polyshard("compare", *TINY, *chosen, "--json", "out.json", path=(crooked,))
    assert done.returncode == 1
    assert "0 of 3 trials are equal to the reference." in done.stdout
    trials: dict[str, dict[str, Any]] = {
        trial["strategy"]: trial
        for trial in json.loads((tmp_path / "out.json").read_text())["trials"]
    }
    assert not any(trial["equal"] for trial in trials.values())
    wrong = trials["unsynchronized"]
    assert "a final weight" in wrong["problem"]
    assert wrong["max_weight_diff"] > 1e-5
    failed = trials["failing"]
    assert "rank 1 of 2 failed: ZeroDivisionError: the fault of rank 1" in failed["problem"]
    assert "in hook 'parallelize' of strategy 'failing' (crooked 1.0)" in failed["details"]
    assert "crooked_failing.py" in failed["details"]
    assert "acme_kernels" in trials["unimportable"]["problem"]
    assert failed["losses"] == trials["unimportable"]["losses"] == []
    for trial in trials.values():
        assert trial["problem"] in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--strategy", "dpp"), "no installed strategy is called 'dpp' (did you mean 'ddp'?)"),
        (("--strategy", "ddp:static_grap=true"), "did you mean 'static_graph'"),
        (("--strategy", "ddp:static_graph"), "expected key=value"),
        (("--strategy", "ddp:static_graph=1"), "expected true or false, found 1 (int)"),
        (("--nproc", "0"), "0 is not in the range"),
        (("--nproc", "3", "--batch-size", "4"), "batch_size: expected a multiple of 3"),
        (("--lr", "-1"), "expected a finite number more than 0"),
        (("--data", "gone.txt"), "cannot be read: No such file"),
        (("--data", "short.txt"), "expected at least 520 bytes"),
        (("--json", "gone/out.json"), "expected a folder at"),
        (("--plot", "out.pdf"), "ends in .png, found 'out.pdf'"),
    ],
)
def test_a_usage_error_is_told_before_anything_starts(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("too short")
    with pytest.raises(SystemExit) as end:
        main(["compare", *arguments])
    told = capsys.readouterr()
    assert end.value.code == 2
    assert message in told.err
    assert "Traceback" not in told.err
    assert told.out == ""


def test_more_processes_than_can_start_are_a_failed_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "long.txt"
    text.write_text("a" * 2000 * 65)
    chosen = ("--nproc", "2000", "--batch-size", "2000", "--device", "cpu", "--data", str(text))
    with pytest.raises(SystemExit) as end:
        main(["compare", *chosen])
    assert end.value.code == 1
    assert "found 2000; start fewer" in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_with_the_cure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as end:
        main(["compare", "--plot", "out.png"])
    assert end.value.code == 2
    assert "pip install 'polyshard[plot]'" in capsys.readouterr().err
