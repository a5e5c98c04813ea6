"""The whole model, gathered on the first rank, and loaded from there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from polyshard._describe import describe_value
from polyshard.exceptions import ModelError
from polyshard.lifecycle.rebuild import rebuild
from polyshard.lifecycle.wrapped_models import WrappedModel, find
from polyshard.mesh.devices import mesh_device
from polyshard.mesh.process_groups import one_timeout
from polyshard.parameters.names import strip_wrappers
from polyshard.registry.registry import default_registry
from polyshard.strategies import fallback

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["full_state_dict", "load_full_state_dict", "parameter_bytes"]


def full_state_dict(model: nn.Module, *, rank0_only: bool = True) -> dict[str, Tensor]:
    """Gather the whole model: unsharded CPU copies under the user's own names.

    Call it on every rank. Tensors are gathered one after the other, so that beside its shards a
    rank that keeps none of them holds one whole tensor at a time.

    Args:
        model: What ``parallelize`` returned, or the module given to it. Of a model that was
            never parallelized it is a copy of the state dict.
        rank0_only: Whether only the first rank of the model's mesh gets the tensors, and the
            others an empty dict; if false every rank gets all of them.

    Raises:
        ModelError: It is a part of a parallelized model, or holds more than one.
    """
    known = find(model)
    keep = not rank0_only or _is_first(None if known is None else known.mesh)
    with one_timeout():
        return {
            name: tensor.detach().to("cpu", copy=True)
            for name, tensor in _full_tensors(model, known)
            if keep
        }


def _full_tensors(model: nn.Module, known: WrappedModel | None) -> Iterator[tuple[str, Tensor]]:
    if known is None:
        return fallback.full_tensors(model)
    tensors: Iterator[tuple[str, Tensor]] = default_registry().dispatch(
        "full_tensors", known.config, model=known.model
    )
    return tensors


def parameter_bytes(model: nn.Module) -> int:
    """Return the bytes that this rank holds for the parameters between two steps."""
    known = find(model)
    if known is None:
        return fallback.parameter_bytes(model)
    with one_timeout():
        return int(default_registry().dispatch("parameter_bytes", known.config, model=known.model))


#: How much of the model a rank holds unsharded at a time, unless one tensor alone is larger.
_CHUNK_BYTES = 256 * 2**20


#: How many of the names that do not fit an error shows.
_MOST_SHOWN = 5


@frozen
class _Entry:
    """A tensor that the first rank is about to send."""

    name: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def load_full_state_dict(model: nn.Module, state_dict: Mapping[str, Tensor] | None) -> None:
    """Load unsharded tensors that the first rank has, such as ``full_state_dict`` returns.

    Call it on every rank, outside of ``rebuild``. A rank holds no more than 256 MiB of the model
    unsharded at a time, or one tensor if that is larger. Values are cast to the model's dtypes.

    Args:
        model: What ``parallelize`` returned, or the module given to it. One that was never
            parallelized is loaded as plain PyTorch does, with the same checks.
        state_dict: On the first rank of the model's mesh, a tensor for each parameter and
            persistent buffer, under the names that the model has without any strategy, on any
            device. What other ranks give is not looked at, and may be None.

    Raises:
        ModelError: There is no state dict on the first rank, or its names and shapes are not those
            of the model; raised on every rank, and nothing is loaded.
        PeerFailedError: Another rank failed.
    """
    known = find(model)
    mesh = None if known is None else known.mesh
    module = _own_module(model, known)
    with rebuild(model):
        entries = _announce(state_dict, mesh)
        own = _tensors(module.state_dict())
        targets = {strip_wrappers(name): name for name in own}
        _check(entries, {strip_wrappers(name): value.shape for name, value in own.items()})
        for chunk in _chunks(entries):
            values = {targets[e.name]: _send(e, state_dict, mesh) for e in chunk}
            module.load_state_dict(values, strict=False)


def _own_module(model: nn.Module, known: WrappedModel | None) -> nn.Module:
    """Return the module that the user built, by whose names tensors are known."""
    if known is None:
        return model
    module = known.module()
    return module if module is not None and module in set(known.model.modules()) else known.model


def _tensors(state: Mapping[str, object]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _announce(state_dict: Mapping[str, Tensor] | None, mesh: DeviceMesh | None) -> list[_Entry]:
    """Return what the first rank has, on every rank.

    Raises:
        ModelError: It has no state dict of tensors.
    """
    found: list[_Entry] | str = ""
    if _is_first(mesh):
        found = _describe(state_dict)
    for group in _groups(mesh):
        sent = [found]
        dist.broadcast_object_list(sent, group=group, group_src=0)
        found = sent[0]
    if isinstance(found, str):
        raise ModelError(
            "load_full_state_dict: expected a mapping of names to tensors on the first rank, found "
            f"{found}; give what full_state_dict returns, or what torch.load reads"
        )
    return found


def _describe(state_dict: object) -> list[_Entry] | str:
    """Return the entries of a state dict, or what it is instead."""
    if not isinstance(state_dict, Mapping):
        return describe_value(state_dict)
    for name, value in state_dict.items():
        if not isinstance(value, Tensor) or isinstance(value, DTensor):
            return f"{describe_value(value)} for {name!r}"
    return [_Entry(name, value.shape, value.dtype) for name, value in state_dict.items()]


def _check(entries: Iterable[_Entry], expected: Mapping[str, torch.Size]) -> None:
    """Raise unless names and shapes are those of the model."""
    found = {entry.name: entry.shape for entry in entries}
    wrong = [
        *(f"no {name!r}" for name in expected if name not in found),
        *(f"{name!r}, which the model lacks" for name in found if name not in expected),
        *(
            f"{name!r} of {list(shape)} where the model has {list(expected[name])}"
            for name, shape in found.items()
            if expected.get(name, shape) != shape
        ),
    ]
    if wrong:
        shown = ", ".join(wrong[:_MOST_SHOWN]) + ", ..." * (len(wrong) > _MOST_SHOWN)
        raise ModelError(
            "load_full_state_dict: expected the names and shapes of the model, found "
            f"{shown}; load a part with load_state_dict(strict=False) inside polyshard.rebuild"
        )


def _chunks(entries: Iterable[_Entry]) -> Iterator[list[_Entry]]:
    """Return the entries in lists of limited size."""
    chunk: list[_Entry] = []
    for entry in entries:
        if chunk and sum(e.nbytes for e in (*chunk, entry)) > _CHUNK_BYTES:
            yield chunk
            chunk = []
        chunk.append(entry)
    yield chunk


def _send(
    entry: _Entry, state_dict: Mapping[str, Tensor] | None, mesh: DeviceMesh | None
) -> Tensor:
    """Return a tensor of the first rank, on the device that this rank computes on."""
    device = mesh_device(mesh)
    if state_dict is not None and _is_first(mesh):
        tensor = state_dict[entry.name].detach().to(device).contiguous()
    else:
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device=device)
    for group in _groups(mesh):
        dist.broadcast(tensor, group=group, group_src=0)
    return tensor


def _is_first(mesh: DeviceMesh | None) -> bool:
    return mesh is None or not any(mesh.get_coordinate() or ())


def _groups(mesh: DeviceMesh | None) -> list[dist.ProcessGroup]:
    """Return the groups through which the first rank reaches all, in this order."""
    return [] if mesh is None else [mesh.get_group(dim) for dim in range(mesh.ndim)]
