"""Which dimensions of a device mesh shard, replicate and split the model."""

from __future__ import annotations

from attrs import frozen
from torch.distributed.device_mesh import DeviceMesh

from polyshard.discovery import describe_owner
from polyshard.exceptions import MeshError, UnsupportedError

__all__ = ["Topology", "topology_of"]

_OUTER = ("dp_outer", "dp_replicate")
_SHARD = ("dp_shard_cp", "dp_cp", "dp_shard", "dp")
_CONTEXT, _TENSOR = "cp", "tp"
_UNUSED = ("ep", "ep_shard")


@frozen
class Topology:
    """The dimensions of a mesh by what the strategy does along them.

    Attributes:
        mesh: The mesh.
        shard: Name of the dimension over which the model is sharded; it may be a flattened one.
        outer: Name of the dimension of the replicas (HSDP), None with a single one.
        tensor: Name of the tensor-parallel dimension, None without one.
    """

    mesh: DeviceMesh
    shard: str
    outer: str | None
    tensor: str | None

    @property
    def data_parallel_size(self) -> int:
        """How many ranks see different data: those of the shard and the outer dimension."""
        outer = self.mesh[self.outer].size() if self.outer else 1
        return self.mesh[self.shard].size() * outer


def topology_of(mesh: DeviceMesh) -> Topology:
    """Find the dimensions by their names; the order does not matter.

    ``dp`` or ``dp_shard`` shards, together with ``cp`` where there is one; ``dp_replicate`` (or
    ``dp_outer``) replicates; ``tp`` splits modules.

    Raises:
        MeshError: No dimension is there to shard over, or a flattened one has another size
            than its parts.
        UnsupportedError: The mesh has an expert-parallel dimension.
    """
    names = mesh.mesh_dim_names or ()
    sizes = {name: mesh.size(dim) for dim, name in enumerate(names)}
    _refuse_experts(sizes)
    parts = _shard_parts(sizes)
    return Topology(
        mesh=mesh,
        shard=parts[0] if len(parts) == 1 else _flattened(mesh, parts),
        outer=next((name for name in _OUTER if sizes.get(name, 1) > 1), None),
        tensor=_TENSOR if _TENSOR in sizes else None,
    )


def _shard_parts(sizes: dict[str, int]) -> tuple[str, ...]:
    shard = next((name for name in _SHARD if name in sizes), None)
    if shard is None:
        raise MeshError(
            f"{describe_owner(topology_of)}: expected a mesh with one of the dimensions "
            f"{', '.join(_SHARD)}, found {', '.join(sizes) or 'dimensions without names'}; "
            "name the data-parallel dimension 'dp'"
        )
    if sizes.get(_CONTEXT, 1) > 1 and not shard.endswith(_CONTEXT):
        return (shard, _CONTEXT)
    return (shard,)


def _flattened(mesh: DeviceMesh, parts: tuple[str, ...]) -> str:
    """Return the name of the flattened dimension of some parts, made if it is not there yet."""
    name = "_".join(parts)
    # A flattened dimension is not in mesh_dim_names; asking for it by name is how to find out.
    try:
        flat = mesh[name]
    except KeyError:
        flat = mesh[parts]._flatten(name)
    expected = mesh[parts].size()
    if flat.size() != expected:
        raise MeshError(
            f"{describe_owner(topology_of)}: expected the flattened dimension {name!r} to have "
            f"the {expected} ranks of {' x '.join(parts)}, found {flat.size()}"
        )
    return name


def _refuse_experts(sizes: dict[str, int]) -> None:
    for name in _UNUSED:
        if sizes.get(name, 1) > 1:
            raise UnsupportedError(
                f"{describe_owner(topology_of)}: expert parallelism is not supported, found a "
                f"mesh with {name}={sizes[name]}; leave the dimension out"
            )
