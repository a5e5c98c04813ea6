"""Wrapping a model with megatron-fsdp: the checks before it, and the call."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from polyshard.exceptions import ModelError, UnsupportedError
from polyshard.mesh.devices import mesh_device
from polyshard.transforms.checks import require_dimensions, require_parameters
from polyshard.transforms.units import UnitReport
from polyshard_megatron_fsdp.config import MegatronFSDPConfig
from polyshard_megatron_fsdp.megatron_fsdp.patches.cuda_shim import prepare
from polyshard_megatron_fsdp.megatron_fsdp.patches.model import patch_model
from polyshard_megatron_fsdp.megatron_fsdp.patches.modules import patch_modules
from polyshard_megatron_fsdp.megatron_fsdp.private_names import local_of, model_of
from polyshard_megatron_fsdp.megatron_fsdp.upstream import MegatronFSDP, fully_shard_model
from polyshard_megatron_fsdp.megatron_fsdp.version import WHO
from polyshard_megatron_fsdp.model.options import wrap_arguments
from polyshard_megatron_fsdp.model.topology import Topology

__all__ = ["check_model", "is_split", "start_alike", "wrap_model"]

#: The dtypes for which megatron-fsdp has buffers.
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def wrap_model(
    config: MegatronFSDPConfig, model: nn.Module, topology: Topology, units: UnitReport
) -> Any:
    """Let megatron-fsdp wrap a model, and patch both."""
    device = mesh_device(topology.mesh)
    prepare(device)
    patch_modules()
    wrapped = fully_shard_model(
        model,
        fsdp_unit_modules=_unit_classes(model, units),
        device=device,
        **wrap_arguments(config, topology),
    )
    wrapped.model_auto_sync = True
    patch_model(wrapped)
    return wrapped


def start_alike(model: nn.Module, topology: Topology) -> None:
    """Give all ranks the parameters and buffers that the first one initialised."""
    for dimension in filter(None, (topology.tensor, topology.outer, topology.shard)):
        group = topology.mesh[dimension].get_group()
        for tensor in (*model.parameters(), *model.buffers()):
            own_part = isinstance(tensor, DTensor) and dimension == topology.tensor
            if not tensor.is_meta and not own_part:
                dist.broadcast(local_of(tensor.detach()), group=group, group_src=0)


def is_split(model: nn.Module) -> bool:
    """Whether the script has split modules over the tensor-parallel dimension itself."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def check_model(model: nn.Module) -> None:
    """Refuse a model that cannot be wrapped, before anything is changed."""
    # The inner module still holds the parameters, which know their model.
    if any(isinstance(module, MegatronFSDP) for module in model.modules()) or any(
        model_of(parameter) is not None for parameter in model.parameters()
    ):
        raise UnsupportedError(
            f"{WHO}: expected a model that is not wrapped yet, found "
            f"{type(model).__name__}, which Megatron-FSDP has wrapped; build a new one"
        )
    require_parameters(model, "megatron_fsdp", trainable=False)
    require_dimensions(model, "megatron_fsdp")
    for name, parameter in model.named_parameters():
        if parameter.dtype not in _DTYPES:
            raise ModelError(
                f"{WHO}: expected parameters of {', '.join(map(str, _DTYPES))}, which megatron-"
                f"fsdp can gather, found {name!r} of {parameter.dtype}; cast it before parallelize"
            )


def _unit_classes(model: nn.Module, units: UnitReport) -> list[type[nn.Module]]:
    """Return the classes of the units; a model without repeated blocks is one unit itself."""
    return list({type(unit): None for unit in units.modules.values()}) or [type(model)]
