"""Which dimensions of a device mesh shard, replicate and split the model."""

from __future__ import annotations

from attrs import frozen
from torch.distributed.device_mesh import DeviceMesh

from polyshard.exceptions import MeshError, UnsupportedError
from polyshard.mesh.devices import axis_sizes
from polyshard_megatron_fsdp.megatron_fsdp.private_names import concatenate, flatten
from polyshard_megatron_fsdp.megatron_fsdp.version import WHO

__all__ = ["Topology", "topology_of"]

_OUTER = ("dp_outer", "dp_replicate")
_SHARD = ("dp_shard_cp", "dp_cp", "dp_shard", "dp")
_CONTEXT, _TENSOR = "cp", "tp"
_UNUSED = {"pp": "pipeline", "ep": "expert", "ep_shard": "expert"}


@frozen
class Topology:
    """The dimensions of a mesh by what the strategy does along them.

    Attributes:
        mesh: Its dimensions in the order outer, shard, tensor, as far as they are there.
        shard: Name of the dimension over which the model is sharded.
        outer: Name of the dimension of the replicas (HSDP), None with a single one.
        tensor: Name of the tensor-parallel dimension, None without one.
        data: All data-parallel ranks, in one dimension.
    """

    mesh: DeviceMesh
    shard: str
    outer: str | None
    tensor: str | None
    data: DeviceMesh

    def tensor_mesh(self) -> DeviceMesh | None:
        """Return the tensor-parallel dimension, None for one with a single rank or without."""
        mesh = self.mesh[self.tensor] if self.tensor else None
        return mesh if mesh is not None and mesh.size() > 1 else None


def topology_of(mesh: DeviceMesh) -> Topology:
    """Find the dimensions by their names; the order does not matter.

    ``dp`` or ``dp_shard`` shards, together with ``cp`` where there is one; ``dp_replicate`` (or
    ``dp_outer``) replicates; ``tp`` splits modules.

    Raises:
        MeshError: No dimension is there to shard over, or a flattened one has another size
            than its parts.
        UnsupportedError: The mesh has a pipeline- or expert-parallel dimension.
    """
    sizes = axis_sizes(mesh)
    if mesh.ndim == 1 and tuple(sizes) != mesh.mesh_dim_names:
        # megatron-fsdp finds dimensions by name; the one of this mesh has none, or any.
        mesh = DeviceMesh.from_group(
            mesh.get_group(), mesh.device_type, mesh_dim_names=tuple(sizes)
        )
    _refuse_unused(sizes)
    parts = _shard_parts(sizes)
    outer = next((name for name in _OUTER if sizes.get(name, 1) > 1), None)
    tensor = _TENSOR if _TENSOR in sizes else None
    shard = mesh[parts[0]] if len(parts) == 1 else _flatten(mesh, parts)
    dimensions = [shard, *(mesh[name] for name in (tensor,) if name)]
    if outer is not None:
        dimensions.insert(0, mesh[outer])
    ordered = dimensions[0] if len(dimensions) == 1 else concatenate(dimensions)
    return Topology(
        mesh=ordered,
        shard="_".join(parts),
        outer=outer,
        tensor=tensor,
        data=shard if outer is None else _flatten(ordered, (outer, "_".join(parts))),
    )


def _shard_parts(sizes: dict[str, int]) -> tuple[str, ...]:
    shard = next((name for name in _SHARD if name in sizes), None)
    if shard is None:
        raise MeshError(
            f"{WHO}: expected a mesh with one of the dimensions "
            f"{', '.join(_SHARD)}, found {', '.join(sizes) or 'dimensions without names'}; "
            "name the data-parallel dimension 'dp'"
        )
    if sizes.get(_CONTEXT, 1) > 1 and not shard.endswith(_CONTEXT):
        return (shard, _CONTEXT)
    return (shard,)


def _flatten(mesh: DeviceMesh, parts: tuple[str, ...]) -> DeviceMesh:
    """Make one dimension of several; one that was flattened before is used again.

    Raises:
        MeshError: The one from before has other ranks.
    """
    name = "_".join(parts)
    try:
        return flatten(mesh[parts], name)
    except ValueError as error:
        raise MeshError(
            f"{WHO}: expected the flattened dimension {name!r} to have "
            f"the {mesh[parts].size()} ranks of {' x '.join(parts)}, found another; flatten those "
            "dimensions under this name, or leave it to parallelize"
        ) from error


def _refuse_unused(sizes: dict[str, int]) -> None:
    for name, kind in _UNUSED.items():
        if sizes.get(name, 1) > 1:
            raise UnsupportedError(
                f"strategy 'megatron_fsdp' ({WHO}): {kind} parallelism is not supported, found a "
                f"mesh with {name}={sizes[name]}; leave the dimension out"
            )
