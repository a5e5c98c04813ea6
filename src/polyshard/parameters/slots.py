"""ParameterSlot: where a parameter is registered, in all the modules that share it."""

from __future__ import annotations

from typing import Any

from attrs import frozen
from torch import nn

from polyshard.parameters.names import strip_wrappers

__all__ = [
    "ParameterSlot",
    "fill_attributes",
    "join_name",
    "parameter_attributes",
    "restore_attributes",
    "slots_of",
]


@frozen(eq=False)
class ParameterSlot:
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


def slots_of(model: nn.Module) -> dict[nn.Parameter, list[ParameterSlot]]:
    """Return every parameter with all the places that it is registered at, by first place."""
    slots: dict[nn.Parameter, list[ParameterSlot]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = strip_wrappers(join_name(prefix, attribute))
            slots.setdefault(parameter, []).append(ParameterSlot(name, module, attribute))
    return slots


def parameter_attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return what the user set on each parameter, by its first name, for ``restore_attributes``."""
    return {slots[0].name: dict(vars(p)) for p, slots in slots_of(model).items()}


def restore_attributes(model: nn.Module, attributes: dict[str, dict[str, Any]]) -> None:
    """Set on the model's present parameters what they lack of what their predecessors had."""
    for parameter, slots in slots_of(model).items():
        for slot in slots:
            fill_attributes(parameter, attributes.get(slot.name, {}))


def join_name(prefix: str, attribute: str) -> str:
    """Return the name in the model of an attribute of the module called ``prefix``."""
    return f"{prefix}.{attribute}" if prefix else attribute


def fill_attributes(parameter: nn.Parameter, attributes: dict[str, Any]) -> None:
    """Set on a parameter those of the attributes that it lacks."""
    for name, value in attributes.items():
        vars(parameter).setdefault(name, value)
