"""When gradients are reduced over the ranks."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch.distributed.fsdp import FSDPModule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

__all__ = ["accumulate"]


@contextmanager
def accumulate(model: nn.Module, *, sync: bool) -> Iterator[None]:
    """Add the gradients of one microbatch to those before it.

    Args:
        model: Sharded, or a plain model of a process without a process group.
        sync: Whether they are reduced over the ranks as well, with all that were not yet.
    """
    if sync or not isinstance(model, FSDPModule):
        yield
        return
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
