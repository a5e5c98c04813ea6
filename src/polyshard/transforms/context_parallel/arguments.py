"""Checks of what context_parallel is given."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from polyshard._describe import describe_value
from polyshard.config.parallelism import MeshAxisName
from polyshard.exceptions import ConfigError, MeshError
from polyshard.mesh.context import MeshContext
from polyshard.transforms.context_parallel.attention import MODES


def context_mesh(mesh: DeviceMesh | MeshContext | None) -> DeviceMesh | None:
    """Return this rank's context-parallel dimension, None without one."""
    context = mesh if isinstance(mesh, MeshContext) else MeshContext(mesh)
    if context.mesh is not None and context.mesh.mesh_dim_names is None:
        raise MeshError(
            f"context_parallel: expected a mesh whose dimensions have names, found {context.mesh}; "
            "name the one of the sequence 'cp'"
        )
    return context.submesh(MeshAxisName.CP)


def check_method(attention: str | None) -> None:
    """Raise ConfigError unless a method has that name."""
    if attention is not None and attention not in MODES:
        raise ConfigError(
            f"context_parallel: expected attention to be one of {', '.join(MODES)} or None, found "
            f"{describe_value(attention)}",
            field="attention",
        )


def checked_dims(buffers: Sequence[Tensor], seq_dims: Sequence[int]) -> list[int]:
    """Return the dimensions counted from the front, checked against the buffers."""
    if not buffers or len(buffers) != len(seq_dims):
        raise ConfigError(
            "context_parallel: expected a sequence dimension for each buffer, and one buffer at "
            f"least, found {len(buffers)} buffers and {len(seq_dims)} seq_dims",
            field="seq_dims",
        )
    for index, (buffer, dim) in enumerate(zip(buffers, seq_dims, strict=True)):
        if not -buffer.ndim <= dim < buffer.ndim:
            raise ConfigError(
                f"context_parallel: expected in seq_dims[{index}] a dimension of a buffer of shape "
                f"{tuple(buffer.shape)}, found {dim}",
                field="seq_dims",
            )
        if buffer.requires_grad:
            raise ConfigError(
                f"context_parallel: expected buffers that need no gradient, found buffers[{index}] "
                "with requires_grad=True; cut what it is computed from",
                field="buffers",
            )
    return [dim % buffer.ndim for buffer, dim in zip(buffers, seq_dims, strict=True)]


def check_lengths(buffers: Sequence[Tensor], dims: Sequence[int], ranks: int) -> None:
    """Raise MeshError unless each sequence can be cut into equal parts."""
    for index, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        if buffer.size(dim) % ranks:
            raise MeshError(
                f"context_parallel: expected a length that the {ranks} context-parallel ranks can "
                f"cut into equal parts, found {buffer.size(dim)} in dimension {dim} of "
                f"buffers[{index}]; pad the sequences, or choose another cp_size"
            )
