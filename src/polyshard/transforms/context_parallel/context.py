"""context_parallel: train on parts of a sequence, with attention over the whole of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from polyshard.exceptions import UnsupportedError
from polyshard.mesh.context import MeshContext
from polyshard.transforms.context_parallel.arguments import (
    check_lengths,
    check_method,
    checked_dims,
    context_mesh,
)
from polyshard.transforms.context_parallel.attention import MODES, AttentionMethod

__all__ = ["context_parallel"]

_entered: ContextVar[bool] = ContextVar("_entered", default=False)


@contextmanager
def context_parallel(
    mesh: DeviceMesh | MeshContext | None,
    *,
    buffers: Sequence[Tensor],
    seq_dims: Sequence[int],
    attention: AttentionMethod | None = None,
) -> Iterator[None]:
    """Cut sequences to this rank's part, and let attention see the whole of them.

    Use it around the forward and the backward of one microbatch, on every context-parallel rank,
    with the same sequences on all of them. Each rank's loss is the mean over its own tokens; the
    strategies average gradients over data- and context-parallel ranks, so that they become those
    of the whole sequence. On a mesh without the dimension ``cp`` of more than one rank it checks
    its arguments and does nothing else.

    Attention has to be ``torch.nn.functional.scaled_dot_product_attention``. Whatever else in a
    model depends on the place in the sequence must be told it by one of the buffers. What was
    compiled runs as it was before.

    Args:
        mesh: With the dimension ``cp``; None is a process by itself.
        buffers: Every tensor that holds something for each place of the sequence: inputs, targets,
            positions, tables of the model. They are cut in place and are whole again afterwards.
        seq_dims: Of each buffer, the dimension that is the sequence; a multiple of the ranks long.
        attention: ``"ring"``, torch's ring attention, passes keys and values around and needs
            CUDA; its parts are not contiguous. ``"gather"`` gathers them, on any device (default:
            ring on CUDA, gather elsewhere).

    Raises:
        ConfigError: A buffer requires grad, a dimension is out of range, there are not as many
            of the one as of the other, or no method has that name.
        MeshError: A sequence cannot be cut into as many equal parts as there are ranks.
        UnsupportedError: A call of attention that the method cannot compute, ring without CUDA, or
            one context inside another.
        ModelError: The body ended without a call of attention.
    """
    check_method(attention)
    dims = checked_dims(buffers, seq_dims)
    ring = context_mesh(mesh)
    if ring is None or ring.size() == 1:
        yield
        return
    check_lengths(buffers, dims, ring.size())
    method = attention or ("ring" if ring.device_type == "cuda" else "gather")
    mode = MODES[method](ring)
    # A compiler would look into the mode at each of torch's functions, and stop at each.
    with _alone(), mode.cut(buffers, dims), torch.compiler.set_stance("force_eager"), mode:
        yield
    mode.check_called()


@contextmanager
def _alone() -> Iterator[None]:
    """Refuse to cut what is cut already."""
    if _entered.get():
        raise UnsupportedError(
            "context_parallel: expected no context_parallel around this one, found one, which has "
            "cut the sequences; leave one of the two out"
        )
    token = _entered.set(True)
    try:
        yield
    finally:
        _entered.reset(token)
