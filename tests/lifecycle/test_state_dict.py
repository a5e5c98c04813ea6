"""Loading what the first rank has; that training goes on right after it is a part of the kit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import polyshard.lifecycle.state_dict
from polyshard import DistributedSetup, full_state_dict, load_full_state_dict, parallelize
from polyshard.conformance import RankPool
from polyshard.conformance.models import build_model
from polyshard.exceptions import ModelError, PolyshardError
from polyshard.registry.resolve import resolve_config

each_strategy = pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=pytest.mark.strategy(name))
        for name in ("ddp", "fsdp2", "megatron_fsdp")
    ],
)


def new_values() -> dict[str, Tensor]:
    return {name: v.clone() for name, v in build_model("tied", seed=1).state_dict().items()}


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], value) for name, value in expected.items()
    )


def load_in_chunks(strategy: str, sizes: dict[str, int], bytes_: int) -> bool:
    """Load in pieces of limited size what the first rank has; return whether it is there then."""
    setup = DistributedSetup.build(strategy, sizes)
    model, _ = setup.parallelize(build_model("tied"))
    whole = polyshard.lifecycle.state_dict._CHUNK_BYTES
    polyshard.lifecycle.state_dict._CHUNK_BYTES = bytes_
    try:
        setup.load_full_state_dict(model, new_values() if dist.get_rank() == 0 else None)
    finally:
        polyshard.lifecycle.state_dict._CHUNK_BYTES = whole
    return equal(setup.full_state_dict(model, rank0_only=False), new_values())


@each_strategy
@pytest.mark.parametrize("bytes_", [1, 5_000])
@pytest.mark.world_size(2)
def test_a_rank_holds_a_part_at_a_time(ranks: RankPool, strategy: str, bytes_: int) -> None:
    assert all(ranks.run(load_in_chunks, strategy, {}, bytes_))


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("fsdp2", marks=pytest.mark.strategy("fsdp2")),
        pytest.param("megatron_fsdp", marks=pytest.mark.strategy("megatron_fsdp")),
    ],
)
@pytest.mark.parametrize("sizes", [{"dp_replicate_size": 2}, {"cp_size": 2}], ids=["HSDP", "CP"])
@pytest.mark.world_size(4)
def test_all_dimensions_of_a_mesh_are_reached(
    ranks: RankPool, strategy: str, sizes: dict[str, int]
) -> None:
    assert all(ranks.run(load_in_chunks, strategy, sizes, 2**20))


def load_on_a_mesh_of_some(strategy: str) -> bool:
    """Load on ranks 1 and 2 of three what rank 1 has."""
    setup = DistributedSetup.build(strategy, ranks=[1, 2])
    if dist.get_rank() not in (1, 2):
        return True
    model, _ = setup.parallelize(build_model("tied"))
    setup.load_full_state_dict(model, new_values() if dist.get_rank() == 1 else None)
    return equal(setup.full_state_dict(model, rank0_only=False), new_values())


@pytest.mark.strategy("fsdp2")
def test_the_first_rank_is_that_of_the_mesh() -> None:
    with RankPool(3) as ranks:
        assert all(ranks.run(load_on_a_mesh_of_some, "fsdp2"))


def load_wrong(strategy: str, mistake: str) -> tuple[str, bool]:
    """Return the error and whether the model kept its values."""
    config = resolve_config(strategy).in_full_precision()
    model, _ = parallelize(build_model("tied"), config)
    before = full_state_dict(model, rank0_only=False)
    values = dict(new_values())
    given: object = values
    match mistake:
        case "missing":
            del values["blocks.0.up.weight"]
        case "unknown":
            values["tail.weight"] = values["head.weight"]
        case "resized":
            values["blocks.0.up.bias"] = torch.zeros(3)
        case "no tensor":
            values["blocks.0.up.bias"] = 3.0  # type: ignore[assignment]
        case "nothing":
            given = None
    try:
        load_full_state_dict(model, given if dist.get_rank() == 0 else new_values())  # type: ignore[arg-type]
    except PolyshardError as error:
        return f"{type(error).__name__}: {error}", equal(
            full_state_dict(model, rank0_only=False), before
        )
    return "loaded", False


@each_strategy
@pytest.mark.parametrize(
    ("mistake", "expected"),
    [
        ("missing", "found no 'blocks.0.up.weight'"),
        ("unknown", "found 'tail.weight', which the model lacks"),
        ("resized", "found 'blocks.0.up.bias' of [3] where the model has [64]"),
        ("no tensor", "found 3.0 (float) for 'blocks.0.up.bias'"),
        ("nothing", "on the first rank, found None"),
    ],
)
@pytest.mark.world_size(2)
def test_every_rank_is_told_what_does_not_fit(
    ranks: RankPool, strategy: str, mistake: str, expected: str
) -> None:
    for message, kept in ranks.run(load_wrong, strategy, mistake):
        assert message.startswith("ModelError: load_full_state_dict: expected")
        assert expected in message
        assert kept


def test_a_plain_model_is_loaded() -> None:
    model = build_model("tied")
    load_full_state_dict(model, new_values())
    assert equal(dict(model.state_dict()), new_values())


def test_names_are_listed_up_to_a_few() -> None:
    values = {f"other.{index}": torch.zeros(1) for index in range(20)}
    with pytest.raises(ModelError, match=r"found no .*, \.\.\.; load a part"):
        load_full_state_dict(build_model("tied"), values)
