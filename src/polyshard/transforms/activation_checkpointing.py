"""checkpoint_units: trade compute for memory, one unit at a time."""

from __future__ import annotations

import logging
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from polyshard.exceptions import UnitError

if TYPE_CHECKING:
    from polyshard.transforms.units import UnitReport

__all__ = ["CheckpointMode", "checkpoint_mode", "checkpoint_units"]

CheckpointMode = Literal["full", "selective"]


_logger = logging.getLogger(__name__)


_aten = torch.ops.aten


#: The operations whose results "selective" keeps: those that cost most to do again.
_KEPT = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)


def checkpoint_mode(value: bool | str) -> CheckpointMode | None:
    """Return what a config's ``activation_checkpointing`` asks for; None for nothing.

    True is ``"full"``.
    """
    if value is False:
        return None
    return "selective" if value == "selective" else "full"


def checkpoint_units(model: nn.Module, units: UnitReport, mode: CheckpointMode) -> int:
    """Wrap each unit so that its backward computes its activations again; return how many.

    ``"full"`` keeps nothing but a unit's inputs; ``"selective"`` keeps the results of matrix
    products and attention too. The parameters stay the same objects under longer names, which
    ``polyshard.parameters.names.canonical_parameter_name`` shortens again.

    Args:
        model: Changed in place; units are replaced in the modules that hold them.
        units: The units of this model.
        mode: Which activations are computed again.

    Raises:
        UnitError: There is no unit to wrap.
    """
    if not units.modules:
        raise UnitError(
            f"activation checkpointing: expected repeated blocks in {type(model).__name__}, found "
            "none to wrap; name their class as the strategy's unit, or turn it off"
        )
    context = _selective_arguments() if mode == "selective" else {}
    holders = list(model.modules())
    wrappers = {unit: checkpoint_wrapper(unit, **context) for unit in units.modules.values()}
    for module in holders:
        _replace_children(module, wrappers)
    _logger.info("activation checkpointing (%s): %s", mode, units)
    return len(wrappers)


def _replace_children(module: nn.Module, wrappers: dict[nn.Module, nn.Module]) -> None:
    for name, child in list(module._modules.items()):  # named_children leaves out repetitions
        if child in wrappers:
            wrappers[child].training = child.training
            module.register_module(name, wrappers[child])


def _selective_arguments() -> dict[str, Any]:
    arguments: dict[str, Any] = {"context_fn": _selective_contexts}
    # Hooks such as torch.autograd.graph.save_on_cpu see the kept results too. Where torch has this
    # choice (2.14.1 has, 2.13 has not) it warns until one is made. 2.13 lets them bypass hooks.
    if "respect_saved_tensors_hooks" in signature(checkpoint).parameters:
        arguments["respect_saved_tensors_hooks"] = True
    return arguments


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_keep_expensive)  # type: ignore[no-untyped-call]


def _keep_expensive(_context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    if operation in _KEPT:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
