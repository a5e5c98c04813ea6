"""Parameters that were replaced after the wrap: the values stay, the old objects come back.

A strategy registers what it does on the Parameter objects that it found or made, and so does the
user's optimizer. New objects in their place get no gradients, or unsynchronised ones, and nothing
says so. ``ParameterSnapshot`` therefore moves new values into the old objects.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from polyshard.exceptions import RebuildError
from polyshard.parameters.dtensors import local_of, same_memory, shard_like, with_local
from polyshard.parameters.replaced import mark_replaced
from polyshard.parameters.slots import ParameterSlot, fill_attributes, join_name, slots_of

__all__ = ["ParameterSnapshot", "SavedParameter"]


@contextmanager
def _collecting_no_garbage() -> Iterator[None]:
    """Pause the garbage collector, which looks at all that is alive as often as objects are made.

    With many parameters that takes longer than all else, and nothing made here is garbage.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@frozen(eq=False)
class SavedParameter:
    """A parameter before the rebuild.

    Attributes:
        parameter: The object.
        slots: Where it was registered.
        data: What was inside of it; it shares the storage.
        requires_grad: Whether it was trained.
        gradient: Its gradient, the object and what was inside of it; None if it had none.
        attributes: What was set on it.
    """

    parameter: nn.Parameter
    slots: list[ParameterSlot]
    data: Tensor
    requires_grad: bool
    gradient: tuple[Tensor, Tensor] | None
    attributes: dict[str, Any]

    @classmethod
    def take(cls, parameter: nn.Parameter, slots: list[ParameterSlot]) -> Self:
        """Remember a parameter as it is."""
        gradient = parameter.grad
        return cls(
            parameter,
            slots,
            parameter.detach(),
            parameter.requires_grad,
            None if gradient is None else (gradient, gradient.detach()),
            dict(vars(parameter)),
        )

    @property
    def names(self) -> str:
        """Its names, for a message."""
        return " and ".join(repr(slot.name) for slot in self.slots)

    def found(self) -> list[nn.Parameter]:
        """Return what its places hold now, each parameter once."""
        present = dict.fromkeys(slot.get() for slot in self.slots)
        return [parameter for parameter in present if parameter is not None]

    def put_back(self) -> None:
        """Register the object in all its places, with what was inside of it and its attributes.

        Attributes that its successors have are kept, ``requires_grad`` is theirs.
        """
        parameter = self.parameter
        for successor in self.found():
            if successor is not parameter:
                vars(parameter).update(vars(successor))
                parameter.requires_grad_(successor.requires_grad)
        for slot in self.slots:
            slot.put(parameter)
        gradient, parameter.grad = parameter.grad, None
        if self.gradient is not None and gradient is self.gradient[0]:
            _put_inside(*self.gradient)
        if not self.data.is_meta:
            _put_inside(parameter, self.data)
        if gradient is not None:
            parameter.grad = gradient.to(parameter.device, parameter.dtype)
        self.restore_attributes()

    def restore_attributes(self) -> None:
        """Set on the object what it lacks of what was set on it; a cast takes it away."""
        fill_attributes(self.parameter, self.attributes)


@frozen(eq=False)
class ParameterSnapshot:
    """The Parameter objects of a model, to be put back with whatever values they have by then.

    Of buffers, which nothing holds on to, the dtype and the device are kept. A strategy whose
    shards torch cannot cut overrides what is said of a value: its shapes, its part, its retirement.
    """

    remembered: list[SavedParameter]
    modules: list[tuple[nn.Module, dict[str, nn.Parameter | None], dict[str, nn.Module | None]]]
    buffers: dict[str, tuple[torch.dtype, torch.device]]

    @classmethod
    @_collecting_no_garbage()
    def take(cls, model: nn.Module) -> Self:
        """Remember every parameter of the model: its object, storage, places and attributes."""
        return cls(
            [SavedParameter.take(p, slots) for p, slots in slots_of(model).items()],
            [(m, dict(m._parameters), dict(m._modules)) for m in model.modules()],
            {name: (buffer.dtype, buffer.device) for name, buffer in model.named_buffers()},
        )

    @_collecting_no_garbage()
    def restore(self, model: nn.Module) -> None:
        """Move the present values into the old objects, and put those back in all their places.

        Dtype, device, layout and ties are those of before. Attributes that the new objects have
        are kept, ``requires_grad`` is theirs, and what they lack comes back.

        Raises:
            RebuildError: A parameter was added, removed, resized or tied to another, its module
                was replaced, or the two ends of a tie have different values. The old modules,
                objects and values are back then, but for what was written over in slot.
        """
        try:
            self._check_slots(model)
            values = [self._present_value(entry) for entry in self.remembered]
        except RebuildError:
            self._undo()
            raise
        values = self._apart_from_old(values)
        for entry, value in zip(self.remembered, values, strict=True):
            _take_value(entry, value)
            for new in entry.found():
                if new is not entry.parameter:
                    self.retire(new, entry)
            entry.put_back()
        self._restore_buffers(model)

    def _apart_from_old(self, values: list[Tensor]) -> list[Tensor]:
        """Copy the values that are in the storage of another parameter, which is written over."""
        locals_ = [local_of(entry.data.detach()) for entry in self.remembered]
        storages = {local.untyped_storage().data_ptr() for local in locals_ if local.numel()}
        return [
            value.clone()
            if value.untyped_storage().data_ptr() in storages and not same_memory(local, value)
            else value
            for local, value in zip(locals_, values, strict=True)
        ]

    def _undo(self) -> None:
        """Put back modules, objects and values as they were, whatever was done."""
        for module, parameters, children in self.modules:
            module._parameters.clear()
            module._parameters.update(parameters)
            module._modules.clear()
            module._modules.update(children)
        for entry in self.remembered:
            entry.put_back()
            entry.parameter.requires_grad_(entry.requires_grad)

    def _restore_buffers(self, model: nn.Module) -> None:
        for prefix, module in model.named_modules():
            for attribute, buffer in module.named_buffers(recurse=False):
                before = self.buffers.get(join_name(prefix, attribute))
                if before is not None and before[1].type != "meta":
                    dtype, device = before
                    setattr(module, attribute, buffer.to(device, dtype))

    def _check_slots(self, model: nn.Module) -> None:
        """Check that the same modules hold parameters under the same names, tied as before."""
        present = {
            slot.name: (slot.module, parameter)
            for parameter, slots in slots_of(model).items()
            for slot in slots
        }
        expected = {slot.name: entry for entry in self.remembered for slot in entry.slots}
        if present.keys() != expected.keys():
            changed = ", ".join(sorted(present.keys() ^ expected.keys()))
            raise RebuildError(
                f"expected the parameters of before the rebuild, found others added or removed "
                f"({changed}); change what a model consists of before parallelize"
            )
        owners: dict[nn.Parameter, SavedParameter] = {}
        for name, (module, parameter) in present.items():
            entry = expected[name]
            if not any(slot.module is module for slot in entry.slots):
                raise RebuildError(
                    f"expected the module that holds {name!r} to stay, found another "
                    f"{type(module).__name__} in its place; replace its parameters instead"
                )
            if owners.setdefault(parameter, entry) is not entry:
                raise RebuildError(
                    f"expected {entry.names} and {owners[parameter].names} to stay apart, found "
                    "them tied to one parameter; tie them before parallelize"
                )

    def _present_value(self, entry: SavedParameter) -> Tensor:
        """Return the value that the places of a parameter have now, as this rank's plain tensor."""
        found = entry.found()
        for value in found:
            self.check_value(value, entry)
        first, *others = [self.local_part(value.detach(), entry) for value in found]
        if not all(_equal(first, other) for other in others):
            raise RebuildError(
                f"expected one value for {entry.names}, which are tied, found different ones; "
                "assign the same parameter to all of them"
            )
        return first

    def shapes(self, entry: SavedParameter) -> tuple[torch.Size, ...]:
        """Return the shapes that a value of a parameter may have."""
        return (entry.data.shape,)

    def check_value(self, value: nn.Parameter, entry: SavedParameter) -> None:
        """Raise if a parameter cannot stand for the one that was there.

        Raises:
            RebuildError: It has another shape, or no value.
        """
        if value.shape not in self.shapes(entry):
            raise RebuildError(
                f"expected a value of shape {list(entry.data.shape)} for {entry.names}, found "
                f"{list(value.shape)}; resize the model before parallelize"
            )
        if value.is_meta and not entry.data.is_meta:
            raise RebuildError(
                f"expected a value for {entry.names}, found one on the meta device; load it first"
            )

    def local_part(self, value: Tensor, entry: SavedParameter) -> Tensor:
        """Return this rank's part of a value, laid out as the parameter was, as a plain tensor."""
        data = entry.data
        if isinstance(value, DTensor) and isinstance(data, DTensor):
            if value.device_mesh == data.device_mesh:
                return value.redistribute(placements=data.placements).to_local()
            value = value.full_tensor()
        if isinstance(data, DTensor):
            return shard_like(value, data).to_local()
        return value.full_tensor() if isinstance(value, DTensor) else value

    def retire(self, new: nn.Parameter, entry: SavedParameter) -> None:
        """Keep an optimizer from stepping a parameter whose place the old object takes again."""
        mark_replaced(new, entry.slots[0].name)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.is_meta or torch.equal(one, other.to(one.device, one.dtype))


def _take_value(entry: SavedParameter, value: Tensor) -> None:
    """Write a value into the storage that the parameter had, or adopt it where it had none."""
    local = local_of(entry.data.detach())
    if not local.is_meta:
        if not same_memory(local, value):
            local.copy_(value)
    elif not value.is_meta:
        _put_inside(entry.parameter, with_local(entry.data, value))


def _put_inside(tensor: Tensor, content: Tensor) -> None:
    """Make an object that others hold contain another tensor, unless it does."""
    if same_memory(local_of(tensor.detach()), local_of(content.detach())):
        return
    if not isinstance(content, DTensor):
        tensor.data = content
        return
    # A DTensor's parts cannot be set through ``data``. The swap takes all else along.
    attributes = dict(vars(tensor))
    if isinstance(tensor, nn.Parameter):
        content = nn.Parameter(content, tensor.requires_grad)
    torch.utils.swap_tensors(tensor, content)  # type: ignore[no-untyped-call]
    vars(tensor).update(attributes)
