"""Wrapping a model, and the optimizer that was built on it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from polyshard.parameters import optimizer_binding as optimizers
from polyshard.parameters.guard import ParameterGuard
from polyshard.parameters.optimizer_binding import record_names
from polyshard.parameters.slots import parameter_attributes, restore_attributes
from polyshard.transforms.activation_checkpointing import checkpoint_units
from polyshard.transforms.tensor_parallel import apply_plan, module_plan
from polyshard.transforms.units import find_units
from polyshard_megatron_fsdp.config import MegatronFSDPConfig
from polyshard_megatron_fsdp.megatron_fsdp.version import logger, warn_once
from polyshard_megatron_fsdp.model.meta_device import (
    check_meta,
    initialize_replicas_alike,
    keep_buffers,
)
from polyshard_megatron_fsdp.model.options import check_options
from polyshard_megatron_fsdp.model.sharded_model import Record, adopt, unwrapped
from polyshard_megatron_fsdp.model.topology import topology_of
from polyshard_megatron_fsdp.model.wrap import check_model, is_split, start_alike, wrap_model
from polyshard_megatron_fsdp.optimizer.optimizer_checks import (
    refuse_empty,
    refuse_unshardable,
    watch_steps,
)
from polyshard_megatron_fsdp.optimizer.sharding import rebind, shard
from polyshard_megatron_fsdp.state.checkpoint import describe_parts
from polyshard_megatron_fsdp.state.load import accept_full_tensors

__all__ = ["parallelize"]


def parallelize(
    config: MegatronFSDPConfig,
    model: nn.Module,
    mesh: DeviceMesh | None,
    optimizer: Optimizer | None,
    *,
    by_hand: bool = False,
) -> tuple[nn.Module, Optimizer | None]:
    """Wrap a model for a mesh, and shard the optimizer that was built on its parameters.

    With one rank both come back as they are, and train as in plain PyTorch.
    """
    if mesh is None or mesh.size() == 1:
        _say_what_one_rank_lacks(config)
        if mesh is not None:
            ParameterGuard(model, model)
        return model, optimizer
    topology = topology_of(mesh)
    check_options(config, topology)
    check_model(model)
    check_meta(config, model, topology)
    names = _names_held(optimizer, model)
    units = find_units(model, config.megatron_fsdp_unit_modules)
    tensor_mesh = topology.tensor_mesh()
    plan = {} if is_split(model) else module_plan(config, model, tensor_mesh)
    # megatron-fsdp would add gradients from before the wrap to the first ones after it.
    model.zero_grad()
    start_alike(model, topology)
    attributes = parameter_attributes(model)
    if plan and tensor_mesh is not None:
        apply_plan(model, tensor_mesh, plan)
    if config.activation_checkpointing:
        checkpoint_units(model, units, "full")
    if topology.data.size() == 1:
        return _leave_to_tensor_parallelism(model, optimizer, names)
    with keep_buffers(model):
        wrapped = wrap_model(config, model, topology, units)
    sharded = adopt(wrapped, Record(config, topology, by_hand=by_hand))
    if config.init_fsdp_with_meta_device:
        initialize_replicas_alike(sharded)
    restore_attributes(sharded.module, attributes)
    accept_full_tensors(sharded)
    describe_parts(sharded.module)
    watch_steps()
    logger.info("Megatron-FSDP stage %d: %s", config.zero_dp_strategy, units)
    if optimizer is not None:
        rebind(optimizer, names, sharded)
        shard(sharded, optimizer)
    return sharded, optimizer


def _leave_to_tensor_parallelism(
    model: nn.Module, optimizer: Optimizer | None, names: Mapping[Tensor, str]
) -> tuple[nn.Module, Optimizer | None]:
    """Let a model that no data-parallel ranks share train by tensor parallelism alone."""
    warn_once(
        "the mesh has one data-parallel rank: the model is split by tensor parallelism alone, and "
        "Megatron-FSDP does not wrap it"
    )
    unwrapped.add(model)
    if optimizer is not None:
        optimizers.rebind(optimizer, names, model)
        optimizers.split_mixed_groups(optimizer)
    ParameterGuard(model, model)
    return model, optimizer


def _names_held(optimizer: Optimizer | None, model: nn.Module) -> Mapping[Tensor, str]:
    """Return the names of an optimizer's parameters, once it is known to be shardable."""
    if optimizer is None:
        return {}
    refuse_unshardable(optimizer)
    refuse_empty(optimizer)
    return record_names(optimizer, model)


def _say_what_one_rank_lacks(config: MegatronFSDPConfig) -> None:
    if config.preserve_fp32_weights or config.grad_reduce_in_fp32:
        warn_once(
            "with one rank Megatron-FSDP does not wrap the model, so that preserve_fp32_weights "
            "and grad_reduce_in_fp32 have no effect: weights and gradients have the model's dtype"
        )
