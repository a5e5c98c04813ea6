"""Each outcome of ``maybe_shard_optimizer`` under Megatron-FSDP, on real ranks and on none."""

from __future__ import annotations

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer

from polyshard import full_state_dict, maybe_shard_optimizer, parallelize
from polyshard.conformance import RankPool
from polyshard.conformance.models import build_model
from polyshard.exceptions import OptimizerNotShardableError
from polyshard_megatron_fsdp import MegatronFSDPConfig


class Dion(SGD):
    """Named like the optimizer that orthogonalizes whole matrices."""


def shard(optimizer_class: type[Optimizer], allow: bool) -> tuple[str, bool]:
    """Return how the call ends, and whether weights and step counts are what they were."""
    config = MegatronFSDPConfig()
    model, _ = parallelize(build_model("plain"), config)
    before = full_state_dict(model, rank0_only=False)
    optimizer = optimizer_class(model.parameters(), lr=0.1, weight_decay=0.1)
    try:
        result = maybe_shard_optimizer(model, optimizer, allow=allow)
    except AssertionError as error:  # which callers may catch, and a bare assert is not it
        outcome = "refused" if isinstance(error, OptimizerNotShardableError) else repr(error)
        result = optimizer
    else:
        outcome = "unchanged" if _is_untouched(optimizer, result) else "sharded"
    after = full_state_dict(model, rank0_only=False)
    same = all(torch.equal(after[name], before[name]) for name in before)
    return outcome, same and not any(state.get("step", 0) for state in result.state.values())


def _is_untouched(optimizer: Optimizer, result: Optimizer) -> bool:
    # megatron-fsdp shards an optimizer in place, and puts a step of its own on the object.
    return result is optimizer and "step" not in vars(result)


OUTCOMES = pytest.mark.parametrize(
    ("optimizer_class", "allow", "alone", "with_others"),
    [
        (AdamW, True, "unchanged", "sharded"),
        (AdamW, False, "unchanged", "refused"),
        (Dion, True, "unchanged", "refused"),
        (Dion, False, "unchanged", "refused"),
    ],
)


@pytest.fixture(scope="module")
def lone_process():
    with RankPool(1, process_group=False) as ranks:
        yield ranks


@OUTCOMES
def test_outcome(ranks, world_size, optimizer_class, allow, alone, with_others):
    outcome = alone if world_size == 1 else with_others
    assert ranks.run(shard, optimizer_class, allow) == [(outcome, True)] * world_size


@OUTCOMES
def test_outcome_without_process_group(lone_process, optimizer_class, allow, alone, with_others):
    assert lone_process.run(shard, optimizer_class, allow) == [(alone, True)]
