"""Consoles, and the form in which sizes, times and differences are shown."""

from __future__ import annotations

from rich.console import Console

__all__ = ["console", "show_bytes", "show_difference", "show_seconds"]

#: Where the output is no terminal, tables are this wide rather than cut to 80 columns.
_PLAIN_WIDTH = 160


def console(*, stderr: bool = False) -> Console:
    """Return a console that does not cut what is written to a file or a pipe."""
    made = Console(stderr=stderr, highlight=False)
    if not made.is_terminal:
        made.width = _PLAIN_WIDTH
    return made


def show_bytes(count: int) -> str:
    """Return a number of bytes in MiB, or in KiB if it is small."""
    return f"{count / 1024**2:,.1f} MiB" if count >= 1024**2 else f"{count / 1024:.1f} KiB"


def show_seconds(seconds: float) -> str:
    """Return a duration in milliseconds."""
    return f"{seconds * 1000:,.0f} ms"


def show_difference(value: float) -> str:
    """Return a difference with two digits, and none at all as 0."""
    return f"{value:.1e}" if value else "0"
