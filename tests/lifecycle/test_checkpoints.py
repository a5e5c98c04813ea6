"""One layout on disk: what a strategy saves, every strategy loads, on any number of ranks.

The state dicts are torch's, of the module that the user built, which every strategy leaves its
names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import AdamW, Optimizer

from polyshard import DistributedSetup
from polyshard.conformance import RankPool
from polyshard.conformance.models import build_model, global_batch, loss_of

MEGATRON_FSDP = pytest.param("megatron_fsdp", marks=pytest.mark.strategy("megatron_fsdp"))
STRATEGIES = ["ddp", "fsdp2", MEGATRON_FSDP]
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
SAVED, STEPS = 2, 4


@frozen
class Run:
    """How a job trains: a strategy on so many ranks, of which some are tensor-parallel."""

    strategy: str
    ranks: int
    frozen: bool
    tp_size: int = 1


class TrainingRun:
    """A model in training, of which part may be frozen."""

    def __init__(self, run: Run, seed: int) -> None:
        config = {"strategy": run.strategy}
        if run.tp_size > 1:
            config["tp_plan"] = PLAN
        setup = DistributedSetup.build(config, {"tp_size": run.tp_size})
        setup = DistributedSetup(setup.config.in_full_precision(), setup.mesh_context)
        self.built = freeze(build_model("plain", seed=seed), run)
        self.model, _ = setup.parallelize(self.built)
        self.optimizer = setup.shard_optimizer(self.model, adamw(self.model))
        self.setup = setup

    def train(self, steps: range) -> None:
        shares = self.setup.mesh_context.submesh("dp")
        rank, size = (0, 1) if shares is None else (shares.get_local_rank(), shares.size())
        for step in steps:
            loss_of(self.model, global_batch(step).chunk(size)[rank]).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.built, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.built, self.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(
            self.built, self.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )


def freeze(model: nn.Module, run: Run) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (run.frozen and name.startswith(("embedding", "blocks.0"))))
    return model


def adamw(model: nn.Module) -> Optimizer:
    return AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def save(run: Run, folder: Path) -> None:
    trainee = TrainingRun(run, seed=0)
    trainee.train(range(SAVED))
    trainee.save(folder)


def load(run: Run, folder: Path) -> Mapping[str, Tensor]:
    """Go on from a checkpoint with other weights and an optimizer that never stepped."""
    trainee = TrainingRun(run, seed=1)
    trainee.load(folder)
    trainee.train(range(SAVED, STEPS))
    return trainee.setup.full_state_dict(trainee.model, rank0_only=False)


def without_interruption(run: Run) -> Mapping[str, Tensor]:
    model = freeze(build_model("plain", seed=0), run)
    optimizer = adamw(model)
    for step in range(STEPS):
        loss_of(model, global_batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.fixture(scope="module")
def pools() -> Iterator[Mapping[int, RankPool]]:
    with RankPool(1) as one, RankPool(2) as two, RankPool(4) as four:
        yield {1: one, 2: two, 4: four}


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # AdamW makes of a gradient near zero, which ranks sum up in another order, a step that
        # differs by more than the gradient does.
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)


def check_goes_on(
    pools: Mapping[int, RankPool], folder: Path, saver: Run, loaders: list[Run]
) -> None:
    pools[saver.ranks].run(save, saver, folder)
    for loader in loaders:
        for found in pools[loader.ranks].run(load, loader, folder):
            assert_equal(found, without_interruption(saver))


@pytest.mark.parametrize("frozen", [False, True], ids=["all trained", "partly frozen"])
@pytest.mark.parametrize("loader", STRATEGIES)
@pytest.mark.parametrize("saver", STRATEGIES)
def test_training_goes_on_under_any_strategy_on_any_number_of_ranks(
    pools: Mapping[int, RankPool], tmp_path: Path, saver: str, loader: str, frozen: bool
) -> None:
    for ranks in (1, 2, 4):
        loaders = [Run(loader, other, frozen) for other in (1, 2, 4)]
        check_goes_on(pools, tmp_path / str(ranks), Run(saver, ranks, frozen), loaders)


def go_back(run: Run, folder: Path) -> Mapping[str, Tensor]:
    """Save, train on, and load into the same model and optimizer."""
    trainee = TrainingRun(run, seed=0)
    trainee.train(range(SAVED))
    trainee.save(folder)
    trainee.train(range(SAVED, STEPS))
    trainee.load(folder)
    trainee.train(range(SAVED, STEPS))
    return trainee.setup.full_state_dict(trainee.model, rank0_only=False)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_model_in_training_goes_back_to_its_checkpoint(
    pools: Mapping[int, RankPool], tmp_path: Path, strategy: str
) -> None:
    for ranks in (2, 4):
        run = Run(strategy, ranks, frozen=False)
        for found in pools[ranks].run(go_back, run, tmp_path / str(ranks)):
            assert_equal(found, without_interruption(run))


@pytest.mark.parametrize("saver", ["fsdp2", MEGATRON_FSDP])
def test_training_goes_on_with_and_without_tensor_parallelism(
    pools: Mapping[int, RankPool], tmp_path: Path, saver: str
) -> None:
    split = [Run(saver, ranks, False, tp_size=2) for ranks in (2, 4)]
    for ranks, run in zip((2, 4), split, strict=True):
        check_goes_on(pools, tmp_path / str(ranks), run, [*split, Run("ddp", 2, False)])
    check_goes_on(pools, tmp_path / "whole", Run("ddp", 2, False), split)
