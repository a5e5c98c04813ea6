"""A check for debugging: ranks that hold the same part of a parameter hold the same values."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from polyshard.config.parallelism import MeshAxisName
from polyshard.exceptions import RanksDisagreeError
from polyshard.mesh.context import MeshContext
from polyshard.mesh.devices import mesh_ranks
from polyshard.parameters.names import strip_wrappers
from polyshard.processes.rank_sync import raise_on_all_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["check_replicas"]

#: Which part of a parameter a rank holds -> checksum of its values, by the parameter's name.
Checksums = Mapping[str, tuple[tuple[int, ...], str]]


#: Along which dimensions ranks hold replicas -> what makes them differ.
_CAUSES: Mapping[MeshAxisName, str] = {
    MeshAxisName.DP_CP: "something changed it on one of them alone",
    MeshAxisName.TP: (
        "something changed it on one of them alone, or it stands between modules that the tp_plan "
        "splits, where each rank has the gradient of its own part: use it outside of them, or "
        "split it with a torch ParallelStyle"
    ),
}


def check_replicas(model: nn.Module, mesh: DeviceMesh | MeshContext | None) -> None:
    """Raise unless all replicas of each parameter are the same, bit for bit.

    For debugging, after a step: it reads every parameter. Call it on every rank of the mesh.
    Compared are the ranks that hold the same part: all of them under DDP, those along
    ``dp_replicate`` under HSDP, and those along ``tp`` for what tensor parallelism does not split.

    Args:
        model: What ``parallelize`` returned.
        mesh: The mesh that it was given.

    Raises:
        RanksDisagreeError: The message names the first parameter that differs, and two ranks.
        PeerFailedError: Ranks along other dimensions found a difference.
    """
    context = mesh if isinstance(mesh, MeshContext) else MeshContext(mesh)
    own = {strip_wrappers(name): _checksum(p) for name, p in model.named_parameters()}
    gathered = {axis: _gather(own, context.group(axis)) for axis in _CAUSES}
    with raise_on_all_ranks("check_replicas", mesh_ranks(context.mesh)):
        for axis, checksums in gathered.items():
            for name in own:
                _compare(name, checksums, _CAUSES[axis])


def _gather(own: Checksums, group: ProcessGroup | None) -> Mapping[int, Checksums]:
    """Return the checksums of each rank of a group, of none where there is nobody else."""
    if group is None or group.size() == 1:
        return {}
    gathered: list[Checksums] = [{}] * group.size()
    dist.all_gather_object(gathered, own, group=group)
    return dict(zip(dist.get_process_group_ranks(group), gathered, strict=True))


def _compare(name: str, checksums: Mapping[int, Checksums], cause: str) -> None:
    first: dict[tuple[int, ...], int] = {}
    for rank, found in checksums.items():
        if name not in found:
            raise RanksDisagreeError(
                f"expected the same parameters on every rank, found no {name!r} on rank {rank}"
            )
        part, checksum = found[name]
        other = first.setdefault(part, rank)
        if checksums[other][name][1] != checksum:
            raise RanksDisagreeError(
                f"expected equal replicas of parameter {name!r}, found other values on rank "
                f"{rank} than on rank {other}; {cause}"
            )


def _checksum(parameter: Tensor) -> tuple[tuple[int, ...], str]:
    """Return which part of a parameter this rank holds, and a checksum of it."""
    part: tuple[int, ...] = ()
    if isinstance(parameter, DTensor):
        coordinate = parameter.device_mesh.get_coordinate() or ()
        places = zip(coordinate, parameter.placements, strict=True)
        part = tuple(-1 if place.is_replicate() else at for at, place in places)
        parameter = parameter.to_local()
    values = parameter.detach().cpu().contiguous().flatten().view(torch.uint8)
    return part, hashlib.blake2b(values.numpy().data, digest_size=16).hexdigest()
