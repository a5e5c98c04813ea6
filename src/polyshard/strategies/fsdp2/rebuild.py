"""Rebuilds: new values go into the shards that ``fully_shard`` gathers from."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

from polyshard.parameters.snapshot import ParameterSnapshot
from polyshard.strategies.fsdp2.guard import FSDP2Guard, follow_registered_parameters

__all__ = ["after_rebuild", "before_rebuild"]


def before_rebuild(model: nn.Module) -> ParameterSnapshot:
    """Register the shards, remember them, and allow assigning loads from now on."""
    _set_in_rebuild(model, True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return ParameterSnapshot.take(model)


def after_rebuild(model: nn.Module, snapshot: ParameterSnapshot) -> None:
    """Put the old shards back with the new values."""
    _set_in_rebuild(model, False)
    try:
        snapshot.restore(model)
    finally:
        follow_registered_parameters(model)


def _set_in_rebuild(model: nn.Module, value: bool) -> None:
    guard = FSDP2Guard.of(model)
    if guard is not None:
        guard.in_rebuild = value
