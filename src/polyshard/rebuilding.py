"""Parameters that were replaced after the wrap: the values stay, the old objects come back.

A strategy registers what it does on the Parameter objects that it found or made, and so does the
user's optimizer. New objects in their place get no gradients, or unsynchronised ones, and nothing
says so. ``ParameterSnapshot`` therefore moves new values into the old objects.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from polyshard.exceptions import RebuildError
from polyshard.guards import parameters_of, remember_replaced
from polyshard.optimizers import own_name, shard_like

__all__ = ["ParameterSnapshot", "Place", "attributes_of", "places_of", "restore_attributes"]


@frozen(eq=False)
class Place:
    """Where a parameter is registered.

    Attributes:
        name: Its name in the user's model.
        module: The module that holds it.
        attribute: Its name in that module.
    """

    name: str
    module: nn.Module
    attribute: str

    def get(self) -> nn.Parameter | None:
        """Return the parameter that is there now."""
        return self.module._parameters.get(self.attribute)

    def put(self, parameter: nn.Parameter) -> None:
        """Register a parameter here in place of the present one."""
        self.module.register_parameter(self.attribute, parameter)


def places_of(model: nn.Module) -> dict[nn.Parameter, list[Place]]:
    """Return every parameter with all the places that it is registered at, by first place."""
    places: dict[nn.Parameter, list[Place]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = own_name(_join(prefix, attribute))
            places.setdefault(parameter, []).append(Place(name, module, attribute))
    return places


def attributes_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return what the user set on each parameter, by its first name, for ``restore_attributes``."""
    return {places[0].name: dict(vars(p)) for p, places in places_of(model).items()}


def restore_attributes(model: nn.Module, attributes: dict[str, dict[str, Any]]) -> None:
    """Set on the model's present parameters what they lack of what their predecessors had."""
    for parameter, places in places_of(model).items():
        for place in places:
            _fill(parameter, attributes.get(place.name, {}))


@frozen(eq=False)
class _Remembered:
    """A parameter before the rebuild; ``data`` shares its storage."""

    parameter: nn.Parameter
    places: list[Place]
    data: Tensor
    requires_grad: bool
    attributes: dict[str, Any]

    @property
    def names(self) -> str:
        return " and ".join(repr(place.name) for place in self.places)


@frozen(eq=False)
class ParameterSnapshot:
    """The Parameter objects of a model, to be put back with whatever values they have by then.

    Of buffers, which nothing holds on to, the dtype and the device are kept.
    """

    remembered: list[_Remembered]
    buffers: dict[str, tuple[torch.dtype, torch.device]]

    @classmethod
    def take(cls, model: nn.Module) -> Self:
        """Remember every parameter of the model: its object, storage, places and attributes."""
        return cls(
            [
                _Remembered(p, places, p.detach(), p.requires_grad, dict(vars(p)))
                for p, places in places_of(model).items()
            ],
            {name: (buffer.dtype, buffer.device) for name, buffer in model.named_buffers()},
        )

    def restore(self, model: nn.Module) -> None:
        """Move the present values into the old objects, and put those back in all their places.

        Dtype, device, layout and ties are those of before. Attributes that the new objects have
        are kept, ``requires_grad`` is theirs, and what they lack comes back. Where this is refused,
        the old values and objects come back too, but not a module that was replaced.

        Raises:
            RebuildError: A parameter was added, removed, resized or tied to another, its module
                was replaced, or the two ends of a tie have different values.
        """
        present = parameters_of(model)
        try:
            self._check_places(model)
            values = [_present_value(entry) for entry in self.remembered]
        except RebuildError:
            for entry in self.remembered:
                _put_back(entry)
                entry.parameter.requires_grad_(entry.requires_grad)
            raise
        for entry, value in zip(self.remembered, values, strict=True):
            _take_value(entry, value)
            _put_back(entry)
        self._restore_buffers(model)
        remember_replaced(present, model)

    def _restore_buffers(self, model: nn.Module) -> None:
        for prefix, module in model.named_modules():
            for attribute, buffer in module.named_buffers(recurse=False):
                before = self.buffers.get(_join(prefix, attribute))
                if before is not None and before[1].type != "meta":
                    dtype, device = before
                    setattr(module, attribute, buffer.to(device, dtype))

    def _check_places(self, model: nn.Module) -> None:
        """Check that the same modules hold parameters under the same names, tied as before."""
        present = {
            place.name: (place.module, parameter)
            for parameter, places in places_of(model).items()
            for place in places
        }
        expected = {place.name: entry for entry in self.remembered for place in entry.places}
        if present.keys() != expected.keys():
            changed = ", ".join(sorted(present.keys() ^ expected.keys()))
            raise RebuildError(
                f"expected the parameters of before the rebuild, found others added or removed "
                f"({changed}); change what a model consists of before parallelize"
            )
        owners: dict[nn.Parameter, _Remembered] = {}
        for name, (module, parameter) in present.items():
            entry = expected[name]
            if not any(place.module is module for place in entry.places):
                raise RebuildError(
                    f"expected the module that holds {name!r} to stay, found another "
                    f"{type(module).__name__} in its place; replace its parameters instead"
                )
            if owners.setdefault(parameter, entry) is not entry:
                raise RebuildError(
                    f"expected {entry.names} and {owners[parameter].names} to stay apart, found "
                    "them tied to one parameter; tie them before parallelize"
                )


def _present_value(entry: _Remembered) -> Tensor:
    """Return the value that the places of a parameter have now, as this rank's plain tensor."""
    present = dict.fromkeys(place.get() for place in entry.places)
    values = [_in_layout(value, entry) for value in present if value is not None]
    first, *others = values
    if not all(_equal(first, other) for other in others):
        raise RebuildError(
            f"expected one value for {entry.names}, which are tied, found different ones; assign "
            "the same parameter to all of them"
        )
    return first


def _in_layout(value: Tensor, entry: _Remembered) -> Tensor:
    """Return this rank's part of a value that replaces the parameter, as a plain tensor."""
    data = entry.data
    if value.shape != data.shape:
        raise RebuildError(
            f"expected a value of shape {list(data.shape)} for {entry.names}, found "
            f"{list(value.shape)}; resize the model before parallelize"
        )
    if value.is_meta and not data.is_meta:
        raise RebuildError(f"expected a value for {entry.names}, found one on the meta device")
    value = value.detach()
    if isinstance(value, DTensor) and isinstance(data, DTensor):
        if value.device_mesh == data.device_mesh:
            return value.redistribute(placements=data.placements).to_local()
        value = value.full_tensor()
    if isinstance(data, DTensor):
        return shard_like(value, data).to_local()
    return value.full_tensor() if isinstance(value, DTensor) else value


def _join(prefix: str, attribute: str) -> str:
    return f"{prefix}.{attribute}" if prefix else attribute


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.is_meta or torch.equal(one, other.to(one.device, one.dtype))


def _take_value(entry: _Remembered, value: Tensor) -> None:
    """Write a value into the storage that the parameter had, or adopt it where it had none."""
    local = _local(entry.data)
    if not local.is_meta:
        if not _same_memory(local, value):
            local.copy_(value)
    elif not value.is_meta:
        _replace_tensor(entry.parameter, _with_local(entry.data, value))


def _put_back(entry: _Remembered) -> None:
    """Register the old object in all its places, with its storage and its attributes."""
    parameter = entry.parameter
    for place in entry.places:
        present = place.get()
        if present is not None and present is not parameter:
            vars(parameter).update(vars(present))
            parameter.requires_grad_(present.requires_grad)
        place.put(parameter)
    if not entry.data.is_meta and not _same_memory(_local(parameter), _local(entry.data)):
        _replace_tensor(parameter, entry.data)
    _fill(parameter, entry.attributes)


def _replace_tensor(parameter: nn.Parameter, tensor: Tensor) -> None:
    """Make the object that the optimizer and the strategy hold contain another tensor."""
    gradient, parameter.grad = parameter.grad, None
    if isinstance(tensor, DTensor):
        # A DTensor's parts cannot be set through ``data``. The swap takes the attributes along.
        attributes = dict(vars(parameter))
        new = nn.Parameter(tensor, parameter.requires_grad)
        torch.utils.swap_tensors(parameter, new)  # type: ignore[no-untyped-call]
        vars(parameter).update(attributes)
    else:
        parameter.data = tensor
    if gradient is not None:
        parameter.grad = gradient.to(tensor.device, tensor.dtype)


def _with_local(like: Tensor, local: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.device == other.device
        and one.data_ptr() == other.data_ptr()
    )


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _fill(parameter: nn.Parameter, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        vars(parameter).setdefault(name, value)
