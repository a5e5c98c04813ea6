"""Wrapping a model, and the optimizer that was built on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from polyshard.exceptions import ModelError, UnsupportedError
from polyshard.mesh.devices import mesh_device
from polyshard.parameters import optimizer_binding as optimizers
from polyshard.parameters.guard import ParameterGuard
from polyshard.parameters.optimizer_binding import record_names
from polyshard.parameters.slots import parameter_attributes, restore_attributes
from polyshard.transforms.activation_checkpointing import checkpoint_units
from polyshard.transforms.checks import require_dimensions, require_parameters
from polyshard.transforms.tensor_parallel import apply_plan, module_plan
from polyshard.transforms.units import UnitReport, find_units
from polyshard_megatron_fsdp import _cpu
from polyshard_megatron_fsdp._checkpoint import describe_parts
from polyshard_megatron_fsdp._guard import refuse_empty, refuse_unshardable, watch_steps
from polyshard_megatron_fsdp._layout import local_of
from polyshard_megatron_fsdp._load import accept_full_tensors
from polyshard_megatron_fsdp._megatron import MegatronFSDP, fully_shard_model
from polyshard_megatron_fsdp._mends import mend_model, mend_modules
from polyshard_megatron_fsdp._mesh import Topology, topology_of
from polyshard_megatron_fsdp._meta import check_meta, initialize_replicas_alike, keep_buffers
from polyshard_megatron_fsdp._model import Record, adopt, unwrapped
from polyshard_megatron_fsdp._optimizer import rebind, shard
from polyshard_megatron_fsdp._options import check_options, wheel_arguments
from polyshard_megatron_fsdp._wheel import WHO, logger, warn_once
from polyshard_megatron_fsdp.config import MegatronFSDPConfig

__all__ = ["parallelize"]

#: The dtypes for which the wheel has buffers.
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


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
    _check_model(model)
    check_meta(config, model, topology)
    names = _names_held(optimizer, model)
    units = find_units(model, config.megatron_fsdp_unit_modules)
    tensor_mesh = topology.tensor_mesh()
    plan = {} if _is_split(model) else module_plan(config, model, tensor_mesh)
    # The wheel would add gradients from before the wrap to the first ones after it.
    model.zero_grad()
    _start_alike(model, topology)
    attributes = parameter_attributes(model)
    if plan and tensor_mesh is not None:
        apply_plan(model, tensor_mesh, plan)
    if config.activation_checkpointing:
        checkpoint_units(model, units, "full")
    if topology.data.size() == 1:
        return _leave_to_tensor_parallelism(model, optimizer, names)
    with keep_buffers(model):
        wheel_model = _wrap(config, model, topology, units)
    sharded = adopt(wheel_model, Record(config, topology, by_hand=by_hand))
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


def _wrap(
    config: MegatronFSDPConfig, model: nn.Module, topology: Topology, units: UnitReport
) -> Any:
    """Let the wheel wrap a model, and mend what it does wrong."""
    device = mesh_device(topology.mesh)
    _cpu.prepare(device)
    mend_modules()
    wrapped = fully_shard_model(
        model,
        fsdp_unit_modules=_unit_classes(model, units),
        device=device,
        **wheel_arguments(config, topology),
    )
    wrapped.model_auto_sync = True
    mend_model(wrapped)
    if device.type != "cuda":
        # gloo has no reduction that scales; the wheel then divides before it sums.
        wrapped.ddp_config.gradient_reduce_div_fusion = False
    return wrapped


def _start_alike(model: nn.Module, topology: Topology) -> None:
    """Give all ranks the parameters and buffers that the first one initialised."""
    for dimension in filter(None, (topology.tensor, topology.outer, topology.shard)):
        group = topology.mesh[dimension].get_group()
        for tensor in (*model.parameters(), *model.buffers()):
            own_part = isinstance(tensor, DTensor) and dimension == topology.tensor
            if not tensor.is_meta and not own_part:
                dist.broadcast(local_of(tensor.detach()), group=group, group_src=0)


def _is_split(model: nn.Module) -> bool:
    """Whether the script has split modules over the tensor-parallel dimension itself."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _check_model(model: nn.Module) -> None:
    """Refuse a model that cannot be wrapped, before anything is changed."""
    # The wheel puts its model on the parameters too, which the inner module still holds.
    if any(isinstance(module, MegatronFSDP) for module in model.modules()) or any(
        hasattr(parameter, "_megatron_fsdp_model") for parameter in model.parameters()
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
                f"{WHO}: expected parameters of {', '.join(map(str, _DTYPES))}, which the wheel "
                f"can gather, found {name!r} of {parameter.dtype}; cast it before parallelize"
            )


def _names_held(optimizer: Optimizer | None, model: nn.Module) -> Mapping[Tensor, str]:
    """Return the names of an optimizer's parameters, once it is known to be shardable."""
    if optimizer is None:
        return {}
    refuse_unshardable(optimizer)
    refuse_empty(optimizer)
    return record_names(optimizer, model)


def _unit_classes(model: nn.Module, units: UnitReport) -> list[type[nn.Module]]:
    """Return the classes of the units; a model without repeated blocks is one unit itself."""
    return list({type(unit): None for unit in units.modules.values()}) or [type(model)]


def _say_what_one_rank_lacks(config: MegatronFSDPConfig) -> None:
    if config.preserve_fp32_weights or config.grad_reduce_in_fp32:
        warn_once(
            "with one rank Megatron-FSDP does not wrap the model, so that preserve_fp32_weights "
            "and grad_reduce_in_fp32 have no effect: weights and gradients have the model's dtype"
        )
