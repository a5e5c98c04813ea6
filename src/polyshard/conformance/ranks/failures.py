"""What went wrong on which rank, in words and plain data.

A failure crosses from the worker's process to the caller's as text and names, never as the
exception object: an exception need not survive pickling, and the caller need not have its class
installed or torch imported.
"""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

FailureKind = Literal["raised", "crashed", "hung", "killed"]


def qualified_name(cls: type) -> str:
    """Return a class's name as a traceback prints it: ``ValueError``, ``package.OurError``."""
    if cls.__module__ in ("builtins", "__main__"):
        return cls.__qualname__
    return f"{cls.__module__}.{cls.__qualname__}"


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"<no message: str() of the exception raised {type(broken).__name__}>"


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """How one rank failed to return.

    Found in ``RanksFailed.failures``. The kinds: "raised" an exception; "crashed", the process
    ended; "hung", no answer in time though nobody had failed; "killed", still running some seconds
    after the first failure.
    """

    rank: int
    kind: FailureKind
    message: str
    """The exception's text, or for the other kinds what the pool saw."""
    type_names: tuple[str, ...] = ()
    """Qualified names of the exception's class and its bases; empty for the other kinds."""
    notes: tuple[str, ...] = ()
    """What ``add_note`` left on the exception."""
    traceback: str = ""
    """The formatted traceback, or the Python stacks of a rank that was stuck."""
    output: str = ""
    """What the rank wrote to stdout and stderr during this run, the last lines of it."""
    at: float = field(default_factory=time.monotonic)
    """When, in seconds of the monotonic clock, which the processes of a machine share."""

    @classmethod
    def from_exception(cls, rank: int, error: BaseException) -> RankFailure:
        """Describe an exception that a rank raised; called in the worker."""
        return cls(
            rank=rank,
            kind="raised",
            message=_text_of(error),
            type_names=tuple(qualified_name(base) for base in type(error).__mro__),
            notes=tuple(map(str, getattr(error, "__notes__", ()))),
            traceback="".join(traceback.format_exception(error)),
        )

    @property
    def type_name(self) -> str:
        """The qualified name of the exception's class, or "" if the rank did not raise."""
        return self.type_names[0] if self.type_names else ""

    def is_a(self, exception_type: type[BaseException]) -> bool:
        """Tell whether the rank raised this type or a subclass of it."""
        return qualified_name(exception_type) in self.type_names

    def __str__(self) -> str:
        what = f"{self.kind} {self.type_name}".rstrip()
        parts = [f"rank {self.rank} {what}: {self.message}", self.traceback.rstrip()]
        if self.output.strip():
            parts += [f"--- output of rank {self.rank} ---", self.output.rstrip()]
        return "\n".join(part for part in parts if part)


class RanksFailed(RuntimeError):
    """At least one rank of a ``RankPool`` did not return.

    Raised by ``RankPool.run``; ``failures`` maps rank to failure, the first in time first.
    """

    def __init__(self, function: str, world_size: int, failures: Iterable[RankFailure]) -> None:
        self.failures = {failure.rank: failure for failure in _by_cause(failures)}
        super().__init__(
            f"{len(self.failures)} of {world_size} ranks failed in {function}; the first is\n\n"
            + "\n\n".join(map(str, self.failures.values()))
        )

    @property
    def first(self) -> RankFailure:
        """The failure that most likely caused the others."""
        return next(iter(self.failures.values()))


def _by_cause(failures: Iterable[RankFailure]) -> list[RankFailure]:
    """Sort by time, but a crash before exceptions and those before the ranks that merely waited.

    A process that dies takes its connections along, and a peer's "connection closed" can be caught
    a moment before the pool sees the death that caused it.
    """
    order: tuple[FailureKind, ...] = ("crashed", "raised", "hung", "killed")
    return sorted(failures, key=lambda failure: (order.index(failure.kind), failure.at))
