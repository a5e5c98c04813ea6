"""``polyshard compare``: every strategy does the same training, beside plain PyTorch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import click

from polyshard.cli.output import console
from polyshard.cli.progress import StepProgress
from polyshard.cli.report import print_report, to_json
from polyshard.cli.types import OUTPUT_FILE, STRATEGY, StrategyChoice
from polyshard.config.base import DistributedConfig
from polyshard.exceptions import PluginError
from polyshard.processes.launcher import Job, check_capacity
from polyshard.registry.discovery import StrategyInfo
from polyshard.registry.registry import available_strategies, default_registry
from polyshard.registry.resolve import resolve_config
from polyshard.training.comparison import Candidate, compare
from polyshard.training.config import DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
from polyshard.training.data import Batches, read_text

__all__ = ["compare_command"]

_POSITIVE = click.IntRange(min=1)
_LEAST_BATCH = 8


@click.command("compare")
@click.option(
    "--strategy",
    "choices",
    type=STRATEGY,
    multiple=True,
    help="Try this strategy, with these fields of its config; repeatable.  [default: all]",
)
@click.option("--nproc", type=_POSITIVE, default=2, show_default=True, help="Processes of a trial.")
@click.option("--steps", type=_POSITIVE, default=20, show_default=True, help="Optimizer steps.")
@click.option(
    "--batch-size",
    type=_POSITIVE,
    help=f"Sequences per step over all processes.  [default: {_LEAST_BATCH}, rounded up to a "
    "multiple of what shares them]",
)
@click.option(
    "--microbatches",
    type=_POSITIVE,
    default=1,
    show_default=True,
    help="Parts of a batch whose gradients are accumulated.",
)
@click.option("--optimizer", type=click.Choice(["sgd", "adamw"]), default="sgd", show_default=True)
@click.option("--lr", type=float, help="Learning rate.  [default: 0.02 for sgd, 0.001 for adamw]")
@click.option("--layers", type=_POSITIVE, default=4, show_default=True, help="Blocks of the model.")
@click.option("--width", type=_POSITIVE, default=192, show_default=True, help="Its hidden size.")
@click.option("--data", type=str, help="Text to train on.  [default: Polyshard's own]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[default: cuda if there]")
@click.option("--json", "json_file", type=OUTPUT_FILE(), help="Write everything to this file.")
@click.option("--plot", "plot_file", type=OUTPUT_FILE(".png"), help="Draw to this PNG file.")
@click.option("--verbose", is_flag=True, help="Show what the processes print.")
def compare_command(
    choices: Sequence[StrategyChoice],
    nproc: int,
    steps: int,
    batch_size: int | None,
    microbatches: int,
    optimizer: str,
    lr: float | None,
    layers: int,
    width: int,
    data: str | None,
    seed: int,
    device: str | None,
    json_file: Path | None,
    plot_file: Path | None,
    verbose: bool,
) -> int:
    """Prove that strategies train alike.

    Trains a small language model for some steps in one plain process and then under each
    strategy, on the same batches and in full precision. The exit status is 1 if a strategy
    fails or is not equal to the plain process.
    """
    if plot_file is not None:
        _require_matplotlib()
    config = TrainingConfig(
        distributed=None,
        model=ModelConfig(layers=layers, width=width),
        data=DataConfig(path=data),
        optimizer=OptimizerConfig(name=optimizer, **({} if lr is None else {"lr": lr})),
        steps=steps,
        batch_size=batch_size or _shared_batch(nproc * microbatches),
        microbatches=microbatches,
        seed=seed,
    )
    config.check_shares(nproc)
    Batches(read_text(data), config)
    candidates = _candidates(choices)
    check_capacity(Job(target="", arguments={}, processes=nproc, device=device))
    with StepProgress(steps) as progress:
        comparison = compare(
            candidates, config, progress, world_size=nproc, device=device, verbose=verbose
        )
    print_report(comparison, console())
    if json_file is not None:
        json_file.write_text(json.dumps(to_json(comparison), indent=2) + "\n")
    if plot_file is not None:
        from polyshard.cli.plot import plot

        plot(comparison, plot_file)
    return int(not all(trial.equal for trial in comparison.trials))


def _require_matplotlib() -> None:
    if find_spec("matplotlib") is None:
        raise click.UsageError(
            "--plot needs matplotlib, which is not installed; run: pip install 'polyshard[plot]'"
        )


def _shared_batch(parts: int) -> int:
    """Return the smallest usual batch that so many parts can share."""
    return -(-_LEAST_BATCH // parts) * parts


def _candidates(choices: Sequence[StrategyChoice]) -> list[Candidate]:
    """Return what to try: what was chosen, or everything that is installed.

    Raises:
        StrategyNotFoundError: A name is unknown.
        ConfigError: A field is unknown or its value is not accepted.
    """
    if not choices:
        choices = [StrategyChoice(name, {}) for name in available_strategies()]
    return [_candidate(choice) for choice in choices]


def _candidate(choice: StrategyChoice) -> Candidate:
    info = default_registry().find(choice.name)
    problem, config = info.problem, None
    if problem is None:
        try:
            config = _full_precision_config(info, choice)
        except PluginError as error:
            problem = str(error)
    return Candidate(
        strategy=info.name,
        options=choice.options,
        distribution=info.distribution,
        version=info.version,
        config=config,
        problem=problem,
    )


def _full_precision_config(info: StrategyInfo, choice: StrategyChoice) -> DistributedConfig:
    return resolve_config({**choice.options, "strategy": info.name}).in_full_precision()
