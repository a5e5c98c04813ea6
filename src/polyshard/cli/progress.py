"""What a run shows while it works: bars on a terminal, now and then a line elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from polyshard.cli.output import console

__all__ = ["StepProgress"]

#: How many lines a run writes where there is no terminal to draw a bar on.
_LINES_PER_RUN = 10


class StepProgress:
    """Shows the steps of one run after another on standard error.

    Args:
        steps: How many each run takes.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._console = console(stderr=True)
        self._warned: set[tuple[str, str]] = set()
        self._tasks: dict[str, TaskID] = {}
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def begin(self, label: str) -> None:
        """Show that a run is being started, which takes some seconds."""
        self._tasks[label] = self._bars.add_task(label, total=self._steps, loss="starting")
        if not self._console.is_terminal:
            self._console.print(f"{label}: starting", markup=False)

    def step(self, label: str, step: Mapping[str, Any]) -> None:
        """Show a step of a run that was begun."""
        number, loss = step["number"], f"loss {step['loss']:.4f}"
        self._bars.update(self._tasks[label], completed=number, loss=loss)
        every = max(1, self._steps // _LINES_PER_RUN)
        if not self._console.is_terminal and (number % every == 0 or number == self._steps):
            self._console.print(f"{label}: step {number} of {self._steps}, {loss}", markup=False)

    def warn(self, label: str, message: str) -> None:
        """Print a warning of a run, once."""
        if (label, message) not in self._warned:
            self._warned.add((label, message))
            self._console.print(f"{label}: warning: {message}", markup=False)

    def end(self, label: str, problem: str | None) -> None:
        """Show how a run came out."""
        task = self._tasks[label]
        self._bars.stop_task(task)
        if problem is not None:
            self._bars.update(task, loss="[red]not equal or failed[/red]")
            if not self._console.is_terminal:
                self._console.print(f"{label}: {problem}", markup=False)
