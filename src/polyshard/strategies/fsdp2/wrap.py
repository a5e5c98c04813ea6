"""Shard a model with fully_shard, in named steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.fsdp import (
    fully_shard,
)

from polyshard.optimizers import rebind, record_names
from polyshard.placement import require_parameters
from polyshard.strategies.fsdp2.mesh import sharding_mesh
from polyshard.units import find_units

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from polyshard.strategies.fsdp2.config import FSDP2Config


def wrap(
    config: FSDP2Config, model: nn.Module, mesh: DeviceMesh | None, optimizer: Optimizer | None
) -> None:
    """Shard the model in place over the units and the rest."""
    require_parameters(model, "fsdp2", trainable=False)
    if mesh is None:
        return
    parts = sharding_mesh(mesh)
    names = {} if optimizer is None else record_names(optimizer, model)
    for unit in find_units(model).modules.values():
        fully_shard(unit, mesh=parts.data)
    fully_shard(model, mesh=parts.data)
    if optimizer is not None:
        rebind(optimizer, names, model)
