"""Wrap a model in DistributedDataParallel, in named steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.parallel import DistributedDataParallel

from polyshard.config.precision import torch_dtype
from polyshard.mesh.devices import mesh_device
from polyshard.parameters.optimizer_binding import rebind, record_names
from polyshard.strategies.ddp.guard import DDPGuard
from polyshard.strategies.ddp.mesh import data_parallel_group
from polyshard.strategies.ddp.model import DataParallelModel
from polyshard.transforms.activation_checkpointing import checkpoint_mode, checkpoint_units
from polyshard.transforms.autocast import autocast_forward
from polyshard.transforms.checks import require_materialized, require_parameters
from polyshard.transforms.units import find_units

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from polyshard.strategies.ddp.config import DDPConfig

__all__ = ["inner_module", "wrap"]


def wrap(
    config: DDPConfig, model: nn.Module, mesh: DeviceMesh | None, optimizer: Optimizer | None
) -> nn.Module:
    """Return the model in DistributedDataParallel, or itself without a process group.

    Args:
        config: The options.
        model: Changed in place: moved to the mesh's device, and checkpointed if that is asked.
        mesh: Its one dimension is the data-parallel one; None without a process group.
        optimizer: Built on the model's parameters, or None; its state follows them.

    Raises:
        MeshError: The mesh has another dimension than data parallelism.
        ModelError: The model has nothing to train, or is not materialized.
        OptimizerError: The optimizer's parameters are not the model's.
        UnitError: Activation checkpointing found no block.
    """
    require_parameters(model, "ddp", trainable=True)
    require_materialized(model, "ddp")
    group = None if mesh is None else data_parallel_group(mesh)
    device = mesh_device(mesh)
    names = {} if optimizer is None else record_names(optimizer, model)
    if device.type != "cpu":
        model.to(device)
    if optimizer is not None:
        rebind(optimizer, names, model)
    mode = checkpoint_mode(config.activation_checkpointing)
    if mode is not None:
        checkpoint_units(model, find_units(model), mode)
    dtype = torch_dtype(config.autocast_dtype)
    if dtype is not None:
        autocast_forward(model, dtype, next(model.parameters()).device.type)
    if group is None:
        return model
    wrapper = DataParallelModel(
        model,
        device_ids=None if device.type == "cpu" else [device],
        process_group=group,
        # Unlike the deprecated broadcast_buffers=False, this still syncs them at the start.
        forward_sync_buffers=config.broadcast_buffers,
        find_unused_parameters=config.find_unused_parameters,
        static_graph=config.static_graph,
        bucket_cap_mb=config.bucket_cap_mb,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
    )
    DDPGuard(wrapper)
    return wrapper


def inner_module(model: nn.Module) -> nn.Module:
    """Return the user's own root module of what ``wrap`` returned."""
    return model.module if isinstance(model, DistributedDataParallel) else model
