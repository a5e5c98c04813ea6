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

from polyshard.group import Place
from polyshard.training.config import OptimizerConfig, TrainingConfig
from polyshard.training.data import Batches, read_text
from polyshard.training.model import next_byte_loss, places_of

__all__ = ["Record", "Step", "Trainee", "build_optimizer", "train"]


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


class Trainee(Protocol):
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
    trainee: Trainee, config: TrainingConfig, place: Place, report: Callable[[Step], None]
) -> Record:
    """Train for the steps that the config asks for and return what each came to.

    Call it on every rank.

    Args:
        trainee: The model and its optimizer.
        config: The run.
        place: This process among the ranks, and its device.
        report: Called after each step.
    """
    batches = Batches(read_text(config.data.path), config)
    record = Record()
    for number in range(config.steps):
        share = batches.share(number, *trainee.share).to(place.device)
        started = time.perf_counter()
        loss, norm = _one_step(trainee, config, share)
        seconds = time.perf_counter() - started
        step = Step(number + 1, _mean_over_ranks(loss, place), norm, seconds)
        record.add(step)
        report(step)
    return record


def _one_step(trainee: Trainee, config: TrainingConfig, share: Tensor) -> tuple[Tensor, float]:
    """Return the mean loss over this rank's share, and the global norm of the gradients."""
    loss = torch.zeros((), dtype=torch.float64, device=share.device)
    for part, last in _microbatches(share, config.microbatches):
        inputs, targets = part[:, :-1], part[:, 1:]
        places = places_of(inputs, config)
        with trainee.microbatch([inputs, targets, *places.values()], last=last):
            part_loss = next_byte_loss(trainee.model, inputs, targets, **places)
            part_loss = part_loss / config.microbatches
            part_loss.backward()  # type: ignore[no-untyped-call]
        loss += part_loss.detach()
    norm = trainee.clip(math.inf if config.max_grad_norm is None else config.max_grad_norm)
    trainee.optimizer.step()
    trainee.optimizer.zero_grad()
    if share.is_cuda:
        torch.cuda.synchronize(share.device)
    return loss, norm


def _microbatches(share: Tensor, count: int) -> Iterator[tuple[Tensor, bool]]:
    parts = share.chunk(count)
    for index, part in enumerate(parts):
        yield part, index == len(parts) - 1


def _mean_over_ranks(loss: Tensor, place: Place) -> float:
    if place.world_size > 1:
        dist.all_reduce(loss)
    return loss.item() / place.world_size
