"""Megatron-FSDP: parameters, gradients and optimizer state sharded by ZeRO stage 0 to 3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyshard.registry.hookspecs import hookimpl
from polyshard_megatron_fsdp.megatron_fsdp.version import require_version

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from polyshard.parameters.snapshot import ParameterSnapshot
    from polyshard_megatron_fsdp.config import MegatronFSDPConfig

# Loading the plugin is when a megatron-fsdp that is missing or too old should be found out.
require_version()


@hookimpl
def parallelize(
    config: MegatronFSDPConfig,
    model: nn.Module,
    mesh: DeviceMesh | None,
    optimizer: Optimizer | None,
) -> tuple[nn.Module, Optimizer | None]:
    """Wrap the model, and give the optimizer the parameters of the wrapped one."""
    from polyshard_megatron_fsdp.parallelize import parallelize

    return parallelize(config, model, mesh, optimizer)


@hookimpl
def add_methods(model: nn.Module, names: Sequence[str]) -> None:
    """Let methods of the module inside the wrapper gather all of it before they begin."""
    from polyshard_megatron_fsdp.model.sharded_model import ShardedModel

    if isinstance(model, ShardedModel):
        model.add_methods(names)


@hookimpl
def shard_optimizer(model: nn.Module, optimizer: Optimizer) -> Optimizer:
    """Make the optimizer step the shards of the model; it takes no step."""
    from polyshard_megatron_fsdp.optimizer.sharding import shard

    return shard(model, optimizer)


@hookimpl
def pre_rebuild(model: nn.Module) -> ParameterSnapshot:
    """Remember the distributed parameters, which megatron-fsdp knows by identity."""
    from polyshard_megatron_fsdp.state.rebuild import remember

    return remember(model)


@hookimpl
def post_rebuild(model: nn.Module, snapshot: ParameterSnapshot) -> None:
    """Move the new values into the distributed parameters and put these back."""
    from polyshard_megatron_fsdp.state.rebuild import restore

    restore(model, snapshot)


@hookimpl
def accumulate(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Leave gradients unreduced in all microbatches but the last."""
    from polyshard_megatron_fsdp.optimizer.gradients import accumulate

    return accumulate(model, last)


@hookimpl
def clip_grad_norm(model: nn.Module, max_norm: float, norm_type: float) -> Tensor:
    """Clip by the norm over all ranks, those with empty shards included."""
    from polyshard_megatron_fsdp.optimizer.gradients import clip_grad_norm

    return clip_grad_norm(model, max_norm, norm_type)


@hookimpl
def full_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Gather the weights that the optimizer steps, and yield the persistent buffers."""
    from polyshard_megatron_fsdp.state.gather import full_tensors

    return full_tensors(model)


@hookimpl
def parameter_bytes(model: nn.Module) -> int:
    """Count the buffers that hold weights on this rank: computing and main copies."""
    from polyshard_megatron_fsdp.state.gather import parameter_bytes

    return parameter_bytes(model)
