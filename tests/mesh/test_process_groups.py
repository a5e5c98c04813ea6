"""Every process group has the timeout of the job, whoever makes it and whenever."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from attrs import frozen
from torch import nn
from torch.distributed import distributed_c10d

import polyshard
from polyshard import DistributedConfig, DistributedSetup, hookimpl
from polyshard.conformance import RankPool
from polyshard.conformance.models import build_model, global_batch, loss_of
from polyshard.lifecycle.replicas import check_replicas
from polyshard.mesh.process_groups import group_timeout

MINUTES = 4.0
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
MEGATRON_FSDP = pytest.mark.strategy("megatron_fsdp")


def timeouts() -> set[timedelta | None]:
    return {group_timeout(group) for group in distributed_c10d._world.pg_map}


def train_and_save(
    strategy: dict[str, Any], sizes: dict[str, int], folder: Path
) -> set[timedelta | None]:
    """Do all that a training script does, and return the timeouts of the groups then there."""
    setup = DistributedSetup.build(strategy, sizes, timeout_minutes=MINUTES)
    model, _ = setup.parallelize(build_model("plain"))
    optimizer = setup.shard_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(2):
        for last in (False, True):
            with setup.accumulate(model, last=last):
                loss_of(model, global_batch(step)[:4]).backward()
        setup.clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    check_replicas(model, setup.mesh_context)
    setup.full_state_dict(model)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
    with setup.rebuild(model):
        pass
    return timeouts()


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        ({"strategy": "ddp"}, {}),
        ({"strategy": "fsdp2"}, {}),
        ({"strategy": "fsdp2", "tp_plan": PLAN}, {"tp_size": 2}),
        pytest.param({"strategy": "megatron_fsdp"}, {}, marks=MEGATRON_FSDP),
        pytest.param(
            {"strategy": "megatron_fsdp", "tp_plan": PLAN}, {"tp_size": 2}, marks=MEGATRON_FSDP
        ),
    ],
)
def test_training_and_saving_leave_one_timeout_on_two_ranks(
    ranks: RankPool, strategy: dict[str, Any], sizes: dict[str, int], tmp_path: Path
) -> None:
    found = ranks.run(train_and_save, strategy, sizes, tmp_path)
    assert found == [{timedelta(minutes=MINUTES)}] * 2


@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        ({"strategy": "ddp"}, {}),
        ({"strategy": "fsdp2"}, {"dp_replicate_size": 2}),
        ({"strategy": "fsdp2", "reshard_after_forward": 2}, {}),
        ({"strategy": "fsdp2", "tp_plan": PLAN}, {"tp_size": 2, "cp_size": 2}),
        pytest.param({"strategy": "megatron_fsdp"}, {"dp_replicate_size": 2}, marks=MEGATRON_FSDP),
        pytest.param(
            {"strategy": "megatron_fsdp", "tp_plan": PLAN}, {"tp_size": 2}, marks=MEGATRON_FSDP
        ),
        pytest.param({"strategy": "megatron_fsdp"}, {"cp_size": 2}, marks=MEGATRON_FSDP),
    ],
)
def test_training_and_saving_leave_one_timeout_on_four_ranks(
    ranks: RankPool, strategy: dict[str, Any], sizes: dict[str, int], tmp_path: Path
) -> None:
    found = ranks.run(train_and_save, strategy, sizes, tmp_path)
    assert found == [{timedelta(minutes=MINUTES)}] * 4


class MakesGroups:
    """A strategy that makes a process group of its own in every hook."""

    @hookimpl
    def parallelize(self, model: Any, optimizer: Any) -> Any:
        dist.new_group([0, 1])
        return model, optimizer

    @hookimpl
    def shard_optimizer(self, optimizer: Any) -> Any:
        dist.new_group([0, 1])
        return optimizer

    @hookimpl
    @contextmanager
    def accumulate(self) -> Any:
        dist.new_group([0, 1])
        yield

    @hookimpl
    def clip_grad_norm(self) -> float:
        dist.new_group([0, 1])
        return 1.0

    @hookimpl
    def full_state_dict(self) -> dict[str, Any]:
        dist.new_group([0, 1])
        return {}

    @hookimpl
    def pre_rebuild(self) -> None:
        dist.new_group([0, 1])

    @hookimpl
    def post_rebuild(self) -> None:
        dist.new_group([0, 1])


@frozen(kw_only=True)
class MakesGroupsConfig(DistributedConfig):
    strategy: ClassVar[str] = "makes_groups"


class MakesOneInForward(nn.Module):
    """A model whose first forward makes a group, as layers of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self) -> torch.Tensor:
        dist.new_group([0, 1])
        return self.weight


def make_groups_in_hooks() -> tuple[int, set[timedelta | None]]:
    polyshard.register(MakesGroups(), config_class=MakesGroupsConfig)
    setup = DistributedSetup.build(MakesGroupsConfig(), timeout_minutes=MINUTES)
    before = len(distributed_c10d._world.pg_map)
    model, _ = setup.parallelize(MakesOneInForward())
    setup.shard_optimizer(model, torch.optim.SGD(model.parameters()))
    with setup.accumulate(model, last=True):
        model().backward()
    setup.clip_grad_norm(model, 1.0)
    setup.full_state_dict(model)
    with setup.rebuild(model):
        pass
    return len(distributed_c10d._world.pg_map) - before, timeouts()


@pytest.mark.world_size(4)
def test_the_timeout_reaches_the_groups_that_a_strategy_makes(ranks: RankPool) -> None:
    found = ranks.run(make_groups_in_hooks)
    one = {timedelta(minutes=MINUTES)}
    assert found == [(8, one), (8, one), (0, one), (0, one)]
