"""Units are found in the model or named by the user, and what cannot be one is refused."""

import logging

import pytest
import torch
from torch import nn

from polyshard import parallelize, resolve_config
from polyshard.conformance import RankPool
from polyshard.conformance.models import build_model
from polyshard.exceptions import UnitError
from polyshard.transforms.units import UnitSpec, find_units


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.activation = nn.ReLU()


class WideBlock(Block):
    pass


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.short = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])


NAMES = ("blocks.0", "blocks.1", "blocks.2")


@pytest.mark.parametrize(
    "spec", [None, Block, "Block", f"{__name__}.Block", ["Block"], (Block, "Block")]
)
def test_a_class_is_found_or_named_in_any_way(spec: UnitSpec | None) -> None:
    report = find_units(Network(), spec)
    assert report.names == NAMES
    assert report.counts == {f"{__name__}.Block": 3}
    assert str(report) == f"3 x {__name__}.Block"


def test_several_classes_are_units_beside_each_other() -> None:
    report = find_units(Network(), [Block, nn.Embedding])
    assert report.names == ("embedding", *NAMES)


def test_a_class_means_its_subclasses_but_a_name_does_not() -> None:
    model = nn.Sequential(WideBlock(), Block())
    assert find_units(model, Block).names == ("0", "1")
    assert find_units(model, "Block").names == ("1",)


class Elsewhere:
    class Block(Block):
        """Another class of the same name."""


def test_a_name_of_two_classes_means_both_and_their_paths_tell_them_apart() -> None:
    model = nn.Sequential(Block(), Elsewhere.Block(), Elsewhere.Block())
    report = find_units(model, "Block")
    assert str(report) == f"1 x {__name__}.Block, 2 x {__name__}.Elsewhere.Block"
    assert find_units(model, f"{__name__}.Elsewhere.Block").names == ("1", "2")
    assert find_units(model, f"{__name__}.Block").names == ("0",)


def test_what_the_model_declares_comes_first() -> None:
    model = Network()
    model._no_split_modules = ["Embedding", "NotInThisOne"]  # type: ignore[assignment]
    assert find_units(model).names == ("embedding",)


def test_of_nested_declarations_the_outer_ones_are_units() -> None:
    model = Network()
    model._no_split_modules = ["Block", "Attention"]  # type: ignore[assignment]
    assert find_units(model).names == NAMES


def test_a_block_that_is_used_twice_is_one_unit() -> None:
    block = Block()
    model = nn.Sequential(block, block, Block())
    assert find_units(model).names == ("0", "2")


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
        nn.Sequential(nn.ReLU(), nn.ReLU()),
    ],
    ids=["one layer", "no two alike", "no parameters"],
)
def test_a_model_without_repeated_blocks_has_no_units(model: nn.Module) -> None:
    report = find_units(model)
    assert report.modules == {}
    assert str(report) == "no repeated block"


@pytest.mark.parametrize("spec", ["Blok", nn.Conv2d, [Block, "Blok"], "tests.other.Block"])
def test_a_class_without_instances_is_refused_with_those_that_exist(spec: UnitSpec) -> None:
    with pytest.raises(UnitError, match="none of them has") as caught:
        find_units(Network(), spec)
    assert f"{__name__}.Block (3)" in str(caught.value)
    assert f"{__name__}.Attention (3)" in str(caught.value)


def test_a_unit_inside_a_unit_is_refused() -> None:
    with pytest.raises(UnitError, match=r"'blocks\.0\.attention' .* inside 'blocks\.0'"):
        find_units(Network(), [Block, Attention])


def test_a_unit_without_parameters_is_refused() -> None:
    with pytest.raises(UnitError, match=r"'blocks\.0\.activation' .* and 2 others that own none"):
        find_units(Network(), nn.ReLU)


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(UnitError, match="at least one module class"):
        find_units(Network(), [])


def told_at_the_wrap(strategy: str) -> str:
    """Return what the loggers of the strategies say at the level INFO."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("polyshard", "polyshard_megatron_fsdp")]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        parallelize(build_model("plain"), resolve_config(strategy))
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
            logger.setLevel(logging.NOTSET)
    return "\n".join(heard)


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(name, marks=pytest.mark.strategy(name)) for name in ("fsdp2", "megatron_fsdp")],
)
@pytest.mark.world_size(2)
def test_what_a_strategy_found_is_told(ranks: RankPool, strategy: str) -> None:
    for told in ranks.run(told_at_the_wrap, strategy):
        assert "3 x polyshard.conformance.models.Block" in told
