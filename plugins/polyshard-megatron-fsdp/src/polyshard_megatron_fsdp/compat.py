"""The functions of the module that this package replaces, with the same signatures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyshard_megatron_fsdp.megatron_fsdp.version import require_version

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = [
    "fully_shard_optimizer",
    "restore_distributed_param_attrs",
    "snapshot_distributed_param_attrs",
]


def fully_shard_optimizer(
    model: nn.Module, optimizer: Optimizer, preproc_state_dict_for_dcp_ckpt: bool = True
) -> Optimizer:
    """Register an optimizer with a wrapped model, so that it steps the shards.

    It takes no step. The optimizer of a model that is not wrapped is returned as it is.

    Args:
        model: What ``parallelize`` returned.
        optimizer: An optimizer built on its parameters; changed in place.
        preproc_state_dict_for_dcp_ckpt: Whether its ``state_dict`` describes uneven shards to
            ``torch.distributed.checkpoint``; that runs collectives.

    Raises:
        PluginLoadError: megatron-fsdp is missing or too old; it is an ImportError.
        OptimizerError: The optimizer is not the model's, or must not be sharded.
    """
    require_version()
    from polyshard_megatron_fsdp.model.sharded_model import ShardedModel
    from polyshard_megatron_fsdp.optimizer.sharding import shard

    if not isinstance(model, ShardedModel):
        return optimizer
    return shard(model, optimizer, preprocess_state_dict=preproc_state_dict_for_dcp_ckpt)


def snapshot_distributed_param_attrs(model: nn.Module) -> dict[str, dict[str, Any]] | None:
    """Copy what is set on each parameter, before something that replaces parameters.

    Returns:
        The ``__dict__`` of each parameter by each of its names; None for a model that is not
        wrapped.
    """
    require_version()
    from polyshard_megatron_fsdp.model.sharded_model import ShardedModel
    from polyshard_megatron_fsdp.state.rebuild import remember

    if not isinstance(model, ShardedModel):
        return None
    remember(model)
    return {
        name: dict(parameter.__dict__)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def restore_distributed_param_attrs(
    model: nn.Module, snapshot: dict[str, dict[str, Any]] | None
) -> None:
    """Set again what a snapshot has and a parameter lacks, by name; nothing is overwritten.

    Attributes alone would leave a model that trains its old values: new values then move into
    the parameters that megatron-fsdp knows, and these return, as after ``polyshard.rebuild``.

    Args:
        model: What ``parallelize`` returned.
        snapshot: What ``snapshot_distributed_param_attrs`` returned; None does nothing.

    Raises:
        RebuildError: What was done to the parameters cannot be made right.
    """
    if snapshot is None:
        return
    for name, parameter in model.named_parameters(remove_duplicate=False):
        for attribute, value in snapshot.get(name, {}).items():
            parameter.__dict__.setdefault(attribute, value)
    from polyshard_megatron_fsdp.model.sharded_model import ShardedModel
    from polyshard_megatron_fsdp.state.rebuild import restore

    if isinstance(model, ShardedModel) and model.record.snapshot is not None:
        restore(model, model.record.snapshot)
