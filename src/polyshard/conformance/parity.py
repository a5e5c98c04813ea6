"""The comparison of a training under a strategy with the same one in one plain process.

A ``Recipe`` says what is trained. ``train_plain`` runs it in the calling process without any
distribution, ``train_under`` runs it on every rank on that rank's share of each batch, and
``assert_parity`` compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from polyshard.conformance.recipes import Outcome, Recipe

__all__ = ["TOLERANCE", "ParityError", "assert_parity", "assert_same_weights"]

#: Largest relative difference in float32 between one process and several: some ten times the
#: rounding of one operation, and a thousandth of what the smallest known fault makes.
TOLERANCE = 1e-6


class ParityError(AssertionError):
    """Two runs that should have been the same were not."""


def assert_parity(
    found: Sequence[Outcome], expected: Outcome, recipe: Recipe, *, tolerance: float = TOLERANCE
) -> None:
    """Compare what each rank came to with what one process came to.

    Weights are compared only under SGD: where a gradient is nearly zero, AdamW turns its rounding
    into a step of full size.

    Args:
        found: The outcome of each rank.
        expected: The outcome of one process.
        recipe: What was trained.
        tolerance: Largest relative difference; for weights, relative to the tensor's largest.

    Raises:
        ParityError: They differ; the message has the largest difference and where it is.
    """
    for rank, outcome in enumerate(found):
        where = f"rank {rank}, {recipe}"
        for what in ("losses", "norms", "evaluations"):
            _compare_steps(
                f"{where}: {what}", getattr(outcome, what), getattr(expected, what), tolerance
            )
        if recipe.optimizer == "sgd":
            assert_same_weights(outcome.weights, expected.weights, tolerance, where=where)


def assert_same_weights(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerance: float = 0.0,
    *,
    where: str = "",
) -> None:
    """Compare two state dicts: names, shapes, dtypes and values.

    Args:
        found: The one to judge.
        expected: The one that is right.
        tolerance: Largest difference, relative to the largest value of the tensor.
        where: What the message begins with.

    Raises:
        ParityError: They differ; the message names the tensor that differs most.
    """
    if found.keys() != expected.keys():
        raise ParityError(
            f"{where}: expected exactly the tensors of one process, missing are "
            f"{sorted(expected.keys() - found.keys())}, unexpected are "
            f"{sorted(found.keys() - expected.keys())}"
        )
    differences = {
        name: _tensor_difference(f"{where}: {name}", found[name], expected[name])
        for name in expected
    }
    worst = max(differences, key=differences.__getitem__)
    if differences[worst] > tolerance:
        wrong = sum(difference > tolerance for difference in differences.values())
        raise ParityError(
            f"{where}: {wrong} of {len(differences)} tensors differ from one process; most does "
            f"{worst}, by {differences[worst]:.1e} of its largest value (tolerance {tolerance:g})"
        )


def _compare_steps(
    where: str, found: Sequence[float], expected: Sequence[float], tolerance: float
) -> None:
    if len(found) != len(expected):
        raise ParityError(f"{where}: expected {len(expected)} values, found {len(found)}")
    differences = [
        _as_difference(abs(f - e) / abs(e)) for f, e in zip(found, expected, strict=True)
    ]
    if max(differences, default=0.0) > tolerance:
        step = differences.index(max(differences))
        raise ParityError(
            f"{where} differ from one process, most in step {step}: expected "
            f"{expected[step]:.9g}, found {found[step]:.9g}, a relative difference of "
            f"{differences[step]:.1e} (tolerance {tolerance:g})"
        )


def _tensor_difference(where: str, found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two tensors relative to the largest value expected."""
    for what in ("shape", "dtype", "device"):
        if getattr(found, what) != getattr(expected, what):
            raise ParityError(
                f"{where}: expected {what} {getattr(expected, what)}, found {getattr(found, what)}"
            )
    if type(found) is not Tensor:
        raise ParityError(f"{where}: expected a plain tensor, found a {type(found).__name__}")
    scale = expected.abs().max().item() or 1.0
    return _as_difference((found - expected).abs().max().item() / scale)


def _as_difference(value: float) -> float:
    """Return the value, or infinity for NaN, which no comparison would find too large."""
    return math.inf if math.isnan(value) else value
