"""Optimizer state for ``torch.distributed.checkpoint`` to load into."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from polyshard_megatron_fsdp._layout import local_of

__all__ = ["offer_state_to_load_into"]


def offer_state_to_load_into(optimizer: Optimizer) -> None:
    """Let the state dict of an optimizer that has taken no step hold the tensors to come.

    A checkpoint is loaded into the tensors of a state dict, and restores nothing where there are
    none. What is made for that goes away again with the next step if nothing was loaded.
    """
    pending = False

    def before_state_dict(_: Optimizer) -> None:
        nonlocal pending
        if not any(optimizer.state.values()):
            _make_state(optimizer)
            pending = True

    def after_load(_: Optimizer) -> None:
        nonlocal pending
        pending = False

    def before_step(*_: Any) -> None:
        nonlocal pending
        if pending:
            pending = False
            optimizer.state.clear()

    optimizer.register_state_dict_pre_hook(before_state_dict)
    optimizer.register_load_state_dict_post_hook(after_load)
    optimizer.register_step_pre_hook(before_step)


@torch.no_grad()
def _make_state(optimizer: Optimizer) -> None:
    """Let the optimizer make its state, by a step whose effect is undone."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters]
    values = [local_of(p.detach()).clone() for p in parameters]
    for parameter in parameters:
        # Ranks without a part of a parameter have no state for it.
        parameter.grad = torch.zeros_like(parameter) if local_of(parameter).numel() else None
    type(optimizer).step(optimizer)
    for parameter, gradient, value in zip(parameters, gradients, values, strict=True):
        parameter.grad = gradient
        local_of(parameter.detach()).copy_(value)
    for state in optimizer.state.values():
        for entry in state.values():
            if isinstance(entry, Tensor):
                local_of(entry).zero_()
