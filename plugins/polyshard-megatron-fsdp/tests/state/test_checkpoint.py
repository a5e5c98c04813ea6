"""State dicts go through ``torch.distributed.checkpoint``, also to another number of ranks."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.optim import SGD, AdamW, NAdam

from polyshard import full_state_dict, maybe_shard_optimizer, parallelize
from polyshard.conformance import RankPool
from polyshard.conformance.models import build_model, global_batch, loss_of
from polyshard.conformance.parity import assert_parity
from polyshard.conformance.recipes import Outcome, Recipe
from polyshard.conformance.trainings import PlainTraining, Training
from polyshard.exceptions import RebuildError, UnsupportedError
from polyshard_megatron_fsdp import MegatronFSDPConfig

OPTIMIZERS = {
    "SGD": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, dampening=0.1),
    "AdamW": lambda parameters: AdamW(parameters, lr=1e-2),
    "NAdam": lambda parameters: NAdam(parameters, lr=1e-3),
}
STEPS = 3
RECIPE = Recipe(model="tied", optimizer="any", steps=2 * STEPS)


def start(config: MegatronFSDPConfig, optimizer: str, seed: int = 0) -> Training:
    model, _ = parallelize(build_model(RECIPE.model, seed=seed), config)
    built = OPTIMIZERS[optimizer](list(model.parameters()))
    return Training(model, maybe_shard_optimizer(model, built), RECIPE, config)


def save(folder: Path, config: MegatronFSDPConfig, optimizer: str) -> None:
    training = start(config, optimizer)
    training.train(range(STEPS))
    state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder)


def load(folder: Path, config: MegatronFSDPConfig, optimizer: str, in_place: bool) -> Outcome:
    """Go on from a checkpoint with a model of other weights and an optimizer that never stepped."""
    training = start(config, optimizer, seed=1)
    with torch.no_grad():
        loss_of(training.model, global_batch(0))
    state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    if not in_place:
        training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    training.train(range(STEPS, RECIPE.steps))
    return training.outcome()


def plain_outcome(optimizer: str) -> Outcome:
    model = build_model(RECIPE.model)
    training = PlainTraining(model, OPTIMIZERS[optimizer](list(model.parameters())), RECIPE)
    training.train(range(RECIPE.steps))
    whole = training.outcome()
    return Outcome(losses=whole.losses[STEPS:], norms=(), evaluations=(), weights=whole.weights)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_goes_on_from_a_checkpoint(ranks, tmp_path, stage, optimizer, in_place):
    config = MegatronFSDPConfig(zero_dp_strategy=stage)
    ranks.run(save, tmp_path, config, optimizer)
    outcomes = ranks.run(load, tmp_path, config, optimizer, in_place)
    assert_parity(outcomes, plain_outcome(optimizer), RECIPE)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_checkpoint_loads_on_another_number_of_ranks(ranks, tmp_path, stage):
    config = MegatronFSDPConfig(zero_dp_strategy=stage)
    ranks.run(save, tmp_path, config, "AdamW")
    with RankPool(4) as more:
        outcomes = more.run(load, tmp_path, config, "AdamW", False)
    assert_parity(outcomes, plain_outcome("AdamW"), RECIPE)


def train_after_looking(optimizer: str) -> Outcome:
    """Take a state dict before the first step, and load nothing into it."""
    training = start(MegatronFSDPConfig(), optimizer)
    assert training.optimizer.state_dict()["state"], "expected tensors to load into"
    training.train(range(RECIPE.steps))
    return training.outcome()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_dict_before_the_first_step_changes_nothing(ranks, optimizer):
    outcomes = ranks.run(train_after_looking, optimizer)
    model = build_model(RECIPE.model)
    plain = PlainTraining(model, OPTIMIZERS[optimizer](list(model.parameters())), RECIPE)
    plain.train(range(RECIPE.steps))
    assert_parity(outcomes, plain.outcome(), RECIPE)


def assign_outside_rebuild() -> str:
    config = MegatronFSDPConfig()
    model, _ = parallelize(build_model("plain"), config)
    try:
        model.module.load_state_dict(full_state_dict(model, rank0_only=False), assign=True)
    except RebuildError as error:
        return str(error)
    raise AssertionError("expected the load to be refused")


@pytest.mark.world_size(2)
def test_assigning_outside_rebuild_is_refused(ranks):
    for message in ranks.run(assign_outside_rebuild):
        assert "polyshard.rebuild(model)" in message


def copying(part: str) -> str:
    model, _ = parallelize(build_model("plain"), MegatronFSDPConfig())
    try:
        copy.deepcopy(model.get_submodule(part))
    except UnsupportedError as error:
        return str(error)
    raise AssertionError("expected the copy to be refused")


@pytest.mark.world_size(2)
@pytest.mark.parametrize("part", ["", "module", "module.blocks.0"])
def test_copying_is_refused(ranks, part):
    for message in ranks.run(copying, part):
        assert "copy what polyshard.full_state_dict(model) returns" in message
