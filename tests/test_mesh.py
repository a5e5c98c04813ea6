"""Sizes multiply to the ranks or the error names each, and the mesh has its axes by name."""

from typing import Any

import pytest

from polyshard import MeshAxisName, MeshContext, ParallelismSizes
from polyshard.conformance.pool import RankPool
from polyshard.exceptions import ConfigError, MeshError


@pytest.mark.parametrize(
    "name",
    ["dp_size", "dp_replicate_size", "tp_size", "pp_size", "cp_size", "ep_size"],
)
@pytest.mark.parametrize("value", [0, -2, True, 2.0, "2"])
def test_a_size_is_a_positive_int(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"ParallelismSizes.{name} .* an integer of at least 1"):
        ParallelismSizes(**{name: value})


@pytest.mark.parametrize(
    ("sizes", "world", "dp"),
    [
        ({}, 1, 1),
        ({}, 8, 8),
        ({"tp_size": 2}, 8, 4),
        ({"tp_size": 2, "cp_size": 2}, 4, 1),
        ({"dp_size": 4, "dp_replicate_size": 2, "tp_size": 2}, 8, 4),
    ],
)
def test_the_data_parallel_size_is_inferred(sizes: dict[str, int], world: int, dp: int) -> None:
    assert ParallelismSizes(**sizes).resolve(world).dp_size == dp


@pytest.mark.parametrize(
    ("sizes", "world"),
    [
        ({"tp_size": 3}, 8),
        ({"tp_size": 16}, 8),
        ({"dp_size": 4}, 8),
        ({"dp_size": 4, "tp_size": 4}, 8),
        ({"dp_replicate_size": 3}, 8),
    ],
)
def test_sizes_that_do_not_fit_are_all_named(sizes: dict[str, int], world: int) -> None:
    with pytest.raises(MeshError) as caught:
        ParallelismSizes(**sizes).resolve(world)
    message = str(caught.value)
    assert f"the {world} ranks of the job" in message
    for name, size in sizes.items():
        assert f"{name}={size}" in message


@pytest.mark.parametrize(
    ("sizes", "axes"),
    [
        ({"dp_size": 1}, {"dp": 1}),
        ({"dp_size": 2, "tp_size": 2, "cp_size": 2}, {"dp": 2, "cp": 2, "tp": 2}),
        ({"dp_size": 4, "dp_replicate_size": 2}, {"dp_replicate": 2, "dp_shard": 2}),
        ({"dp_size": 2, "dp_replicate_size": 2}, {"dp_replicate": 2, "dp_shard": 1}),
        ({"dp_size": 2, "dp_replicate_size": 1, "pp_size": 2}, {"pp": 2, "dp": 2}),
    ],
)
def test_axes_come_in_a_fixed_order_without_those_of_one_rank(
    sizes: dict[str, int], axes: dict[str, int]
) -> None:
    assert list(ParallelismSizes(**sizes).axes().items()) == list(axes.items())


def test_axis_names_equal_their_strings() -> None:
    assert MeshAxisName.DP_SHARD == "dp_shard"
    assert {MeshAxisName.DP: 1}["dp"] == 1


def test_without_a_mesh_every_axis_has_one_rank_and_dp_is_unknown() -> None:
    context = MeshContext.build(ParallelismSizes())
    assert context.mesh is None
    assert context.size("tp") == 1
    assert context.size("dp") is None


def test_an_unknown_axis_is_refused() -> None:
    with pytest.raises(MeshError, match=r"one of the mesh axes pp, dp, .* found 'shard'"):
        MeshContext().size("shard")


def built(sizes: dict[str, int]) -> dict[str, Any]:
    context = MeshContext.build(ParallelismSizes(**sizes))
    assert context.mesh is not None
    return {
        "device": context.mesh.device_type,
        "names": context.mesh.mesh_dim_names,
        "dp": context.size("dp"),
        "dp_shard": context.size(MeshAxisName.DP_SHARD),
        "tp": context.size("tp"),
        "ranks": context.mesh.mesh.tolist(),
    }


@pytest.mark.world_size(4)
def test_a_mesh_of_two_kinds_of_data_parallelism(ranks: RankPool) -> None:
    expected = {
        "device": "cpu",
        "names": ("dp_replicate", "dp_shard"),
        "dp": 4,
        "dp_shard": 2,
        "tp": 1,
        "ranks": [[0, 1], [2, 3]],
    }
    assert ranks.run(built, {"dp_replicate_size": 2}) == [expected] * 4


def test_a_mesh_over_all_ranks(ranks: RankPool, world_size: int) -> None:
    (first, *_) = ranks.run(built, {})
    assert first["names"] == ("dp",)
    assert first["ranks"] == list(range(world_size))
