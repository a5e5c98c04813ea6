"""Parameters that were replaced outside ``rebuild`` are noticed before they train wrongly."""

from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
from torch import nn

from polyshard import full_state_dict, parallelize, resolve_config
from polyshard.conformance import RankPool
from polyshard.conformance.models import build_model, global_batch, loss_of
from polyshard.exceptions import RebuildError

each_strategy = pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("ddp", marks=pytest.mark.strategy("ddp")),
        pytest.param("fsdp2", marks=pytest.mark.strategy("fsdp2")),
    ],
)


@each_strategy
@pytest.mark.parametrize("name", ["head.weight", "blocks.1.up.bias"])
@pytest.mark.parametrize("after", ["nothing", "training", "evaluation"])
def test_a_replaced_parameter_is_refused_at_the_next_forward(
    ranks: RankPool, strategy: str, name: str, after: str
) -> None:
    for message in ranks.run(replace_one, strategy, name, after):
        assert f"expected {name!r} to be the parameter of parallelize" in message
        assert "polyshard.rebuild(model)" in message


def replace_one(strategy: str, name: str, after: str) -> str:
    config = resolve_config(strategy).in_full_precision()
    module = build_model("plain")
    model, _ = parallelize(module, config)
    if after != "nothing":
        loss_of(model, global_batch(0)).backward()
    if after == "evaluation":
        with torch.no_grad():
            loss_of(model, global_batch(0))
    holder, _, attribute = name.rpartition(".")
    shape = module.get_parameter(name).shape
    setattr(module.get_submodule(holder), attribute, nn.Parameter(torch.zeros(shape)))
    try:
        loss_of(model, global_batch(0))
    except RebuildError as error:
        return str(error)
    return "no error"


@each_strategy
def test_an_assigning_load_is_refused_and_changes_nothing(ranks: RankPool, strategy: str) -> None:
    for message, unchanged in ranks.run(load_by_assignment, strategy):
        assert "load_state_dict(assign=True)" in message
        assert "polyshard.rebuild(model)" in message
        assert unchanged


def load_by_assignment(strategy: str) -> tuple[str, bool]:
    config = resolve_config(strategy).in_full_precision()
    module = build_model("plain")
    model, _ = parallelize(module, config)
    before = full_state_dict(model, rank0_only=False)
    message = "no error"
    try:
        module.load_state_dict(build_model("plain", seed=1).state_dict(), assign=True)
    except RebuildError as error:
        message = str(error)
    loss_of(model, global_batch(0)).backward()
    return message, _equal(full_state_dict(model, rank0_only=False), before)


@each_strategy
@pytest.mark.parametrize("checkpointing", [False, True])
def test_full_tensors_are_loaded_in_place(
    ranks: RankPool, strategy: str, checkpointing: bool
) -> None:
    assert all(ranks.run(load_full, strategy, checkpointing))


def load_full(strategy: str, checkpointing: bool) -> bool:
    config = resolve_config(strategy, activation_checkpointing=checkpointing).in_full_precision()
    module = build_model("tied", seed=dist.get_rank())
    model, _ = parallelize(module, config)
    values = build_model("tied", seed=7).state_dict()
    module.load_state_dict(values)
    loss_of(model, global_batch(0)).backward()
    return _equal(full_state_dict(model, rank0_only=False), values)


def _equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
