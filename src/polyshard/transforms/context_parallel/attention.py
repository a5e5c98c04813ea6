"""Attention over the sequence of all ranks, computed by two methods."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from attrs import asdict, evolve, frozen
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel as ring_context
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode

from polyshard.exceptions import ModelError, UnsupportedError
from polyshard.parameters.dtensors import local_of

__all__ = ["AttentionMethod"]

AttentionMethod = Literal["ring", "gather"]


#: torch's function, under whatever name a model calls it and while torch's ring replaces the name.
_attention: Any = F.scaled_dot_product_attention


_BACKWARDS = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)


_SEQUENCE = -2  # the dimension of query, key and value that is the sequence


@frozen
class _Call:
    """The arguments of one call of attention, as torch names them."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


class _Attention(TorchFunctionMode):
    """Computes each call of attention over the sequence of all ranks."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.calls = 0

    def cut(self, buffers: Sequence[Tensor], dims: Sequence[int]) -> AbstractContextManager[None]:
        """Return the context in which buffers hold this rank's part."""
        raise NotImplementedError

    def attend(self, call: _Call) -> Tensor:
        """Return the rows of attention that belong to this rank's queries."""
        raise NotImplementedError

    def check_called(self) -> None:
        """Raise if the model never came by: its attention saw this rank's part alone."""
        if not self.calls:
            raise ModelError(
                "context_parallel: expected the model to call "
                "torch.nn.functional.scaled_dot_product_attention, found no call; other attention "
                "sees one rank's part of the sequence alone; choose the one that is supported "
                "(attn_implementation='sdpa' in transformers), or leave cp_size out"
            )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Called for torch's functions, whose own calls it does not see."""
        kwargs = kwargs or {}
        if func is _attention:
            return self._attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            raise UnsupportedError(
                "context_parallel: expected attention by scaled_dot_product_attention, found "
                "torch.nn.MultiheadAttention, whose inside cannot be reached; call the function"
            )
        if func in _BACKWARDS:
            with _entered_by_modules(self):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _attend(self, *args: Any, **kwargs: Any) -> Tensor:
        call = _Call(*args, **kwargs)
        self.calls += 1
        rows, keys = call.query.size(_SEQUENCE), call.key.size(_SEQUENCE)
        if call.is_causal and rows != keys:
            raise UnsupportedError(
                "context_parallel: expected causal attention of a sequence to itself, found "
                f"{rows} queries and {keys} keys on this rank"
            )
        return self.attend(call)


class _GatherAttention(_Attention):
    """Gathers keys and values; each rank has the part of the sequence at its own place."""

    @contextmanager
    def cut(self, buffers: Sequence[Tensor], dims: Sequence[int]) -> Iterator[None]:
        """Put this rank's part in the place of each buffer."""
        size, rank = self.mesh.size(), self.mesh.get_local_rank()
        parts = [b.chunk(size, dim)[rank].clone() for b, dim in zip(buffers, dims, strict=True)]
        with _replaced(buffers, parts):
            yield

    def attend(self, call: _Call) -> Tensor:
        """Return attention of this rank's queries to the keys of all."""
        group = self.mesh.get_group()
        key, value = _gather(call.key, group), _gather(call.value, group)
        keys = key.size(_SEQUENCE)
        if call.attn_mask is not None and call.attn_mask.size(-1) != keys:
            raise UnsupportedError(
                f"context_parallel: expected an attn_mask over all {keys} keys of the sequence, "
                f"found one over {call.attn_mask.size(-1)}; leave it to is_causal, or make it of "
                "the whole sequence and give it as a buffer that is cut along its rows"
            )
        if call.is_causal and call.attn_mask is None:
            mask = self._causal_rows(call.query)
            seen = mask.size(-1)
            call = evolve(call, attn_mask=mask, is_causal=False)
            key, value = key[..., :seen, :], value[..., :seen, :]
        return _compute(evolve(call, key=key, value=value))

    def _causal_rows(self, query: Tensor) -> Tensor:
        """Return which keys this rank's queries see; later ones, which none sees, are left out."""
        rows = query.size(_SEQUENCE)
        before = rows * self.mesh.get_local_rank()
        every = torch.ones(rows, before + rows, dtype=torch.bool, device=query.device)
        return every.tril(before)


class _RingAttention(_Attention):
    """torch's ring attention; each rank has a part near the start and its mirror near the end."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        if mesh.device_type != "cuda":
            raise UnsupportedError(
                "context_parallel: expected a mesh of CUDA devices for attention='ring', found "
                f"{mesh.device_type!r}; leave attention out"
            )

    @contextmanager
    def cut(self, buffers: Sequence[Tensor], dims: Sequence[int]) -> Iterator[None]:
        """Let torch cut the buffers, which writes into their memory: into that of copies."""
        with (
            _replaced(buffers, [buffer.clone() for buffer in buffers]),
            ring_context(self.mesh, buffers=list(buffers), buffer_seq_dims=list(dims)),
        ):
            yield

    def attend(self, call: _Call) -> Tensor:
        """Return attention around the ring.

        Where a model looks torch's function up it finds torch's own replacement, which calls it
        with DTensors; elsewhere it calls the function itself.
        """
        self._check(call)
        parts = [local_of(tensor) for tensor in (call.query, call.key, call.value)]
        if call.enable_gqa:  # not every kernel of the ring can
            parts = [_with_heads(part, call.query.size(1)) for part in parts]
        query, key, value = (
            DTensor.from_local(part, self.mesh, [Shard(2)], run_check=False) for part in parts
        )
        output = _compute(_Call(query, key, value, is_causal=True, scale=call.scale))
        return output if isinstance(call.query, DTensor) else local_of(output)

    @staticmethod
    def _check(call: _Call) -> None:
        """Refuse what the ring cannot compute, or not right."""
        masked, dimensions = call.attn_mask is not None, call.query.ndim
        if masked or call.dropout_p or not call.is_causal or dimensions != 4:
            raise UnsupportedError(
                "context_parallel: expected causal attention of 4 dimensions without attn_mask and "
                f"dropout, which is what torch's ring computes, found is_causal={call.is_causal}, "
                f"{dimensions} dimensions, {'an' if masked else 'no'} attn_mask, "
                f"dropout_p={call.dropout_p}; give context_parallel attention='gather'"
            )


MODES: dict[str, type[_Attention]] = {"ring": _RingAttention, "gather": _GatherAttention}


class _Gather(torch.autograd.Function):
    """Joins the parts of all ranks along the sequence; gradients are summed and cut again."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the whole; ``part`` has the same shape on all ranks."""
        ctx.group = group
        parts = part.new_empty(group.size() * part.size(0), *part.shape[1:])
        dist.all_gather_single(parts, part.contiguous(), group)
        return torch.cat(parts.chunk(group.size()), _SEQUENCE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of this rank's part, which every rank's rows add to."""
        parts = gradient.chunk(ctx.group.size(), _SEQUENCE)
        own = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
        dist.reduce_scatter_single(own, torch.cat(parts), group=ctx.group)
        return own, None


def _gather(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole: Tensor = _Gather.apply(part, group)  # type: ignore[no-untyped-call]
    return whole


@contextmanager
def _entered_by_modules(mode: _Attention) -> Iterator[None]:
    """Enter a mode with each call of a module while the body runs, and leave it with the call.

    For a backward, which runs without the mode: activation checkpoints call modules again in it.
    """
    depth = 0

    def enter(*_: object) -> None:
        nonlocal depth
        if depth == 0:
            mode.__enter__()  # type: ignore[no-untyped-call]
        depth += 1

    def leave(*_: object) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    # A checkpoint ends the call by an exception as soon as it has what it needs.
    with (
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
    ):
        yield


def _compute(call: _Call) -> Tensor:
    """Call torch's function."""
    output: Tensor = _attention(**asdict(call, recurse=False))
    return output


def _with_heads(part: Tensor, heads: int) -> Tensor:
    """Repeat the heads of grouped keys or values, (batch, heads, length, size), up to a number."""
    return part.repeat_interleave(heads // part.size(1), dim=1)


@contextmanager
def _replaced(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Let each tensor be another one, memory and shape, while the body runs."""
    originals = [buffer.detach() for buffer in buffers]
    _put(buffers, values)
    try:
        yield
    finally:
        _put(buffers, originals)


def _put(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.data = value
        if not buffer.is_inference():
            increment_version(buffer)  # a backward after the context must not use it unnoticed
