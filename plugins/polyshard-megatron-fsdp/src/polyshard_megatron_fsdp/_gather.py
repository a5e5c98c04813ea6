"""The whole model on every rank, and the bytes that one rank holds of it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from polyshard.parameters.names import canonical_name
from polyshard.strategies import fallback as defaults
from polyshard_megatron_fsdp._layout import local_of, offsets_of, shard_dims
from polyshard_megatron_fsdp._model import ShardedModel

__all__ = ["full_state_dict", "parameter_bytes"]

Piece = tuple[tuple[int, ...], Tensor]


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and persistent buffer, whole, on the CPU, by the user's names.

    Parameters have the dtype of the weights that the optimizer steps. Runs collectives: call it
    on every rank.
    """
    if not isinstance(model, ShardedModel):
        return defaults.full_state_dict(model)
    model.show_distributed()
    state: dict[str, Tensor] = model.module.state_dict(keep_vars=True)
    sharded = {name: value for name, value in state.items() if isinstance(value, DTensor)}
    whole = _gather(sharded)
    return {
        canonical_name(name): (
            whole[id(value)].clone() if name in sharded else value.detach().to("cpu", copy=True)
        )
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


def parameter_bytes(model: nn.Module) -> int:
    """Return the bytes of all storages that hold weights on this rank."""
    if not isinstance(model, ShardedModel):
        return defaults.parameter_bytes(model)
    storages = (tensor.untyped_storage() for tensor in _weights(model))
    # Computing and main weights may be one storage, and are counted once then.
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def _weights(model: ShardedModel) -> list[Tensor]:
    """Return every tensor that backs the weights: what computes and what the optimizer steps."""
    buffers = [
        buffer.data
        for group in model.param_and_grad_buffer.parameter_groups
        for buffer in (
            group.model_weight_buffer,
            group.main_weight_buffer,
            group.hfsdp_helper_wbuf,
        )
        if buffer is not None and buffer.data is not None
    ]
    return [*buffers, *(local_of(parameter) for parameter in model.raw_param.values())]


def _gather(sharded: dict[str, DTensor]) -> dict[int, Tensor]:
    """Put the parts of parameters together, on the CPU, by the identity of the parameter.

    Parts travel as pairs of offsets and values: the wheel's shards are uneven, which torch's
    own gathers do not support over gloo.
    """
    parameters = list({id(parameter): parameter for parameter in sharded.values()}.values())
    pieces: list[list[Piece]] = [
        [(offsets_of(parameter), local_of(parameter).detach().cpu())] for parameter in parameters
    ]
    for dim_group, positions in _by_group(parameters).items():
        received: list[dict[int, list[Piece]]] = [{}] * dist.get_world_size(dim_group)
        dist.all_gather_object(received, {i: pieces[i] for i in positions}, group=dim_group)
        for i in positions:
            pieces[i] = [piece for part in received for piece in part[i]]
    return {
        id(parameter): _assemble(parameter, parts)
        for parameter, parts in zip(parameters, pieces, strict=True)
    }


def _by_group(parameters: list[DTensor]) -> dict[dist.ProcessGroup, list[int]]:
    """Return the positions of the parameters that are sharded over each process group.

    The order is the same on every rank, because all ranks place parameters alike.
    """
    groups: dict[dist.ProcessGroup, list[int]] = {}
    for position, parameter in enumerate(parameters):
        for dim in shard_dims(parameter):
            groups.setdefault(parameter.device_mesh.get_group(dim), []).append(position)
    return groups


def _assemble(parameter: DTensor, pieces: list[Piece]) -> Tensor:
    whole = torch.empty(parameter.shape, dtype=parameter.dtype)
    for offsets, part in pieces:
        if part.numel():
            whole[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))] = part
    return whole
