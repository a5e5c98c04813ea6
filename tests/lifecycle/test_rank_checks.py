"""Ranks that have different plugins, versions or models fail together, before anything is done."""

import functools
import sys
from typing import ClassVar

import pytest
from attrs import frozen
from torch import nn

import polyshard
from polyshard import DistributedConfig, hookimpl
from polyshard.conformance import RankPool
from polyshard.lifecycle.parallelize import parallelize
from polyshard.registry.registry import default_registry


@frozen(kw_only=True)
class RecorderConfig(DistributedConfig):
    strategy: ClassVar[str] = "recorder"


class Recorder:
    """A strategy that changes nothing and writes down which hooks are called."""

    def __init__(self):
        self.calls = []

    @hookimpl
    def parallelize(self, model, optimizer):
        self.calls.append("parallelize")
        return model, optimizer


@functools.cache
def register_recorder():
    """Make the strategy known in a rank's process, which serves other tests as well."""
    polyshard.register(Recorder(), config_class=RecorderConfig)


def parallelize_where_rank_one_has_no_plugin():
    import torch.distributed as dist

    if dist.get_rank() == 0:
        register_recorder()
    try:
        parallelize(nn.Linear(2, 2), RecorderConfig())
    except polyshard.PolyshardError as error:
        return f"{type(error).__name__}: {error}"


def test_ranks_with_different_plugins_fail_together():
    with RankPool(2, timeout=60) as fresh:
        on_zero, on_one = fresh.run(parallelize_where_rank_one_has_no_plugin)
    cause = "StrategyNotFoundError: no installed strategy is called 'recorder'"
    assert on_zero.startswith(f"PeerFailedError: parallelize: rank 1 failed first: {cause}")
    assert on_one.startswith(cause)


def parallelize_with_a_version_per_rank(folder):
    """Parallelize with a plugin of which each rank has another version installed."""
    import torch.distributed as dist

    metadata = folder / str(dist.get_rank()) / "versioned.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Name: versioned\nVersion: 1.{dist.get_rank()}\n")
    (metadata / "entry_points.txt").write_text(
        f"[polyshard.strategies]\nrecorder = {__name__}:versioned\n"
        f"[polyshard.configs]\nrecorder = {__name__}:RecorderConfig\n"
    )
    sys.path.insert(0, str(metadata.parent))
    default_registry.cache_clear()
    try:
        parallelize(nn.Linear(2, 2), RecorderConfig())
    except polyshard.PolyshardError as error:
        return f"{type(error).__name__}: {error}", versioned.calls


versioned = Recorder()


def test_ranks_with_different_versions_of_a_plugin_fail_together(tmp_path):
    with RankPool(2, timeout=60) as fresh:
        answers = fresh.run(parallelize_with_a_version_per_rank, tmp_path)
    kinds = sorted(message.partition(":")[0] for message, _ in answers)
    assert kinds == ["PeerFailedError", "RanksDisagreeError"]
    for message, calls in answers:
        assert "found plugin 'recorder of versioned 1." in message
        assert "versioned 1.0' on rank 0" in message
        assert "versioned 1.1' on rank 1" in message
        assert calls == [], "expected nothing to be wrapped"


def parallelize_another_model_on_rank_one():
    import torch.distributed as dist

    register_recorder()
    model = nn.Linear(2, 2 + dist.get_rank())
    try:
        parallelize(model, RecorderConfig())
    except polyshard.PolyshardError as error:
        return f"{type(error).__name__}: {error}"


def wrap_different_models(strategy):
    """Give each rank another model, and return the error and whether the model was left alone."""
    import torch.distributed as dist

    model = nn.Linear(2, 2 + dist.get_rank())
    weight = model.weight
    try:
        polyshard.DistributedSetup.build(strategy).parallelize(model)
    except polyshard.PolyshardError as error:
        left = model.weight is weight and not model._forward_hooks and not model._forward_pre_hooks
        # A rank that lives on, in a collective that the others do not join, waits to the end.
        dist.barrier()
        return type(error).__name__, left


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.world_size(2)
def test_ranks_that_differ_wait_for_nobody(ranks, strategy):
    answers = ranks.run(wrap_different_models, strategy)
    assert sorted(answers) == [("PeerFailedError", True), ("RanksDisagreeError", True)]


@pytest.mark.world_size(2)
def test_ranks_with_different_models_are_told_the_difference(ranks):
    messages = ranks.run(parallelize_another_model_on_rank_one)
    assert sorted(message.partition(":")[0] for message in messages) == [
        "PeerFailedError",
        "RanksDisagreeError",
    ]
    for message in messages:
        assert "'weight [2, 2] torch.float32 requires_grad=True' on rank 0" in message
        assert "'weight [3, 2] torch.float32 requires_grad=True' on rank 1" in message
