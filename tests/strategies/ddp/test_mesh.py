"""DDP takes the data-parallel dimension and refuses every other that has ranks."""

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from polyshard.conformance import RankPool
from polyshard.exceptions import MeshError
from polyshard.strategies.ddp.mesh import data_parallel_group

pytestmark = [pytest.mark.strategy("ddp"), pytest.mark.world_size(2)]

Names = tuple[str, ...] | None


@pytest.mark.parametrize(
    ("shape", "names"),
    [((2,), ("dp",)), ((2,), None), ((2,), ("data",)), ((2, 1), ("dp", "tp"))],
    ids=str,
)
def test_the_replicas_are_the_ranks_of_one_dimension(
    ranks: RankPool, shape: tuple[int, ...], names: Names
) -> None:
    assert ranks.run(group_of, shape, names) == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("shape", "names", "found"),
    [
        ((1, 2), ("dp", "tp"), "{'dp': 1, 'tp': 2}; leave out tp"),
        ((1, 2), ("dp", "pp"), "{'dp': 1, 'pp': 2}; leave out pp"),
        ((1, 2), ("dp", "ep"), "{'dp': 1, 'ep': 2}; leave out ep"),
        ((2,), ("tp",), "{'tp': 2}"),
        ((2, 1), ("dp_replicate", "dp_shard"), "{'dp_replicate': 2, 'dp_shard': 1}"),
        ((1, 2), None, "2 dimensions without names"),
        ((1, 2), ("rows", "columns"), "{'rows': 1, 'columns': 2}"),
    ],
    ids=str,
)
def test_another_dimension_is_refused(
    ranks: RankPool, shape: tuple[int, ...], names: Names, found: str
) -> None:
    for message in ranks.run(group_of, shape, names):
        assert "strategy 'ddp' spreads a model over the mesh dimension 'dp' alone" in str(message)
        assert f"found {found}" in str(message)


def group_of(shape: tuple[int, ...], names: Names) -> list[int] | str:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    try:
        return dist.get_process_group_ranks(data_parallel_group(mesh))
    except MeshError as error:
        return str(error)
