"""Parallelism sizes, and the device mesh that they make."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from attrs import frozen

from polyshard.config.parallelism import MeshAxisName, ParallelismSizes
from polyshard.exceptions import MeshError, UnsupportedError
from polyshard.mesh.devices import device_type
from polyshard.processes.environment import read_launch_environment

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["MeshContext", "world_mesh"]


@frozen
class MeshContext:
    """The live mesh of a job, None in a process without a process group.

    Attributes:
        mesh: The device mesh, its dimensions named by ``MeshAxisName``.
    """

    mesh: DeviceMesh | None = None

    @classmethod
    def build(
        cls,
        sizes: ParallelismSizes,
        *,
        device: str | None = None,
        ranks: Iterable[int] | None = None,
        timeout: timedelta | None = None,
    ) -> MeshContext:
        """Make the mesh of these sizes; call it on every rank of the job.

        The dimensions that the sizes imply (``dp`` of replicas and shards, ``dp_cp`` and
        ``dp_shard_cp`` with context parallelism) are made with it. Groups of one rank and of all
        ranks, and those of earlier meshes, are used again.

        Args:
            sizes: Resolved or not.
            device: Type of the device, such as ``"cpu"`` (default: by the job's backend).
            ranks: Global ranks that the mesh covers (default: all). On the others it has no
                coordinate and no groups. A mesh of some ranks has neither replicas nor context
                parallelism: flattening dimensions takes every rank of the job.
            timeout: Of every process group of this process from now on (default: that of the
                job's default group).

        Raises:
            MeshError: The sizes do not multiply to the number of ranks, or a rank does not exist
                or is given twice.
            UnsupportedError: Replicas or context parallelism over some of the ranks.
        """
        import torch.distributed as dist

        from polyshard.mesh.process_groups import one_timeout

        job_size = dist.get_world_size() if dist.is_initialized() else 1
        covered = covered_ranks(ranks, job_size)
        axes = sizes.resolve(len(covered)).axes()
        if len(covered) < job_size and axes.keys() & {MeshAxisName.DP_REPLICATE, MeshAxisName.CP}:
            raise UnsupportedError(
                f"expected dp_replicate_size and cp_size of 1 on {len(covered)} of the job's "
                f"{job_size} ranks, found {sizes._listed()}; leave them out, or cover all ranks"
            )
        if not dist.is_initialized():
            return cls(None)
        with one_timeout(timeout):
            context = cls(_make_mesh(device or device_type(), axes, covered))
            # Made now, so that no rank asks for one alone; in the same order on every rank.
            for several in dict.fromkeys(map(context._several, _COMPOSED)):
                if len(several) > 1:
                    context._flatten(several)
        return context

    @property
    def dp_size(self) -> int | None:
        """Data-parallel ranks, None without a mesh."""
        return self.size(MeshAxisName.DP)

    @property
    def dp_replicate_size(self) -> int:
        """Replicas among the data-parallel ranks."""
        return self._size(MeshAxisName.DP_REPLICATE)

    @property
    def dp_shard_size(self) -> int:
        """Data-parallel ranks that share one replica."""
        return self._size(MeshAxisName.DP_SHARD)

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks."""
        return self._size(MeshAxisName.TP)

    @property
    def pp_size(self) -> int:
        """Pipeline-parallel ranks."""
        return self._size(MeshAxisName.PP)

    @property
    def cp_size(self) -> int:
        """Context-parallel ranks."""
        return self._size(MeshAxisName.CP)

    @property
    def ep_size(self) -> int:
        """Expert-parallel ranks."""
        return self._size(MeshAxisName.EP)

    def size(self, axis: MeshAxisName | str) -> int | None:
        """Return the size of an axis: 1 for one that the mesh lacks, None for ``dp`` without mesh.

        Raises:
            MeshError: No axis has that name.
        """
        name = self._known(axis)
        return None if self.mesh is None and name is MeshAxisName.DP else self._size(name)

    def submesh(self, axis: MeshAxisName | str) -> DeviceMesh | None:
        """Return the mesh of one axis, None if the mesh lacks it or does not cover this rank.

        An axis that is composed of others (``dp_cp`` of data and context parallelism, say) is
        their flattened dimension; where only one of them has more than one rank, it is that one.

        Raises:
            MeshError: No axis has that name, or the mesh has a flattened dimension of that name
                with other ranks.
        """
        several = self._several(self._known(axis))
        if self.mesh is None or self.mesh.get_coordinate() is None or not several:
            return None
        return self.mesh[several[0]] if len(several) == 1 else self._flatten(several)

    def group(self, axis: MeshAxisName | str) -> ProcessGroup | None:
        """Return this rank's process group along an axis; see ``submesh``."""
        submesh = self.submesh(axis)
        return None if submesh is None else submesh.get_group()

    def _size(self, name: MeshAxisName) -> int:
        sizes = self._dimensions()
        return math.prod(sizes[part] for part in self._parts(name))

    def _flatten(self, parts: tuple[str, ...]) -> DeviceMesh:
        """Return the mesh in which these dimensions are one; several calls make one."""
        flat = _flat_name(parts)
        submesh = self.mesh[parts]  # type: ignore[index]
        try:
            return submesh._flatten(flat)
        except ValueError as error:
            raise MeshError(
                f"expected the flattened dimension {flat.value!r} to have the {submesh.size()} "
                f"ranks of {' x '.join(parts)}, found another of that name; flatten those "
                "dimensions under it, or leave it to MeshContext"
            ) from error

    def _several(self, name: MeshAxisName) -> tuple[str, ...]:
        """Return the parts of an axis that have more than one rank, or one part if none has."""
        sizes, parts = self._dimensions(), self._parts(name)
        return tuple(part for part in parts if sizes[part] > 1) or parts[:1]

    def _parts(self, name: MeshAxisName) -> tuple[str, ...]:
        """Return the dimensions of the mesh that an axis consists of, outermost first."""
        dimensions = self._dimensions()
        if name in dimensions:
            return (name.value,)
        return tuple(part for part in dimensions if part in _COMPOSED.get(name, ()))

    def _dimensions(self) -> dict[str, int]:
        if self.mesh is None or self.mesh.mesh_dim_names is None:
            return {}
        return dict(zip(self.mesh.mesh_dim_names, self.mesh.shape, strict=True))

    @staticmethod
    def _known(axis: MeshAxisName | str) -> MeshAxisName:
        try:
            return MeshAxisName(axis)
        except ValueError:
            raise MeshError(
                f"expected one of the mesh axes {', '.join(MeshAxisName)}, found {axis!r}"
            ) from None


#: Axis -> the dimensions that it consists of, as far as a mesh has them. A mesh without replicas
#: has one data-parallel dimension, ``dp``, whose ranks share the one replica.
_COMPOSED: Mapping[MeshAxisName, frozenset[str]] = {
    MeshAxisName.DP: frozenset({"dp_replicate", "dp_shard"}),
    MeshAxisName.DP_SHARD: frozenset({"dp"}),
    MeshAxisName.DP_SHARD_CP: frozenset({"dp", "dp_shard", "cp"}),
    MeshAxisName.DP_CP: frozenset({"dp", "dp_replicate", "dp_shard", "cp"}),
}


def _flat_name(parts: Collection[str]) -> MeshAxisName:
    """Return the axis that these dimensions make up, under whose name they are flattened."""
    if MeshAxisName.CP not in parts:
        return MeshAxisName.DP
    shards_alone = MeshAxisName.DP_SHARD in parts and MeshAxisName.DP_REPLICATE not in parts
    return MeshAxisName.DP_SHARD_CP if shards_alone else MeshAxisName.DP_CP


def covered_ranks(ranks: Iterable[int] | None, job_size: int) -> tuple[int, ...]:
    """Return the ranks that a mesh covers in ascending order, all of the job for None.

    Raises:
        MeshError: A rank is no int, does not exist, or is given twice; or there is none.
    """
    if ranks is None:
        return tuple(range(job_size))
    given = list(ranks)
    wrong = [r for r in given if not isinstance(r, int) or isinstance(r, bool)]
    if not given or wrong or len(set(given)) < len(given) or not set(given) <= set(range(job_size)):
        raise MeshError(
            f"expected ranks that are different integers from 0 to {job_size - 1}, found {given}"
        )
    return tuple(sorted(given))


def _make_mesh(
    device: str, axes: Mapping[MeshAxisName, int], covered: tuple[int, ...]
) -> DeviceMesh:
    """Make the mesh with these dimensions over these ranks; called on every rank of the job."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from polyshard.mesh.process_groups import group_along

    _take_own_device(device)
    names = tuple(map(str, axes))
    ranks = torch.tensor(covered, device="cpu").reshape(tuple(axes.values()))
    if len(covered) < dist.get_world_size():
        return DeviceMesh(device, ranks, mesh_dim_names=names)
    groups = [group_along(ranks, dim) for dim in range(ranks.ndim)]
    return DeviceMesh.from_group(groups, device, ranks, mesh_dim_names=names)


def _take_own_device(device: str) -> None:
    """Choose this rank's device as ``init_device_mesh`` does, unless the script has chosen one."""
    import torch

    if device == "cpu" or "LOCAL_RANK" not in os.environ:
        return
    module = torch.get_device_module(device)
    if not module.is_initialized():
        module.set_device(int(os.environ["LOCAL_RANK"]))


def world_mesh() -> DeviceMesh | None:
    """Return a mesh of one dimension, ``dp``, over all ranks; None in a process by itself.

    Raises:
        MeshError: The process is one of several but has no process group, so that each would
            train alone and nobody would say so.
    """
    import torch.distributed as dist

    if not dist.is_initialized() and (place := read_launch_environment()) and place.world_size > 1:
        raise MeshError(
            f"expected a process group, since this process was started as rank {place.rank} of "
            f"{place.world_size}; found none; call torch.distributed.init_process_group() before "
            "parallelize, or use DistributedSetup.build, which joins the group"
        )
    return MeshContext.build(ParallelismSizes()).mesh
