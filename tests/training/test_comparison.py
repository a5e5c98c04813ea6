"""When two runs count as equal."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from polyshard.training.comparison import Difference, Run, Tolerance, measure_difference

WEIGHTS = {"small": torch.tensor([1e-3, -2e-3]), "large": torch.tensor([[10.0, 0.0]])}


def run(**changes: Any) -> Run:
    values: dict[str, Any] = {
        "losses": [4.0, 2.0],
        "grad_norms": [1.0, 0.5],
        "step_seconds": [0.3, 0.1, 0.2],
        "peak_rss_bytes": [1],
        "parameter_bytes": [1],
        "optimizer_bytes": [1],
    }
    return Run(**values | changes)


def difference(weights: dict[str, torch.Tensor] | None = None, **changes: Any) -> Difference:
    return measure_difference(run(**changes), run(), weights or WEIGHTS, WEIGHTS)


def test_the_same_is_equal() -> None:
    same = difference()
    assert same.excesses(Tolerance()) == []
    assert (same.loss, same.grad_norm, same.weight) == (0, 0, 0)


def test_losses_and_norms_are_compared_relative_to_their_step() -> None:
    apart = difference(losses=[4.0, 2.0 + 1e-5], grad_norms=[1.0 + 1e-5, 0.5])
    assert apart.loss == pytest.approx(5e-6)
    assert apart.loss_absolute == pytest.approx(1e-5)
    assert apart.grad_norm == pytest.approx(1e-5)
    assert [text.split(" is off")[0] for text in apart.excesses(Tolerance())] == [
        "a loss",
        "a gradient norm",
    ]


def test_weights_are_compared_relative_to_the_largest_of_their_tensor() -> None:
    large_one_off = {**WEIGHTS, "large": torch.tensor([[10.0, 5e-6]])}
    assert difference(large_one_off).excesses(Tolerance()) == []
    small_one_off = {**WEIGHTS, "small": torch.tensor([1e-3 + 1e-8, -2e-3])}
    apart = difference(small_one_off)
    assert apart.weight == pytest.approx(5e-6, rel=2e-2)
    assert apart.worst_weight == "small"
    assert apart.excesses(Tolerance()) == [
        f"a final weight (small) is off by {apart.weight:.1e} relative, more than 1e-06"
    ]


def test_what_is_not_a_number_is_not_equal() -> None:
    nan = {**WEIGHTS, "small": torch.tensor([math.nan, -2e-3])}
    assert len(difference(nan).excesses(Tolerance())) == 1
    assert len(difference(losses=[math.nan, 2.0]).excesses(Tolerance())) == 1
    assert len(difference(grad_norms=[1.0, math.inf]).excesses(Tolerance())) == 1


def test_a_weight_that_is_missing_is_not_equal() -> None:
    apart = difference({"large": WEIGHTS["large"]})
    assert apart.worst_weight == "small"
    assert apart.weight == math.inf


def test_the_step_time_is_the_median() -> None:
    assert run().median_step_seconds == 0.2


def test_single_weights_say_nothing_under_adamw() -> None:
    apart = difference({**WEIGHTS, "small": torch.tensor([0.0, -2e-3])}, losses=[4.0, 2.1])
    excesses = apart.excesses(Tolerance.under("adamw"))
    assert [text.split(" is off")[0] for text in excesses] == ["a loss"]
