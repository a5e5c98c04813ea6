"""What a training of the kit is: a model, an optimizer, steps; and what comes of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs
from attrs import frozen
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from polyshard.exceptions import ModelError

__all__ = ["Outcome", "Recipe", "build_optimizer"]


@frozen(kw_only=True)
class Recipe:
    """What is trained and how; every step has its own batch.

    Attributes:
        model: A name in ``models.MODELS``.
        optimizer: A name in ``OPTIMIZERS``; each has two parameter groups that differ.
        steps: Number of optimizer steps.
        microbatches: Into how many microbatches each batch is cut, with ``accumulate`` around
            each; None for the batch in one piece without ``accumulate``.
        unadapted: Where the model leaves out its adapter, whose parameters then get no gradient:
            in every second step, or in the first or the last microbatch of each step.
        max_norm: The norm to which gradients are clipped; None does not clip.
        norm_type: The p of that norm.
        evaluate: Whether there is a forward without gradients in each step, and where.
        zero_grad: What clears the gradients: the optimizer, the optimizer in place
            (``set_to_none=False``), or the model.
        decay: The factor of the learning rate from step to step, through torch's scheduler.
    """

    model: str = "plain"
    optimizer: str = "sgd"
    steps: int = 5
    microbatches: int | None = None
    unadapted: Literal["odd steps", "first microbatch", "last microbatch"] | None = None
    max_norm: float | None = None
    norm_type: float = 2.0
    evaluate: Literal["before step", "after step"] | None = None
    zero_grad: Literal["optimizer", "in place", "model"] = "optimizer"
    decay: float = 1.0

    def __str__(self) -> str:
        values = attrs.asdict(self)
        defaults = attrs.asdict(Recipe())
        told = [f"{k} {v}" for k, v in values.items() if k == "model" or v != defaults[k]]
        return ", ".join(told)

    def adapts(self, step: int, microbatch: int) -> bool:
        """Tell whether the model uses its adapter here."""
        return {
            None: True,
            "odd steps": step % 2 == 0,
            "first microbatch": microbatch > 0,
            "last microbatch": microbatch + 1 < (self.microbatches or 1),
        }[self.unadapted]


@frozen(kw_only=True)
class Outcome:
    """What a training came to; one rank's view, equal on all ranks if all is right.

    Attributes:
        losses: The loss of each step over the global batch.
        norms: The gradient norm that clipping found in each step; empty without clipping.
        evaluations: The loss of each evaluation.
        weights: The full state dict at the end, float32 tensors on the CPU.
    """

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    evaluations: tuple[float, ...]
    weights: Mapping[str, Tensor]


OPTIMIZERS: Mapping[str, Callable[[list[dict[str, Any]]], Optimizer]] = {
    # Momentum and dampening show a hidden step, and SGD a wrong scale, which AdamW hides.
    "sgd": lambda groups: SGD(groups, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "adamw": lambda groups: AdamW(groups, lr=1e-2, weight_decay=0.1),
    "adamw foreach": lambda groups: AdamW(groups, lr=1e-2, weight_decay=0.1, foreach=True),
}


def build_optimizer(name: str, model: nn.Module) -> Optimizer:
    """Build an optimizer with two groups, as scripts do it: chosen by name, on this model.

    Biases, norms and gains are not decayed and learn more slowly. ``"params"`` is not the first
    key of its group, and each group has a key of the user's own.
    """
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    decayed = [p for n, p in trained if _is_decayed(n)]
    others = [p for n, p in trained if not _is_decayed(n)]
    if not decayed or not others:
        raise ModelError(
            "expected parameters with and without weight decay, found the names "
            + ", ".join(n for n, _ in trained)
        )
    return OPTIMIZERS[name](
        [
            {"role": "decayed", "params": decayed},
            {"role": "others", "params": others, "weight_decay": 0.0, "lr": 5e-3},
        ]
    )


def _is_decayed(name: str) -> bool:
    return name.endswith("weight") and "norm" not in name
