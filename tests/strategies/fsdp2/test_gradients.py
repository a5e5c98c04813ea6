"""Gradients are reduced in the last microbatch, or in each; the sum is the same."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from polyshard import FSDP2Config, accumulate, parallelize
from polyshard.conformance import RankPool

pytestmark = [pytest.mark.strategy("fsdp2"), pytest.mark.world_size(2)]


@pytest.mark.parametrize("defer", [True, False])
def test_when_gradients_are_reduced(ranks: RankPool, defer: bool) -> None:
    for seen in ranks.run(gradients_of_rank, defer):
        # Rank r has the gradient r + 1 in each microbatch.
        assert seen == [None if defer else 1.5, 3.0] * 2


def gradients_of_rank(defer: bool) -> list[float | None]:
    """Return this rank's reduced gradient after each of two microbatches, in two steps."""
    config = FSDP2Config(defer_fsdp_grad_sync=defer).in_full_precision()
    model, _ = parallelize(nn.Linear(1, 2, bias=False), config)
    (weight,) = model.parameters()
    seen = []
    for _ in range(2):
        for last in (False, True):
            with accumulate(model, last=last):
                model(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
            gradient = weight.grad
            seen.append(None if gradient is None else gradient.to_local().item())  # type: ignore[attr-defined]
        weight.grad = None
    return seen
