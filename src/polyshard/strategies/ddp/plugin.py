"""DistributedDataParallel: the whole model on every rank, gradients averaged in backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyshard.registry.hookspecs import hookimpl
from polyshard.strategies import fallback
from polyshard.strategies.ddp import gradients, rebuild, wrap
from polyshard.strategies.ddp.model import DataParallelModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from polyshard.strategies.ddp.config import DDPConfig

__all__: list[str] = []


@hookimpl
def parallelize(
    config: DDPConfig,
    model: nn.Module,
    mesh: DeviceMesh | None,
    optimizer: Optimizer | None,
) -> tuple[nn.Module, Optimizer | None]:
    """Wrap the model in ``DistributedDataParallel``; the optimizer stays the same object."""
    return wrap.wrap(config, model, mesh, optimizer), optimizer


@hookimpl
def add_methods(model: nn.Module, names: Sequence[str]) -> None:
    """Let methods of the module inside the wrapper run as its forward does."""
    if isinstance(model, DataParallelModel):
        model.add_methods(names)


@hookimpl
def pre_rebuild(model: nn.Module) -> rebuild.Snapshot:
    """Remember the Parameter objects that are hooked."""
    return rebuild.before_rebuild(model)


@hookimpl
def post_rebuild(model: nn.Module, snapshot: rebuild.Snapshot) -> None:
    """Move new values into the hooked objects, and put these back."""
    rebuild.after_rebuild(model, snapshot)


@hookimpl
def accumulate(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Reduce gradients in the last microbatch only."""
    return gradients.accumulate(model, sync=last)


@hookimpl
def full_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the state dict of the module inside the wrapper."""
    return fallback.full_tensors(wrap.inner_module(model))
