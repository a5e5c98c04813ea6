"""One training run, step by step, whatever distributes the model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from polyshard.processes.process_group import RankInfo
from polyshard.training.config import OptimizerConfig, TrainingConfig
from polyshard.training.data import Batches, read_text
from polyshard.training.model import next_byte_loss, position_ids_for

__all__ = ["Record", "Step", "TrainingRun", "build_optimizer", "train"]


@frozen
class Step:
    """What one step came to, the same on every rank except for the time.

    Attributes:
        number: Counted from 1.
        loss: Mean over the whole batch, in nats per byte.
        grad_norm: Global norm of the gradients before clipping.
        seconds: Time from the first forward to the end of the optimizer's step, on this rank.
    """

    number: int
    loss: float
    grad_norm: float
    seconds: float


@define
class Record:
    """The steps of a run, in order."""

    losses: list[float] = field(factory=list)
    grad_norms: list[float] = field(factory=list)
    step_seconds: list[float] = field(factory=list)

    def add(self, step: Step) -> None:
        """Append a step."""
        self.losses.append(step.loss)
        self.grad_norms.append(step.grad_norm)
        self.step_seconds.append(step.seconds)


class TrainingRun(Protocol):
    """A model in training: plain, or under a strategy.

    Attributes:
        model: The model.
        optimizer: Its optimizer.
        share: Which part of each batch this rank trains on, and into how many it is divided.
    """

    model: nn.Module
    optimizer: Optimizer
    share: tuple[int, int]

    def microbatch(
        self, sequences: Sequence[Tensor], *, last: bool
    ) -> AbstractContextManager[None]:
        """Return a context for the forward and backward of one microbatch.

        In it the sequences, each of shape (batch, length), are what this rank computes of them.
        """

    def clip(self, max_norm: float) -> float:
        """Clip the gradients to a global norm and return the norm before."""


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Return the optimizer of a run over all parameters of a model."""
    if config.name == "adamw":
        return AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    return SGD(
        model.parameters(),
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
    )


def train(
    run: TrainingRun, config: TrainingConfig, rank_info: RankInfo, report: Callable[[Step], None]
) -> Record:
    """Train for the steps that the config asks for and return what each came to.

    Call it on every rank.

    Args:
        run: The model and its optimizer.
        config: The run.
        rank_info: This process among the ranks, and its device.
        report: Called after each step.
    """
    batches = Batches(read_text(config.data.path), config)
    record = Record()
    for number in range(config.steps):
        share = batches.share(number, *run.share).to(rank_info.device)
        started = time.perf_counter()
        loss, norm = _one_step(run, config, share)
        seconds = time.perf_counter() - started
        step = Step(number + 1, _mean_over_ranks(loss, rank_info), norm, seconds)
        record.add(step)
        report(step)
    return record


def _one_step(run: TrainingRun, config: TrainingConfig, share: Tensor) -> tuple[Tensor, float]:
    """Return the mean loss over this rank's share, and the global norm of the gradients."""
    loss = torch.zeros((), dtype=torch.float64, device=share.device)
    for part, last in _microbatches(share, config.microbatches):
        inputs, targets = part[:, :-1], part[:, 1:]
        places = position_ids_for(inputs, config)
        with run.microbatch([inputs, targets, *places.values()], last=last):
            part_loss = next_byte_loss(run.model, inputs, targets, **places)
            part_loss = part_loss / config.microbatches
            part_loss.backward()  # type: ignore[no-untyped-call]
        loss += part_loss.detach()
    norm = run.clip(math.inf if config.max_grad_norm is None else config.max_grad_norm)
    run.optimizer.step()
    run.optimizer.zero_grad()
    if share.is_cuda:
        torch.cuda.synchronize(share.device)
    return loss, norm


def _microbatches(share: Tensor, count: int) -> Iterator[tuple[Tensor, bool]]:
    parts = share.chunk(count)
    for index, part in enumerate(parts):
        yield part, index == len(parts) - 1


def _mean_over_ranks(loss: Tensor, rank_info: RankInfo) -> float:
    if rank_info.world_size > 1:
        dist.all_reduce(loss)
    return loss.item() / rank_info.world_size
