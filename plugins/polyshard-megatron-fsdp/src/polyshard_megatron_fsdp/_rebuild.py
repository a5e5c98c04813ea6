"""Bringing a wrapped model back after a script has replaced its parameters.

The wheel knows parameters by identity: its buffers, hooks and dicts are keyed by the objects made
at the wrap, and each forward puts these back whatever the module holds. So values are moved, not
objects: what the script put in the module is copied into the old storage, and the old objects
return under all their names.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from polyshard.exceptions import RebuildError
from polyshard.parameter_guard import ParameterGuard
from polyshard.rebuilding import ParameterSnapshot
from polyshard_megatron_fsdp._layout import local_of, original_of, part_of
from polyshard_megatron_fsdp._model import ShardedModel
from polyshard_megatron_fsdp._wheel import WHO

__all__ = ["REPLACES", "Snapshot", "remember", "restore"]

#: Set on a parameter that a script put in the model, to the one that it stands for: an optimizer
#: may have been built on it before the model was restored.
REPLACES = "_polyshard_replaces"


@frozen(eq=False)
class _Kept:
    """One distributed parameter as the wheel knows it.

    Attributes:
        names: All its names in the wrapped module, more than one if it is tied.
        holders: The module that holds it, by name.
        parameter: The object.
        value: The tensor behind it; it shares the wheel's storage.
        requires_grad: Whether it is trained, which the wheel settles at the wrap.
        gradient: Its gradient, if any; the wheel keeps the object.
        gradient_value: The tensor behind the gradient.
        attributes: What is set on the object.
    """

    names: tuple[str, ...]
    holders: tuple[nn.Module, ...]
    parameter: nn.Parameter
    value: DTensor
    requires_grad: bool
    gradient: Tensor | None
    gradient_value: Tensor | None
    attributes: dict[str, Any] = field(repr=False)

    @property
    def said(self) -> str:
        """Its names, for a message."""
        return " and ".join(map(repr, self.names))


@frozen(eq=False)
class Snapshot:
    """All distributed parameters of a model."""

    kept: tuple[_Kept, ...]


def remember(model: nn.Module) -> Snapshot | ParameterSnapshot:
    """Put the distributed parameters in place and remember them."""
    if not isinstance(model, ShardedModel):
        _set_in_rebuild(model, True)
        return ParameterSnapshot.take(model)
    model.show_distributed()
    model.record.rebuilding = True
    names: dict[int, list[str]] = {}
    for name, parameter in model.module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    snapshot = Snapshot(
        tuple(
            _Kept(
                names=tuple(names[id(parameter)]),
                holders=tuple(_holder(model.module, name) for name in names[id(parameter)]),
                parameter=parameter,
                value=_data(parameter),
                requires_grad=parameter.requires_grad,
                gradient=parameter.grad,
                gradient_value=None if parameter.grad is None else parameter.grad.detach(),
                attributes=dict(parameter.__dict__),
            )
            for _, parameter in model.distributed_parameters()
        )
    )
    model.record.attributes = [(kept.parameter, kept.attributes) for kept in snapshot.kept]
    return snapshot


def _set_in_rebuild(model: nn.Module, value: bool) -> None:
    guard = ParameterGuard.of(model)
    if guard is not None:
        guard.in_rebuild = value


def _holder(module: nn.Module, name: str) -> nn.Module:
    return module.get_submodule(name.rpartition(".")[0])


def _data(parameter: nn.Parameter) -> DTensor:
    data = parameter.data
    assert isinstance(data, DTensor)
    return data


@torch.no_grad()
def restore(model: nn.Module, snapshot: object) -> None:
    """Take over the values that the module holds, and put the remembered objects back.

    Raises:
        RebuildError: The wheel cannot take over what was done; the model is as it was before.
    """
    if not isinstance(model, ShardedModel):
        assert isinstance(snapshot, ParameterSnapshot)
        _set_in_rebuild(model, False)
        snapshot.restore(model)
        return
    assert isinstance(snapshot, Snapshot)
    model.record.rebuilding = False
    model.record.attributes = []
    try:
        _check_parameters(model.module, snapshot)
        found = [_found(model.module, kept) for kept in snapshot.kept]
        values = [
            _new_value(kept, parameters)
            for kept, parameters in zip(snapshot.kept, found, strict=True)
        ]
    except RebuildError:
        for kept in snapshot.kept:
            _put_back(model.module, kept, [])
        raise
    for kept, parameters, value in zip(snapshot.kept, found, values, strict=True):
        if value is not None:
            local_of(kept.value).copy_(value)
        _put_back(model.module, kept, parameters)
    model.is_param_fsdp_distributed = True
    model.install_optimized_model_weights()
    # What was gathered before has the old values.
    model.synchronize_param_gather()


def _check_parameters(module: nn.Module, snapshot: Snapshot) -> None:
    """Check that the same modules hold parameters under the same names, tied as before."""
    known = {name: kept for kept in snapshot.kept for name in kept.names}
    present = dict(module.named_parameters(remove_duplicate=False))
    if changed := sorted(known.keys() ^ present.keys()):
        raise _error(
            "the parameters of before",
            f"others added or removed ({', '.join(changed)})",
            "change what a model consists of before parallelize",
        )
    owners: dict[nn.Parameter, _Kept] = {}
    for name, parameter in present.items():
        holder = _holder(module, name)
        if holder is not known[name].holders[known[name].names.index(name)]:
            raise _error(
                f"the module that holds {name!r} to stay",
                f"another {type(holder).__name__} in its place",
                "replace its parameters instead",
            )
        first = owners.setdefault(parameter, known[name])
        if first is not known[name]:
            raise _error(
                f"{first.said} and {known[name].said} to stay apart",
                "them tied to one parameter",
                "tie them before parallelize",
            )


def _found(module: nn.Module, kept: _Kept) -> list[nn.Parameter]:
    """Return the parameters that now stand under the names of a remembered one, each once."""
    return list(dict.fromkeys(module.get_parameter(name) for name in kept.names))


def _new_value(kept: _Kept, found: list[nn.Parameter]) -> Tensor | None:
    """Return this rank's part of a parameter's new value, None if it has not changed hands."""
    for parameter in found:
        if parameter.requires_grad != kept.requires_grad:
            raise _error(
                f"requires_grad={kept.requires_grad} for {kept.names[0]!r}, as it was wrapped",
                str(parameter.requires_grad),
                "choose what is trained before parallelize",
            )
    if all(p is kept.parameter and _is_at(p, kept.value) for p in found):
        return None
    first, *others = [_part(parameter, kept) for parameter in found]
    if any(not torch.equal(first, other) for other in others):
        raise _error(
            f"one value for {kept.said}, which are tied",
            "different ones",
            "assign the same parameter to all of them",
        )
    return first


def _is_at(parameter: Tensor, value: Tensor) -> bool:
    """Whether a parameter still has the storage, and the dtype, that it had."""
    local, old = local_of(parameter), local_of(value)
    return local.dtype == old.dtype and local.data_ptr() == old.data_ptr()


def _part(parameter: nn.Parameter, kept: _Kept) -> Tensor:
    value = parameter.detach()
    if value.is_meta and not kept.value.is_meta:
        raise _error(f"a value for {kept.said}", "one on the meta device", "load it first")
    if isinstance(value, DTensor):
        same = value.device_mesh == kept.value.device_mesh
        if not same or local_of(value).shape != local_of(kept.value).shape:
            raise _error(
                f"{kept.names[0]!r} placed as it was, or as a full tensor",
                f"a DTensor placed as {value.placements} on {value.device_mesh}",
                "gather it first",
            )
        part = local_of(value)
    else:
        # The layout is on the old object, unless a cast has just taken its attributes away.
        layout = _with_attributes(kept)
        if value.shape not in (kept.value.shape, local_of(original_of(layout)).shape):
            raise _error(
                f"a value of shape {list(kept.value.shape)} for {kept.said}",
                str(list(value.shape)),
                "resize the model before parallelize",
            )
        part = part_of(value, layout)
    return part.to(local_of(kept.value), copy=True)


def _with_attributes(kept: _Kept) -> Any:
    kept.parameter.__dict__.update(kept.attributes)
    return kept.parameter


def _put_back(module: nn.Module, kept: _Kept, found: list[nn.Parameter]) -> None:
    """Let the module hold the remembered object, with the storage and attributes that it had."""
    old = kept.parameter
    fresh = {k: v for p in found if p is not old for k, v in p.__dict__.items()}
    if not _is_at(old, kept.value):
        # A cast changes what is inside of the object; that change is undone.
        _swap(old, nn.Parameter(kept.value, kept.requires_grad))
    for name, value in kept.attributes.items():
        old.__dict__.setdefault(name, value)
    old.__dict__.update(fresh)
    old.requires_grad_(kept.requires_grad)
    old.grad = None
    if kept.gradient is not None and kept.gradient_value is not None:
        if not _is_at(kept.gradient, kept.gradient_value):
            _swap(kept.gradient, kept.gradient_value)
        old.grad = kept.gradient
    for parameter in found:
        if parameter is not old:
            setattr(parameter, REPLACES, old)
    for name, holder in zip(kept.names, kept.holders, strict=True):
        setattr(holder, name.rpartition(".")[2], old)


def _swap(old: Tensor, new: Tensor) -> None:
    torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]


def _error(expected: str, found: str, cure: str) -> RebuildError:
    return RebuildError(f"{WHO}: after rebuild, expected {expected}, found {found}; {cure}")
