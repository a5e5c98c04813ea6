"""Sharding an optimizer: its parameters, its groups, its step."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from polyshard.exceptions import OptimizerError
from polyshard.parameters.names import canonical_parameters
from polyshard.parameters.optimizer_binding import split_mixed_groups
from polyshard_megatron_fsdp.megatron_fsdp.patches.optimizer import patched_optimizer
from polyshard_megatron_fsdp.megatron_fsdp.private_names import original_of, set_model_of
from polyshard_megatron_fsdp.megatron_fsdp.upstream import fully_shard_optimizer
from polyshard_megatron_fsdp.megatron_fsdp.version import WHO
from polyshard_megatron_fsdp.model.sharded_model import ShardedModel, unwrapped, wrapped
from polyshard_megatron_fsdp.optimizer.optimizer_checks import refuse_empty, refuse_unshardable
from polyshard_megatron_fsdp.state.checkpoint import describe_state, offer_state_to_load_into
from polyshard_megatron_fsdp.state.load import shard_like
from polyshard_megatron_fsdp.state.rebuild import REPLACES

__all__ = ["rebind", "shard"]


def shard(
    model: nn.Module, optimizer: Optimizer, *, preprocess_state_dict: bool = True
) -> Optimizer:
    """Make an optimizer step the shards of a wrapped model; the same object is returned.

    It takes no step, and its groups, hyperparameters and state stay.

    Raises:
        OptimizerNotShardableError: Its update needs whole matrices.
        OptimizerError: It has no parameters, or those of another model.
    """
    if model in unwrapped:
        split_mixed_groups(optimizer)
        return optimizer
    sharded = wrapped(model)
    if optimizer in sharded.record.optimizers:
        return optimizer
    refuse_unshardable(optimizer)
    refuse_empty(optimizer)
    sharded.show_distributed()
    _take_distributed(optimizer, sharded)
    _stamp_owner(sharded)
    offer_state_to_load_into(optimizer)
    if preprocess_state_dict:
        describe_state(optimizer)
    with patched_optimizer(optimizer):
        fully_shard_optimizer(optimizer, preproc_state_dict_for_dcp_ckpt=False)
    _keep_in_step(optimizer, sharded)
    sharded.record.optimizers.add(optimizer)
    return optimizer


def rebind(optimizer: Optimizer, names: Mapping[Tensor, str], model: ShardedModel) -> None:
    """Put the distributed parameters in the places of those that the optimizer was built on.

    Groups and their options stay; of state of a parameter's shape each rank keeps its part.

    Args:
        optimizer: Changed in place.
        names: The user's name of each parameter that it held before the wrap.
        model: The wrapped model.
    """
    present = canonical_parameters(model.module)
    for group in optimizer.param_groups:
        group["params"][:] = [present[names[parameter]] for parameter in group["params"]]
    for old, name in names.items():
        state = optimizer.state.pop(old, None)
        if state is not None:
            optimizer.state[present[name]] = {
                key: _shard_state(value, present[name]) for key, value in state.items()
            }


def _shard_state(value: Any, parameter: Tensor) -> Any:
    """Return this rank's part of a tensor of the parameter's shape, anything else as it is."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    assert isinstance(parameter, DTensor)
    return shard_like(value, parameter)


def _take_distributed(optimizer: Optimizer, model: ShardedModel) -> None:
    """Give an optimizer that was built during a forward the parameters it should have had.

    Raises:
        OptimizerError: A parameter is not the model's.
    """
    distributed = {id(p): p for _, p in model.distributed_parameters()}
    stands_for = {id(original_of(p)): p for p in distributed.values()} | distributed
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in held:
        # One that a script put in the model inside rebuild, and built the optimizer on.
        if (old := getattr(parameter, REPLACES, None)) is not None and id(old) in distributed:
            stands_for[id(parameter)] = old
    foreign = sum(id(parameter) not in stands_for for parameter in held)
    if foreign:
        raise OptimizerError(
            f"{type(optimizer).__name__}: expected parameters of the {type(model.module).__name__} "
            f"that {WHO} wrapped, found {foreign} of {len(held)} that are not; "
            "build the optimizer on what parallelize returned, and replace parameters only "
            "inside polyshard.rebuild(model)"
        )
    seen: set[int] = set()
    for group in optimizer.param_groups:
        # The ends of a tie were two parameters for a while, if each was replaced by its own.
        new = {id(p): p for p in (stands_for[id(held)] for held in group["params"])}
        group["params"][:] = [p for key, p in new.items() if key not in seen]
        seen |= new.keys()


def _stamp_owner(model: ShardedModel) -> None:
    """Put the model on its parameters again: megatron-fsdp looks there, and casts lose it."""
    for _, parameter in model.distributed_parameters():
        set_model_of(parameter, model)


def _keep_in_step(optimizer: Optimizer, model: ShardedModel) -> None:
    """Gather parameters anew after each step, also those that a forward gathered before it."""

    def before(*_: Any) -> None:
        if model.record.unreduced:
            warnings.warn(
                f"{type(optimizer).__name__}.step: the gradients of {model.record.unreduced} "
                "microbatches are not reduced yet and are left out; put the microbatch before the "
                "step in polyshard.accumulate(model, last=True)",
                RuntimeWarning,
                stacklevel=4,
            )

    def after(*_: Any) -> None:
        model.synchronize_param_gather()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
