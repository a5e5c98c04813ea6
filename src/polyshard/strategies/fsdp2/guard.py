"""What torch's ``fully_shard`` keeps of each parameter, and the guard that knows it.

torch offers no public way to it; all that this strategy reads of it is read here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from polyshard.parameters.guard import ParameterGuard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from polyshard.parameters.slots import ParameterSlot

__all__ = ["FSDP2Guard", "follow_registered_parameters"]


class FSDP2Guard(ParameterGuard):
    """Refuses a forward that would discard a parameter that replaced a shard, or use old values.

    Args:
        model: The root on which ``fully_shard`` was called.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, model)
        self.sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.records: dict[tuple[nn.Module, str], Any] = {}
        for record in _records(model):
            info = record._module_info
            self.records[info.module, info.param_name] = record
            for module, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                self.records[module, name] = record

    def before_forward(self, *arguments: Any) -> None:
        """Raise if a shard was replaced, and free what was gathered for a forward before.

        Where no backward followed it, the gathered values have been kept, and are old if the
        optimizer stepped since.
        """
        super().before_forward(*arguments)
        if torch.compiler.is_compiling():
            return
        for module in self.sharded:
            module.reshard()

    def is_own(self, slot: ParameterSlot, parameter: nn.Parameter | None) -> bool:
        """Tell whether ``fully_shard`` has put a parameter there: gathered, or sharded anew."""
        record = self.records[slot.module, slot.attribute]
        forms = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
        return parameter is not None and any(
            parameter is getattr(record, form, None) for form in forms
        )


def follow_registered_parameters(model: nn.Module) -> None:
    """Make ``fully_shard`` gather from the sharded parameters that are registered now."""
    for record in _records(model):
        record.reset_sharded_param()


def _records(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                yield from group.fsdp_params
