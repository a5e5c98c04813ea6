"""Between a full tensor, a DTensor and the part of it that this rank holds."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from polyshard.mesh.devices import mesh_device

__all__ = ["full_of", "local_of", "same_memory", "shard_like", "with_local"]


def shard_like(full: Tensor, like: DTensor) -> DTensor:
    """Cut a tensor that every rank holds in full to the part that ``like`` has here.

    No rank sends anything; the result is on the device of ``like``, or of its mesh while ``like``
    is on the meta device.
    """
    device = mesh_device(like.device_mesh) if like.is_meta else like.device
    return distribute_tensor(
        full.detach().to(device), like.device_mesh, like.placements, src_data_rank=None
    )


def with_local(like: Tensor, local: Tensor) -> Tensor:
    """Return a tensor like ``like``, of which this rank holds ``local``."""
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors of one dtype begin at the same place in memory."""
    return (
        one.dtype == other.dtype
        and one.device == other.device
        and one.data_ptr() == other.data_ptr()
    )


def full_of(tensor: Tensor) -> Tensor:
    """Return the whole of a DTensor, gathered on every rank, or the tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_of(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a DTensor, or the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
