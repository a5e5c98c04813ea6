"""Parameters that a strategy replaced: no optimizer may step them unnoticed."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from polyshard.exceptions import OptimizerError

__all__ = ["refuse_replaced_parameters", "mark_replaced"]

# Parameter that a strategy replaced -> its name. Weak, by identity: tensors do not hash by value.
_replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()


_watching = False


def mark_replaced(parameter: nn.Parameter, name: str) -> None:
    """Remember that a parameter was replaced, so that no optimizer steps it unnoticed."""
    _replaced[parameter] = name
    _check_optimizers_before_step()


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


def _check_optimizers_before_step() -> None:
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
