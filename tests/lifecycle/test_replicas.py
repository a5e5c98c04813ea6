"""Replicas that drifted apart are found, and the first parameter is named."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from polyshard import DistributedSetup, FSDP2Config, parallelize
from polyshard.conformance import RankPool
from polyshard.exceptions import PolyshardError, RanksDisagreeError
from polyshard.lifecycle.replicas import check_replicas


def break_one(strategy: str, sizes: dict[str, int], broken: int) -> str:
    setup = DistributedSetup.build(strategy, sizes)
    model, optimizer = setup.parallelize(*small_model())
    assert optimizer is not None
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    check_replicas(model, setup.mesh_context)
    if dist.get_rank() == broken:
        weight = list(model.parameters())[2]
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        with torch.no_grad():
            local[0, 0] += 1e-6
    try:
        check_replicas(model, setup.mesh_context.mesh)
    except RanksDisagreeError as error:
        return str(error)
    return "equal"


def small_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.world_size(4)
def test_a_replica_that_was_changed_is_named_on_every_rank(ranks: RankPool) -> None:
    answers = ranks.run(break_one, "fsdp2", {"dp_replicate_size": 2}, 3)
    assert len(set(answers)) == 1
    assert "parameter '1.weight', found other values on rank 3 than on rank 1;" in answers[0]


@pytest.mark.world_size(2)
def test_under_ddp_every_rank_is_a_replica(ranks: RankPool) -> None:
    (answer, _) = ranks.run(break_one, "ddp", {}, 1)
    assert "parameter 'module.1.weight', found other values on rank 1 than" in answer


@pytest.mark.world_size(2)
def test_shards_are_no_replicas(ranks: RankPool) -> None:
    assert ranks.run(break_one, "fsdp2", {}, 1) == ["equal"] * 2


def train_without_replicas(whole: bool) -> str:
    context = DistributedSetup.build("fsdp2", {"dp_replicate_size": 2}).mesh_context
    assert context.mesh is not None
    mesh = context.mesh if whole else context.mesh["dp_shard"]
    model, optimizer = small_model()
    model, _ = parallelize(model, FSDP2Config(mp_policy=None), mesh=mesh, optimizer=optimizer)
    model(torch.full((2, 4), dist.get_rank() + 1.0)).sum().backward()
    optimizer.step()
    try:
        check_replicas(model, context)
    except PolyshardError as error:
        return str(error)
    return "equal"


@pytest.mark.world_size(4)
def test_replicas_that_the_mesh_leaves_out_drift_and_are_found(ranks: RankPool) -> None:
    assert set(ranks.run(train_without_replicas, True)) == {"equal"}
    for answer in ranks.run(train_without_replicas, False):
        assert "expected equal replicas of parameter '0.weight', found other values" in answer


class Between(nn.Module):
    """Two layers that a plan splits, and a parameter before, between or after them."""

    def __init__(self, place: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.place = place
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gains = {self.place: self.gain}
        hidden = self.up(hidden * gains.get("before", 1.0))
        hidden = torch.relu(hidden) * gains.get("between", 1.0)
        output: torch.Tensor = self.down(hidden) * gains.get("after", 1.0)
        return output


def train_between(strategy: str, place: str) -> str:
    config = {"strategy": strategy, "tp_plan": {"up": "colwise", "down": "rowwise"}}
    setup = DistributedSetup.build(config, {"tp_size": 2})
    model, _ = setup.parallelize(Between(place))
    optimizer = setup.shard_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        model(torch.full((2, 4), step + 1.0)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    try:
        check_replicas(model, setup.mesh_context)
    except PolyshardError as error:
        return str(error)
    return "equal"


STRATEGIES = ["fsdp2", pytest.param("megatron_fsdp", marks=pytest.mark.strategy("megatron_fsdp"))]


@pytest.mark.world_size(2, 4)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("place", ["before", "after"])
def test_what_tensor_parallelism_does_not_split_is_equal(
    ranks: RankPool, strategy: str, place: str
) -> None:
    assert set(ranks.run(train_between, strategy, place)) == {"equal"}


@pytest.mark.world_size(2, 4)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_parameter_between_split_modules_is_found(ranks: RankPool, strategy: str) -> None:
    for answer in ranks.run(train_between, strategy, "between"):
        assert "equal replicas of parameter" in answer
        assert "gain', found other values on rank" in answer
        assert "stands between modules that the tp_plan splits" in answer


def compare_without_mesh() -> None:
    check_replicas(small_model()[0], None)


@pytest.mark.world_size(1)
def test_one_rank_has_no_replicas(ranks: RankPool) -> None:
    ranks.run(compare_without_mesh)
