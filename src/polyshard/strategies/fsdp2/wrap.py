"""Shard a model with ``fully_shard``, in named steps."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from polyshard.config.precision import MixedPrecision, torch_dtype
from polyshard.exceptions import ConfigError, OptimizerError, UnitError, UnsupportedError
from polyshard.parameters.optimizer_binding import rebind, record_names
from polyshard.parameters.slots import parameter_attributes, restore_attributes
from polyshard.strategies.fsdp2.guard import FSDP2Guard
from polyshard.strategies.fsdp2.mesh import sharding_mesh
from polyshard.strategies.fsdp2.weights import (
    broadcast_weights,
    check_dtypes,
    check_tensors,
    separable_units,
)
from polyshard.transforms.activation_checkpointing import checkpoint_mode, checkpoint_units
from polyshard.transforms.autocast import autocast_forward
from polyshard.transforms.checks import require_parameters
from polyshard.transforms.tensor_parallel import apply_plan, module_plan
from polyshard.transforms.units import UnitReport, find_units

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from polyshard.strategies.fsdp2.config import CPUOffload, FSDP2Config

__all__ = ["wrap"]

_logger = logging.getLogger(__name__)


def wrap(
    config: FSDP2Config, model: nn.Module, mesh: DeviceMesh | None, optimizer: Optimizer | None
) -> None:
    """Shard a model in place, and put its shards in the places of the optimizer's parameters.

    Without a process group there is nothing to shard: what else the config asks for is done, and
    what it then cannot do is refused or warned of.

    Args:
        config: The options.
        model: On any device; on the meta device it stays there, and its values are loaded later.
        mesh: With the dimension ``dp``, or ``dp_shard`` and ``dp_replicate``, and perhaps ``cp``
            and ``tp``; None without a process group.
        optimizer: Built on the model's parameters, or None; its state is sharded with them.

    Raises:
        ConfigError: An option does not fit this model or mesh.
        MeshError: The mesh has dimensions that FSDP2 does not take.
        ModelError: The model has no parameters, or some that cannot be sharded.
        OptimizerError: The optimizer's parameters are not the model's, or have no values.
        UnitError: The units could not be determined.
        UnsupportedError: Offloading was asked for where there is no accelerator.
    """
    require_parameters(model, "fsdp2", trainable=False)
    check_tensors(model)
    units = find_units(model, config.unit_modules)
    names = {} if optimizer is None else record_names(optimizer, model)
    if mesh is None:
        _check_without_group(config, model)
        _prepare_compute(config, model, units, next(model.parameters()).device.type)
        return
    parts = sharding_mesh(mesh)
    plan = module_plan(config, model, parts.tensor)
    groups = separable_units(model, units)
    _logger.info("fsdp2: %s; %d of them sharded on their own", units, len(groups))
    _check_options(config, parts.data, groups, split=bool(plan))
    check_dtypes(model, groups)
    _check_optimizer(optimizer)
    attributes = parameter_attributes(model)
    if config.sync_initial_weights:
        broadcast_weights(model, mesh)
    if parts.tensor is not None:
        apply_plan(model, parts.tensor, plan)
    _prepare_compute(config, model, units, mesh.device_type)
    _shard(config, model, list(groups), parts.data)
    if optimizer is not None:
        rebind(optimizer, names, model)
    restore_attributes(model, attributes)
    FSDP2Guard(model)


def _check_without_group(config: FSDP2Config, model: nn.Module) -> None:
    """Refuse or warn of what needs a process group."""
    module_plan(config, model, None)
    if config.offload_policy is not None:
        raise UnsupportedError(
            "FSDP2Config.offload_policy: expected a process group with an accelerator, found a "
            "plain process on the CPU; start it with torchrun, or leave the option out"
        )
    policy = config.mp_policy
    dtypes = {parameter.dtype for parameter in model.parameters()}
    wanted = (
        {torch_dtype(policy.param_dtype), torch_dtype(policy.output_dtype)} if policy else set()
    )
    if wanted - dtypes - {None}:
        warnings.warn(
            f"FSDP2Config.mp_policy has no effect without a process group: {type(model).__name__} "
            f"computes in {', '.join(map(str, dtypes))}; start the script with torchrun "
            "--nproc-per-node 1 for the same numerics as on more ranks, or set mp_policy to None",
            stacklevel=2,
        )


def _check_options(
    config: FSDP2Config, mesh: DeviceMesh, groups: dict[str, nn.Module], *, split: bool
) -> None:
    """Refuse the options that could not do what they say with this model on this mesh."""
    if config.offload_policy is not None and mesh.device_type == "cpu":
        raise UnsupportedError(
            "FSDP2Config.offload_policy: expected a mesh of accelerators to offload from, found "
            "one of CPUs; leave the option out"
        )
    for option in ("forward_prefetch_depth", "backward_prefetch_depth"):
        if getattr(config, option) is not None and not groups:
            raise UnitError(
                f"FSDP2Config.{option}: expected units to gather ahead, found none that can be "
                "sharded on their own; set unit_modules, or leave the option out"
            )
    ranks = config.reshard_after_forward
    if isinstance(ranks, bool) or ranks is None:
        return
    if mesh.size(-1) % ranks:
        raise ConfigError(
            f"FSDP2Config.reshard_after_forward: expected a divisor of the {mesh.size(-1)} ranks "
            f"that share a copy, found {ranks}",
            field="reshard_after_forward",
        )
    if split:
        raise UnsupportedError(
            "FSDP2Config.reshard_after_forward: expected true, false or none with tensor "
            f"parallelism, found {ranks}: torch does not reshard split parameters over fewer ranks"
        )


def _check_optimizer(optimizer: Optimizer | None) -> None:
    groups = [] if optimizer is None else optimizer.param_groups
    if any(parameter.is_meta for group in groups for parameter in group["params"]):
        raise OptimizerError(
            f"{type(optimizer).__name__}: expected parameters with values, found some on the meta "
            "device; load the parallelized model first, and build the optimizer then"
        )


def _prepare_compute(
    config: FSDP2Config, model: nn.Module, units: UnitReport, device_type: str
) -> None:
    """Set up how the model computes, whatever holds its parameters."""
    mode = checkpoint_mode(config.activation_checkpointing)
    if mode is not None:
        checkpoint_units(model, units, mode)
    dtype = torch_dtype(config.autocast_dtype)
    if dtype is not None:
        autocast_forward(model, dtype, device_type)
    if config.enable_compile:
        for module in [model.get_submodule(name) for name in units.names] or [model]:
            module.compile()


def _shard(config: FSDP2Config, model: nn.Module, units: list[str], mesh: DeviceMesh) -> None:
    """Call ``fully_shard`` on the units of these names and on the root."""
    policy = _policy(config.mp_policy)
    shard = partial(
        fully_shard,
        mesh=mesh,
        reshard_after_forward=config.reshard_after_forward,
        offload_policy=_offload_policy(config.offload_policy),
    )
    for name in units:
        # The outputs of the model alone are cast: between units it would be there and back again.
        shard(model.get_submodule(name), mp_policy=replace(policy, output_dtype=None))
    shard(model, mp_policy=policy)
    if config.reduce_scatter_unused_params and isinstance(model, FSDPModule):
        model.set_reduce_scatter_unused_params(True)
    _prefetch(config, model, [model.get_submodule(name) for name in units])


def _policy(policy: MixedPrecision | None) -> MixedPrecisionPolicy:
    if policy is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=torch_dtype(policy.param_dtype),
        reduce_dtype=torch_dtype(policy.reduce_dtype),
        output_dtype=torch_dtype(policy.output_dtype),
        cast_forward_inputs=policy.cast_forward_inputs,
    )


def _offload_policy(policy: CPUOffload | None) -> OffloadPolicy:
    return OffloadPolicy() if policy is None else CPUOffloadPolicy(pin_memory=policy.pin_memory)


def _prefetch(config: FSDP2Config, model: nn.Module, units: list[nn.Module]) -> None:
    """Tell the root, and each unit, which units to gather ahead: those that come next."""
    ahead, back = config.forward_prefetch_depth, config.backward_prefetch_depth
    modules: list[FSDPModule] = []
    modules += (module for module in (model, *units) if isinstance(module, FSDPModule))
    sharded = modules[1:]
    for before, module in enumerate(modules):
        if ahead is not None:
            module.set_modules_to_forward_prefetch(sharded[before : before + ahead])
        if back is not None:
            # The backward of the root begins first, and then that of the last unit.
            left = before - 1 if before else len(sharded)
            module.set_modules_to_backward_prefetch(sharded[max(0, left - back) : left][::-1])
