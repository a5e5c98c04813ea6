"""A comparison as a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from polyshard import __version__
from polyshard.cli.output import show_bytes, show_difference, show_seconds
from polyshard.training.comparison import Comparison, Run, Tolerance, Trial

__all__ = ["print_report", "to_json"]

_ABSENT = "-"


def print_report(comparison: Comparison, console: Console) -> None:
    """Print the table, and then what is wrong with each trial that is not equal."""
    console.print(_fitting_table(comparison, console))
    console.print(_explanation(comparison.tolerance))
    for trial in comparison.trials:
        if trial.problem is not None:
            console.print(f"\n[red]{escape(trial.candidate.label)}[/red]: {escape(trial.problem)}")
            if trial.details:
                console.print(trial.details, markup=False)
    equal = sum(trial.equal for trial in comparison.trials)
    console.print(f"\n{equal} of {len(comparison.trials)} trials are equal to the reference.")


def _explanation(tolerance: Tolerance) -> str:
    if tolerance.weight is None:
        weights = "; weights are not judged, which AdamW moves apart by rounding alone"
    else:
        weights = f", and final weights within {tolerance.weight:.0e} of their tensor's largest"
    return (
        "A trial is equal if in every step the loss is within "
        f"{tolerance.loss:.0e} and the gradient norm within {tolerance.grad_norm:.0e} of the "
        f"reference's, relative{weights}. Memory is a rank's peak, torch and Python included."
    )


def _fitting_table(comparison: Comparison, console: Console) -> Table:
    """Return one row per run, or one column per run where rows would be too wide."""
    headings, runs = list(_MEASURES), _cells(comparison)
    rows = Table(*headings, box=box.SIMPLE_HEAD)
    for cells in runs:
        rows.add_row(*cells)
    if console.measure(rows).minimum <= console.width and _natural_width(runs) <= console.width:
        return rows
    columns = Table(headings[0], box=box.SIMPLE_HEAD)
    for cells in runs:
        columns.add_column(cells[0], overflow="fold")
    for index, heading in enumerate(headings[1:], start=1):
        columns.add_row(heading.replace("\n", " "), *(cells[index] for cells in runs))
    return columns


def _natural_width(runs: list[list[str]]) -> int:
    """Return how wide rows are in which no cell is broken into lines."""
    widths = (
        max(len(line) for cell in column for line in cell.splitlines() or [""])
        for column in zip(_MEASURES, *runs, strict=True)
    )
    return sum(width + 2 for width in widths) + 1


def _cells(comparison: Comparison) -> list[list[str]]:
    reference = [escape(show(None, comparison.reference)) for show in _MEASURES.values()]
    trials = [
        [escape(show(trial, trial.run)) for show in _MEASURES.values()]
        for trial in comparison.trials
    ]
    return [reference, *trials]


def _name(trial: Trial | None, _: Run | None) -> str:
    if trial is None:
        return "reference\nplain torch"
    candidate = trial.candidate
    return f"{candidate.label}\n{candidate.distribution} {candidate.version}".rstrip()


def _verdict(trial: Trial | None, run: Run | None) -> str:
    if trial is None:
        return _ABSENT
    if run is None:
        return "FAILED"
    return "yes" if trial.equal else "NO"


def _of_run(show: Callable[[Run], str]) -> Callable[[Trial | None, Run | None], str]:
    return lambda _, run: _ABSENT if run is None else show(run)


def _difference(name: str) -> Callable[[Trial | None, Run | None], str]:
    def show(trial: Trial | None, _: Run | None) -> str:
        if trial is None or trial.difference is None:
            return _ABSENT
        return show_difference(getattr(trial.difference, name))

    return show


#: Heading -> how to show it of a trial (None for the reference) and its run (None if it failed).
_MEASURES: dict[str, Callable[[Trial | None, Run | None], str]] = {
    "strategy": _name,
    "equal": _verdict,
    "ranks": lambda trial, _: str(trial.world_size if trial else 1),
    "first\nloss": _of_run(lambda run: f"{run.losses[0]:.4f}"),
    "last\nloss": _of_run(lambda run: f"{run.losses[-1]:.4f}"),
    "loss\ndifference": _difference("loss"),
    "weight\ndifference": _difference("weight"),
    "gradient\nnorm": _of_run(lambda run: f"{run.grad_norms[-1]:.4f}"),
    "step\ntime": _of_run(lambda run: show_seconds(run.median_step_seconds)),
    "peak\nmemory": _of_run(lambda run: show_bytes(max(run.peak_rss_bytes))),
    "parameters\nper rank": _of_run(lambda run: show_bytes(max(run.parameter_bytes))),
    "optimizer\nper rank": _of_run(lambda run: show_bytes(max(run.optimizer_bytes))),
}


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Return all of a comparison as plain values, one object per trial under ``"trials"``."""
    import torch

    values = {
        "polyshard": __version__,
        "torch": torch.__version__,
        "tolerance": attrs.asdict(comparison.tolerance),
        "training": comparison.config.to_dict(),
        "reference": _run_to_json(comparison.reference),
        "trials": [_trial_to_json(trial, comparison) for trial in comparison.trials],
    }
    return {key: _finite(value) for key, value in values.items()}


def _finite(value: Any) -> Any:
    """Replace what JSON has no number for, of a run that diverged, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return value


def _trial_to_json(trial: Trial, comparison: Comparison) -> dict[str, Any]:
    candidate, difference = trial.candidate, trial.difference
    return {
        "strategy": candidate.strategy,
        "options": dict(candidate.options),
        "config": candidate.config.to_dict() if candidate.config is not None else None,
        "distribution": candidate.distribution,
        "version": candidate.version,
        "world_size": trial.world_size,
        "equal": trial.equal,
        "problem": trial.problem,
        "details": trial.details,
        "reference_losses": comparison.reference.losses,
        "reference_grad_norms": comparison.reference.grad_norms,
        "max_loss_diff": difference.loss_absolute if difference else None,
        "max_relative_loss_diff": difference.loss if difference else None,
        "max_relative_grad_norm_diff": difference.grad_norm if difference else None,
        "max_weight_diff": difference.weight_absolute if difference else None,
        "max_relative_weight_diff": difference.weight if difference else None,
        "worst_weight": difference.worst_weight if difference else None,
        **_run_to_json(trial.run),
    }


def _run_to_json(run: Run | None) -> dict[str, Any]:
    """Return what was measured; a number per rank is that of the rank with the largest."""
    return {
        "losses": run.losses if run else [],
        "grad_norms": run.grad_norms if run else [],
        "step_seconds": run.step_seconds if run else [],
        "median_step_seconds": run.median_step_seconds if run else None,
        "peak_rss_bytes": max(run.peak_rss_bytes) if run else None,
        "parameter_bytes_per_rank": max(run.parameter_bytes) if run else None,
        "optimizer_bytes_per_rank": max(run.optimizer_bytes) if run else None,
        "ranks": _ranks_to_json(run) if run else [],
    }


def _ranks_to_json(run: Run) -> list[dict[str, int]]:
    return [
        {"peak_rss_bytes": peak, "parameter_bytes": parameters, "optimizer_bytes": optimizer}
        for peak, parameters, optimizer in zip(
            run.peak_rss_bytes, run.parameter_bytes, run.optimizer_bytes, strict=True
        )
    ]
