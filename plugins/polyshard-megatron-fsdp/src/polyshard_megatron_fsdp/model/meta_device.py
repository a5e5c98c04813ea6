"""Models on the meta device, which megatron-fsdp initializes shard by shard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from polyshard.exceptions import ModelError, UnsupportedError
from polyshard.parameters.slots import slots_of
from polyshard.transforms.checks import require_materialized
from polyshard_megatron_fsdp.config import MegatronFSDPConfig
from polyshard_megatron_fsdp.megatron_fsdp.private_names import local_of
from polyshard_megatron_fsdp.megatron_fsdp.version import WHO
from polyshard_megatron_fsdp.model.sharded_model import ShardedModel
from polyshard_megatron_fsdp.model.topology import Topology

__all__ = ["check_meta", "initialize_replicas_alike", "keep_buffers"]


def check_meta(config: MegatronFSDPConfig, model: nn.Module, topology: Topology) -> None:
    """Check that everything on the meta device will get a value.

    Raises:
        ModelError: Something will not; the message names it.
        UnsupportedError: megatron-fsdp cannot initialize this mesh.
    """
    if not config.init_fsdp_with_meta_device:
        require_materialized(model, "megatron_fsdp")
        return
    if topology.tensor_mesh() is not None:
        raise UnsupportedError(
            f"{WHO}: init_fsdp_with_meta_device=True does not work with tensor parallelism; build "
            "the model on its device"
        )
    for name, module in model.named_modules():
        _check_module(name or type(model).__name__, module)
    for parameter, slots in slots_of(model).items():
        if parameter.is_meta and len(slots) > 1:
            raise _error(
                f"the tied parameter {' and '.join(repr(slot.name) for slot in slots)}",
                "megatron-fsdp initializes each name for itself; tie them on a real device",
            )


@contextmanager
def keep_buffers(model: nn.Module) -> Iterator[None]:
    """Give buffers their values again, which initializing the module around them wipes out."""
    values = {name: buffer.clone() for name, buffer in model.named_buffers()}
    yield
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])


@torch.no_grad()
def initialize_replicas_alike(model: ShardedModel) -> None:
    """Give all replicas the shards that the first one initialized."""
    topology = model.record.topology
    if topology.outer is None or model.record.config.outer_dp_sharding_strategy:
        return
    group = topology.mesh[topology.outer].get_group()
    for _, parameter in model.distributed_parameters():
        dist.broadcast(local_of(parameter.detach()), group=group, group_src=0)
    model.install_optimized_model_weights()
    model.synchronize_param_gather()


def _check_module(name: str, module: nn.Module) -> None:
    for buffer_name, buffer in module.named_buffers(recurse=False):
        if buffer.is_meta:
            raise _error(
                f"the buffer {buffer_name!r} of {name!r}",
                "nothing gives it a value; make it on a real device, with torch.device('cpu')",
            )
    parameters = dict(module.named_parameters(recurse=False))
    on_meta = [key for key, parameter in parameters.items() if parameter.is_meta]
    if not on_meta:
        return
    if len(on_meta) < len(parameters):
        raise _error(
            f"{on_meta[0]!r} of {name!r}, whose other parameters have values",
            "initializing it would wipe these out; build all of the module on one device",
        )
    if not (hasattr(module, "reset_parameters") or hasattr(module, "_reset_parameters")):
        raise _error(
            f"{on_meta[0]!r} of {name!r}",
            f"{type(module).__name__} has no reset_parameters() to give it a value; add one",
        )


def _error(what: str, cure: str) -> ModelError:
    return ModelError(f"{WHO}: init_fsdp_with_meta_device=True cannot initialize {what}: {cure}")
