"""Methods of a sharded model that run without any other rank, on parameters gathered before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from polyshard.strategies.fsdp2.guard import FSDP2Guard, Gathering
from polyshard.transforms.methods import has_gradients

__all__ = ["add_methods"]


def add_methods(model: nn.Module, names: Sequence[str]) -> None:
    """Let these methods of a sharded model gather all of it before they begin.

    All ranks call one together, as they call a forward; what it does after that is each rank's own
    affair. Nothing is done to a model that is not sharded.
    """
    if isinstance(model, FSDPModule):
        for name in names:
            setattr(model, name, _gathering(model, getattr(model, name)))


def _gathering(model: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        guard = FSDP2Guard.of(model)
        if not isinstance(guard, FSDP2Guard) or guard.gathered:
            return method(*args, **kwargs)  # one method calls another
        guard.before_forward()
        with _gathered(guard) as gathering:
            args, kwargs = gathering.enter(args, kwargs)
            output = gathering.leave(args, method(*args, **kwargs))
            gathering.trains = has_gradients(output)
        return output

    return call


@contextmanager
def _gathered(guard: FSDP2Guard) -> Iterator[Gathering]:
    """Let the model stay gathered once it is, and shard it again afterwards, whatever happens."""
    gathering = Gathering(guard.model)
    guard.gathered = True
    try:
        yield gathering
    finally:
        guard.gathered = False
        gathering.undo()
