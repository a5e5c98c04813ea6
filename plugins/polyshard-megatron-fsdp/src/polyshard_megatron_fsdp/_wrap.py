"""Wrapping a model, and the optimizer that was built on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from polyshard.activation_checkpointing import checkpoint_units
from polyshard.discovery import describe_owner
from polyshard.exceptions import UnsupportedError
from polyshard.optimizers import canonical_parameters, record_names
from polyshard.units import UnitReport, find_units
from polyshard_megatron_fsdp import _cpu
from polyshard_megatron_fsdp._guard import refuse_empty, refuse_unshardable, watch_steps
from polyshard_megatron_fsdp._load import accept_full_tensors
from polyshard_megatron_fsdp._megatron import MegatronFSDP, fully_shard_model
from polyshard_megatron_fsdp._mends import mend_model, mend_modules
from polyshard_megatron_fsdp._mesh import Topology, topology_of
from polyshard_megatron_fsdp._model import Record, ShardedModel, adopt
from polyshard_megatron_fsdp._optimizer import rebind, shard
from polyshard_megatron_fsdp._precision import policy_for
from polyshard_megatron_fsdp._wheel import logger, warn_once
from polyshard_megatron_fsdp.config import MegatronFSDPConfig

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
        return model, optimizer
    topology = topology_of(mesh)
    _check_model(model)
    names = _names_held(optimizer, model)
    units = _units_of(model, config)
    if config.activation_checkpointing:
        checkpoint_units(model, units, "full")
    _start_alike(model, topology)
    stamps = {name: dict(p.__dict__) for name, p in canonical_parameters(model).items()}
    sharded = adopt(
        _wrap(config, model, topology, units), Record(config, topology, by_hand=by_hand)
    )
    _stamp_again(sharded, stamps)
    accept_full_tensors(sharded)
    watch_steps()
    logger.info("Megatron-FSDP stage %d: %s", config.zero_dp_strategy, units)
    if optimizer is not None:
        rebind(optimizer, names, sharded)
        shard(sharded, optimizer)
    return sharded, optimizer


def _wrap(
    config: MegatronFSDPConfig, model: nn.Module, topology: Topology, units: UnitReport
) -> Any:
    """Let the wheel wrap a model, and mend what it does wrong."""
    device = _device_of(topology.mesh)
    _cpu.prepare(device)
    mend_modules()
    wrapped = fully_shard_model(
        model,
        device_mesh=topology.mesh,
        dp_shard_dim=topology.shard,
        tp_dim=topology.tensor,
        fsdp_unit_modules=_unit_classes(model, units),
        zero_dp_strategy=config.zero_dp_strategy,
        device=device,
        mixed_precision_policy=policy_for(config),
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather,
        # Synchronising every microbatch is set below: the wheel's argument for it logs a warning
        # about what accumulate() prevents.
        sync_model_each_microbatch=False,
        disable_bucketing=config.disable_bucketing,
        calculate_per_token_loss=config.calculate_per_token_loss,
        keep_fp8_transpose_cache=config.keep_fp8_transpose_cache,
        nccl_ub=config.nccl_ub,
        fsdp_double_buffer=config.fsdp_double_buffer,
        **_outer_arguments(config, topology),
    )
    wrapped.model_auto_sync = True
    mend_model(wrapped)
    if device.type != "cuda":
        # gloo has no reduction that scales; the wheel then divides before it sums.
        wrapped.ddp_config.gradient_reduce_div_fusion = False
    return wrapped


def _outer_arguments(config: MegatronFSDPConfig, topology: Topology) -> dict[str, object]:
    """Return the arguments that a second data-parallel dimension needs."""
    if topology.outer is None:
        return {}
    both = topology.mesh[(topology.outer, topology.shard)]
    return {
        "dp_outer_dim": topology.outer,
        "hybrid_fsdp_group": both._flatten(f"{topology.outer}_{topology.shard}").get_group(),
        "outer_dp_sharding_strategy": config.outer_dp_sharding_strategy,
    }


def _start_alike(model: nn.Module, topology: Topology) -> None:
    """Give all ranks the parameters and buffers that the first one initialised."""
    for dimension in filter(None, (topology.tensor, topology.outer, topology.shard)):
        group = topology.mesh[dimension].get_group()
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                dist.broadcast(tensor.detach(), group=group, group_src=0)


def _stamp_again(model: ShardedModel, stamps: Mapping[str, Mapping[str, Any]]) -> None:
    """Set what the user had set on each parameter on the one that now stands for it."""
    for name, parameter in canonical_parameters(model.module).items():
        for attribute, value in stamps[name].items():
            parameter.__dict__.setdefault(attribute, value)


def _check_model(model: nn.Module) -> None:
    """Refuse a model that cannot be wrapped, before anything is changed."""
    if any(isinstance(module, MegatronFSDP) for module in model.modules()):
        raise UnsupportedError(
            f"{describe_owner(parallelize)}: expected a model that is not wrapped yet, found "
            f"{type(model).__name__}, which Megatron-FSDP has wrapped; build a new one"
        )
    if not any(True for _ in model.parameters()):
        raise UnsupportedError(
            f"{describe_owner(parallelize)}: expected a model with parameters, found "
            f"{type(model).__name__} without any"
        )


def _names_held(optimizer: Optimizer | None, model: nn.Module) -> Mapping[Tensor, str]:
    """Return the names of an optimizer's parameters, once it is known to be shardable."""
    if optimizer is None:
        return {}
    refuse_unshardable(optimizer)
    refuse_empty(optimizer)
    return record_names(optimizer, model)


def _units_of(model: nn.Module, config: MegatronFSDPConfig) -> UnitReport:
    return find_units(model, config.megatron_fsdp_unit_modules)


def _unit_classes(model: nn.Module, units: UnitReport) -> list[type[nn.Module]]:
    """Return the classes of the units; a model without repeated blocks is one unit itself."""
    return list({type(unit): None for unit in units.modules.values()}) or [type(model)]


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def _say_what_one_rank_lacks(config: MegatronFSDPConfig) -> None:
    if config.preserve_fp32_weights or config.grad_reduce_in_fp32:
        warn_once(
            "with one rank Megatron-FSDP does not wrap the model, so that preserve_fp32_weights "
            "and grad_reduce_in_fp32 have no effect: weights and gradients have the model's dtype"
        )
