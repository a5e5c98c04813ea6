"""Methods beside forward, and attributes, of the model that parallelize returns."""

import copy
import pickle
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from polyshard import DDPConfig, DistributedConfig, FSDP2Config, parallelize, resolve_config
from polyshard.conformance import RankPool
from polyshard.conformance.methods import ModelWithMethods, assert_methods_work, use_methods
from polyshard.conformance.models import global_batch
from polyshard.exceptions import (
    ModelError,
    PeerFailedError,
    RanksDisagreeError,
    UnsupportedError,
)
from polyshard.lifecycle.distributed_setup import DistributedSetup
from polyshard.lifecycle.gradients import accumulate
from polyshard.lifecycle.parallelize import maybe_shard_optimizer
from polyshard.lifecycle.state_dict import full_state_dict

CONFIGS: Mapping[str, Callable[[], DistributedConfig]] = MappingProxyType(
    {
        "ddp": DDPConfig,
        "ddp views": lambda: DDPConfig(gradient_as_bucket_view=True),
        "ddp unused": lambda: DDPConfig(find_unused_parameters=True),
        "ddp checkpointing": lambda: DDPConfig(activation_checkpointing=True),
        "fsdp2": lambda: FSDP2Config(mp_policy=None),
        "fsdp2 kept": lambda: FSDP2Config(mp_policy=None, reshard_after_forward=False),
        "fsdp2 by two": lambda: FSDP2Config(mp_policy=None, reshard_after_forward=2),
        "fsdp2 ahead": lambda: FSDP2Config(
            mp_policy=None, forward_prefetch_depth=2, backward_prefetch_depth=1
        ),
        "fsdp2 checkpointing": lambda: FSDP2Config(mp_policy=None, activation_checkpointing=True),
    }
)

each_option = pytest.mark.parametrize("option", sorted(CONFIGS))
each_strategy = pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=pytest.mark.strategy(name))
        for name in ("ddp", "fsdp2", "megatron_fsdp")
    ],
)


@each_option
@pytest.mark.world_size(2)
def test_methods_equal_one_process_under_each_option(ranks: RankPool, option: str) -> None:
    assert_methods_work(ranks.run(use_methods, CONFIGS[option](), None))


@pytest.mark.world_size(4)
@pytest.mark.parametrize("option", ["ddp", "fsdp2", "fsdp2 by two", "fsdp2 ahead"])
def test_one_of_four_ranks_may_raise(ranks: RankPool, option: str) -> None:
    assert_methods_work(ranks.run(use_methods, CONFIGS[option](), None))


# What is refused


class Odd(nn.Linear):
    """A model with what is no method to prepare."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.size = 2

    def stream(self, x: Tensor) -> Any:
        """Yield outputs."""
        yield self(x)

    def join(self, x: Tensor) -> Tensor:
        """Return an output; the wrapper has a method of that name."""
        return self(x)

    def train_on(self, x: Tensor) -> Tensor:
        """Call backward itself."""
        loss = self(x).sum()
        loss.backward()
        return loss.detach()


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (("generat",), "found 'generat', which it lacks"),
        (("size",), "found 'size', which is no method but 2"),
        (("forward",), "found 'forward', which every module has"),
        (("stream",), "found 'stream', which goes on after it has returned"),
        ("stream", "a sequence of names, found 'stream'"),
        ((1,), "a sequence of names"),
    ],
)
def test_what_is_no_method_is_refused(methods: Any, message: str) -> None:
    model = Odd()
    with pytest.raises(ModelError, match=message):
        parallelize(model, DDPConfig(), methods=methods)
    parallelize(model, DDPConfig())  # nothing has been done to it


@pytest.mark.world_size(2)
def test_ranks_name_the_same_methods(ranks: RankPool) -> None:
    first, second = sorted(ranks.run(name_by_rank))
    assert "methods" in first
    assert "methods" in second


def name_by_rank() -> str:
    model = ModelWithMethods()
    try:
        parallelize(model, DDPConfig(), methods=("encode",) if dist.get_rank() else ("loss",))
    except (RanksDisagreeError, PeerFailedError) as error:
        return str(error)
    return "no error"


@pytest.mark.world_size(2)
def test_a_name_that_the_wrapper_has_is_refused(ranks: RankPool) -> None:
    for error in ranks.run(shadow_the_wrapper):
        assert "found 'join', which DataParallelModel has itself" in error


def shadow_the_wrapper() -> str:
    try:
        parallelize(Odd(), DDPConfig(), methods=("join",))
    except UnsupportedError as error:
        return str(error)
    return "no error"


@pytest.mark.world_size(2)
def test_a_backward_inside_of_a_method_is_refused(ranks: RankPool) -> None:
    for error in ranks.run(train_inside):
        assert "return the loss instead" in error


def train_inside() -> str:
    model, _ = parallelize(Odd(), DDPConfig(), methods=("train_on",))
    try:
        model.train_on(torch.ones(1, 2))  # type: ignore[operator]
    except UnsupportedError as error:
        return str(error)
    return "no error"


# The wrapper


@pytest.mark.world_size(2)
def test_a_method_that_was_not_named_refuses_gradients(ranks: RankPool) -> None:
    for error, without in ranks.run(call_unnamed):
        assert 'name it in parallelize(..., methods=("encode",))' in error
        assert without == [24, 16]


def call_unnamed() -> tuple[str, list[int]]:
    model: Any
    model, _ = parallelize(ModelWithMethods(), DDPConfig())
    with torch.no_grad():
        without = list(model.encode(global_batch(0)).shape)
    try:
        model.encode(global_batch(0))
    except UnsupportedError as error:
        return str(error), without
    return "no error", without


@each_strategy
def test_attributes_are_read(ranks: RankPool, strategy: str) -> None:
    for found in ranks.run(read_attributes, strategy):
        assert found["purpose"] == "to be read through a wrapper"
        assert found["missing"] == "'ModelWithMethods' object has no attribute 'purposes'"
        assert found["is DDP"] == (strategy == "ddp")
        assert found["modes"] == [False, False, True, True]


def read_attributes(strategy: str) -> dict[str, Any]:
    model: Any
    module = ModelWithMethods()
    model, _ = parallelize(module, resolve_config(strategy))
    try:
        missing = str(model.purposes)
    except AttributeError as error:
        missing = str(error).replace("FSDPModelWithMethods", "ModelWithMethods")
    modes = [part.eval().training for part in (model,)] + [module.training]
    modes += [model.train().training, module.training]
    is_ddp = isinstance(model, DistributedDataParallel)
    return {"purpose": model.purpose, "missing": missing, "is DDP": is_ddp, "modes": modes}


@pytest.mark.world_size(2)
def test_copies_of_the_wrapper_have_the_methods(ranks: RankPool) -> None:
    for same in ranks.run(call_copies):
        assert same == [True, True]


def call_copies() -> list[bool]:
    model: Any
    model, _ = parallelize(ModelWithMethods(), DDPConfig(), methods=("encode",))
    expected = model.encode(global_batch(0))
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    return [torch.equal(another.encode(global_batch(0)), expected) for another in copies]


@pytest.mark.world_size(2)
def test_generating_first_leaves_a_static_graph_alone(ranks: RankPool) -> None:
    for difference in ranks.run(generate_before_training):
        assert difference < 1e-6


def generate_before_training() -> float:
    """Return how far two steps are from those of a model that has generated nothing."""
    gradients = []
    for generates in (True, False):
        torch.manual_seed(0)
        model: Any
        model, _ = parallelize(ModelWithMethods(), DDPConfig(static_graph=True))
        for step in range(2):
            if generates:
                model.generate(global_batch(step)[:1, :3], dist.get_rank())
            model.zero_grad()
            model(global_batch(step + dist.get_rank())).square().mean().backward()
        gradients.append(model.head.weight.grad)
    return (gradients[0] - gradients[1]).abs().max().item()


@each_strategy
@pytest.mark.world_size(2)
def test_a_method_in_microbatches(ranks: RankPool, strategy: str) -> None:
    for difference in ranks.run(accumulate_by_method, strategy):
        assert difference < 1e-6


def accumulate_by_method(strategy: str) -> float:
    """Return how far two microbatches by a method, with an evaluation, are from one batch."""
    weights = []
    for pieces in (1, 2):
        torch.manual_seed(0)
        model: Any
        config = resolve_config(strategy).in_full_precision()
        model, _ = parallelize(ModelWithMethods(), config, methods=("loss", "generate"))
        optimizer = maybe_shard_optimizer(model, SGD(model.parameters(), lr=1.0))
        for index, tokens in enumerate(global_batch(dist.get_rank()).chunk(pieces)):
            with accumulate(model, last=index == pieces - 1):
                (model.loss(tokens) / pieces).backward()
            model.generate(tokens[:1], dist.get_rank())
        optimizer.step()
        weights.append(full_state_dict(model, rank0_only=False)["head.weight"])
    return (weights[0] - weights[1]).abs().max().item()


@each_strategy
@pytest.mark.world_size(2)
def test_the_setup_passes_names_on(ranks: RankPool, strategy: str) -> None:
    for found in ranks.run(encode_by_setup, strategy):
        assert found == [24, 16]


def encode_by_setup(strategy: str) -> list[int]:
    setup = DistributedSetup.build(strategy)
    model: Any
    model, _ = setup.parallelize(ModelWithMethods(), methods=["encode"])
    return list(model.encode(global_batch(0)).shape)
