"""megatron-fsdp on one rank: on CUDA, where one device allows no more, and on the CPU alike.

With one rank Polyshard does not wrap the model; what is tested here is what it does on more.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from polyshard import full_state_dict, parallelize, rebuild
from polyshard.conformance import RankPool
from polyshard.conformance.models import build_model
from polyshard.conformance.parity import assert_parity
from polyshard.conformance.recipes import Outcome, Recipe, build_optimizer
from polyshard.conformance.trainings import PlainTraining, Training
from polyshard.lifecycle import wrapped_models
from polyshard.transforms.units import find_units
from polyshard_megatron_fsdp import MegatronFSDPConfig
from polyshard_megatron_fsdp.model.sharded_model import Record, ShardedModel, adopt
from polyshard_megatron_fsdp.model.topology import topology_of
from polyshard_megatron_fsdp.model.wrap import wrap_model
from polyshard_megatron_fsdp.optimizer.sharding import shard
from polyshard_megatron_fsdp.state.load import accept_full_tensors


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The type of device that the tests run on, the CPU first."""
    return request.param


@pytest.fixture(scope="module")
def rank(device: str) -> Iterator[RankPool]:
    """A process for one type of device, since megatron-fsdp serves one per process."""
    with RankPool(1) as pool:
        yield pool


class PlainOn(PlainTraining):
    """The reference on the same device, whose kernels round in their own way."""

    def share(self, tokens: Tensor) -> Tensor:
        return tokens.to(next(self.model.parameters()).device)

    def weights(self) -> dict[str, Tensor]:
        return {name: value.cpu().clone() for name, value in self.model.state_dict().items()}


def wrap_alone(config: MegatronFSDPConfig, model: Any, device: str) -> ShardedModel:
    """Wrap a model as on several ranks."""
    topology = topology_of(init_device_mesh(device, (1,), mesh_dim_names=("dp",)))
    model = model.to(device)
    wrapped = wrap_model(config, model, topology, find_units(model))
    sharded = adopt(wrapped, Record(config, topology))
    accept_full_tensors(sharded)
    wrapped_models.remember(model, sharded, config, topology.mesh)
    return sharded


def train_both(
    config: MegatronFSDPConfig, recipe: Recipe, device: str, bf16: bool = False
) -> tuple[Outcome, Outcome]:
    """Return what training came to under megatron-fsdp, and in a plain model on the same device."""
    cast = partial(torch.nn.Module.to, dtype=torch.bfloat16) if bf16 else (lambda model: model)
    model = wrap_alone(config, cast(build_model(recipe.model)), device)
    optimizer = shard(model, build_optimizer(recipe.optimizer, model))
    training = Training(model, optimizer, recipe, config)
    training.train(range(recipe.steps))
    plain = cast(build_model(recipe.model)).to(device)
    reference = PlainOn(plain, build_optimizer(recipe.optimizer, plain), recipe)
    reference.train(range(recipe.steps))
    return training.outcome(), reference.outcome()


@pytest.mark.parametrize("model", ["tied", "frozen", "adapter"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_equals_the_plain_model(rank, stage, model, device):
    config = MegatronFSDPConfig(zero_dp_strategy=stage)
    recipe = Recipe(model=model, steps=3, max_norm=0.1, evaluate="before step")
    [(found, expected)] = rank.run(train_both, config, recipe, device)
    assert_parity([found], expected, recipe)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_microbatches_add_up(rank, stage, device):
    config = MegatronFSDPConfig(zero_dp_strategy=stage)
    recipe = Recipe(steps=3, microbatches=4)
    [(found, expected)] = rank.run(train_both, config, recipe, device)
    assert_parity([found], expected, recipe)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw foreach"])
def test_adamw(rank, optimizer, device):
    recipe = Recipe(optimizer=optimizer, steps=3)
    [(found, expected)] = rank.run(train_both, MegatronFSDPConfig(), recipe, device)
    assert_parity([found], expected, recipe)


def test_bf16_model(rank, device):
    config = MegatronFSDPConfig()
    recipe = Recipe(steps=3)
    [(found, expected)] = rank.run(train_both, config, recipe, device, bf16=True)
    assert {weight.dtype for weight in found.weights.values()} == {torch.bfloat16}
    assert_parity([found], expected, recipe, tolerance=2**-7)


@pytest.mark.parametrize(
    "options", [{"average_in_collective": True}, {"activation_checkpointing": True}], ids=str
)
def test_options(rank, options, device):
    recipe = Recipe(steps=3)
    [(found, expected)] = rank.run(train_both, MegatronFSDPConfig(**options), recipe, device)
    assert_parity([found], expected, recipe)


def replace_all(device: str) -> bool:
    """Load by assignment inside ``rebuild``; whether the model then has the new values."""
    config = MegatronFSDPConfig()
    model = wrap_alone(config, build_model("tied"), device)
    values = build_model("tied", seed=1).state_dict()
    with rebuild(model):
        model.module.load_state_dict(values, assign=True)
    found = full_state_dict(model, rank0_only=False)
    return all(torch.equal(found[name], value) for name, value in values.items())


def test_rebuild(rank, device):
    assert rank.run(replace_all, device) == [True]


def names_of_torch(device: str) -> tuple[bool, bool]:
    """Whether megatron-fsdp sees torch itself, and whether Polyshard leaves one rank unwrapped."""
    import megatron_fsdp.megatron_fsdp as upstream

    config = MegatronFSDPConfig()
    wrap_alone(config, build_model("plain"), device)
    plain = build_model("plain")
    mesh = init_device_mesh(device, (1,), mesh_dim_names=("dp",))
    return upstream.torch is torch, parallelize(plain, config, mesh=mesh)[0] is plain


def test_stand_ins_are_active_without_cuda_alone(rank, device):
    assert rank.run(names_of_torch, device) == [(device == "cuda", True)]
