"""Which dimensions of the mesh hold shards, replicas and tensor-parallel parts."""

from __future__ import annotations

from attrs import frozen
from torch.distributed.device_mesh import DeviceMesh

from polyshard.config.parallelism import MeshAxisName as Axis
from polyshard.exceptions import MeshError
from polyshard.mesh.context import MeshContext
from polyshard.mesh.devices import axis_sizes

__all__ = ["ShardingMesh", "sharding_mesh"]

_SUPPORTED = (Axis.DP, Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.CP, Axis.TP)


@frozen
class ShardingMesh:
    """The parts of a mesh that ``fully_shard`` and tensor parallelism get.

    Attributes:
        data: One dimension of shards, or two: replicas first, shards second.
        tensor: The tensor-parallel dimension; None without one or with a single rank in it.
    """

    data: DeviceMesh
    tensor: DeviceMesh | None


def sharding_mesh(mesh: DeviceMesh) -> ShardingMesh:
    """Take a mesh apart by the names of its dimensions, in whatever order they are.

    Context-parallel ranks hold the same weights as data-parallel ones and share in their shards.

    Raises:
        MeshError: A dimension is not one that FSDP2 knows, there is none to shard over, or a
            flattened one has other ranks than its parts.
    """
    names = axis_sizes(mesh)
    unknown = [name for name in names if name not in _SUPPORTED and names[name] > 1]
    shard = next((name for name in (Axis.DP_SHARD, Axis.DP) if name in names), None)
    if unknown or shard is None or (Axis.DP_SHARD in names and Axis.DP in names):
        raise MeshError(
            "strategy 'fsdp2' shards over the mesh dimension 'dp', or 'dp_shard' with "
            "'dp_replicate', and takes 'cp' and 'tp' beside it; found "
            f"{names or f'{mesh.ndim} dimensions without names'}"
        )
    if mesh.ndim == 1:
        return ShardingMesh(mesh, None)
    data = mesh[shard]
    if names.get(Axis.CP, 1) > 1:
        # A rank that the mesh leaves out has no part in it.
        data = MeshContext(mesh).submesh(Axis.DP_SHARD_CP) or data
    if Axis.DP_REPLICATE in names:
        # fully_shard takes the first dimension for the replicas, whatever it is called.
        data = DeviceMesh._concatenate([mesh[Axis.DP_REPLICATE], data])
    tensor = mesh[Axis.TP] if names.get(Axis.TP, 1) > 1 else None
    return ShardingMesh(data, tensor)
