"""The run that every strategy is compared with: plain PyTorch in one process.

Nothing in it goes through a strategy or through the functions that a strategy can answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from polyshard.training.config import TrainingConfig
from polyshard.training.loop import build_optimizer
from polyshard.training.model import build_model

__all__ = ["PlainRun"]


class PlainRun:
    """A model in training by plain PyTorch."""

    share = (0, 1)

    def __init__(self, config: TrainingConfig, device: torch.device) -> None:
        self.model: nn.Module = build_model(config).to(device)
        self.optimizer: Optimizer = build_optimizer(self.model, config.optimizer)

    def microbatch(
        self, sequences: Sequence[Tensor], *, last: bool
    ) -> AbstractContextManager[None]:
        """Do nothing: gradients add up by themselves."""
        return nullcontext()

    def clip(self, max_norm: float) -> float:
        """Clip the gradients to a global norm and return the norm before.

        As ``clip_grad_norm_`` does, but summed up in float64: in float32 the sum over a large
        tensor is off by more than what is to be shown.
        """
        parameters = list(self.model.parameters())
        gradients = [p.grad.double() for p in parameters if p.grad is not None]
        norm = get_total_norm(gradients)
        clip_grads_with_norm_(parameters, max_norm, norm)
        return norm.item()

    def weights(self) -> dict[str, Tensor]:
        """Return copies of all weights on the CPU."""
        return {k: v.detach().to("cpu", copy=True) for k, v in self.model.state_dict().items()}

    def parameter_bytes(self) -> int:
        """Return the bytes of all parameters, a tied one once."""
        return sum(parameter.nbytes for parameter in self.model.parameters())
