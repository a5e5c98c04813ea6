"""Every option of DDPConfig does what it says; training equals one process under each."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from polyshard import DDPConfig, parallelize
from polyshard.conformance import RankPool
from polyshard.conformance.models import build_model, global_batch, loss_of
from polyshard.conformance.parity import assert_parity
from polyshard.conformance.recipes import Recipe
from polyshard.conformance.trainings import train_plain, train_under
from polyshard.exceptions import ModelError, OptimizerError, UnitError

pytestmark = pytest.mark.strategy("ddp")


@pytest.mark.parametrize(
    "options",
    [
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective", "static_graph": True},
        {"broadcast_buffers": False},
        {"static_graph": True},
        {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("microbatches", [None, 3])
def test_training_equals_one_process(
    ranks: RankPool, options: dict[str, Any], microbatches: int | None
) -> None:
    recipe = Recipe(model="tied", microbatches=microbatches, max_norm=0.5)
    outcomes = ranks.run(train_under, DDPConfig(**options), recipe, passed=True)
    assert_parity(outcomes, train_plain(recipe), recipe)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("broadcast", [True, False])
def test_buffers_are_those_of_rank_0_at_the_start_or_in_each_forward(
    ranks: RankPool, broadcast: bool
) -> None:
    at_start, later = zip(*ranks.run(buffers_of_rank, broadcast), strict=True)
    assert at_start == (0.0, 0.0)
    assert later == ((5.0, 5.0) if broadcast else (5.0, 6.0))


def buffers_of_rank(broadcast: bool) -> tuple[float, float]:
    """Return a buffer after the wrap, and after a forward before which each rank changed it."""
    module = build_model("buffers")
    module.get_buffer("scale").fill_(dist.get_rank())
    model, _ = parallelize(module, DDPConfig(broadcast_buffers=broadcast))
    at_start = module.get_buffer("scale")[0].item()
    module.get_buffer("scale").fill_(5.0 + dist.get_rank())
    loss_of(model, global_batch(0))
    return at_start, module.get_buffer("scale")[0].item()


def test_options_reach_torch(ranks: RankPool) -> None:
    for found in ranks.run(options_of_wrapper):
        assert found == {"unused": True, "bucket": 3 * 2**20, "view": True, "static": False}


def options_of_wrapper() -> dict[str, Any]:
    config = DDPConfig(find_unused_parameters=True, bucket_cap_mb=3, gradient_as_bucket_view=True)
    model, _ = parallelize(nn.Linear(2, 2), config)
    assert isinstance(model, DistributedDataParallel)
    return {
        "unused": model.find_unused_parameters,
        "bucket": model.bucket_bytes_cap,
        "view": model.gradient_as_bucket_view,
        "static": model.static_graph,
    }


@pytest.mark.parametrize("grouped", [True, False])
def test_autocast_lowers_the_forward_alone(ranks: RankPool, grouped: bool) -> None:
    results = ranks.run(dtypes_under_autocast) if grouped else [dtypes_under_autocast()]
    for output, gradient in results:
        assert (output, gradient) == (torch.bfloat16, torch.float32)


def dtypes_under_autocast() -> tuple[torch.dtype, torch.dtype]:
    model, _ = parallelize(nn.Linear(2, 2), DDPConfig(autocast_dtype="bf16"))
    output = model(torch.ones(1, 2))
    output.float().sum().backward()
    (gradient, _) = [p.grad for p in model.parameters()]
    assert gradient is not None
    return output.dtype, gradient.dtype


def test_without_a_process_group_the_model_itself_comes_back() -> None:
    module = build_model("plain")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, bound = parallelize(module, DDPConfig(), optimizer=optimizer)
    assert model is module
    assert bound is optimizer


@pytest.mark.world_size(2)
def test_an_optimizer_built_before_the_wrap_moves_the_weights(ranks: RankPool) -> None:
    assert ranks.run(step_moves_weights) == [True, True]


def step_moves_weights() -> bool:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, bound = parallelize(module, DDPConfig(), optimizer=optimizer)
    assert bound is optimizer
    before = module.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    bound.step()
    return not torch.equal(module.weight, before)


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (nn.ReLU(), {}, ModelError, "expected a model with a trainable parameter, found ReLU"),
        (nn.Linear(2, 2).requires_grad_(False), {}, ModelError, "found Linear with none"),
        (nn.Linear(2, 2, device="meta"), {}, ModelError, "found 2 on the meta device"),
        (nn.Linear(2, 2), {"activation_checkpointing": True}, UnitError, "found none to wrap"),
    ],
    ids=["no parameters", "frozen", "meta", "no blocks"],
)
def test_what_cannot_be_wrapped_is_refused(
    model: nn.Module, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        parallelize(model, DDPConfig(**options))


def test_an_optimizer_of_another_model_is_refused() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(OptimizerError, match="found 2 of 2 that are not"):
        parallelize(nn.Linear(2, 2), DDPConfig(), optimizer=optimizer)
