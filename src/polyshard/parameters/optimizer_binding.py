"""Optimizers that were built before the model was distributed, and the names that bind them.

A strategy that replaces Parameter objects records the names that an optimizer's parameters have
before it wraps the model, and rebinds the optimizer by those names afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from polyshard.exceptions import OptimizerError
from polyshard.parameters.dtensors import shard_like
from polyshard.parameters.names import canonical_parameters

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim import Optimizer

__all__ = ["rebind", "record_names", "split_mixed_groups"]


def record_names(optimizer: Optimizer, model: nn.Module) -> dict[Tensor, str]:
    """Return the name of each parameter that the optimizer holds, for ``rebind``.

    Args:
        optimizer: Built on the parameters of ``model``.
        model: The model before it is wrapped.

    Raises:
        OptimizerError: The optimizer holds parameters that are not the model's.
    """
    known: dict[Tensor, str] = {}
    for name, parameter in canonical_parameters(model).items():
        known.setdefault(parameter, name)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = sum(parameter not in known for parameter in held)
    if foreign:
        raise OptimizerError(
            f"{type(optimizer).__name__}: expected the parameters of the {type(model).__name__} "
            f"that is parallelized, found {foreign} of {len(held)} that are not; build the "
            "optimizer on this model's parameters"
        )
    return {parameter: known[parameter] for parameter in held}


def rebind(optimizer: Optimizer, names: Mapping[Tensor, str], model: nn.Module) -> None:
    """Put the model's present parameters in the places of those that the optimizer held.

    Groups and their options stay, and so do the lists of parameters, which some optimizers hold
    on to. State moves to the new parameter; where that is a DTensor, each rank keeps its part of
    the state tensors of the parameter's size.

    Args:
        optimizer: Changed in place.
        names: What ``record_names`` returned.
        model: The user's own root module, wrapped inside or not.

    Raises:
        OptimizerError: State of another size than its parameter cannot be sharded.
    """
    present = canonical_parameters(model)
    for group in optimizer.param_groups:
        group["params"][:] = [present[names[parameter]] for parameter in group["params"]]
    for old, name in names.items():
        state = optimizer.state.pop(old, None)
        if state is not None:
            new = present[name]
            optimizer.state[new] = {
                key: _follow(value, old, new, f"{type(optimizer).__name__} state {key!r} of {name}")
                for key, value in state.items()
            }


def split_mixed_groups(optimizer: Optimizer) -> None:
    """Part the groups that would step DTensors and plain tensors in one operation.

    Call it where part of a model stays plain: ``foreach`` and ``fused`` steps take one kind. The
    plain tensors get a group of their own, right behind and with the same options; other groups
    stay. A scheduler counts groups when it is made, which is to be done afterwards.

    Args:
        optimizer: Changed in place.
    """
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        groups.append(group)
        plain = [p for p in group["params"] if not isinstance(p, DTensor)]
        in_one = group.get("foreach") or group.get("fused")
        if in_one and 0 < len(plain) < len(group["params"]):
            group["params"][:] = [p for p in group["params"] if isinstance(p, DTensor)]
            groups.append({**group, "params": plain})
    optimizer.param_groups[:] = groups


def _follow(value: Any, old: Tensor, new: Tensor, what: str) -> Any:
    """Return one piece of state in the layout and on the device of the new parameter."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    if isinstance(new, DTensor) and not isinstance(value, DTensor):
        if value.shape != new.shape:
            raise OptimizerError(
                f"{what}: expected a scalar or the shape {list(new.shape)} of the parameter, found "
                f"{list(value.shape)}, which cannot be sharded with it; build the optimizer after "
                "parallelize, or before its first step"
            )
        return shard_like(value, new)
    return value.to(new.device) if value.device == old.device else value
