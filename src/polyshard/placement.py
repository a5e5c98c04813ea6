"""Where a model has to be before a strategy takes it, and the checks of what it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from polyshard.exceptions import ModelError
from polyshard.mesh import MeshAxisName

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "axis_sizes",
    "mesh_device",
    "require_dimensions",
    "require_materialized",
    "require_parameters",
]


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
    if mesh is None or mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def require_parameters(model: nn.Module, strategy: str, *, trainable: bool) -> None:
    """Raise unless the model has parameters, of which one is trained if ``trainable``.

    Raises:
        ModelError: It has none.
    """
    kind = "a trainable parameter" if trainable else "a parameter"
    if not any(p.requires_grad or not trainable for p in model.parameters()):
        raise ModelError(
            f"strategy {strategy!r}: expected a model with {kind}, found {type(model).__name__} "
            "with none; there is nothing to distribute"
        )


def require_dimensions(model: nn.Module, strategy: str) -> None:
    """Raise if a parameter is a scalar, which cannot be sharded.

    Raises:
        ModelError: One is; it is named.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise ModelError(
                f"strategy {strategy!r}: expected parameters of at least one dimension, found the "
                f"scalar {name!r}; give it the shape (1,)"
            )


def require_materialized(model: nn.Module, strategy: str) -> None:
    """Raise if a parameter or buffer is on the meta device, which holds no values.

    Raises:
        ModelError: Some are; the first is named.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    on_meta = [name for name, tensor in tensors if tensor.is_meta]
    if on_meta:
        raise ModelError(
            f"strategy {strategy!r}: expected values in every parameter and buffer, found "
            f"{len(on_meta)} on the meta device ({on_meta[0]}, ...); call model.to_empty() and "
            "load or initialise them first"
        )
