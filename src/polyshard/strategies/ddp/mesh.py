"""Which ranks hold the replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyshard.config.parallelism import MeshAxisName
from polyshard.exceptions import MeshError
from polyshard.mesh.devices import axis_sizes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["data_parallel_group"]

#: Dimensions that 'fsdp2' does not take either.
_NOWHERE = {MeshAxisName.PP, MeshAxisName.EP, MeshAxisName.EP_SHARD}


def data_parallel_group(mesh: DeviceMesh) -> ProcessGroup:
    """Return the process group of the mesh's data-parallel dimension.

    Raises:
        MeshError: Another dimension has more than one rank, or there is no ``dp``.
    """
    sizes = axis_sizes(mesh)
    others = {name: size for name, size in sizes.items() if name != MeshAxisName.DP and size > 1}
    if MeshAxisName.DP not in sizes or others:
        elsewhere = "" if others.keys() & _NOWHERE else ", or use strategy 'fsdp2'"
        raise MeshError(
            "strategy 'ddp' spreads a model over the mesh dimension 'dp' alone, found "
            f"{sizes or f'{mesh.ndim} dimensions without names'}; leave out "
            f"{', '.join(others) or 'the others'}{elsewhere}"
        )
    return mesh.get_group(None if mesh.ndim == 1 else MeshAxisName.DP)
