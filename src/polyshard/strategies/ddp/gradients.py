"""When gradients are reduced over the ranks."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch.nn.parallel import DistributedDataParallel

from polyshard.strategies.ddp.guard import DDPGuard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

__all__ = ["accumulate"]


@contextmanager
def accumulate(model: nn.Module, *, sync: bool) -> Iterator[None]:
    """Add the gradients of one microbatch to those before it.

    Args:
        model: Wrapped, or a plain model of a process without a process group.
        sync: Whether they are reduced over the ranks as well, with all that were not yet.
    """
    guard = DDPGuard.of(model)
    if not isinstance(model, DistributedDataParallel) or not isinstance(guard, DDPGuard):
        yield
    elif sync or (model.static_graph and not guard.has_reduced):
        # With static_graph the first backward has to reduce, for the wrapper learns the graph by
        # it. Averaging a part of the gradients twice does not change it.
        yield
        guard.has_reduced = True
    else:
        with model.no_sync():
            yield
