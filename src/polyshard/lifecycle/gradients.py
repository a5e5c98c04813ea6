"""accumulate and clip_grad_norm: the same under every strategy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor, nn

from polyshard._describe import describe_value
from polyshard.lifecycle import wrapped_models
from polyshard.mesh.process_groups import one_timeout
from polyshard.registry.registry import default_registry
from polyshard.strategies import fallback

__all__ = ["accumulate", "clip_grad_norm"]


def accumulate(model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
    """Return a context for the forward and backward of one of several microbatches.

    The gradients of all microbatches up to the last add up to those of one big batch, provided
    that each loss is divided by their number.

    Args:
        model: What ``parallelize`` returned, or the module given to it. For a model that was
            never parallelized the context does nothing, as in plain PyTorch.
        last: Whether the optimizer steps after this microbatch.

    Raises:
        ModelError: It is a part of a parallelized model, or holds more than one.
    """
    known = wrapped_models.find(model)
    if known is None:
        return nullcontext()
    return _accumulating(
        default_registry().dispatch("accumulate", known.config, model=known.model, last=last)
    )


@contextmanager
def _accumulating(context: AbstractContextManager[None]) -> Iterator[None]:
    """Enter the strategy's context; a first forward may make process groups."""
    with one_timeout(), context:
        yield


def clip_grad_norm(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clip the gradients by their global norm, in place, and return the norm before clipping.

    Call it on every rank between the last backward and the step.

    Args:
        model: What ``parallelize`` returned, or the module given to it. One that was never
            parallelized is clipped as plain PyTorch does.
        max_norm: The norm that the gradients have at most afterwards; ``inf`` only measures.
        norm_type: The p of the p-norm, more than 0; may be ``inf``.

    Returns:
        The norm that one process with the whole batch would have found: a tensor of shape ``()``
        on the device of the gradients, the same on every rank.

    Raises:
        ModelError: It is a part of a parallelized model, or holds more than one.
        ValueError: A norm is negative or not a number.
    """
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if math.isnan(value) or value < 0 or (name == "norm_type" and value == 0):
            raise ValueError(f"clip_grad_norm: expected {name} > 0, found {describe_value(value)}")
    known = wrapped_models.find(model)
    if known is None:
        return fallback.clip_grad_norm(model, float(max_norm), float(norm_type))
    with one_timeout():
        norm: Tensor = default_registry().dispatch(
            "clip_grad_norm",
            known.config,
            model=known.model,
            max_norm=float(max_norm),
            norm_type=float(norm_type),
        )
    return norm
