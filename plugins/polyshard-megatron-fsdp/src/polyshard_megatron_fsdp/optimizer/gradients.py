"""One optimizer step over several microbatches, and the norm of its gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from polyshard.strategies import fallback
from polyshard_megatron_fsdp.model.sharded_model import ShardedModel

__all__ = ["accumulate", "clip_grad_norm"]


@contextmanager
def accumulate(model: nn.Module, last: bool) -> Iterator[None]:
    """Add a microbatch's gradients to those before it, and reduce them after the last.

    What it found in the model is there again afterwards.
    """
    if not isinstance(model, ShardedModel):
        yield
        return
    found = {"model_auto_sync": model.model_auto_sync, "is_last_microbatch": _is_last(model)}
    # Either flag alone is wrong for some stage: both say whether this backward reduces.
    model.model_auto_sync = model.is_last_microbatch = last
    try:
        yield
    finally:
        model.__dict__.update(found)
    if not last:
        model.record.unreduced += 1


def clip_grad_norm(model: nn.Module, max_norm: float, norm_type: float) -> Tensor:
    """Scale the gradients that the optimizer will see by their norm over all ranks."""
    if isinstance(model, ShardedModel):
        model.show_distributed()
    return fallback.clip_grad_norm(model, max_norm, norm_type)


def _is_last(model: ShardedModel) -> bool:
    return bool(getattr(model, "is_last_microbatch", False))
