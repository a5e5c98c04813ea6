"""The table fits where it is shown."""

from __future__ import annotations

import io
import json
import math

import pytest
from attrs import evolve
from rich.console import Console

from polyshard.cli.report import print_report, to_json
from polyshard.training.comparison import Candidate, Comparison, Difference, Run, Trial
from polyshard.training.config import TrainingConfig

RUN = Run(
    losses=[5.5, 3.25],
    grad_norms=[4.0, 1.5],
    step_seconds=[0.25],
    peak_rss_bytes=[300 * 1024**2, 350 * 1024**2],
    parameter_bytes=[7 * 1024**2, 6 * 1024**2],
    optimizer_bytes=[512, 2048],
)
DIFFERENCE = Difference(
    loss=1.3e-7, loss_absolute=5e-7, grad_norm=0.0, weight=0.0, weight_absolute=0.0, worst_weight=""
)
EQUAL = Trial(
    candidate=Candidate(strategy="fine", distribution="acme-sharding", version="1.2"),
    world_size=2,
    run=RUN,
    difference=DIFFERENCE,
)
FAILED = Trial(
    candidate=Candidate(strategy="crooked", options={"stage": 1}, distribution="acme"),
    world_size=2,
    problem="rank 1 of 2 failed: ValueError: [oops]",
    details="Traceback\n  [inner]",
)


def shown(width: int, *trials: Trial) -> str:
    config = TrainingConfig(distributed=None)
    file = io.StringIO()
    comparison = Comparison(config=config, reference=RUN, trials=list(trials))
    print_report(comparison, Console(file=file, width=width))
    return file.getvalue()


def line_with(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.split()[:1] == [start])


def test_a_wide_table_has_a_row_for_each_run() -> None:
    line = line_with(shown(160, EQUAL), "fine")
    for cell in ("yes", "2", "5.5000", "3.2500", "1.3e-07", "250 ms", "350.0 MiB", "2.0 KiB"):
        assert cell in line


def test_a_narrow_table_has_a_column_for_each_run() -> None:
    text = shown(70, EQUAL, FAILED)
    assert line_with(text, "equal").split() == ["equal", "-", "yes", "FAILED"]
    assert line_with(text, "ranks").split() == ["ranks", "1", "2", "2"]
    assert max(map(len, text.splitlines())) <= 70


@pytest.mark.parametrize("width", [70, 160])
def test_a_failure_is_told_as_it_was_written(width: int) -> None:
    text = shown(width, EQUAL, FAILED)
    assert "crooked (stage=1): rank 1 of 2 failed: ValueError: [oops]" in " ".join(text.split())
    assert "Traceback\n  [inner]" in text
    assert "1 of 2 trials are equal to the reference." in text


def test_a_run_that_diverged_is_still_written_as_json() -> None:
    diverged = evolve(EQUAL, run=evolve(RUN, losses=[5.5, math.nan]), problem="a loss is off")
    comparison = Comparison(
        config=TrainingConfig(distributed=None), reference=RUN, trials=[diverged]
    )
    written = json.dumps(to_json(comparison), allow_nan=False)
    assert json.loads(written)["trials"][0]["losses"] == [5.5, None]
