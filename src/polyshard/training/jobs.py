"""What each process of a training job does, as ``polyshard.processes.launcher`` calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from polyshard.config.structuring import structure
from polyshard.processes.process_group import RankInfo
from polyshard.training.config import TrainingConfig
from polyshard.training.distributed import StrategyRun
from polyshard.training.loop import Step, train
from polyshard.training.measure import optimizer_bytes, peak_rss_bytes
from polyshard.training.reference import PlainRun

__all__ = ["run"]

Report = Callable[[Mapping[str, Any]], None]


def run(arguments: Mapping[str, Any], rank_info: RankInfo, report: Report) -> dict[str, Any]:
    """Train and measure.

    Args:
        arguments: ``"config"``, a ``TrainingConfig`` as plain values, and ``"weights"``, the
            file where rank 0 saves the final weights, or None.
        rank_info: This process among the ranks.
        report: Called with each ``Step`` as a mapping.

    Returns:
        What the launcher reads as a ``RankResult``.
    """
    config = structure(arguments["config"], TrainingConfig)

    def report_step(step: Step) -> None:
        report(attrs.asdict(step))

    if config.distributed is None:
        run: PlainRun | StrategyRun = PlainRun(config, rank_info.device)
    else:
        run = StrategyRun(config, config.distributed, rank_info.device)
    record = train(run, config, rank_info, report_step)
    # Before the weights are gathered, which no training does.
    peak = peak_rss_bytes()
    if arguments["weights"] is not None:
        weights = run.weights()
        if rank_info.rank == 0:
            torch.save(weights, arguments["weights"])
    return {
        **attrs.asdict(record),
        "peak_rss_bytes": peak,
        "parameter_bytes": run.parameter_bytes(),
        "optimizer_bytes": optimizer_bytes(run.optimizer),
    }
