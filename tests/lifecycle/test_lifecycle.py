"""The lifecycle functions: which hooks they call when, and what they refuse."""

import functools
import math
from typing import ClassVar

import pytest
import torch
from attrs import frozen
from torch import nn
from torch.optim import SGD, Adam, AdamW

import polyshard
from polyshard import DDPConfig, DistributedConfig, FSDP2Config, hookimpl
from polyshard.conformance import RankPool
from polyshard.exceptions import (
    OptimizerNotShardableError,
    PluginError,
    StrategyNotFoundError,
    UnsupportedError,
)
from polyshard.lifecycle.gradients import accumulate, clip_grad_norm
from polyshard.lifecycle.parallelize import maybe_shard_optimizer, parallelize
from polyshard.lifecycle.rebuild import rebuild
from polyshard.lifecycle.state_dict import full_state_dict, parameter_bytes
from polyshard.registry.registry import default_registry


@frozen(kw_only=True)
class RecorderConfig(DistributedConfig):
    strategy: ClassVar[str] = "recorder"


@frozen(kw_only=True)
class UnknownConfig(DistributedConfig):
    strategy: ClassVar[str] = "unknown"


class NeedsWholeMatrices(SGD):
    """Stands for the optimizers that a strategy knows it cannot shard."""


class Sharded(SGD):
    """What the recorder returns for an optimizer."""


class Recorder:
    """A strategy that writes down which hooks are called, and fails in those it is told to."""

    def __init__(self):
        self.calls = []
        self.failing = set()
        self.returns = {}

    def _record(self, hook, result):
        self.calls.append(hook)
        if hook in self.failing:
            raise KeyError(f"raised in {hook}")
        return self.returns.get(hook, result)

    @hookimpl
    def parallelize(self, model, optimizer):
        return self._record("parallelize", (model, optimizer))

    @hookimpl
    def shard_optimizer(self, optimizer):
        if isinstance(optimizer, NeedsWholeMatrices):
            raise OptimizerNotShardableError("the recorder cannot shard this")
        return self._record("shard_optimizer", Sharded(optimizer.param_groups, lr=0.1))

    @hookimpl
    def pre_rebuild(self, model):
        return self._record("pre_rebuild", ("snapshot of", model))

    @hookimpl
    def post_rebuild(self, model, snapshot):
        assert snapshot == ("snapshot of", model)
        self._record("post_rebuild", None)


def small_model():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


# The outcomes of maybe_shard_optimizer


@functools.cache
def register_recorder():
    """Make the strategy known in a rank's process, which serves other tests as well."""
    polyshard.register(Recorder(), config_class=RecorderConfig)


def shard(config, optimizer_class, allow):
    """Return how ``maybe_shard_optimizer`` ends on this rank, and whether values stayed."""
    register_recorder()
    model = small_model()
    if config is not None and config.strategy != "unknown":
        model, _ = parallelize(model, config)
    optimizer = optimizer_class(model.parameters(), lr=0.1, weight_decay=0.1)
    before = full_state_dict(model, rank0_only=False)
    try:
        result = maybe_shard_optimizer(model, optimizer, config, allow=allow)
    except OptimizerNotShardableError as error:
        assert_refusal(error)
        outcome = "refused"
    except StrategyNotFoundError as error:
        outcome = str(error)
    else:
        outcome = "unchanged" if result is optimizer else type(result).__name__
    after = full_state_dict(model, rank0_only=False)
    return outcome, all(torch.equal(after[name], before[name]) for name in before)


def assert_refusal(error):
    if not isinstance(error, AssertionError):  # no assert: it must hold under python -O
        raise TypeError("expected an error that callers can catch as an AssertionError")


def assertions_are_off():
    return not __debug__


@pytest.fixture(scope="module")
def lone_process():
    with RankPool(1, process_group=False) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def ranks_without_assertions():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONOPTIMIZE", "1")  # as python -O
        with RankPool(2) as ranks:
            yield ranks


SHARDING_OUTCOMES = [
    # config, optimizer, allow, outcome with one rank, outcome with two
    (None, SGD, True, "unchanged", "unchanged"),
    (None, SGD, False, "unchanged", "unchanged"),
    (DDPConfig(), SGD, True, "unchanged", "unchanged"),
    (DDPConfig(), SGD, False, "unchanged", "unchanged"),
    (FSDP2Config(mp_policy=None), SGD, True, "unchanged", "unchanged"),
    (FSDP2Config(mp_policy=None), SGD, False, "unchanged", "unchanged"),
    (RecorderConfig(), SGD, False, "unchanged", "refused"),
    (RecorderConfig(), NeedsWholeMatrices, True, "unchanged", "refused"),
    (RecorderConfig(), SGD, True, "unchanged", "Sharded"),
]


each_outcome = pytest.mark.parametrize(
    ("config", "optimizer", "allow", "one", "two"),
    SHARDING_OUTCOMES,
    ids=lambda value: getattr(value, "strategy", None),
)


@each_outcome
def test_outcome_of_sharding(ranks, world_size, config, optimizer, allow, one, two):
    outcome = one if world_size == 1 else two
    assert ranks.run(shard, config, optimizer, allow) == [(outcome, True)] * world_size


@each_outcome
def test_outcome_of_sharding_without_process_group(
    lone_process, config, optimizer, allow, one, two
):
    assert lone_process.run(shard, config, optimizer, allow) == [(one, True)]


@each_outcome
def test_outcome_of_sharding_without_assertions(
    ranks_without_assertions, config, optimizer, allow, one, two
):
    assert ranks_without_assertions.run(assertions_are_off) == [True, True]
    assert ranks_without_assertions.run(shard, config, optimizer, allow) == [(two, True)] * 2


@pytest.mark.parametrize("allow", [True, False])
def test_config_of_no_installed_strategy_is_refused(ranks, lone_process, allow):
    for pool in (ranks, lone_process):
        for message, _ in pool.run(shard, UnknownConfig(), SGD, allow):
            assert "'unknown'" in message
            assert "ddp (polyshard" in message


def shard_what_parallelize_sharded():
    register_recorder()
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    model, optimizer = parallelize(model, RecorderConfig(), optimizer=optimizer)
    once = maybe_shard_optimizer(model, optimizer, RecorderConfig())
    return once is optimizer


def test_optimizer_from_parallelize_is_not_sharded_again(ranks):
    assert all(ranks.run(shard_what_parallelize_sharded))


def shard_twice():
    register_recorder()
    model, _ = parallelize(small_model(), RecorderConfig())
    optimizer = SGD(model.parameters(), lr=0.1)
    once = maybe_shard_optimizer(model, optimizer, RecorderConfig())
    return maybe_shard_optimizer(model, once, RecorderConfig()) is once


def test_sharded_optimizer_is_not_sharded_again(ranks):
    assert all(ranks.run(shard_twice))


def shard_into_nothing():
    plugin = Recorder()
    plugin.returns["shard_optimizer"] = "an optimizer"
    default_registry.cache_clear()
    try:
        polyshard.register(plugin, config_class=RecorderConfig)
        model, _ = parallelize(small_model(), RecorderConfig())
        maybe_shard_optimizer(model, SGD(model.parameters(), lr=0.1), RecorderConfig())
    except PluginError as error:
        return str(error)
    finally:
        default_registry.cache_clear()
        register_recorder.cache_clear()


@pytest.mark.world_size(2)
def test_hook_that_returns_no_optimizer_is_named(ranks):
    for message in ranks.run(shard_into_nothing):
        assert "'shard_optimizer' of strategy 'recorder'" in message
        assert "expected it to return an optimizer, found 'an optimizer' (str)" in message


# The other functions, in one process


@pytest.fixture
def recorder():
    """The recorder, registered in a registry of the test's own."""
    default_registry.cache_clear()
    recorder = Recorder()
    polyshard.register(recorder, config_class=RecorderConfig)
    yield recorder
    default_registry.cache_clear()


def test_parallelize_returns_what_the_strategy_returned(recorder):
    model, other = small_model(), small_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    recorder.returns["parallelize"] = other, optimizer
    assert parallelize(model, RecorderConfig(), optimizer=optimizer) == (other, optimizer)
    assert recorder.calls == ["parallelize"]


def test_parallelized_model_is_not_parallelized_again(recorder):
    model, other = small_model(), small_model()
    recorder.returns["parallelize"] = other, None
    parallelize(model, RecorderConfig())
    for again in (model, other):
        with pytest.raises(UnsupportedError, match="Sequential, which 'recorder' has parallelized"):
            parallelize(again, RecorderConfig())


@pytest.mark.parametrize(
    ("found", "optimizer", "expected"),
    [
        (None, False, r"\(model, None\)"),
        (nn.Linear(1, 1), False, r"\(model, None\)"),
        (("model", None), False, r"\(model, None\)"),
        ((nn.Linear(1, 1), SGD([torch.zeros(1)])), False, r"\(model, None\)"),
        ((nn.Linear(1, 1), None), True, r"\(model, optimizer\)"),
    ],
    ids=["nothing", "a model", "no model", "an optimizer too many", "an optimizer too few"],
)
def test_wrong_result_of_parallelize_is_named(recorder, found, optimizer, expected):
    model = small_model()
    recorder.returns["parallelize"] = found
    with pytest.raises(PluginError, match=f"'parallelize' of strategy 'recorder'.*{expected}"):
        parallelize(
            model,
            RecorderConfig(),
            optimizer=SGD(model.parameters()) if optimizer else None,
        )


def test_unknown_strategy_is_refused_before_anything_is_done():
    with pytest.raises(StrategyNotFoundError, match=r"'unknown'.*installed are ddp"):
        parallelize(small_model(), UnknownConfig())


def test_error_of_a_hook_says_whose_it_is(recorder):
    recorder.failing.add("parallelize")
    with pytest.raises(KeyError) as caught:
        parallelize(small_model(), RecorderConfig())
    assert "in hook 'parallelize' of strategy 'recorder'" in caught.value.__notes__[0]


def test_rebuild_calls_both_hooks_around_the_body(recorder):
    model, _ = parallelize(small_model(), RecorderConfig())
    with rebuild(model):
        recorder.calls.append("body")
    assert recorder.calls == ["parallelize", "pre_rebuild", "body", "post_rebuild"]


def test_rebuild_takes_several_parts(recorder):
    parts = [parallelize(small_model(), RecorderConfig())[0] for _ in range(2)]
    recorder.calls.clear()
    with rebuild(parts):
        recorder.calls.append("body")
    assert recorder.calls == [*["pre_rebuild"] * 2, "body", *["post_rebuild"] * 2]


def test_rebuild_restores_when_its_body_raises(recorder):
    model, _ = parallelize(small_model(), RecorderConfig())
    error = ValueError("of the body")
    with pytest.raises(ValueError, match="of the body") as caught, rebuild(model):
        raise error
    assert caught.value is error
    assert recorder.calls[-1] == "post_rebuild"


def test_rebuild_that_cannot_restore_keeps_the_first_error(recorder):
    model, _ = parallelize(small_model(), RecorderConfig())
    recorder.failing.add("post_rebuild")
    with pytest.raises(ValueError, match="of the body") as caught, rebuild(model):
        raise ValueError("of the body")
    assert "restoring the model failed as well" in caught.value.__notes__[0]
    assert "raised in post_rebuild" in caught.value.__notes__[0]


def test_rebuild_does_not_run_its_body_if_it_cannot_begin(recorder):
    model, _ = parallelize(small_model(), RecorderConfig())
    recorder.failing.add("pre_rebuild")
    with pytest.raises(KeyError, match="pre_rebuild"), rebuild(model):
        recorder.calls.append("body")
    assert "body" not in recorder.calls


def test_without_a_config_everything_is_plain_pytorch():
    model = small_model()
    optimizer = Adam(model.parameters())
    with rebuild(model), accumulate(model, last=False):
        model(torch.ones(1, 2)).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    expected = nn.utils.get_total_norm(gradients).item()
    assert clip_grad_norm(model, expected / 2) == pytest.approx(expected)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient / 2)
    assert maybe_shard_optimizer(model, optimizer, None) is optimizer
    assert full_state_dict(model, rank0_only=False).keys() == model.state_dict().keys()
    assert parameter_bytes(model) == 2 * (4 + 2) * 4


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf])
def test_infinite_maximum_only_measures(norm_type):
    model = small_model()
    model(torch.ones(1, 2)).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    expected = nn.utils.get_total_norm(gradients, norm_type).item()
    assert clip_grad_norm(model, math.inf, norm_type) == pytest.approx(expected)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_no_gradients_have_norm_zero():
    assert clip_grad_norm(small_model(), 1.0) == 0.0


@pytest.mark.parametrize(
    ("max_norm", "norm_type", "name"),
    [(-1.0, 2.0, "max_norm"), (math.nan, 2.0, "max_norm"), (1.0, 0.0, "norm_type")],
)
def test_impossible_norms_are_refused(max_norm, norm_type, name):
    with pytest.raises(ValueError, match=f"expected {name}"):
        clip_grad_norm(small_model(), max_norm, norm_type)


def test_full_state_dict_is_a_copy():
    model = small_model()
    state = full_state_dict(model, rank0_only=False)
    state["0.weight"].fill_(7)
    assert not torch.equal(model[0].weight, state["0.weight"])


def test_optimizer_of_replaced_parameters_is_refused(recorder):
    """Also where the strategy shards no optimizers: the step itself says so."""
    model = small_model()
    optimizer = AdamW(model.parameters())
    recorder.returns["parallelize"] = small_model(), None
    wrapped, _ = parallelize(model, RecorderConfig())
    with pytest.raises(
        polyshard.PolyshardError, match="4 of 4 that parallelize or rebuild replaced"
    ):
        maybe_shard_optimizer(wrapped, optimizer, RecorderConfig())
    with pytest.raises(polyshard.PolyshardError, match=r"parallelize.*optimizer=optimizer"):
        optimizer.step()
