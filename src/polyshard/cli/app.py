"""The command group, and how errors become messages and exit statuses."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from polyshard import __version__
from polyshard.cli.compare import compare_command
from polyshard.cli.config import config
from polyshard.cli.strategies import strategies
from polyshard.cli.train import train
from polyshard.exceptions import ConfigError, PolyshardError, StrategyNotFoundError
from polyshard.processes.launcher import Interrupted, JobFailedError

__all__ = ["main"]

SUCCESS = 0
FAILED_RUN = 1
USAGE_ERROR = 2

#: What the user asked for cannot be done as asked; nothing was started.
_USAGE_ERRORS = (ConfigError, StrategyNotFoundError)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="polyshard")
def polyshard() -> None:
    """Train a PyTorch model under any installed strategy, and prove strategies equal."""


polyshard.add_command(compare_command)
polyshard.add_command(config)
polyshard.add_command(strategies)
polyshard.add_command(train)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    The status is 0 after success, 1 after a run that failed or came out unequal, 2 for a usage
    error, and 128 plus the signal's number after an interruption.

    Args:
        arguments: What to run (default: ``sys.argv``).
    """
    sys.exit(_run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    try:
        status = polyshard.main(arguments, prog_name="polyshard", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return _report_interruption(signal.SIGINT)
    except Interrupted as interruption:
        return _report_interruption(interruption.signal)
    except PolyshardError as error:
        _report(error)
        return USAGE_ERROR if isinstance(error, _USAGE_ERRORS) else FAILED_RUN
    return status if isinstance(status, int) else SUCCESS


def _report(error: PolyshardError) -> None:
    """Print an error: what a process told of its failure first, in one line what it means last."""
    if isinstance(error, JobFailedError) and error.details:
        click.echo(error.details.rstrip(), err=True)
    click.echo(f"polyshard: error: {error}", err=True)
    for note in getattr(error, "__notes__", ()):
        click.echo(f"  {note}", err=True)


def _report_interruption(number: signal.Signals) -> int:
    click.echo(f"polyshard: interrupted by {number.name}; nothing is left running", err=True)
    return 128 + number
