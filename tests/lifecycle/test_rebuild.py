"""A rebuild keeps dtypes; that training goes on right after it is a part of the kit."""

from operator import is_

import pytest
import torch
from torch import is_tensor

from polyshard import full_state_dict, parallelize, rebuild, resolve_config
from polyshard.conformance import RankPool
from polyshard.conformance.models import build_model, global_batch, loss_of

each_strategy = pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("ddp", marks=pytest.mark.strategy("ddp")),
        pytest.param("fsdp2", marks=pytest.mark.strategy("fsdp2")),
        pytest.param("megatron_fsdp", marks=pytest.mark.strategy("megatron_fsdp")),
    ],
)


@each_strategy
def test_dtypes_are_those_of_before(ranks: RankPool, strategy: str) -> None:
    """Of parameters, buffers and a gradient that was there; the values are the rounded ones."""
    for dtypes, gradients, rounded in ranks.run(cast_down, strategy):
        assert gradients
        assert dtypes == {torch.float32, torch.int64}
        assert rounded


def cast_down(strategy: str) -> tuple[set[torch.dtype], bool, bool]:
    """Return the dtypes after a cast, whether gradients are still there, and values rounded."""
    config = resolve_config(strategy).in_full_precision()
    module = build_model("buffers")
    model, _ = parallelize(module, config)
    loss_of(model, global_batch(0)).backward()
    expected = full_state_dict(model, rank0_only=False)["head.weight"].bfloat16().float()
    before = [p.grad for p in model.parameters()]
    with rebuild(model):
        model.to(torch.bfloat16)
    gradients = [p.grad for p in model.parameters()]
    kept = any(map(is_tensor, before)) and all(map(is_, gradients, before))
    tensors = [*model.parameters(), *model.buffers(), *filter(is_tensor, gradients)]
    rounded = torch.equal(full_state_dict(model, rank0_only=False)["head.weight"], expected)
    return {tensor.dtype for tensor in tensors}, kept, rounded
