"""What cannot be sharded is told by name before the wrap; ties are found and kept whole."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from polyshard import FSDP2Config, full_state_dict, parallelize
from polyshard.conformance import RankPool
from polyshard.conformance.models import MODELS, TinyModel, build_model, global_batch, loss_of
from polyshard.exceptions import ModelError, OptimizerError
from polyshard.strategies.fsdp2.weights import check_dtypes, check_tensors, separable_units
from polyshard.transforms.units import find_units

pytestmark = pytest.mark.strategy("fsdp2")


class Scaled(nn.Module):
    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(scale)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            nn.Sequential(Scaled(torch.tensor(1.0))),
            r"the scalar '0\.scale'; give it the shape \(1,\)",
        ),
        (nn.Sequential(Scaled(torch.ones(2, 3).T)), r"'0\.scale' with the strides \(1, 3\)"),
    ],
    ids=["scalar", "not contiguous"],
)
def test_a_parameter_that_cannot_be_sharded_is_named(model: nn.Module, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check_tensors(model)


def test_a_buffer_that_nothing_would_fill_is_named() -> None:
    with torch.device("meta"):
        model = MODELS["buffers"]()
    with pytest.raises(ModelError, match="no checkpoint holds, found positions on the meta device"):
        check_tensors(model)
    model.positions = torch.full((6, 1), 3.0)
    check_tensors(model)


@pytest.mark.parametrize(
    ("cast", "where"),
    [("blocks.1.up", "'blocks.1'"), ("head", "what belongs to no unit")],
)
def test_two_dtypes_in_a_group_are_named(cast: str, where: str) -> None:
    model = build_model("plain")
    model.get_submodule(cast).bfloat16()
    with pytest.raises(ModelError) as caught:
        check_dtypes(model, find_units(model).modules)
    assert f"expected one dtype in {where}, which is gathered in one piece" in str(caught.value)
    assert "torch.float32 (" in str(caught.value)
    assert f"torch.bfloat16 ({cast}." in str(caught.value)


def test_groups_of_different_dtypes_and_frozen_parameters_are_fine() -> None:
    model = build_model("plain")
    model.blocks[0].bfloat16()
    model.blocks[1].up.bfloat16().requires_grad_(False)
    check_dtypes(model, find_units(model).modules)


def _tie_ends(model: TinyModel) -> None:
    model.embedding.weight = model.head.weight


def _tie_block_and_head(model: TinyModel) -> None:
    model.head = nn.Linear(16, 64)
    model.head.weight = model.blocks[1].up.weight


def _tie_blocks(model: TinyModel) -> None:
    model.blocks[2].down.weight = model.blocks[0].down.weight


def _share_a_module(model: TinyModel) -> None:
    model.blocks[2].down = model.blocks[0].down


def _tie_inside_a_block(model: TinyModel) -> None:
    model.blocks[1].other = model.blocks[1].up


TIES: dict[str, tuple[Callable[[TinyModel], None], list[str]]] = {
    "ends": (_tie_ends, ["blocks.0", "blocks.1", "blocks.2"]),
    "block and head": (_tie_block_and_head, ["blocks.0", "blocks.2"]),
    "blocks": (_tie_blocks, ["blocks.1"]),
    "a module of two": (_share_a_module, ["blocks.1"]),
    "inside a block": (_tie_inside_a_block, ["blocks.0", "blocks.1", "blocks.2"]),
}


@pytest.mark.parametrize("tie", TIES)
def test_a_unit_with_a_tie_to_the_outside_goes_with_the_root(tie: str) -> None:
    model = build_model("plain")
    TIES[tie][0](model)
    assert list(separable_units(model, find_units(model))) == TIES[tie][1]


@pytest.mark.parametrize("tie", ["blocks", "a module of two", "inside a block"])
def test_tied_units_train_like_one_process(ranks: RankPool, tie: str) -> None:
    for difference, tied in ranks.run(train_tied, tie):
        assert difference < 1e-6
        assert tied


def train_tied(tie: str) -> tuple[float, bool]:
    """Return the largest difference of a weight to plain training, and whether the tie holds."""
    plain, model = build_model("plain"), build_model("plain")
    for each in (plain, model):
        TIES[tie][0](each)
    config = FSDP2Config().in_full_precision()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    parallelize(model, config, optimizer=optimizers[1])
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for step in range(3):
        batch = global_batch(step)
        for each, share in ((plain, batch), (model, batch.chunk(ranks)[rank])):
            loss_of(each, share).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found, expected = full_state_dict(model, rank0_only=False), plain.state_dict()
    assert found.keys() == expected.keys()
    difference = max((found[n] - v).abs().max().item() for n, v in expected.items())
    aliases = model.named_parameters(remove_duplicate=False)
    return difference, len({id(p) for _, p in aliases}) == len(list(plain.parameters()))


@pytest.mark.parametrize("way", ["empty and load", "load by assignment"])
@pytest.mark.parametrize("model", ["tied", "plain"])
def test_a_model_on_the_meta_device_is_loaded_after_the_wrap(
    ranks: RankPool, model: str, way: str
) -> None:
    for difference in ranks.run(load_after_meta, model, way):
        assert difference < 1e-6


def load_after_meta(name: str, way: str) -> float:
    """Return the largest difference to the plain model after a step of both."""
    plain = build_model(name)
    with torch.device("meta"):
        model = MODELS[name]()
    config = FSDP2Config().in_full_precision()
    parallelize(model, config)
    values = {key: value.clone() for key, value in plain.state_dict().items()}
    if way == "empty and load":
        model.to_empty(device="cpu")
    model.load_state_dict(values, assign=way != "empty and load")
    for each in (plain, model):
        loss_of(each, global_batch(0)).backward()
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    loss_of(model, global_batch(0))  # a forward later the parameters are still the same
    found = full_state_dict(model, rank0_only=False)
    return max((found[n] - v).abs().max().item() for n, v in plain.state_dict().items())


def test_an_optimizer_of_parameters_without_values_is_refused(ranks: RankPool) -> None:
    for message in ranks.run(optimize_meta):
        assert "SGD: expected parameters with values, found some on the meta device" in message


def optimize_meta() -> str:
    with torch.device("meta"):
        model = MODELS["plain"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        parallelize(model, FSDP2Config(), optimizer=optimizer)
    except OptimizerError as error:
        return str(error)
    return "no error"
