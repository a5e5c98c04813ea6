"""Gradients are averaged in the last microbatch, and locally added up before."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from polyshard import DDPConfig, accumulate, parallelize
from polyshard.conformance import RankPool

pytestmark = [pytest.mark.strategy("ddp"), pytest.mark.world_size(2)]


@pytest.mark.parametrize("static", [False, True])
def test_only_the_last_microbatch_communicates(ranks: RankPool, static: bool) -> None:
    steps = list(zip(*ranks.run(gradients_of_rank, static), strict=True))
    # Rank r has the gradient r + 1 in each microbatch. With a static graph the first backward of
    # all has to reduce, which does not change the sum.
    assert steps == [
        ((1.5, 1.5) if static else (1.0, 2.0)),
        (3.0, 3.0),
        (1.0, 2.0),
        (3.0, 3.0),
    ]


def gradients_of_rank(static: bool) -> list[float]:
    """Return the gradient after each of two microbatches, in two steps."""
    config = DDPConfig(static_graph=static)
    model, _ = parallelize(nn.Linear(1, 1, bias=False), config)
    (weight,) = model.parameters()
    seen = []
    for _ in range(2):
        for last in (False, True):
            with accumulate(model, last=last):
                model(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
            assert weight.grad is not None
            seen.append(weight.grad.item())
        weight.grad = None
    return seen
