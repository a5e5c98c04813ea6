"""The names of the module that this package replaces, used as a script of that module would."""

from __future__ import annotations

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD

import polyshard
from polyshard import full_state_dict
from polyshard.conformance.models import build_model
from polyshard.conformance.parity import assert_parity
from polyshard.conformance.recipes import Outcome, Recipe, build_optimizer
from polyshard.conformance.trainings import Training, train_plain
from polyshard.exceptions import ConfigError, MeshError, UnsupportedError
from polyshard_megatron_fsdp import (
    HAS_MEGATRON_FSDP,
    MegatronFSDPConfig,
    MegatronFSDPManager,
    fully_shard_optimizer,
    logger,
    maybe_shard_optimizer,
    restore_distributed_param_attrs,
    snapshot_distributed_param_attrs,
)

pytestmark = pytest.mark.world_size(2)

RECIPE = Recipe(model="tied", steps=3)


def manager_of(stage: int) -> MegatronFSDPManager:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return MegatronFSDPManager(MegatronFSDPConfig(zero_dp_strategy=stage), mesh)


def train_with_manager(stage: int, passed: bool) -> Outcome:
    manager = manager_of(stage)
    module = build_model(RECIPE.model)
    early = build_optimizer("sgd", module) if passed else None
    model, optimizer = manager.parallelize(module, early)
    if optimizer is None:
        optimizer = build_optimizer("sgd", model)
        assert fully_shard_optimizer(model, optimizer) is optimizer
    training = Training(model, optimizer, RECIPE, manager.config)
    training.train(range(RECIPE.steps))
    return training.outcome()


@pytest.mark.parametrize("passed", [True, False], ids=["passed", "sharded later"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_managed_training_equals_one_process(ranks, stage, passed):
    assert_parity(ranks.run(train_with_manager, stage, passed), train_plain(RECIPE), RECIPE)


def clip_under_manager() -> tuple[float, list[str]]:
    """Call Polyshard's own functions with the module that the manager was given."""
    module = build_model("plain")
    model, _ = manager_of(3).parallelize(module)
    model(torch.ones(2, 8, dtype=torch.long)).sum().backward()
    norm = polyshard.clip_grad_norm(module, 1.0)
    return norm.item(), list(polyshard.full_state_dict(module))


def test_managed_models_are_known_to_the_functions(ranks):
    plain = build_model("plain")
    plain(torch.ones(2, 8, dtype=torch.long)).sum().backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item()
    for rank, (norm, names) in enumerate(ranks.run(clip_under_manager)):
        assert norm == pytest.approx(expected, rel=1e-6)
        assert names == (list(plain.state_dict()) if rank == 0 else [])


def manager_attributes() -> tuple[dict, dict, str]:
    manager = manager_of(1)
    fields = {a.name: getattr(manager, a.name) for a in attrs.fields(MegatronFSDPConfig)}
    return fields, manager.config.to_dict(), str(manager.device_mesh.mesh_dim_names)


def test_manager_has_the_fields_of_its_config(ranks):
    for fields, config, names in ranks.run(manager_attributes):
        assert fields == {k: v for k, v in config.items() if k != "strategy"}
        assert names == "('dp',)"


def test_manager_refuses_what_is_no_config_or_mesh():
    with pytest.raises(ConfigError, match=r"expected a MegatronFSDPConfig, found \{\} \(dict\)"):
        MegatronFSDPManager({}, None)
    with pytest.raises(MeshError, match=r"expected a DeviceMesh, found None .*init_device_mesh"):
        MegatronFSDPManager(MegatronFSDPConfig(), None)


def wrap_twice() -> tuple[str, str]:
    manager = manager_of(3)
    model, _ = manager.parallelize(build_model("plain"))
    messages = []
    for again in (model, model.module):
        with pytest.raises(UnsupportedError) as caught:
            manager.parallelize(again)
        messages.append(str(caught.value))
    return messages[0], messages[1]


def test_wrapping_twice_is_refused(ranks):
    for messages in ranks.run(wrap_twice):
        for message in messages:
            assert "Megatron-FSDP has wrapped; build a new one" in message


def test_unwrapped_models_pass_through():
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    assert fully_shard_optimizer(model, optimizer) is optimizer
    assert maybe_shard_optimizer(model, optimizer, MegatronFSDPConfig()) is optimizer
    assert snapshot_distributed_param_attrs(model) is None
    restore_distributed_param_attrs(model, None)
    assert HAS_MEGATRON_FSDP
    assert logger.name == "polyshard_megatron_fsdp"
    assert maybe_shard_optimizer is polyshard.maybe_shard_optimizer


def snapshot_and_restore() -> tuple[list[str], bool, dict]:
    """Snapshot, take attributes away and change one, and restore."""
    model, _ = manager_of(3).parallelize(build_model("tied"))
    model.module.head.weight.mark = "first"
    snapshot = snapshot_distributed_param_attrs(model)
    parameter = model.module.blocks[0].up.weight
    del parameter.__dict__["orig_param"]
    model.module.head.weight.mark = "second"
    restore_distributed_param_attrs(model, snapshot)
    marks = {
        name: getattr(p, "mark", None)
        for name, p in model.module.named_parameters(remove_duplicate=False)
        if name in ("head.weight", "embedding.weight")
    }
    return sorted(snapshot), hasattr(parameter, "orig_param"), marks


def test_attributes_are_restored_by_name_where_they_are_absent(ranks):
    names = {f"module.{name}" for name in build_model("tied").state_dict()}
    for found, restored, marks in ranks.run(snapshot_and_restore):
        assert set(found) == names, "expected tied parameters under each of their names"
        assert restored
        assert marks == {"head.weight": "second", "embedding.weight": "second"}


def rebuild_by_attributes(stage: int) -> Outcome:
    """Replace every parameter between snapshot and restore, and train on."""
    manager = manager_of(stage)
    model, _ = manager.parallelize(build_model("plain", seed=1))
    snapshot = snapshot_distributed_param_attrs(model)
    values = build_model("plain").state_dict()
    model.module.load_state_dict(values, assign=True)
    restore_distributed_param_attrs(model, snapshot)
    optimizer = fully_shard_optimizer(model, build_optimizer("sgd", model))
    training = Training(model, optimizer, Recipe(steps=3), manager.config)
    training.train(range(3))
    return training.outcome()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_new_values_train_after_a_restore(ranks, stage):
    recipe = Recipe(steps=3)
    assert_parity(ranks.run(rebuild_by_attributes, stage), train_plain(recipe), recipe)


def state_dict_keys(preprocess: bool) -> bool:
    """Whether the optimizer's state dict describes its shards to torch's checkpoints."""
    model, _ = manager_of(3).parallelize(build_model("plain"))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    fully_shard_optimizer(model, optimizer, preproc_state_dict_for_dcp_ckpt=preprocess)
    state = optimizer.state_dict()["state"]
    locals_ = [v["momentum_buffer"]._local_tensor for v in state.values()]
    return all(hasattr(tensor, "__create_chunk_list__") for tensor in locals_)


def test_preprocessing_of_state_dicts_is_passed_on(ranks):
    assert ranks.run(state_dict_keys, True) == [True, True]
    assert not any(ranks.run(state_dict_keys, False))


def untied(how: str) -> str:
    """Do inside ``rebuild`` what megatron-fsdp cannot follow; return the error."""
    config = MegatronFSDPConfig()
    model, _ = polyshard.parallelize(build_model("tied" if how == "untie" else "plain"), config)
    before = full_state_dict(model, rank0_only=False)
    module = model.module
    try:
        with polyshard.rebuild(model):
            if how == "untie":
                module.head.weight = nn.Parameter(torch.zeros(33, 16))
                module.embedding.weight = nn.Parameter(torch.ones(33, 16))
            elif how == "tie":
                module.head.weight = module.embedding.weight
            elif how == "add":
                module.extra = nn.Parameter(torch.zeros(2))
            elif how == "resize":
                module.head.bias = nn.Parameter(torch.zeros(5))
            elif how == "remove":
                del module.head.bias
    except polyshard.PolyshardError as error:
        after = full_state_dict(model, rank0_only=False) if how != "add" else before
        assert all(torch.equal(before[name], after[name]) for name in before)
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"expected {how!r} to be refused")


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("untie", "which are tied, found different ones"),
        ("tie", "tie them before parallelize"),
        ("add", "others added or removed (extra)"),
        ("resize", "found [5]; resize the model before parallelize"),
        ("remove", "others added or removed (head.bias)"),
    ],
)
def test_rebuilds_that_cannot_be_followed_are_refused(ranks, how, expected):
    for message in ranks.run(untied, how):
        assert message.startswith("RebuildError: polyshard-megatron-fsdp")
        assert expected in message
