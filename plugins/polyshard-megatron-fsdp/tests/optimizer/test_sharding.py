"""Optimizers of every kind step the shards as they step the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

from polyshard import maybe_shard_optimizer, parallelize
from polyshard.config.parallelism import ParallelismSizes
from polyshard.conformance.models import build_model
from polyshard.conformance.parity import assert_parity, assert_same_weights
from polyshard.conformance.recipes import Outcome, Recipe
from polyshard.conformance.trainings import PlainTraining, Training, mesh_of
from polyshard_megatron_fsdp import MegatronFSDPConfig

OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], Optimizer]] = {
    "SGD with momentum": lambda groups: SGD(groups, lr=0.1, momentum=0.9),
    "SGD with Nesterov momentum": lambda groups: SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda groups: AdamW(groups, lr=1e-2),
    "AdamW foreach": lambda groups: AdamW(groups, lr=1e-2, foreach=True),
    "AdamW fused": lambda groups: AdamW(groups, lr=1e-2, fused=True),
    "AdamW amsgrad": lambda groups: AdamW(groups, lr=1e-2, amsgrad=True),
    "Adam": lambda groups: Adam(groups, lr=1e-2),
    "Adagrad": lambda groups: Adagrad(groups, lr=1e-2),
    "RMSprop": lambda groups: RMSprop(groups, lr=1e-3),
    "NAdam": lambda groups: NAdam(groups, lr=1e-3),
}

RECIPE = Recipe(model="tied", optimizer="any", steps=4)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return [
        {"weight_decay": 0.1, "lr": 2e-2, "params": matrices},
        {"params": vectors, "weight_decay": 0.0},
    ]


def train_plain(name: str) -> Outcome:
    model = build_model(RECIPE.model)
    training = PlainTraining(model, OPTIMIZERS[name](groups_of(model)), RECIPE)
    training.train(range(RECIPE.steps))
    return training.outcome()


def train(config: MegatronFSDPConfig, name: str, passed: bool) -> Outcome:
    model = build_model(RECIPE.model)
    early = OPTIMIZERS[name](groups_of(model)) if passed else None
    wrapped, optimizer = parallelize(model, config, optimizer=early)
    if optimizer is None:
        optimizer = OPTIMIZERS[name](groups_of(wrapped))
    training = Training(wrapped, maybe_shard_optimizer(wrapped, optimizer), RECIPE, config)
    training.train(range(RECIPE.steps))
    return training.outcome()


@pytest.mark.parametrize("passed", [False, True], ids=["built after", "passed"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_one_process(ranks, name, stage, passed):
    config = MegatronFSDPConfig(zero_dp_strategy=stage)
    outcomes, expected = ranks.run(train, config, name, passed), train_plain(name)
    assert_parity(outcomes, expected, RECIPE)
    if name.startswith("SGD"):
        # The others turn rounding in a gradient near zero into a step of full size.
        for outcome in outcomes:
            assert_same_weights(outcome.weights, expected.weights, 1e-6)


def train_split(name: str, passed: bool, tp_size: int) -> Outcome:
    """Train on a mesh with tensor parallelism, which leaves part of the model plain."""
    config = MegatronFSDPConfig(tp_plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})
    model = build_model(RECIPE.model)
    early = OPTIMIZERS[name](groups_of(model)) if passed else None
    mesh = mesh_of(ParallelismSizes(tp_size=tp_size))
    wrapped, optimizer = parallelize(model, config, mesh=mesh, optimizer=early)
    if optimizer is None:
        optimizer = OPTIMIZERS[name](groups_of(wrapped))
    optimizer = maybe_shard_optimizer(wrapped, optimizer)
    training = Training(wrapped, optimizer, RECIPE, config, mesh)
    training.train(range(RECIPE.steps))
    return training.outcome()


@pytest.mark.world_size(2, 4)
@pytest.mark.parametrize("passed", [False, True], ids=["built after", "passed"])
@pytest.mark.parametrize("name", ["AdamW", "AdamW foreach", "AdamW fused"])
def test_tensors_split_and_plain_are_stepped_alike(ranks, name, passed):
    outcomes = ranks.run(train_split, name, passed, 2)
    assert_parity(outcomes, train_plain(name), RECIPE)


def keep_state(stage: int) -> Outcome:
    """Take two steps in a plain model, and the others after it is wrapped."""
    model = build_model(RECIPE.model)
    optimizer = OPTIMIZERS["SGD with momentum"](groups_of(model))
    PlainTraining(model, optimizer, RECIPE).train(range(2))
    config = MegatronFSDPConfig(zero_dp_strategy=stage)
    wrapped, optimizer = parallelize(model, config, optimizer=optimizer)
    training = Training(wrapped, optimizer, RECIPE, config)
    training.train(range(2, RECIPE.steps))
    return training.outcome()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_state_of_an_optimizer_that_has_stepped_is_sharded(ranks, stage):
    expected = train_plain("SGD with momentum")
    for outcome in ranks.run(keep_state, stage):
        assert_same_weights(outcome.weights, expected.weights, 1e-6)


def shard_with_odd_groups() -> tuple[list[int], list[str], bool]:
    """Shard an optimizer whose first group is empty, with a gradient there already."""
    config = MegatronFSDPConfig()
    model, _ = parallelize(build_model("plain"), config)
    optimizer = AdamW([{"params": []}, {"lr": 0.5, "params": list(model.parameters())}])
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    maybe_shard_optimizer(model, optimizer)
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    return sizes, list(optimizer.param_groups[1]), first.grad is not None


@pytest.mark.world_size(2)
def test_groups_may_begin_with_an_empty_one_and_params_may_be_any_key(ranks):
    for sizes, keys, kept in ranks.run(shard_with_odd_groups):
        assert sizes[0] == 0
        assert sizes[1] > 0
        assert keys[:2] == ["lr", "params"]
        assert kept, "expected sharding to leave gradients alone"
