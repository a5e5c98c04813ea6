"""What Megatron-FSDP supports, stage by stage: each cell is equal to one process, or refused.

``docs/generate.py`` writes docs/reference/megatron-fsdp-support.md from ``ROWS``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from polyshard import maybe_shard_optimizer, parallelize
from polyshard.conformance.models import TinyModel, build_model
from polyshard.conformance.parity import assert_parity
from polyshard.conformance.recipes import Outcome, Recipe, build_optimizer
from polyshard.conformance.trainings import Training, train_plain
from polyshard.exceptions import PolyshardError
from polyshard_megatron_fsdp import MegatronFSDPConfig

STAGES = (0, 1, 2, 3)
CLIPPED = Recipe(model="tied", steps=3, max_norm=0.1)
MLP = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
COLWISE = {"blocks.*.up": "colwise_gather_output"}


class SelfPlanned(TinyModel):
    """A model that says itself how it is split, as Hugging Face's do."""

    _tp_plan = MLP


def split_by_script(model: nn.Module, mesh: Any) -> nn.Module:
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], styles)
    return model


def plan_itself(model: nn.Module, mesh: Any) -> nn.Module:
    planned = SelfPlanned()
    planned.load_state_dict(model.state_dict())
    return planned


def on_meta(model: nn.Module, mesh: Any) -> nn.Module:
    """Take the values away, for each module to give them back when it is asked to."""
    for module in model.modules():
        values = {name: p.detach() for name, p in module.named_parameters(recurse=False)}
        if values:
            module.reset_parameters = partial(give_back, module, values)
    return model.to("meta")


def tied_on_meta(model: nn.Module, mesh: Any) -> nn.Module:
    model = on_meta(model, mesh)
    model.head.weight = model.embedding.weight
    return model


@torch.no_grad()
def give_back(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        module.get_parameter(name).copy_(value)


@frozen(kw_only=True)
class Row:
    """One way to train under every stage.

    Attributes:
        mesh: The dimensions of the mesh by name, outermost first.
        flattened: Those that the script has flattened beforehand.
        options: Of the config.
        recipe: What is trained.
        prepare: What the script does to the model before the wrap.
        refused: Stage -> what the error says that refuses it.
    """

    mesh: Mapping[str, int] = field(factory=lambda: {"dp": 4})
    flattened: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(factory=dict)
    recipe: Recipe = CLIPPED
    prepare: Callable[[nn.Module, Any], nn.Module] | None = None
    refused: Mapping[int, str] = field(factory=dict)


def refused(message: str, *stages: int) -> dict[int, str]:
    return dict.fromkeys(stages or STAGES, message)


META = {"init_fsdp_with_meta_device": True}
TENSOR = {"dp": 2, "tp": 2}
REPLICAS = {"dp_replicate": 2, "dp_shard": 2}
INNER_REPLICAS = {"dp_shard": 2, "dp_replicate": 2}
CONTEXT = {"dp": 2, "cp": 2}
SHARDED_REPLICAS = {"outer_dp_sharding_strategy": 1}
NOT_ALL_SHARDED = refused("outer_dp_sharding_strategy=1 needs zero_dp_strategy=3", 0, 1, 2)
NO_SHARDS = refused("init_fsdp_with_meta_device=True needs zero_dp_strategy 1, 2 or 3", 0)
FROZEN = Recipe(model="frozen", steps=3, max_norm=0.1)
PLAIN = Recipe(steps=3, max_norm=0.1)
ATTENTION = Recipe(model="mixed", steps=3, max_norm=0.1)
ACCUMULATED = Recipe(model="adapter", steps=3, microbatches=3, unadapted="first microbatch")

#: By what the page calls them.
ROWS: Mapping[str, Row] = {
    "data parallel": Row(),
    "data parallel, a dimension of any name": Row(mesh={"anything": 4}),
    "tied weights, AdamW": Row(recipe=Recipe(model="tied", steps=3, optimizer="adamw")),
    "frozen layers": Row(recipe=FROZEN),
    "buffers": Row(recipe=Recipe(model="buffers", steps=3, max_norm=0.1)),
    "parameters unused in every other step": Row(
        recipe=Recipe(model="adapter", steps=4, unadapted="odd steps")
    ),
    "microbatches, parameters unused in the first": Row(recipe=ACCUMULATED),
    "an evaluation between backward and step": Row(
        recipe=Recipe(model="tied", steps=3, evaluate="before step")
    ),
    "activation checkpointing": Row(options={"activation_checkpointing": True}),
    "float32 main weights and reduction": Row(
        options={"preserve_fp32_weights": True, "grad_reduce_in_fp32": True}
    ),
    "replicas (HSDP)": Row(mesh=REPLICAS),
    "replicas, by megatron-fsdp's own names": Row(mesh={"dp_outer": 2, "dp": 2}),
    "replicas as the inner dimension": Row(mesh=INNER_REPLICAS),
    "replicas, microbatches": Row(mesh=REPLICAS, recipe=ACCUMULATED),
    "sharded replicas (`outer_dp_sharding_strategy=1`)": Row(
        mesh=REPLICAS,
        options=SHARDED_REPLICAS,
        refused=NOT_ALL_SHARDED,
    ),
    "sharded replicas, microbatches": Row(
        mesh=REPLICAS,
        options=SHARDED_REPLICAS,
        recipe=ACCUMULATED,
        refused=NOT_ALL_SHARDED,
    ),
    "sharded replicas as the inner dimension": Row(
        mesh=INNER_REPLICAS,
        options=SHARDED_REPLICAS,
        refused=refused(r"'dp_replicate' before 'dp_shard' .*order \[0, 2, 1, 3\]", 3)
        | NOT_ALL_SHARDED,
    ),
    "context parallel": Row(mesh=CONTEXT, recipe=ATTENTION),
    "context parallel, flattened by the script": Row(
        mesh={**CONTEXT, "tp": 1}, flattened=("dp", "cp"), recipe=ATTENTION
    ),
    "context parallel, as one dimension `dp_cp`": Row(mesh={"dp_cp": 4}),
    "tensor parallel, column- and row-wise": Row(mesh=TENSOR, options={"tp_plan": MLP}),
    "tensor parallel, outputs gathered": Row(mesh=TENSOR, options={"tp_plan": COLWISE}),
    "tensor parallel, microbatches": Row(mesh=TENSOR, options={"tp_plan": MLP}, recipe=ACCUMULATED),
    "tensor parallel, frozen layers": Row(mesh=TENSOR, options={"tp_plan": MLP}, recipe=FROZEN),
    "tensor parallel by the model's own plan": Row(mesh=TENSOR, prepare=plan_itself, recipe=PLAIN),
    "tensor parallel by the script": Row(mesh=TENSOR, prepare=split_by_script),
    "tensor and context parallel": Row(mesh={"dp": 1, "cp": 2, "tp": 2}, recipe=ATTENTION),
    "tensor parallel alone, which megatron-fsdp does not wrap": Row(
        mesh={"dp": 1, "tp": 4}, options={"tp_plan": MLP}
    ),
    "meta device": Row(options=META, prepare=on_meta, recipe=PLAIN, refused=NO_SHARDS),
    "meta device, replicas": Row(
        mesh=REPLICAS, options=META, prepare=on_meta, recipe=PLAIN, refused=NO_SHARDS
    ),
    "meta device, tensor parallel": Row(
        mesh=TENSOR,
        options={**META, "tp_plan": MLP},
        prepare=on_meta,
        recipe=PLAIN,
        refused=refused("does not work with tensor parallelism") | NO_SHARDS,
    ),
    "meta device, tied weights": Row(
        options=META,
        prepare=tied_on_meta,
        refused=refused("cannot initialize the tied parameter") | NO_SHARDS,
    ),
    "expert parallel": Row(mesh={"dp": 2, "ep": 2}, refused=refused("expert parallelism .* ep=2")),
}


def train(name: str, stage: int, passed: bool) -> Outcome | str:
    """Train a row under a stage on every rank, or return the error that refuses it."""
    row = ROWS[name]
    mesh = init_device_mesh("cpu", tuple(row.mesh.values()), mesh_dim_names=tuple(row.mesh))
    if row.flattened:
        mesh[row.flattened]._flatten("_".join(row.flattened))
    model = build_model(row.recipe.model)
    if row.prepare is not None:
        model = row.prepare(model, mesh)
    early = build_optimizer(row.recipe.optimizer, model) if passed else None
    try:
        config = MegatronFSDPConfig(zero_dp_strategy=stage, **row.options)
        wrapped, optimizer = parallelize(model, config, mesh=mesh, optimizer=early)
    except PolyshardError as error:
        return str(error)
    if optimizer is None:
        optimizer = build_optimizer(row.recipe.optimizer, wrapped)
    optimizer = maybe_shard_optimizer(wrapped, optimizer)
    training = Training(wrapped, optimizer, row.recipe, config, mesh)
    training.train(range(row.recipe.steps))
    return training.outcome()


@pytest.mark.world_size(4)
@pytest.mark.parametrize("passed", [False, True], ids=["built after", "passed"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ROWS)
def test_it_equals_one_process_or_is_refused(ranks, name, stage, passed):
    row = ROWS[name]
    found = ranks.run(train, name, stage, passed)
    if stage in row.refused:
        for message in found:
            assert re.search(row.refused[stage], message), message
    else:
        assert_parity(found, train_plain(row.recipe), row.recipe)
