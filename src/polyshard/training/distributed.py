"""A run under a strategy, by the functions that any training script would call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import Tensor

from polyshard.config.base import DistributedConfig
from polyshard.config.parallelism import MeshAxisName
from polyshard.lifecycle.distributed_setup import DistributedSetup
from polyshard.lifecycle.state_dict import parameter_bytes
from polyshard.mesh.context import MeshContext
from polyshard.training.config import TrainingConfig
from polyshard.training.loop import build_optimizer
from polyshard.training.model import build_model

__all__ = ["StrategyRun"]


class StrategyRun:
    """A model in training under a strategy."""

    def __init__(
        self, config: TrainingConfig, distributed: DistributedConfig, device: torch.device
    ) -> None:
        minutes = config.timeout_minutes
        timeout = None if minutes is None else timedelta(minutes=minutes)
        mesh_context = MeshContext.build(config.parallelism, timeout=timeout)
        self._setup = DistributedSetup(distributed, mesh_context)
        model = build_model(config).to(device)
        self.model, _ = self._setup.parallelize(model)
        optimizer = build_optimizer(self.model, config.optimizer)
        self.optimizer = self._setup.shard_optimizer(self.model, optimizer)
        sharing = mesh_context.submesh(MeshAxisName.DP)
        self.share = (0, 1) if sharing is None else (sharing.get_local_rank(), sharing.size())

    @contextmanager
    def microbatch(self, sequences: Sequence[Tensor], *, last: bool) -> Iterator[None]:
        """Return a context for the forward and backward of one microbatch.

        In it the sequences, each of shape (batch, length), are this rank's parts of them.
        """
        dims = [1] * len(sequences)
        with (
            self._setup.accumulate(self.model, last=last),
            self._setup.context_parallel(buffers=sequences, seq_dims=dims),
        ):
            yield

    def clip(self, max_norm: float) -> float:
        """Clip the gradients to a global norm and return the norm before."""
        return self._setup.clip_grad_norm(self.model, max_norm).item()

    def weights(self) -> dict[str, Tensor]:
        """Gather copies of all weights on the CPU; call it on every rank."""
        return self._setup.full_state_dict(self.model)

    def parameter_bytes(self) -> int:
        """Return the bytes that this rank holds for the parameters."""
        return parameter_bytes(self.model)
