"""The mesh is taken apart by name, in whatever order its dimensions are."""

import pytest
from torch.distributed.device_mesh import init_device_mesh

from polyshard.conformance import RankPool
from polyshard.exceptions import MeshError
from polyshard.strategies.fsdp2.mesh import sharding_mesh

pytestmark = pytest.mark.strategy("fsdp2")

Names = tuple[str, ...] | None


@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    ("shape", "names", "data", "tensor"),
    [
        ((4,), ("dp",), [0, 1, 2, 3], None),
        ((4,), None, [0, 1, 2, 3], None),
        ((4,), ("data",), [0, 1, 2, 3], None),
        ((4, 1), ("dp", "tp"), [0, 1, 2, 3], None),
        ((2, 2), ("dp", "tp"), [0, 2], [0, 1]),
        ((2, 2), ("tp", "dp"), [0, 1], [0, 2]),
        ((2, 2), ("dp", "cp"), [0, 1, 2, 3], None),
        ((2, 2), ("dp_replicate", "dp_shard"), [[0, 1], [2, 3]], None),
        ((2, 2), ("dp_shard", "dp_replicate"), [[0, 2], [1, 3]], None),
        ((2, 1, 2), ("dp_replicate", "dp_shard", "cp"), [[0, 1], [2, 3]], None),
        ((1, 2, 2), ("pp", "dp", "tp"), [0, 2], [0, 1]),
    ],
    ids=str,
)
def test_shards_replicas_and_parts(
    ranks: RankPool, shape: tuple[int, ...], names: Names, data: object, tensor: object
) -> None:
    assert ranks.run(parts_of, shape, names)[0] == (data, tensor)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("shape", "names", "found"),
    [
        ((1, 2), ("dp", "pp"), "{'dp': 1, 'pp': 2}"),
        ((1, 2), ("dp", "ep"), "{'dp': 1, 'ep': 2}"),
        ((1, 2), ("shard", "rep"), "{'shard': 1, 'rep': 2}"),
        ((1, 2), ("dp", "dp_shard"), "{'dp': 1, 'dp_shard': 2}"),
        ((1, 2), None, "2 dimensions without names"),
        ((2,), ("tp",), "{'tp': 2}"),
    ],
    ids=str,
)
def test_what_cannot_be_sharded_over_is_refused(
    ranks: RankPool, shape: tuple[int, ...], names: Names, found: str
) -> None:
    for message in ranks.run(parts_of, shape, names):
        assert "strategy 'fsdp2' shards over the mesh dimension 'dp'" in str(message)
        assert f"found {found}" in str(message)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("shard", ["dp", "dp_shard"])
def test_a_dimension_that_was_flattened_of_other_ranks_is_refused(
    ranks: RankPool, shard: str
) -> None:
    for message in ranks.run(flatten_wrongly, shard):
        assert f"'{shard}_cp' to have the 4 ranks of {shard} x cp, found another" in message


def flatten_wrongly(shard: str) -> str:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=(shard, "cp", "tp"))
    mesh["cp", "tp"]._flatten(f"{shard}_cp")
    try:
        sharding_mesh(mesh)
    except MeshError as error:
        return str(error)
    return "no error"


def parts_of(shape: tuple[int, ...], names: Names) -> tuple[object, object] | str:
    try:
        parts = sharding_mesh(init_device_mesh("cpu", shape, mesh_dim_names=names))
    except MeshError as error:
        return str(error)
    tensor = None if parts.tensor is None else parts.tensor.mesh.tolist()
    return parts.data.mesh.tolist(), tensor
