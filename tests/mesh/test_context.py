"""Sizes multiply to the ranks or the error names each, and the mesh has its axes by name."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

import polyshard
from polyshard import MeshAxisName, MeshContext, ParallelismSizes
from polyshard.conformance import RankPool, RanksFailed
from polyshard.exceptions import ConfigError, MeshError
from polyshard.mesh.process_groups import group_timeout


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
    assert context.size("tp") == context.tp_size == context.dp_shard_size == 1
    assert context.size("dp") is context.dp_size is None
    assert context.submesh("dp_cp") is context.group("tp") is None


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


def sizes_and_members(sizes: dict[str, int]) -> tuple[dict[str, int | None], dict[str, list[int]]]:
    context = MeshContext.build(ParallelismSizes(**sizes))
    properties = ("dp", "dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")
    members = {
        axis.value: dist.get_process_group_ranks(group)
        for axis in MeshAxisName
        if (group := context.group(axis)) is not None
    }
    for axis, ranks in members.items():
        assert context.size(axis) == len(ranks), axis
    return {name: getattr(context, f"{name}_size") for name in properties}, members


@pytest.mark.world_size(4)
def test_flattened_dimensions_resolve_by_name_to_the_product(ranks: RankPool) -> None:
    sizes, members = ranks.run(sizes_and_members, {"cp_size": 2})[3]
    one = {"dp_replicate": 1, "tp": 1, "pp": 1, "ep": 1}
    assert sizes == one | {"dp": 2, "dp_shard": 2, "cp": 2}
    everyone = [0, 1, 2, 3]
    assert members == {
        "dp": [1, 3],
        "dp_shard": [1, 3],
        "cp": [2, 3],
        "dp_cp": everyone,
        "dp_shard_cp": everyone,
    }


@pytest.mark.world_size(4)
def test_replicas_and_shards_together_are_the_data_parallel_ranks(ranks: RankPool) -> None:
    sizes, members = ranks.run(sizes_and_members, {"dp_replicate_size": 2})[3]
    assert (sizes["dp"], sizes["dp_replicate"], sizes["dp_shard"]) == (4, 2, 2)
    assert members["dp"] == members["dp_cp"] == [0, 1, 2, 3]
    assert members["dp_shard"] == members["dp_shard_cp"] == [2, 3]
    assert members["dp_replicate"] == [1, 3]


def flatten_wrongly() -> None:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    mesh["cp", "tp"]._flatten("dp_cp")
    assert MeshContext(mesh).group("dp_cp") == mesh.get_group("cp")
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "cp", "tp"))
    mesh["cp", "tp"]._flatten("dp_cp")
    with pytest.raises(MeshError, match="'dp_cp' to have the 4 ranks of dp x cp, found another"):
        MeshContext(mesh).submesh("dp_cp")


@pytest.mark.world_size(4)
def test_a_flattened_dimension_of_other_ranks_is_refused(ranks: RankPool) -> None:
    ranks.run(flatten_wrongly)


def count_groups(sizes: dict[str, int]) -> tuple[int, int]:
    counts = []
    for _ in range(2):
        before = len(distributed_c10d._world.pg_map)
        MeshContext.build(ParallelismSizes(**sizes))
        counts.append(len(distributed_c10d._world.pg_map) - before)
    return counts[0], counts[1]


@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    ("sizes", "made"),
    [
        ({}, 0),
        ({"tp_size": 4}, 1),  # dp has one rank
        ({"dp_size": 1, "cp_size": 4}, 0),  # the same group of one rank
        ({"pp_size": 4}, 0),
        ({"tp_size": 2}, 2),
        ({"cp_size": 2}, 0),  # dp_cp is all ranks
        ({"dp_replicate_size": 2}, 0),
        ({"pp_size": 2, "tp_size": 2}, 0),
    ],
)
def test_groups_are_made_once(fresh_ranks: RankPool, sizes: dict[str, int], made: int) -> None:
    assert fresh_ranks.run(count_groups, sizes) == [(made, 0)] * 4


@pytest.fixture(scope="module")
def fresh_ranks() -> Iterator[RankPool]:
    """Ranks that have made no groups but those of the tests that use them, in their order."""
    with RankPool(4) as pool:
        yield pool


def timeouts_of(sizes: dict[str, int], minutes: float | None) -> set[timedelta | None]:
    timeout = None if minutes is None else timedelta(minutes=minutes)
    MeshContext.build(ParallelismSizes(**sizes), timeout=timeout)
    return {group_timeout(group) for group in distributed_c10d._world.pg_map}


@pytest.mark.world_size(4)
def test_one_timeout_reaches_every_group(ranks: RankPool) -> None:
    for minutes in (3, 7):
        found = ranks.run(timeouts_of, {"dp_replicate_size": 2}, minutes)
        assert found == [{timedelta(minutes=minutes)}] * 4
    # Without one of its own, a mesh has that of the job.
    assert (
        ranks.run(timeouts_of, {"tp_size": 2, "cp_size": 2}, None) == [{timedelta(minutes=7)}] * 4
    )


def wait_alone() -> str | None:
    context = MeshContext.build(ParallelismSizes(), timeout=timedelta(seconds=1))
    outcome = None
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(1), group=context.group("dp"))
        outcome = str(caught.value)
    dist.distributed_c10d._get_default_store().set_timeout(timedelta(minutes=1))
    ends = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        ends.set("waited", "")
    ends.wait(["waited"])
    return outcome


def test_a_collective_waits_no_longer_than_the_timeout() -> None:
    with RankPool(2) as own:
        assert "Timed out waiting 1000ms" in str(own.run(wait_alone)[0])


def part_of_the_ranks(sizes: dict[str, int]) -> tuple[Any, ...]:
    context = MeshContext.build(ParallelismSizes(**sizes), ranks=(3, 0))
    group = context.group("tp")
    return context.tp_size, None if group is None else dist.get_process_group_ranks(group)


@pytest.mark.world_size(4)
def test_a_mesh_covers_the_ranks_that_it_is_given(ranks: RankPool) -> None:
    outside = (2, None)
    inside = (2, [0, 3])
    answers = ranks.run(part_of_the_ranks, {"tp_size": 2})
    assert answers == [inside, outside, outside, inside]
    for axis in ("cp", "dp_replicate"):
        with pytest.raises(RanksFailed, match=r"UnsupportedError.* on 2 of the job's 4 ranks"):
            ranks.run(part_of_the_ranks, {f"{axis}_size": 2})


@pytest.mark.parametrize("ranks", [[], [0, 0], [1], [-1], [True], ["0"], [0.0]])
def test_ranks_that_do_not_exist_are_refused(ranks: list[Any]) -> None:
    with pytest.raises(MeshError, match="different integers from 0 to 0, found"):
        MeshContext.build(ParallelismSizes(), ranks=ranks)


def test_one_of_several_processes_needs_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    for name, value in {**place, "MASTER_ADDR": "localhost", "MASTER_PORT": "12345"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MeshError, match=r"rank 1 of 2; found none; call .*init_process_group"):
        polyshard.parallelize(nn.Linear(2, 2), polyshard.DDPConfig())
