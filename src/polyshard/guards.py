"""Checks for mistakes that would train silently wrong, and what ranks must agree on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from polyshard.config import DistributedConfig
from polyshard.exceptions import OptimizerError, RanksDisagreeError, RebuildError
from polyshard.ranks import agree
from polyshard.registry import default_registry

__all__ = [
    "Versions",
    "agree_on_changes",
    "facts",
    "parameters_of",
    "refuse_replaced_parameters",
    "remember_replaced",
    "versions_of",
]

#: By name: a parameter, its version, which counts what was written to it, and for a DTensor the
#: local tensor, which a cast exchanges.
Versions = dict[str, tuple[nn.Parameter, int, Tensor | None]]

# Parameter that a strategy replaced -> its name. Weak, by identity: tensors do not hash by value.
_replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()
_watching = False


def facts(model: nn.Module, config: DistributedConfig) -> dict[str, str]:
    """Return what must be the same on every rank, one line per thing that can differ."""
    info = default_registry().find(config.strategy)
    parameters = (
        f"{name} {list(p.shape)} {p.dtype} requires_grad={p.requires_grad}"
        for name, p in model.named_parameters()
    )
    return {
        "plugin": f"{info.name} of {info.origin}",
        "torch": torch.__version__,
        "config": "\n".join([type(config).__qualname__, *_lines(config)]),
        "model": "\n".join([type(model).__qualname__, *parameters]),
    }


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return every parameter by name."""
    return dict(model.named_parameters())


def versions_of(model: nn.Module) -> Versions:
    """Return what ``agree_on_changes`` compares with."""
    return {
        name: (p, p._version, getattr(p, "_local_tensor", None))
        for name, p in model.named_parameters()
    }


def agree_on_changes(before: Versions, model: nn.Module, members: Sequence[int]) -> None:
    """Check that all ranks replaced, and wrote to, the same parameters.

    A write to the local tensor of a DTensor is each rank's own affair and does not count.

    Args:
        before: What ``versions_of`` returned.
        model: The same model, changed.
        members: The ranks that hold it; each calls this.

    Raises:
        RebuildError: A parameter was changed on some of them only.
    """
    lines = (
        f"{name} {'kept' if _same(before.get(name, ()), present) else 'changed'}"
        for name, present in versions_of(model).items()
    )
    try:
        agree("rebuild", members, {"parameter": "\n".join(lines)})
    except RanksDisagreeError as error:
        raise RebuildError(
            f"{error}; change them on every rank: what rank 0 alone has, it can send by "
            "torch.distributed.broadcast_object_list"
        ) from error


def _same(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    # Small ints are one object each; a larger version is compared by value.
    return len(one) == len(other) and all(
        a is b or (isinstance(a, int) and a == b) for a, b in zip(one, other, strict=True)
    )


def remember_replaced(parameter: nn.Parameter, name: str) -> None:
    """Remember that a parameter was replaced, so that no optimizer steps it unnoticed."""
    _replaced[parameter] = name
    _watch_optimizers()


def refuse_replaced_parameters(optimizer: Optimizer) -> None:
    """Raise if an optimizer holds parameters that no model uses any more.

    Raises:
        OptimizerError: It was built before ``parallelize`` and not given to it.
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    dead = [_replaced[p] for p in held if p in _replaced]
    if dead:
        raise OptimizerError(
            f"{type(optimizer).__name__}: expected parameters of the parallelized model, found "
            f"{len(dead)} of {len(held)} that parallelize or rebuild replaced ({dead[0]}, ...) and "
            "that get no gradients; build the optimizer after parallelize and outside of rebuild, "
            "or pass it: parallelize(model, config, optimizer=optimizer)"
        )


def _watch_optimizers() -> None:
    """Check each optimizer of the process before it steps, through torch's own global hook."""
    global _watching
    if not _watching:
        _watching = True
        register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    # One look at the first parameter: an optimizer is built before or after, not half.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in _replaced:
                refuse_replaced_parameters(optimizer)
            return


def _lines(config: Any) -> list[str]:
    return [f"{a.name}={_plain(getattr(config, a.name))}" for a in attrs.fields(type(config))]


def _plain(value: object) -> str:
    """Write a value such that equal ones look equal on every rank: no addresses of objects."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_plain(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_plain, value)) + "]"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if attrs.has(type(value)):
        return "\n".join([type(value).__qualname__, *_lines(value)])
    return getattr(value, "__qualname__", type(value).__qualname__)
