"""The picture of a comparison."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from polyshard.cli.plot import plot
from polyshard.training.comparison import Candidate, Comparison, Run, Trial
from polyshard.training.config import TrainingConfig

RUN = Run(
    losses=[5.5, 4.0, 3.25],
    grad_norms=[4.0, 2.0, 1.5],
    step_seconds=[0.25, 0.5, 0.3],
    peak_rss_bytes=[300 * 1024**2],
    parameter_bytes=[7 * 1024**2],
    optimizer_bytes=[7 * 1024**2],
)
SAME = Trial(candidate=Candidate(strategy="same"), world_size=2, run=RUN)
NEAR = Trial(
    candidate=Candidate(strategy="near", options={"a_long_option": "with_a_long_value"}),
    world_size=2,
    run=evolve(RUN, losses=[5.5, 4.0, 3.2500004]),
)
FAILED = Trial(candidate=Candidate(strategy="failed"), world_size=2, problem="no")


@pytest.mark.parametrize("trials", [[SAME, NEAR, FAILED], [FAILED], []])
def test_a_comparison_is_drawn_whatever_became_of_the_trials(
    trials: list[Trial], tmp_path: Path
) -> None:
    config = TrainingConfig(distributed=None, steps=3)
    plot(Comparison(config=config, reference=RUN, trials=trials), tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
