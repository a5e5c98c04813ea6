"""DistributedSetup carries strategy and mesh, and its methods are the lifecycle functions."""

from typing import Any

import pytest
import torch
from torch import nn

from polyshard import DDPConfig, DistributedSetup, ParallelismSizes
from polyshard.conformance.pool import RankPool
from polyshard.exceptions import ConfigError, MeshError, StrategyNotFoundError


@pytest.mark.parametrize("strategy", ["ddp", "DDP", {"strategy": "ddp"}, DDPConfig()])
def test_a_strategy_is_named_in_any_way(strategy: Any) -> None:
    setup = DistributedSetup.build(strategy, {"dp_size": 1})
    assert setup.config == DDPConfig()
    assert setup.world_size == 1
    assert setup.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("nosuch",), StrategyNotFoundError),
        ((3,), ConfigError),
        (("ddp", {"tp_sise": 2}), ConfigError),
        (("ddp", ParallelismSizes(tp_size=2)), MeshError),
    ],
)
def test_a_mistake_is_found_before_anything_starts(arguments: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        DistributedSetup.build(*arguments)


def train_one_step() -> tuple[int, list[float]]:
    setup = DistributedSetup.build("ddp")
    torch.manual_seed(0)
    model, optimizer = setup.parallelize(nn.Linear(2, 1))
    assert optimizer is None
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    assert setup.shard_optimizer(model, sgd) is sgd
    with setup.rebuild(model):
        pass
    rank = torch.distributed.get_rank()
    model(torch.full((1, 2), float(rank))).sum().backward()
    sgd.step()
    return setup.world_size, [p.sum().item() for p in model.parameters()]


def test_its_methods_train(ranks: RankPool, world_size: int) -> None:
    answers = ranks.run(train_one_step)
    torch.manual_seed(0)
    plain = nn.Linear(2, 1)
    # The mean of the inputs 0 and 1 is what the ranks saw together; with one rank it is 0.
    plain(torch.full((1, 2), (world_size - 1) / 2)).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    expected = [p.sum().item() for p in plain.parameters()]
    for size, found in answers:
        assert size == world_size
        assert found == pytest.approx(expected, rel=1e-6)
