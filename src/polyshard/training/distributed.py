"""A run under a strategy, by the functions that any training script would call."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

import polyshard
from polyshard.config import DistributedConfig
from polyshard.lifecycle import parameter_bytes
from polyshard.training.config import TrainingConfig
from polyshard.training.loop import build_optimizer
from polyshard.training.model import build_model

__all__ = ["DistributedTrainee"]


class DistributedTrainee:
    """A model in training under a strategy."""

    def __init__(
        self, config: TrainingConfig, distributed: DistributedConfig, device: torch.device
    ) -> None:
        self._config = distributed
        model = build_model(config).to(device)
        self.model, _ = polyshard.parallelize(model, self._config)
        optimizer = build_optimizer(self.model, config.optimizer)
        self.optimizer = polyshard.maybe_shard_optimizer(self.model, optimizer, self._config)

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        """Return a context for the forward and backward of one microbatch."""
        return polyshard.accumulate(self.model, self._config, last=last)

    def clip(self, max_norm: float) -> float:
        """Clip the gradients to a global norm and return the norm before."""
        return polyshard.clip_grad_norm(self.model, self._config, max_norm)

    def weights(self) -> dict[str, Tensor]:
        """Gather copies of all weights on the CPU; call it on every rank."""
        return polyshard.full_state_dict(self.model, self._config)

    def parameter_bytes(self) -> int:
        """Return the bytes that this rank holds for the parameters."""
        return parameter_bytes(self.model, self._config)
