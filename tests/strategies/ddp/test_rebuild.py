"""After a rebuild the gradients are averaged again, whatever was lost."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from polyshard import DDPConfig, accumulate, parallelize, rebuild
from polyshard.conformance import RankPool

pytestmark = [pytest.mark.strategy("ddp"), pytest.mark.world_size(2)]


@pytest.mark.parametrize(
    "options",
    [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}],
    ids=str,
)
@pytest.mark.parametrize("midway", [False, True])
def test_a_cast_model_is_hooked_again(
    ranks: RankPool, options: dict[str, Any], midway: bool
) -> None:
    for gradients, hooked in ranks.run(train_across_cast, options, midway):
        assert gradients == [1.5, 3.0]
        assert hooked == 2


def train_across_cast(options: dict[str, Any], midway: bool) -> tuple[list[float], int]:
    """Return the averaged gradients of a step and of two microbatches, and the hook's calls."""
    config = DDPConfig(**options)
    model, _ = parallelize(nn.Linear(1, 1, bias=False), config)
    assert isinstance(model, DistributedDataParallel)
    calls = []

    def average(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        calls.append(bucket.index())
        total = bucket.buffer() / dist.get_world_size()
        return dist.all_reduce(total, async_op=True).get_future().then(lambda f: f.value()[0])

    model.register_comm_hook(None, average)
    if midway:
        _backward(model)
        model.zero_grad()
        calls.clear()
    with rebuild(model):
        model.double()
        model.float()
    gradients = [_backward(model)]
    model.zero_grad()
    with accumulate(model, last=False):
        _backward(model)
    with accumulate(model, last=True):
        gradients.append(_backward(model))
    return gradients, len(calls) - bool(config.static_graph)


def _backward(model: nn.Module) -> float:
    model(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
    (weight,) = model.parameters()
    assert weight.grad is not None
    return weight.grad.item()


def test_freezing_in_a_rebuild_takes_effect(ranks: RankPool) -> None:
    assert ranks.run(freeze) == [(1.5, None), (1.5, None)]


def freeze() -> tuple[float, None]:
    config = DDPConfig()
    module = nn.Linear(1, 1)
    model, _ = parallelize(module, config)
    with rebuild(model):
        module.bias.requires_grad_(False)
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
    assert module.weight.grad is not None
    return module.weight.grad.item(), module.bias.grad  # type: ignore[return-value]
