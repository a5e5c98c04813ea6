"""What a model in DistributedDataParallel must not be used for, caught at its forward."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import get_gradient_edge

from polyshard.exceptions import RebuildError
from polyshard.parameters.guard import ParameterGuard

if TYPE_CHECKING:
    from torch import nn
    from torch.autograd.graph import Node
    from torch.nn.parallel import DistributedDataParallel

__all__ = ["DDPGuard", "accumulators"]


def accumulators(model: nn.Module) -> dict[nn.Parameter, Node]:
    """Return the autograd node that adds up each trained parameter's gradient.

    DistributedDataParallel hooks these nodes. A parameter gets a new one, without the hook, when
    its dtype or device changes, be it only for a moment.
    """
    return {p: get_gradient_edge(p).node for p in model.parameters() if p.requires_grad}


class DDPGuard(ParameterGuard):
    """Refuses a forward whose gradients would not be averaged, and warns of one past the wrapper.

    Args:
        wrapper: What ``parallelize`` returns.
    """

    settles_training = True

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        super().__init__(wrapper.module, wrapper)
        self.inside = False
        self.warned = False
        self.watch(wrapper.module)
        wrapper.register_forward_hook(self.after_forward, always_call=True)
        wrapper.module.register_forward_pre_hook(self.before_inner_forward)

    def __getstate__(self) -> dict[str, Any]:
        """Let copies of the model do without the accumulator, which cannot be copied."""
        return {**self.__dict__, "accumulator": None}

    def watch(self, model: nn.Module) -> None:
        """Take the present parameters for those that are hooked, newly, and their accumulator.

        One parameter stands for all: what changes dtype or device changes the whole model's.
        """
        self.remember()
        self.parameter = next(p for p in model.parameters() if p.requires_grad)
        self.accumulator: Node | None = get_gradient_edge(self.parameter).node
        self.has_reduced = False

    def before_forward(self, *arguments: Any) -> None:
        """Raise if a parameter, or the node that adds up its gradient, is not the hooked one."""
        if torch.compiler.is_compiling():
            return
        super().before_forward(*arguments)
        if not self._is_hooked():
            raise RebuildError(
                "expected the dtype and device that the model had at parallelize, found that they "
                "were changed, after which gradients are not averaged any more; do it inside "
                "`with polyshard.rebuild(model):`"
            )
        self.inside = True

    def _is_hooked(self) -> bool:
        """Tell whether a backward would find the hooked node, as far as there will be one."""
        if not self.parameter.requires_grad or not torch.is_grad_enabled():
            return True
        return self.accumulator in (None, get_gradient_edge(self.parameter).node)

    def after_forward(self, *_: Any) -> None:
        """Note that the forward is over, also when it raised."""
        self.inside = False

    def before_inner_forward(self, module: nn.Module, _: Any) -> None:
        """Warn, once, if the module inside is trained without the wrapper."""
        if self.inside or self.warned or not (module.training and torch.is_grad_enabled()):
            return
        self.warned = True
        warnings.warn(
            f"{type(module).__name__} was called without the DistributedDataParallel around it: "
            "its gradients are not averaged over the ranks; call the model that parallelize "
            "returned",
            stacklevel=2,
        )
