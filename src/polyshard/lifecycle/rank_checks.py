"""Checks for mistakes that would train silently wrong, and what ranks must agree on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from polyshard.config.base import DistributedConfig
from polyshard.exceptions import RanksDisagreeError, RebuildError
from polyshard.processes.rank_sync import check_same_on_all_ranks
from polyshard.registry.registry import default_registry

__all__ = [
    "ParameterVersions",
    "check_same_changes",
    "facts",
    "named_parameters_of",
    "parameter_versions",
]

#: By name: a parameter, its version, which counts what was written to it, and for a DTensor the
#: local tensor, which a cast exchanges.
ParameterVersions = dict[str, tuple[nn.Parameter, int, Tensor | None]]


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


def named_parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return every parameter by name."""
    return dict(model.named_parameters())


def parameter_versions(model: nn.Module) -> ParameterVersions:
    """Return what ``check_same_changes`` compares with."""
    return {
        name: (p, p._version, getattr(p, "_local_tensor", None))
        for name, p in model.named_parameters()
    }


def check_same_changes(before: ParameterVersions, model: nn.Module, members: Sequence[int]) -> None:
    """Check that all ranks replaced, and wrote to, the same parameters.

    A write to the local tensor of a DTensor is each rank's own affair and does not count.

    Args:
        before: What ``parameter_versions`` returned.
        model: The same model, changed.
        members: The ranks that hold it; each calls this.

    Raises:
        RebuildError: A parameter was changed on some of them only.
    """
    lines = (
        f"{name} {'kept' if _same(before.get(name, ()), present) else 'changed'}"
        for name, present in parameter_versions(model).items()
    )
    try:
        check_same_on_all_ranks("rebuild", members, {"parameter": "\n".join(lines)})
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
