"""FSDP2: parameters, gradients and optimizer state sharded by torch's fully_shard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyshard.registry.hookspecs import hookimpl
from polyshard.strategies.fsdp2 import gradients, methods, rebuild
from polyshard.strategies.fsdp2.wrap import wrap

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from polyshard.parameters.snapshot import ParameterSnapshot
    from polyshard.strategies.fsdp2.config import FSDP2Config

__all__: list[str] = []


@hookimpl
def parallelize(
    config: FSDP2Config,
    model: nn.Module,
    mesh: DeviceMesh | None,
    optimizer: Optimizer | None,
) -> tuple[nn.Module, Optimizer | None]:
    """Shard the model in place; the optimizer stays the same object with new parameters."""
    wrap(config, model, mesh, optimizer)
    return model, optimizer


@hookimpl
def add_methods(model: nn.Module, names: Sequence[str]) -> None:
    """Let methods gather the whole model before they begin."""
    methods.add_methods(model, names)


@hookimpl
def pre_rebuild(model: nn.Module) -> ParameterSnapshot:
    """Remember the shards that ``fully_shard`` gathers from."""
    return rebuild.before_rebuild(model)


@hookimpl
def post_rebuild(model: nn.Module, snapshot: ParameterSnapshot) -> None:
    """Move new values into the shards, and put these back."""
    rebuild.after_rebuild(model, snapshot)


@hookimpl
def accumulate(config: FSDP2Config, model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Reduce gradients in the last microbatch only, or in each, as the config says."""
    return gradients.accumulate(model, sync=last or not config.defer_fsdp_grad_sync)
