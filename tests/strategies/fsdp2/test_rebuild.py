"""Shards are rebuilt from full tensors, from shards laid out otherwise, and with TP beside."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from polyshard import FSDP2Config, full_state_dict, parallelize, rebuild
from polyshard.conformance import RankPool
from polyshard.conformance.models import build_model

pytestmark = [pytest.mark.strategy("fsdp2"), pytest.mark.world_size(4)]


@pytest.mark.parametrize("layout", ["full", "own", "columns", "other mesh"])
@pytest.mark.parametrize("names", [("dp",), ("dp", "tp"), ("dp_replicate", "dp_shard")], ids=str)
def test_a_value_may_come_in_any_layout(
    ranks: RankPool, layout: str, names: tuple[str, ...]
) -> None:
    assert all(ranks.run(replace, layout, names))


def replace(layout: str, names: tuple[str, ...]) -> bool:
    """Tell whether the same object holds the new value."""
    shape = (4,) if len(names) == 1 else (2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"} if "tp" in names else None
    config = FSDP2Config(tp_plan=plan).in_full_precision()
    model = build_model("plain")
    parallelize(model, config, mesh=mesh)
    layer = model.blocks[0].up
    kept = layer.weight
    assert isinstance(kept, DTensor)
    value = torch.randn(64, 16, generator=torch.Generator().manual_seed(3))
    with rebuild(model):
        layer.weight = nn.Parameter(_laid_out(value, layout, kept))
        assert layer.weight is not kept
    return layer.weight is kept and torch.equal(
        full_state_dict(model, rank0_only=False)["blocks.0.up.weight"], value
    )


def _laid_out(value: torch.Tensor, layout: str, like: DTensor) -> torch.Tensor:
    if layout == "full":
        return value
    if layout == "own":
        return distribute_tensor(value, like.device_mesh, like.placements)
    if layout == "columns":
        others = [Replicate()] * (like.device_mesh.ndim - 1)
        return distribute_tensor(value, like.device_mesh, [*others, Shard(1)])
    return distribute_tensor(value, init_device_mesh("cpu", (4,)), [Shard(0)])
