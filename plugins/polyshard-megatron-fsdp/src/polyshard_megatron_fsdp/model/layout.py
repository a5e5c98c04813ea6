"""Where this rank's part of a parameter lies in the whole.

megatron-fsdp cuts parameters at arbitrary rows, so that ranks hold uneven parts or none, and
neither torch's own layout computations nor its gathers apply. What it cut is on each of its
parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from polyshard_megatron_fsdp.megatron_fsdp.private_names import (
    compute_local_shape_and_global_offset,
    local_of,
    original_of,
    slice_of,
)

__all__ = [
    "is_laid_out_like",
    "offsets_of",
    "part_of",
    "shard_dims",
    "tensor_parallel_shape",
]


def shard_dims(parameter: DTensor) -> tuple[int, ...]:
    """Return the dimensions of its mesh over which a parameter is sharded."""
    return tuple(
        dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate()
    )


def is_laid_out_like(tensor: DTensor, parameter: DTensor) -> bool:
    """Tell whether a tensor is cut as a distributed parameter is, as far as this rank can see."""
    return (
        tensor.device_mesh == parameter.device_mesh
        and local_of(tensor).shape == local_of(parameter).shape
    )


def tensor_parallel_shape(parameter: Tensor) -> torch.Size:
    """Return the shape of what tensor parallelism left to this rank of a parameter."""
    return local_of(original_of(parameter)).shape


def offsets_of(parameter: DTensor) -> tuple[int, ...]:
    """Return the indices in the whole parameter at which this rank's part begins."""
    shape, offsets = _tensor_parallel_part(parameter)
    first, _ = _flat_range(parameter, shape)
    rows = first // max(1, _numel(shape[1:]))
    return (offsets[0] + rows, *offsets[1:]) if offsets else ()


def part_of(full: Tensor, parameter: DTensor) -> Tensor:
    """Return this rank's part of a tensor that has the shape of the whole parameter.

    ``full`` may also have the shape of this rank's tensor-parallel part.
    """
    shape, offsets = _tensor_parallel_part(parameter)
    if full.shape == parameter.shape:
        ends = (start + size for start, size in zip(offsets, shape, strict=True))
        full = full[tuple(slice(s, e) for s, e in zip(offsets, ends, strict=True))]
    first, last = _flat_range(parameter, shape)
    return full.reshape(-1)[first:last].view(local_of(parameter).shape)


def _tensor_parallel_part(parameter: DTensor) -> tuple[Sequence[int], Sequence[int]]:
    """Return shape and offsets of what tensor parallelism left to this rank."""
    original = original_of(parameter)
    if not isinstance(original, DTensor):
        return original.shape, (0,) * original.dim()
    return compute_local_shape_and_global_offset(
        original.shape, original.device_mesh, original.placements
    )


def _flat_range(parameter: DTensor, shape: Sequence[int]) -> tuple[int, int]:
    """Return where this rank's part begins and ends in a tensor of ``shape``, flattened."""
    size = _numel(shape)
    if local_of(parameter).numel() == size:
        return 0, size
    part = slice_of(parameter)
    return part.start, part.stop


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()
