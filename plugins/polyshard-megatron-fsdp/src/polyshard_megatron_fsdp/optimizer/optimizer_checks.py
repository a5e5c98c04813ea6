"""Optimizers that must not be sharded, and optimizers that must be and were not."""

from __future__ import annotations

import re
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from polyshard._describe import describe_owner
from polyshard.exceptions import OptimizerError, OptimizerNotShardableError
from polyshard_megatron_fsdp.megatron_fsdp.private_names import model_of
from polyshard_megatron_fsdp.megatron_fsdp.version import WHO
from polyshard_megatron_fsdp.model.sharded_model import ShardedModel

__all__ = ["refuse_empty", "refuse_unshardable", "watch_steps"]

# Their updates need the whole matrix, or its norm, and a rank has some of its rows. By name, since
# most of them are in packages that need not be installed, and copies of them are in many more.
_WHOLE_MATRIX = re.compile(r"Dion|Muon|Shampoo|SOAP|Adafactor|LAMB|LARS|Lamb$|Lars$|LBFGS")

_watching = False


def refuse_unshardable(optimizer: Optimizer) -> None:
    """Raise for an optimizer whose update is not elementwise, by its class and base classes.

    Raises:
        OptimizerNotShardableError: It is one of them.
    """
    for cls in type(optimizer).__mro__:
        if _WHOLE_MATRIX.search(cls.__name__):
            raise OptimizerNotShardableError(
                f"expected an optimizer whose update is elementwise, found "
                f"{type(optimizer).__name__} ({describe_owner(type(optimizer))}), a "
                f"{cls.__name__}, which needs whole matrices, while 'megatron_fsdp' "
                f"({WHO}) gives each rank some rows of them; use "
                "AdamW or SGD, or a strategy that does not shard optimizers, such as DDP"
            )


def refuse_empty(optimizer: Optimizer) -> None:
    """Raise for an optimizer without parameters.

    Raises:
        OptimizerError: None of its groups has any.
    """
    if not any(group["params"] for group in optimizer.param_groups):
        raise OptimizerError(
            f"{type(optimizer).__name__}: expected parameters in at least one group, found none"
        )


def watch_steps() -> None:
    """Make an optimizer that was never sharded fail at its first step, not train nothing."""
    global _watching
    if not _watching:
        _watching = True
        register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    # One look at the first parameter: optimizers are sharded as a whole.
    first = next((p for group in optimizer.param_groups for p in group["params"]), None)
    model = model_of(first)
    if not isinstance(model, ShardedModel):
        return
    if not model.record.by_hand and optimizer not in model.record.optimizers:
        raise OptimizerError(
            f"{type(optimizer).__name__}: expected an optimizer that is sharded like its model, "
            "found one that is not, whose steps would not reach the model; call optimizer = "
            "polyshard.maybe_shard_optimizer(model, optimizer) before the first step"
        )
