"""The whole model, tensor by tensor, and the bytes that one rank holds of it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from polyshard.parameters.names import canonical_parameter_name
from polyshard.strategies import fallback
from polyshard_megatron_fsdp.megatron_fsdp.private_names import local_of, weights
from polyshard_megatron_fsdp.model.layout import offsets_of, shard_dims
from polyshard_megatron_fsdp.model.sharded_model import ShardedModel

__all__ = ["full_tensors", "parameter_bytes"]

#: Where a part of a parameter lies in the whole.
Box = tuple[slice, ...]


def full_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and persistent buffer, whole, by the user's names.

    Parameters have the dtype of the weights that the optimizer steps. Runs collectives: go
    through it on every rank.
    """
    if not isinstance(model, ShardedModel):
        yield from fallback.full_tensors(model)
        return
    model.show_distributed()
    for name, value in model.module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            whole = _gather(value) if isinstance(value, DTensor) else value.detach()
            yield canonical_parameter_name(name), whole


def parameter_bytes(model: nn.Module) -> int:
    """Return the bytes of all storages that hold weights on this rank."""
    if not isinstance(model, ShardedModel):
        return fallback.parameter_bytes(model)
    storages = (tensor.untyped_storage() for tensor in weights(model))
    # Computing and main weights may be one storage, and are counted once then.
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def _gather(parameter: DTensor) -> Tensor:
    """Put the parts of a parameter together, on its device, on every rank.

    Parts are broadcast one by one: megatron-fsdp's shards are uneven, which torch's own gathers
    do not support over gloo.
    """
    local = local_of(parameter).detach()
    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=local.device)
    boxes = [_box_of(parameter)]
    whole[boxes[0]] = local
    for dim in shard_dims(parameter):
        group = parameter.device_mesh.get_group(dim)
        held: list[list[Box]] = [[]] * dist.get_world_size(group)
        dist.all_gather_object(held, boxes, group=group)
        for rank, theirs in enumerate(held):
            for box in theirs:
                part = whole[box].contiguous()
                dist.broadcast(part, group=group, group_src=rank)
                whole[box] = part
        boxes = [box for theirs in held for box in theirs]
    return whole


def _box_of(parameter: DTensor) -> Box:
    """Return where this rank's part of a parameter lies."""
    shape = local_of(parameter).shape
    return tuple(slice(o, o + n) for o, n in zip(offsets_of(parameter), shape, strict=True))
