"""Methods of a model beside its forward, under a strategy and in one process.

``use_methods`` runs on every rank, ``assert_methods_work`` compares what it found with what one
plain process finds with the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from polyshard.conformance.models import TiedModel, global_batch, inputs_and_targets
from polyshard.conformance.parity import TOLERANCE, ParityError, assert_same_weights
from polyshard.conformance.recipes import Recipe, build_optimizer
from polyshard.conformance.trainings import Training, mesh_of
from polyshard.lifecycle.parallelize import maybe_shard_optimizer, parallelize
from polyshard.lifecycle.state_dict import full_state_dict

if TYPE_CHECKING:
    from polyshard.config.base import DistributedConfig
    from polyshard.config.parallelism import ParallelismSizes

__all__ = ["Found", "ModelWithMethods", "assert_methods_work", "use_methods"]

#: Enough for a step by each method, and one after each.
_STEPS = 4

_LONGEST = 6


class StoppedError(Exception):
    """What a method raises on one rank alone."""


class ModelWithMethods(TiedModel):
    """It generates, encodes without its forward, and finds its own loss with it."""

    def __init__(self) -> None:
        super().__init__()
        self.purpose = "to be read through a wrapper"

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int, stop: int | None = None) -> Tensor:
        """Return the logits of the next tokens, each after the one before: (count, vocabulary).

        ``stop`` is the number of tokens after which it raises.
        """
        found = [torch.zeros(0, self.head.out_features, device=tokens.device)]
        for position in range(count):
            if position == stop:
                raise StoppedError
            found.append(self(tokens)[:, -1])
            tokens = torch.cat([tokens, found[-1].argmax(-1, keepdim=True)], dim=1)
        return torch.cat(found)

    def encode(self, tokens: Tensor) -> Tensor:
        """Return one vector for each sequence: (batch, width)."""
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.mean(dim=1)

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the mean cross entropy of each next token, a scalar."""
        inputs, targets = inputs_and_targets(tokens)
        return F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())


METHODS = ("generate", "encode", "loss")


@frozen(kw_only=True)
class Found:
    """What the methods came to on one rank.

    Attributes:
        generated: What ``generate`` returned before, between and after the steps; None where it
            raised.
        losses: This rank's in each step.
        weights: The full state dict at the end.
        purpose: The model's attribute, as it was read from what ``parallelize`` returned.
    """

    generated: Sequence[Tensor | None]
    losses: Sequence[float]
    weights: Mapping[str, Tensor]
    purpose: object


def _build() -> ModelWithMethods:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return ModelWithMethods()


def _generate(generate: Callable[..., Tensor], index: int, device: torch.device) -> Tensor | None:
    """Generate as the rank of this number does: each for longer than the one before.

    Of each four ranks the first does not at all, and the last until it raises.
    """
    prompt = global_batch(index)[:1, : 2 + index % 2].to(device)
    # More than one forward, for the first may find gathered what the second has to gather.
    count = 0 if index % 4 == 0 else min(2 + index, _LONGEST)
    try:
        return generate(prompt, count, stop=2 if index % 4 == 3 else None).cpu()
    except StoppedError:
        return None


def _objective(model: Any, step: int, tokens: Tensor) -> Tensor:
    """Return the loss of a step: by a method with or without forward in it, or by forward."""
    if step % 2:
        inputs, targets = inputs_and_targets(tokens)
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    if step % 4 == 0:
        loss: Tensor = model.loss(tokens)
        return loss
    encoded: Tensor = model.encode(tokens)
    return encoded.square().mean()


def _train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    share: Callable[[Tensor], Tensor],
    indices: Iterable[int],
) -> tuple[list[Tensor | None], list[float]]:
    generated: list[Tensor | None] = []
    losses = []
    device = next(model.parameters()).device
    for step in range(_STEPS):
        generated += (_generate(model.generate, index, device) for index in indices)
        optimizer.zero_grad()
        loss = _objective(model, step, share(global_batch(step)))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    generated += (_generate(model.generate, index, device) for index in indices)
    return generated, losses


def use_methods(config: DistributedConfig, sizes: ParallelismSizes | None) -> Found:
    """Train by methods, and generate in between, each rank for its own number of tokens."""
    mesh = mesh_of(sizes)
    model, _ = parallelize(_build(), config, mesh=mesh, methods=METHODS)
    optimizer = maybe_shard_optimizer(model, build_optimizer("sgd", model))
    training = Training(model, optimizer, Recipe(), config, mesh)
    index, _ = training._place()
    generated, losses = _train(model, optimizer, training.share, [index])
    weights = full_state_dict(model, rank0_only=False)
    purpose = getattr(model, "purpose", None)
    return Found(generated=generated, losses=losses, weights=weights, purpose=purpose)


def assert_methods_work(found: Sequence[Found]) -> None:
    """Compare what each rank found with one process.

    Raises:
        ParityError: They differ.
    """
    model = _build()
    count = len(found)
    optimizer = build_optimizer("sgd", model)
    generated, losses = _train(model, optimizer, lambda tokens: tokens, range(count))
    for rank, own in enumerate(found):
        _assert_same_outputs(own.generated, generated[rank::count], f"rank {rank}: generate")
        assert_same_weights(
            own.weights, model.state_dict(), TOLERANCE, where=f"rank {rank}, trained by methods"
        )
        if own.purpose != model.purpose:
            raise ParityError(
                f"rank {rank}: expected the model's attribute {model.purpose!r} to be readable on "
                f"what parallelize returned, found {own.purpose!r}"
            )
    for step, expected in enumerate(losses):
        mean = sum(own.losses[step] for own in found) / count
        if abs(mean - expected) > TOLERANCE * abs(expected):
            raise ParityError(f"step {step}: expected a loss of {expected:.9g}, found {mean:.9g}")


def _assert_same_outputs(
    found: Sequence[Tensor | None], expected: Sequence[Tensor | None], where: str
) -> None:
    for call, (own, other) in enumerate(zip(found, expected, strict=True)):
        if own is None or other is None:
            if own is not other:
                raise ParityError(f"{where}, call {call}: expected it to raise as in one process")
        elif own.shape != other.shape or not torch.allclose(own, other, rtol=1e-5, atol=1e-5):
            raise ParityError(f"{where}, call {call}: expected the logits of one process")
