"""What a mesh consists of: its device type, its ranks, and the sizes of its dimensions.

Importing this module does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyshard.config.parallelism import MeshAxisName
from polyshard.processes.process_group import world_size

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["axis_sizes", "device_type", "mesh_device", "mesh_ranks"]


def mesh_ranks(mesh: DeviceMesh | None) -> tuple[int, ...]:
    """Return the global ranks of a mesh in ascending order, those of the job without one."""
    if mesh is None:
        return tuple(range(world_size()))
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def served_devices() -> list[str]:
    """Return the types of devices that the backends of the job's default group compute on.

    gloo accepts CUDA tensors, too, and moves them to the CPU and back.
    """
    import torch.distributed as dist

    backends = dist.get_backend_config()
    return ["cuda"] * ("nccl" in backends) + ["cpu"] * ("gloo" in backends)


def device_type() -> str:
    """Return the device type of the job's default process group: what its backend computes on."""
    return "cuda" if "cuda" in served_devices() else "cpu"


def axis_sizes(mesh: DeviceMesh) -> dict[str, int]:
    """Return the size of each dimension of a mesh by its name.

    A mesh of one dimension that has no name, or none of Polyshard's, is a data-parallel one.
    Several dimensions without names are an empty mapping: nothing says what they are.
    """
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 1 and not set(names) & set(MeshAxisName):
        return {MeshAxisName.DP: mesh.size()}
    return dict(zip(names, mesh.shape, strict=True)) if names else {}


def mesh_device(mesh: DeviceMesh | None) -> torch.device:
    """Return the device that this rank computes on; the CPU without a mesh."""
    import torch

    if mesh is None or mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())
