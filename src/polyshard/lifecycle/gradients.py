"""accumulate and clip_grad_norm: the same under every strategy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn

from polyshard._describe import describe_value
from polyshard.config.base import DistributedConfig
from polyshard.mesh.process_groups import one_timeout
from polyshard.registry.registry import default_registry

__all__ = ["accumulate", "clip_grad_norm"]


def accumulate(
    model: nn.Module, config: DistributedConfig | None, *, last: bool
) -> AbstractContextManager[None]:
    """Return a context for the forward and backward of one of several microbatches.

    The gradients of all microbatches up to the last add up to those of one big batch, provided
    that each loss is divided by their number.

    Args:
        model: What ``parallelize`` returned.
        config: The config that it was parallelized with; None is plain PyTorch.
        last: Whether the optimizer steps after this microbatch.
    """
    if config is None:
        return nullcontext()
    return _accumulating(default_registry().dispatch("accumulate", config, model=model, last=last))


@contextmanager
def _accumulating(context: AbstractContextManager[None]) -> Iterator[None]:
    """Enter the strategy's context; a first forward may make process groups."""
    with one_timeout(), context:
        yield


def clip_grad_norm(
    model: nn.Module,
    config: DistributedConfig | None,
    max_norm: float,
    norm_type: float = 2.0,
) -> float:
    """Clip the gradients by their global norm, in place, and return the norm before clipping.

    Call it on every rank between the last backward and the step.

    Args:
        model: What ``parallelize`` returned.
        config: The config that it was parallelized with; None is plain PyTorch.
        max_norm: The norm that the gradients have at most afterwards; ``inf`` only measures.
        norm_type: The p of the p-norm, more than 0; may be ``inf``.

    Returns:
        The norm that one process with the whole batch would have found.
    """
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if math.isnan(value) or value < 0 or (name == "norm_type" and value == 0):
            raise ValueError(f"clip_grad_norm: expected {name} > 0, found {describe_value(value)}")
    if config is None:
        from polyshard.strategies import fallback as defaults

        return defaults.clip_grad_norm(model, float(max_norm), float(norm_type))
    with one_timeout():
        return float(
            default_registry().dispatch(
                "clip_grad_norm",
                config,
                model=model,
                max_norm=float(max_norm),
                norm_type=float(norm_type),
            )
        )
