"""What the hooks do where a strategy leaves them out: right for plain tensors and DTensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from polyshard.config.base import DistributedConfig
from polyshard.exceptions import UnsupportedError
from polyshard.parameters.dtensors import full_of, local_of
from polyshard.parameters.names import strip_wrappers
from polyshard.registry.hookspecs import hookimpl


@hookimpl
def add_methods(
    config: DistributedConfig, model: nn.Module, module: nn.Module, names: Sequence[str]
) -> None:
    """Leave the methods of a model that is the user's own module as they are.

    Raises:
        UnsupportedError: It is a wrapper, which does not have them.
    """
    if model is not module:
        raise UnsupportedError(
            f"methods: expected a strategy that makes methods work through its wrapper, found "
            f"{config.strategy!r}, whose {type(model).__name__} would not run {', '.join(names)} "
            "right; leave methods out, and call the model alone"
        )


@hookimpl
def pre_rebuild() -> object:
    """Remember nothing: the strategy keeps nothing on the Parameter objects."""
    return None


@hookimpl
def post_rebuild() -> None:
    """Restore nothing."""


@hookimpl
def accumulate() -> AbstractContextManager[None]:
    """Let gradients add up as in plain PyTorch."""
    return nullcontext()


@hookimpl
def clip_grad_norm(model: nn.Module, max_norm: float, norm_type: float) -> Tensor:
    """Scale the gradients in place by the norm over all ranks that hold a part of them."""
    parameters = list(model.parameters())
    norm = _global_norm(parameters, norm_type)
    if max_norm < float("inf"):
        # Scaling by 1 changes nothing, and to ask whether it is 1 would wait for the device.
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for parameter in parameters:
            if parameter.grad is not None:
                gradient = local_of(parameter.grad)
                gradient.mul_(scale.to(gradient.device))
    return norm.to(_norm_dtype(parameters))


@hookimpl
def full_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the state dict, each DTensor gathered when its turn comes."""
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            yield strip_wrappers(name), full_of(value)


@hookimpl
def parameter_bytes(model: nn.Module) -> int:
    """Count the local tensors of ``model.parameters()``, a tied one once."""
    return sum(local_of(parameter).nbytes for parameter in model.parameters())


class _ShardGroup(NamedTuple):
    """Where the parts of a gradient lie: on the ranks along these dimensions of this mesh."""

    mesh: DeviceMesh | None
    dims: tuple[int, ...]


def _norm_dtype(parameters: Iterable[nn.Parameter]) -> torch.dtype:
    """Return float64 for a model in float64, and float32 for any other."""
    double = any(parameter.dtype == torch.float64 for parameter in parameters)
    return torch.float64 if double else torch.float32


def _global_norm(parameters: Iterable[nn.Parameter], norm_type: float) -> Tensor:
    """Return the norm of all gradients as if they were one vector in one process.

    Which collectives run depends on how the parameters are placed and not on which of them have
    a gradient here, so that all ranks run the same ones.
    """
    groups: dict[_ShardGroup, list[Tensor]] = {}
    for parameter in parameters:
        gradients = groups.setdefault(_shard_group(parameter), [])
        if parameter.grad is not None:
            part = local_of(_placed_like(parameter.grad, parameter))
            if part.numel():  # an empty part has no largest entry
                gradients.append(part)
    device = _device(groups.values())
    totals = [_group_total(group, g, norm_type, device) for group, g in groups.items()]
    if not totals:
        return torch.zeros((), dtype=torch.float64, device=device)
    together = torch.stack(totals)
    if norm_type == float("inf"):
        return together.max()
    return together.sum() ** (1.0 / norm_type)


def _group_total(
    group: _ShardGroup, gradients: list[Tensor], norm_type: float, device: torch.device
) -> Tensor:
    """Return the sum of the powers of all entries (or their maximum) over the group's ranks."""
    infinite = norm_type == float("inf")
    # In double precision, since float64 sums are the same in whatever order ranks add them up.
    norm = get_total_norm(_rows_first(gradients, norm_type), norm_type).to(device, torch.float64)
    total = norm if infinite else norm**norm_type
    for dim in group.dims:
        if group.mesh is not None and group.mesh.size(dim) > 1:
            operation = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
            dist.all_reduce(total, op=operation, group=group.mesh.get_group(dim))
    return total


def _rows_first(gradients: list[Tensor], norm_type: float) -> list[Tensor]:
    """Return tensors of the same norm that can be summed up exactly: on the CPU, norms of rows.

    There torch sums up a whole tensor in float32 and in one go, and is 5e-5 off for a million
    entries, less for the half of them that a shard holds. By rows it is right to 1e-7.
    """
    return [
        torch.linalg.vector_norm(gradient, norm_type, dim=-1)
        if gradient.device.type == "cpu" and gradient.numel() > 0
        else gradient
        for gradient in gradients
    ]


def _shard_group(parameter: Tensor) -> _ShardGroup:
    if not isinstance(parameter, DTensor):
        return _ShardGroup(None, ())
    dims = tuple(dim for dim, place in enumerate(parameter.placements) if not place.is_replicate())
    return _ShardGroup(parameter.device_mesh, dims)


def _placed_like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Bring a gradient that is not yet summed over a mesh dimension to its parameter's layout."""
    if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
        assert isinstance(parameter, DTensor)
        return gradient.redistribute(placements=parameter.placements)
    return gradient


def _device(groups: Iterable[list[Tensor]]) -> torch.device:
    """Return the device of the gradients, or of the process group where a rank has none."""
    for gradients in groups:
        for gradient in gradients:
            return gradient.device
    if dist.is_initialized() and "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
