"""``polyshard train``: one run of one strategy, as a file describes it."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import click
from ruamel.yaml import YAML

from polyshard.cli.output import show_bytes, show_seconds
from polyshard.cli.progress import StepProgress
from polyshard.config.structuring import KeyPathError
from polyshard.exceptions import PolyshardError
from polyshard.processes.environment import LaunchEnvironment, read_launch_environment
from polyshard.processes.launcher import Job, check_capacity, default_processes, launch
from polyshard.processes.process_group import exit_process, final_barrier, join_process_group
from polyshard.training.config import TrainingConfig, read_run
from polyshard.training.data import Batches, read_text

__all__ = ["train"]


@click.command()
@click.argument("config_file", metavar="CONFIG.yaml", type=click.Path(path_type=Path))
@click.argument("assignments", metavar="[KEY=VALUE]...", nargs=-1)
@click.option(
    "--nproc",
    type=click.IntRange(min=1),
    help="Processes to start.  [default: one for each CUDA device, or 1]",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[default: cuda if there]")
@click.option("--verbose", is_flag=True, help="Show what the processes print.")
def train(
    config_file: Path,
    assignments: Sequence[str],
    nproc: int | None,
    device: str | None,
    verbose: bool,
) -> None:
    """Train a small language model under the strategy that a file names.

    Each KEY=VALUE sets a key of the file, with dots for nesting: optimizer.lr=0.1. Under torchrun
    or SLURM this process joins the group that is there; otherwise it starts --nproc processes.
    """
    source = read_run(config_file, assignments)
    config = source.structure(TrainingConfig)
    launch_environment = read_launch_environment()
    if launch_environment is None:
        processes = nproc or default_processes(device)
    else:
        processes = launch_environment.world_size
        _refuse_other_count(nproc, launch_environment)
    with source.located():
        Batches(read_text(config.data.path), config)
        _check_processes(config, processes)
    if launch_environment is None:
        _train_in_new_processes(config, processes, device, verbose)
    else:
        _train_in_this_process(config, launch_environment, device)


def _train_in_new_processes(
    config: TrainingConfig, processes: int, device: str | None, verbose: bool
) -> None:
    job = Job(
        target="polyshard.training.jobs:run",
        arguments={"config": config.to_dict(), "weights": None},
        processes=processes,
        device=device,
        join=config.distributed is not None,
    )
    check_capacity(job)
    _print_config(config)
    label = _label(config)
    with StepProgress(config.steps) as progress:
        progress.begin(label)
        results = launch(
            job,
            on_event=lambda step: progress.step(label, step),
            on_warning=lambda message: progress.warn(label, message),
            verbose=verbose,
        )
    _print_result(results[0])


def _train_in_this_process(
    config: TrainingConfig, launch_environment: LaunchEnvironment, device: str | None
) -> NoReturn:
    """Train as one rank of a group that something else started, and end the process."""
    try:
        _train_as_rank(config, launch_environment, device)
        final_barrier()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        _report_rank(error, launch_environment)
        exit_process(1)
    exit_process(0)


def _train_as_rank(
    config: TrainingConfig, launch_environment: LaunchEnvironment, device: str | None
) -> None:
    from polyshard.processes.rank_sync import check_same_on_all_ranks, raise_on_all_ranks
    from polyshard.training.jobs import run

    place = join_process_group(launch_environment, device)
    everyone = range(place.world_size)
    with raise_on_all_ranks("polyshard train", everyone):
        check_same_on_all_ranks(
            "polyshard train", everyone, {"config": json.dumps(config.to_dict(), indent=0)}
        )
    arguments = {"config": config.to_dict(), "weights": None}
    if place.rank > 0:
        run(arguments, place, lambda step: None)
        return
    _print_config(config)
    label = _label(config)
    with StepProgress(config.steps) as progress:
        progress.begin(label)
        result = run(arguments, place, lambda step: progress.step(label, step))
    _print_result(result)


def _report_rank(error: BaseException, launch_environment: LaunchEnvironment) -> None:
    """Say what failed here, and leave it where torchrun looks for the first failure."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if not isinstance(error, PolyshardError):
        traceback.print_exception(error)
    where = f"rank {launch_environment.rank} of {launch_environment.world_size}"
    click.echo(f"polyshard: error: {where} failed: {type(error).__name__}: {error}", err=True)
    get_error_handler().record_exception(error)


def _refuse_other_count(nproc: int | None, launch_environment: LaunchEnvironment) -> None:
    if nproc not in (None, launch_environment.world_size):
        raise click.UsageError(
            f"--nproc {nproc}: this process was started as rank {launch_environment.rank} of "
            f"{launch_environment.world_size}; leave --nproc out, since processes "
            "are there already"
        )


def _check_processes(config: TrainingConfig, processes: int) -> None:
    if config.distributed is None and processes > 1:
        raise KeyPathError(
            f"expected a strategy for {processes} processes, found none", ("distributed",)
        )
    config.check_shares(processes)


def _label(config: TrainingConfig) -> str:
    return "plain torch" if config.distributed is None else config.distributed.strategy


def _print_config(config: TrainingConfig) -> None:
    yaml = YAML()
    yaml.representer.add_representer(
        type(None), lambda dumper, _: dumper.represent_scalar("tag:yaml.org,2002:null", "null")
    )
    yaml.dump(config.to_dict(), sys.stdout)


def _print_result(result: dict[str, Any]) -> None:
    click.echo(
        f"final loss {result['losses'][-1]:.4f} after {len(result['losses'])} steps of "
        f"{show_seconds(median(result['step_seconds']))}, with a peak of "
        f"{show_bytes(result['peak_rss_bytes'])} of memory on rank 0"
    )
