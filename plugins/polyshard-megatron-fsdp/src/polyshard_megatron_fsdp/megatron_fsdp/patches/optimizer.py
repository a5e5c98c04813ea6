"""Patches of an optimizer, for as long as megatron-fsdp's ``fully_shard_optimizer`` runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.optim import Optimizer

from polyshard_megatron_fsdp.megatron_fsdp.patches.patch import ALL, Patch

__all__ = ["OPTIMIZER_PATCHES", "patched_optimizer"]


@contextmanager
def patched_optimizer(optimizer: Optimizer) -> Iterator[None]:
    """Disguise an optimizer with parameters while ``fully_shard_optimizer`` looks at it."""
    with ExitStack() as stack:
        for patch in OPTIMIZER_PATCHES:
            if patch.is_needed:
                stack.enter_context(patch.apply(optimizer))
        yield


@contextmanager
def _in_one_group(optimizer: Optimizer) -> Iterator[None]:
    """Show one group with one parameter, and bring the real groups back.

    ``fully_shard_optimizer`` also drops the gradient of that parameter.
    """
    groups = optimizer.param_groups
    first = next(parameter for group in groups for parameter in group["params"])
    gradient = first.grad
    optimizer.param_groups = [{"params": [first]}]
    try:
        yield
    finally:
        optimizer.param_groups = groups
        first.grad = gradient


@contextmanager
def _without_first_step(optimizer: Optimizer) -> Iterator[None]:
    """Let the step do nothing.

    The step that ``fully_shard_optimizer`` extends is the type's, so that the instance's is free.
    """
    optimizer.step = _no_step  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        if optimizer.__dict__.get("step") is _no_step:
            del optimizer.step


def _no_step(*_: Any, **__: Any) -> None:
    """Take no step."""


OPTIMIZER_PATCHES = (
    Patch(
        name="one-group",
        problem="the first value of the first group's dict is taken for its parameters, whatever "
        "its key, and the first of these is looked at, which an empty group has not",
        versions=ALL,
        test="megatron_fsdp/test_faults.py::test_fault_is_there[the first group must not be empty]",
        apply=_in_one_group,
    ),
    Patch(
        name="no-first-step",
        problem="`fully_shard_optimizer` takes a step with zero gradients, which counts and decays "
        "weights",
        versions=ALL,
        test="megatron_fsdp/test_faults.py::test_fault_is_there[sharding counts a step]",
        apply=_without_first_step,
    ),
)
