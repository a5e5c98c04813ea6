"""Meshes of several dimensions, in any order and under any of their names."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from polyshard import maybe_shard_optimizer, parallelize
from polyshard.conformance.models import TinyModel, build_model
from polyshard.conformance.parity import (
    Outcome,
    Recipe,
    Training,
    assert_parity,
    build_optimizer,
    train_plain,
)
from polyshard.exceptions import PolyshardError
from polyshard_megatron_fsdp import MegatronFSDPConfig

pytestmark = pytest.mark.world_size(4)

MLP = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
COLWISE = {"blocks.*.up": "colwise_gather_output"}

# A mesh by its sizes and names, and by which of its dimensions are flattened beforehand.
Dimensions = dict[str, int]


class SplitTraining(Training):
    """A training in which tensor-parallel ranks, neighbours in the mesh, get the same data."""

    def __init__(self, *arguments: Any, tensor: int) -> None:
        super().__init__(*arguments)
        self.tensor = tensor

    def share(self, tokens: Tensor) -> Tensor:
        return tokens.chunk(dist.get_world_size() // self.tensor)[dist.get_rank() // self.tensor]


class SelfPlanned(TinyModel):
    """A model that says itself how it is split, as Hugging Face's do."""

    _tp_plan = MLP


def mesh_of(dimensions: Dimensions, flattened: tuple[str, ...] = ()) -> DeviceMesh:
    mesh = init_device_mesh(
        "cpu", tuple(dimensions.values()), mesh_dim_names=tuple(dimensions) or None
    )
    if flattened:
        mesh[flattened]._flatten("_".join(flattened))
    return mesh


def train_on(
    config: MegatronFSDPConfig,
    recipe: Recipe,
    dimensions: Dimensions,
    flattened: tuple[str, ...] = (),
    passed: bool = False,
    model: Any = None,
) -> Outcome:
    mesh = mesh_of(dimensions, flattened)
    module = build_model(recipe.model) if model is None else model
    early = build_optimizer(recipe.optimizer, module) if passed else None
    wrapped, optimizer = parallelize(module, config, mesh=mesh, optimizer=early)
    if optimizer is None:
        optimizer = build_optimizer(recipe.optimizer, wrapped)
    optimizer = maybe_shard_optimizer(wrapped, optimizer, config)
    tensor = dimensions.get("tp", 1)
    training = SplitTraining(wrapped, optimizer, recipe, config, tensor=tensor)
    training.train(range(recipe.steps))
    return training.outcome()


@pytest.mark.parametrize("passed", [False, True], ids=["built after", "passed"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("plan", [MLP, COLWISE], ids=["rowwise", "colwise"])
def test_tensor_parallel_by_data_parallel(ranks, plan, stage, passed):
    config = MegatronFSDPConfig(zero_dp_strategy=stage, tp_plan=plan)
    recipe = Recipe(model="tied", steps=3, max_norm=0.1)
    outcomes = ranks.run(train_on, config, recipe, {"dp": 2, "tp": 2}, passed=passed)
    assert_parity(outcomes, train_plain(recipe), recipe)


@pytest.mark.parametrize("model", ["adapter", "frozen", "buffers"])
def test_tensor_parallel_with_every_kind_of_parameter(ranks, model):
    config = MegatronFSDPConfig(tp_plan=MLP)
    recipe = Recipe(model=model, steps=3, microbatches=3, unadapted="first microbatch")
    outcomes = ranks.run(train_on, config, recipe, {"dp": 2, "tp": 2})
    assert_parity(outcomes, train_plain(recipe), recipe)


def train_self_planned(recipe: Recipe) -> Outcome:
    model = SelfPlanned()
    model.load_state_dict(build_model(recipe.model).state_dict())
    return train_on(MegatronFSDPConfig(), recipe, {"dp": 2, "tp": 2}, model=model)


def test_plan_is_taken_from_the_model(ranks):
    recipe = Recipe(steps=3)
    assert_parity(ranks.run(train_self_planned, recipe), train_plain(recipe), recipe)


def train_split_by_hand(recipe: Recipe) -> Outcome:
    model = build_model(recipe.model)
    mesh = mesh_of({"dp": 2, "tp": 2})
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], styles)
    config = MegatronFSDPConfig()
    wrapped, _ = parallelize(model, config, mesh=mesh)
    optimizer = build_optimizer(recipe.optimizer, wrapped)
    optimizer = maybe_shard_optimizer(wrapped, optimizer, config)
    training = SplitTraining(wrapped, optimizer, recipe, config, tensor=2)
    training.train(range(recipe.steps))
    return training.outcome()


def test_script_may_split_the_model_itself(ranks):
    recipe = Recipe(steps=3)
    assert_parity(ranks.run(train_split_by_hand, recipe), train_plain(recipe), recipe)


def test_tensor_parallel_by_context_parallel_by_data_parallel_of_one(ranks):
    config = MegatronFSDPConfig(tp_plan=MLP)
    recipe = Recipe(steps=3)
    outcomes = ranks.run(train_on, config, recipe, {"dp": 1, "cp": 2, "tp": 2})
    assert_parity(outcomes, train_plain(recipe), recipe)


class Warnings(logging.Handler):
    """Collects what the plugin's logger says."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def train_by_tensor_parallelism_alone(recipe: Recipe, passed: bool) -> tuple[Outcome, list[str]]:
    from polyshard_megatron_fsdp import _wheel

    _wheel.warn_once.cache_clear()
    heard = Warnings()
    _wheel.logger.addHandler(heard)
    config = MegatronFSDPConfig(tp_plan=MLP)
    outcome = train_on(config, recipe, {"dp": 1, "tp": 4}, passed=passed)
    _wheel.logger.removeHandler(heard)
    return outcome, heard.messages


@pytest.mark.parametrize("passed", [False, True], ids=["built after", "passed"])
def test_tensor_parallelism_alone_trains_with_a_warning(ranks, passed):
    recipe = Recipe(steps=3)
    results = ranks.run(train_by_tensor_parallelism_alone, recipe, passed)
    assert_parity([outcome for outcome, _ in results], train_plain(recipe), recipe)
    for _, messages in results:
        assert any("one data-parallel rank" in message for message in messages)


@pytest.mark.parametrize("outer", [0, 1])
@pytest.mark.parametrize("names", [("dp_replicate", "dp_shard"), ("dp_outer", "dp")])
def test_replicas_are_found_by_name(ranks, names, outer):
    config = MegatronFSDPConfig(outer_dp_sharding_strategy=outer)
    recipe = Recipe(model="tied", steps=3)
    outcomes = ranks.run(train_on, config, recipe, dict.fromkeys(names, 2))
    assert_parity(outcomes, train_plain(recipe), recipe)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_replicas_may_be_the_inner_dimension(ranks, stage):
    config = MegatronFSDPConfig(zero_dp_strategy=stage)
    recipe = Recipe(steps=3)
    outcomes = ranks.run(train_on, config, recipe, {"dp_shard": 2, "dp_replicate": 2})
    assert_parity(outcomes, train_plain(recipe), recipe)


@pytest.mark.parametrize(
    ("dimensions", "flattened"),
    [({"dp": 2, "cp": 2}, ()), ({"dp": 2, "cp": 2, "tp": 1}, ("dp", "cp")), ({"dp_cp": 4}, ())],
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_context_parallel_ranks_share_the_shards(ranks, stage, dimensions, flattened):
    config = MegatronFSDPConfig(zero_dp_strategy=stage)
    recipe = Recipe(model="tied", steps=3)
    outcomes = ranks.run(train_on, config, recipe, dimensions, flattened)
    assert_parity(outcomes, train_plain(recipe), recipe)


def bytes_on(dimensions: Dimensions, flattened: tuple[str, ...]) -> int:
    from polyshard.lifecycle import parameter_bytes

    config = MegatronFSDPConfig()
    model, _ = parallelize(build_model("plain"), config, mesh=mesh_of(dimensions, flattened))
    return parameter_bytes(model, config)


def test_flattened_dimension_shards_over_all_its_ranks(ranks):
    flattened = ranks.run(bytes_on, {"dp": 2, "cp": 2, "tp": 1}, ("dp", "cp"))
    assert flattened == ranks.run(bytes_on, {"dp": 4}, ())


def train_on_nameless_mesh(recipe: Recipe) -> Outcome:
    return train_on(MegatronFSDPConfig(), recipe, {"anything": dist.get_world_size()})


def test_one_dimension_may_have_any_name(ranks):
    recipe = Recipe(steps=3)
    assert_parity(ranks.run(train_on_nameless_mesh, recipe), train_plain(recipe), recipe)


def refusal(config: MegatronFSDPConfig, dimensions: Dimensions, flattened: tuple[str, ...]) -> str:
    model = build_model("plain")
    try:
        parallelize(model, config, mesh=mesh_of(dimensions, flattened))
    except PolyshardError as error:
        assert type(model.head.weight).__name__ == "Parameter", "expected the model left alone"
        return f"{type(error).__name__}: {error}"
    raise AssertionError("expected the mesh to be refused")


@pytest.mark.parametrize(
    ("options", "dimensions", "flattened", "expected"),
    [
        ({}, {"x": 2, "tp": 2}, (), "MeshError: polyshard-megatron-fsdp .* found x, tp; name"),
        ({}, {"dp": 2, "ep": 2}, (), "UnsupportedError: .*expert parallelism .* ep=2"),
        ({"tp_plan": MLP}, {"dp": 4}, (), "MeshError: MegatronFSDPConfig.tp_plan: .*'tp'"),
        ({}, {"dp": 2, "tp": 2}, (), "ConfigError: MegatronFSDPConfig.tp_plan: .*none of its own"),
        (
            {"tp_plan": {"nowhere": "colwise"}},
            {"dp": 2, "tp": 2},
            (),
            "ConfigError: MegatronFSDPConfig.tp_plan: .*'nowhere', which matches none of",
        ),
        (
            {"outer_dp_sharding_strategy": 1},
            {"dp": 4},
            (),
            "UnsupportedError: .*outer_dp_sharding_strategy=1 needs a mesh with .*dp_replicate",
        ),
        (
            {"outer_dp_sharding_strategy": 1},
            {"dp_shard": 2, "dp_replicate": 2},
            (),
            "UnsupportedError: .*'dp_replicate' before 'dp_shard' .*order \\[0, 2, 1, 3\\]",
        ),
    ],
)
def test_meshes_that_do_not_fit_are_refused(ranks, options, dimensions, flattened, expected):
    for message in ranks.run(refusal, MegatronFSDPConfig(**options), dimensions, flattened):
        assert re.search(expected, message), message
