"""What each process of a training job does, as ``polyshard.launch`` calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from polyshard.group import Place
from polyshard.structuring import structure
from polyshard.training.config import TrainingConfig
from polyshard.training.distributed import DistributedTrainee
from polyshard.training.loop import Step, train
from polyshard.training.measure import optimizer_bytes, peak_rss_bytes
from polyshard.training.reference import PlainTrainee

__all__ = ["run"]

Report = Callable[[Mapping[str, Any]], None]


def run(arguments: Mapping[str, Any], place: Place, report: Report) -> dict[str, Any]:
    """Train and measure.

    Args:
        arguments: ``"config"``, a ``TrainingConfig`` as plain values, and ``"weights"``, the
            file where rank 0 saves the final weights, or None.
        place: This process among the ranks.
        report: Called with each ``Step`` as a mapping.

    Returns:
        What the launcher reads as a ``RankResult``.
    """
    config = structure(arguments["config"], TrainingConfig)

    def report_step(step: Step) -> None:
        report(attrs.asdict(step))

    if config.distributed is None:
        trainee: PlainTrainee | DistributedTrainee = PlainTrainee(config, place.device)
    else:
        trainee = DistributedTrainee(config, config.distributed, place.device)
    record = train(trainee, config, place, report_step)
    # Before the weights are gathered, which no training does.
    peak = peak_rss_bytes()
    if arguments["weights"] is not None:
        weights = trainee.weights()
        if place.rank == 0:
            torch.save(weights, arguments["weights"])
    return {
        **attrs.asdict(record),
        "peak_rss_bytes": peak,
        "parameter_bytes": trainee.parameter_bytes(),
        "optimizer_bytes": optimizer_bytes(trainee.optimizer),
    }
