"""What a model must be like before it is sharded: checks, groups, the same values everywhere."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from polyshard.exceptions import ModelError
from polyshard.mesh.devices import mesh_device
from polyshard.parameters.slots import slots_of
from polyshard.transforms.checks import require_dimensions

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from polyshard.transforms.units import UnitReport

__all__ = ["broadcast_weights", "check_dtypes", "check_tensors", "separable_units"]

_logger = logging.getLogger(__name__)


def check_tensors(model: nn.Module) -> None:
    """Check what ``fully_shard`` asks of parameters, and that every buffer can get a value.

    Raises:
        ModelError: A parameter is a scalar or not contiguous, or a buffer that no checkpoint
            holds is on the meta device.
    """
    require_dimensions(model, "fsdp2")
    for name, parameter in model.named_parameters():
        if not parameter.is_contiguous():
            raise ModelError(
                f"strategy 'fsdp2': expected contiguous parameters, found {name!r} with the "
                f"strides {parameter.stride()}; make it contiguous() first"
            )
    saved = model.state_dict().keys()
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in saved]
    if lost:
        raise ModelError(
            "strategy 'fsdp2': expected values in the buffers that no checkpoint holds, found "
            f"{', '.join(lost)} on the meta device; build them on a real device, or make them "
            "persistent"
        )


def separable_units(model: nn.Module, units: UnitReport) -> dict[str, nn.Module]:
    """Return the units that share no parameter, nor a module that has one, with what is outside.

    A parameter belongs to one group, whichever modules it is registered in. The units that share
    one with others are left to the group of the root, which holds all that is left over.
    """
    owners = Counter(p for unit in units.modules.values() for p in unit.parameters())
    holders = {p: {slot.module for slot in slots} for p, slots in slots_of(model).items()}
    separable = {
        name: unit
        for name, unit in units.modules.items()
        if all(owners[p] == 1 and holders[p] <= set(unit.modules()) for p in unit.parameters())
    }
    for name in units.modules.keys() - separable.keys():
        _logger.info("%s shares a parameter with another module and is sharded with the root", name)
    return separable


def check_dtypes(model: nn.Module, units: dict[str, nn.Module]) -> None:
    """Check that the trained parameters of each group have one dtype, which is gathered as one.

    Raises:
        ModelError: They have several; the message names one parameter of each.
    """
    grouped = {p for unit in units.values() for p in unit.parameters()}
    rest = {name: p for name, p in model.named_parameters() if p not in grouped}
    groups = {
        **{repr(name): dict(unit.named_parameters(name)) for name, unit in units.items()},
        "what belongs to no unit": rest,
    }
    for group, parameters in groups.items():
        examples = {p.dtype: name for name, p in parameters.items() if p.requires_grad}
        if len(examples) > 1:
            found = ", ".join(f"{dtype} ({name})" for dtype, name in examples.items())
            raise ModelError(
                f"strategy 'fsdp2': expected one dtype in {group}, which is gathered in one piece, "
                f"found {found}; cast them to one dtype, and set FSDP2Config.mp_policy to compute "
                "in another"
            )


@torch.no_grad()
def broadcast_weights(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give every rank the parameters and buffers of the mesh's first one; call it on all ranks.

    What is on the meta device has no values yet and is left out.
    """
    device = mesh_device(mesh)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_meta:
            continue
        staged = tensor.to(device).contiguous()
        for dim in range(mesh.ndim):
            dist.broadcast(staged, group=mesh.get_group(dim), group_src=0)
        tensor.copy_(staged)
