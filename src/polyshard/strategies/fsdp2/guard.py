"""What torch's ``fully_shard`` keeps of each parameter, and the guard that knows it.

torch offers no public way to it; all that this strategy reads of it is read here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from polyshard.parameters.guard import ParameterGuard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from polyshard.parameters.slots import ParameterSlot

__all__ = ["FSDP2Guard", "Gathering", "follow_registered_parameters"]


class FSDP2Guard(ParameterGuard):
    """Refuses a forward that would discard a parameter that replaced a shard, or use old values.

    Args:
        model: The root on which ``fully_shard`` was called.

    Attributes:
        gathered: Whether a method is running that has gathered the whole model before.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, model)
        self.gathered = False
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
        if self.gathered:
            return  # what was looked at when the method began is what the model computes with
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


class Gathering:
    """A model that is gathered as a whole, so that forwards inside of it meet no other rank.

    Args:
        model: The root on which ``fully_shard`` was called, sharded.

    Attributes:
        trains: Whether there will be a backward.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.trains = False
        self.states = list(_states(model))
        self.groups = [group for state in self.states for group in state._fsdp_param_groups]
        self.kept: list[tuple[Any, Any, int]] = []

    def enter(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather everything, and return the arguments as the root's forward would have them."""
        root = self.states[0]
        root._lazy_init()
        self.order = root._comm_ctx.post_forward_order
        self.calls = len(self.order)
        for group in self.groups:
            self.kept.append(
                (group, group.post_forward_mesh_info, len(group._post_forward_indices))
            )
            group.post_forward_mesh_info = None  # it is not sharded again after a forward
        args, kwargs = root._pre_forward(self.model, args, kwargs)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
        return args, kwargs

    def leave(self, args: tuple[Any, ...], output: Any) -> Any:
        """Return what a method returned, such that its backward gathers what it needs."""
        return self.states[0]._post_forward(self.model, args, output)

    def undo(self) -> None:
        """Shard everything, from wherever the method was left."""
        for state in self.states:
            state._training_state = TrainingState.IDLE
            state._state_ctx.iter_forward_root = None
            state._modules_to_run_forward.clear()
        for group, after_forward, calls in self.kept:
            group.post_forward_mesh_info = after_forward
            group._training_state = TrainingState.IDLE
            if not self.trains:
                # The next backward would gather ahead in the order of these forwards, of which
                # another rank may have run none.
                del group._post_forward_indices[calls:]
        if self.kept and not self.trains:
            del self.order[self.calls :]
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def follow_registered_parameters(model: nn.Module) -> None:
    """Make ``fully_shard`` gather from the sharded parameters that are registered now."""
    for record in _records(model):
        record.reset_sharded_param()


def _states(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield module._get_fsdp_state()


def _records(model: nn.Module) -> Iterator[Any]:
    for state in _states(model):
        for group in state._fsdp_param_groups:
            yield from group.fsdp_params
