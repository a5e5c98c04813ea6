"""DistributedDataParallel: the whole model on every rank, gradients averaged in backward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from torch.nn.parallel import DistributedDataParallel

from polyshard import defaults
from polyshard.hookspecs import hookimpl
from polyshard.strategies.ddp import wrap

if TYPE_CHECKING:
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
def accumulate(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Reduce gradients in the last microbatch only."""
    if last or not isinstance(model, DistributedDataParallel):
        return nullcontext()
    return model.no_sync()


@hookimpl
def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Copy the state dict of the module inside the wrapper."""
    return defaults.full_state_dict(wrap.inner_module(model))
