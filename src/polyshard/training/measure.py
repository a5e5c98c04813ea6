"""What a process holds: its peak of memory, and the bytes of an optimizer's state."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor
from torch.optim import Optimizer

from polyshard.parameters.dtensors import local_of

__all__ = ["optimizer_bytes", "peak_rss_bytes"]

_STATUS = Path("/proc/self/status")


def peak_rss_bytes() -> int:
    """Return the largest resident set that this process has had so far.

    Read from Linux's own account of this program where there is one: ``getrusage`` remembers
    the parent's peak from before the program was started.
    """
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def optimizer_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of state that this rank holds, of DTensors the local parts."""
    return sum(local_of(tensor).nbytes for tensor in _tensors(optimizer.state.values()))


def _tensors(values: Iterable[object]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
