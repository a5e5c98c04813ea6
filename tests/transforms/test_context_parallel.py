"""Attention over sequence shards is attention over the sequence, forward and backward."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention as imported_attention
from torch.utils.checkpoint import CheckpointError, checkpoint

from polyshard import (
    MeshContext,
    ParallelismSizes,
    context_parallel,
)
from polyshard.conformance import RankPool
from polyshard.exceptions import ConfigError, MeshError, PolyshardError
from polyshard.transforms.context_parallel.attention import AttentionMethod

BATCH, HEADS, LENGTH, SIZE = 2, 4, 8, 16

two_ranks = pytest.mark.world_size(2)


def context(device: str = "cpu") -> MeshContext:
    return MeshContext.build(ParallelismSizes(cp_size=dist.get_world_size()), device=device)


def sequence(seed: int, heads: int = HEADS, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, heads, length, SIZE, generator=generator)


def difference(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


# Attention


@two_ranks
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"is_causal": True, "scale": 0.1},
        {"is_causal": True, "enable_gqa": True},
        {"enable_gqa": True},
    ],
    ids=str,
)
def test_attention_is_that_of_the_whole_sequence(ranks: RankPool, options: dict[str, Any]) -> None:
    for differences in ranks.run(attend, options):
        assert max(differences) < 1e-6


@two_ranks
@pytest.mark.gpu
def test_on_cuda_it_goes_around_a_ring(ranks: RankPool) -> None:
    skip_without_devices()
    for differences in ranks.run(attend, {"is_causal": True, "enable_gqa": True}, "cuda"):
        assert max(differences) < 1e-3


def skip_without_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a CUDA device for each rank")


@two_ranks
def test_compiled_attention_is_that_of_the_whole_sequence(ranks: RankPool) -> None:
    for differences in ranks.run(attend, {"is_causal": True}, compiled=True):
        assert max(differences) < 1e-6


def attend(options: dict[str, Any], device: str = "cpu", *, compiled: bool = False) -> list[float]:
    """Return how much output and gradients differ from those of the whole sequence."""
    heads = 2 if options.get("enable_gqa") else HEADS
    whole = [sequence(seed, n).to(device) for seed, n in enumerate((HEADS, heads, heads))]
    weights = sequence(9).to(device)
    expected = attention_and_gradients(whole, weights, options)
    buffers = [*whole, weights, *expected]
    with context_parallel(context(device), buffers=buffers, seq_dims=[2] * len(buffers)):
        compute = torch.compile(attention_and_gradients) if compiled else attention_and_gradients
        found = compute(whole, weights, options)
        return [difference(mine, other) for mine, other in zip(found, expected, strict=True)]


def attention_and_gradients(
    tensors: list[Tensor],
    weights: Tensor,
    options: dict[str, Any],
    attention: Callable[..., Tensor] = imported_attention,
) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    output = attention(*leaves, **options)
    (output * weights).sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@two_ranks
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_computes_over_the_whole_sequence_again(
    ranks: RankPool, reentrant: bool
) -> None:
    for differences in ranks.run(attend_twice, reentrant):
        assert max(differences) < 1e-6


class Causal(nn.Module):
    def forward(self, *tensors: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*tensors, is_causal=True)


def attend_twice(reentrant: bool) -> list[float]:
    whole, weights = [sequence(seed) for seed in range(3)], sequence(9)
    module = Causal()
    expected = attention_and_gradients(whole, weights, {}, module)
    buffers = [*whole, weights, *expected]
    with context_parallel(context(), buffers=buffers, seq_dims=[2] * len(buffers)):
        again = partial(checkpoint, module, use_reentrant=reentrant)
        found = attention_and_gradients(whole, weights, {}, again)
        return [difference(mine, other) for mine, other in zip(found, expected, strict=True)]


def rows(tensor: Any, dim: int) -> Tensor:
    own: Tensor = tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()]
    return own


@two_ranks
@pytest.mark.parametrize("cut", ["queries alone", "keys too"])
def test_attention_to_another_sequence(ranks: RankPool, cut: str) -> None:
    """Its keys may be cut, or the same on all ranks."""
    assert max(ranks.run(attend_to_another, cut)) < 1e-6


def attend_to_another(cut: str) -> float:
    query, key, value = sequence(0), sequence(1, length=12), sequence(2, length=12)
    expected = rows(F.scaled_dot_product_attention(query, key, value), 2)
    buffers = [query] if cut == "queries alone" else [query, key, value]
    with context_parallel(context(), buffers=buffers, seq_dims=[2] * len(buffers)):
        return difference(F.scaled_dot_product_attention(query, key, value), expected)


@two_ranks
@pytest.mark.parametrize("rows_of_mask", [LENGTH, 1])
def test_a_mask_over_the_whole_sequence(ranks: RankPool, rows_of_mask: int) -> None:
    assert max(ranks.run(attend_masked, rows_of_mask)) < 1e-6


def attend_masked(rows_of_mask: int) -> float:
    mask = torch.rand(BATCH, 1, rows_of_mask, LENGTH, generator=torch.Generator().manual_seed(1))
    tensors = [sequence(seed) for seed in range(3)]
    expected = rows(F.scaled_dot_product_attention(*tensors, attn_mask=mask), 2)
    buffers = [*tensors, mask] if rows_of_mask > 1 else tensors
    with context_parallel(context(), buffers=buffers, seq_dims=[2] * len(buffers)):
        return difference(F.scaled_dot_product_attention(*tensors, attn_mask=mask), expected)


# Buffers


@two_ranks
def test_buffers_are_cut_and_whole_again(ranks: RankPool) -> None:
    """Also those that share memory, and when the body raises."""
    for during, same in ranks.run(cut_and_raise):
        assert during == [(1, 4), (1, 4), (4, 3)]
        assert same


def cut_and_raise() -> tuple[list[tuple[int, ...]], bool]:
    tokens, table = torch.arange(9).view(1, 9), torch.randn(8, 3)
    buffers = [tokens[:, :-1], tokens[:, 1:], table]
    before = [buffer.clone() for buffer in buffers]
    during: list[tuple[int, ...]] = []
    with (
        suppress(ZeroDivisionError),  # and not the error that attention was never called
        context_parallel(context(), buffers=buffers, seq_dims=[1, -1, 0]),
    ):
        during += [tuple(buffer.shape) for buffer in buffers]
        assert torch.equal(buffers[0], rows(before[0], 1))
        raise ZeroDivisionError
    same = all(torch.equal(b, o) for b, o in zip(buffers, before, strict=True))
    return during, same and buffers[0].data_ptr() == tokens.data_ptr()


@pytest.mark.parametrize("mesh", [None, MeshContext()])
def test_without_context_parallel_ranks_nothing_is_cut(mesh: MeshContext | None) -> None:
    tokens = torch.arange(3)
    with context_parallel(mesh, buffers=[tokens], seq_dims=[0], attention="ring"):
        assert tokens.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("buffers", "seq_dims", "message"),
    [
        ([torch.ones(2)], [0, 0], "found 1 buffers and 2 seq_dims"),
        ([], [], "found 0 buffers and 0 seq_dims"),
        ([torch.ones(2), torch.ones(2)], [0, 1], r"seq_dims\[1\] a dimension .* \(2,\), found 1"),
        ([torch.ones(2)], [-2], r"seq_dims\[0\] a dimension .* found -2"),
        ([torch.ones(2, requires_grad=True)], [0], r"buffers\[0\] with requires_grad=True"),
    ],
)
def test_buffers_that_cannot_be_cut_are_refused(
    buffers: list[Tensor], seq_dims: list[int], message: str
) -> None:
    with (
        pytest.raises(ConfigError, match=message),
        context_parallel(None, buffers=buffers, seq_dims=seq_dims),
    ):
        pass


def test_an_unknown_method_is_refused() -> None:
    unknown: Any = "flash"
    with (
        pytest.raises(ConfigError, match="one of ring, gather or None, found 'flash'"),
        context_parallel(None, buffers=[torch.ones(2)], seq_dims=[0], attention=unknown),
    ):
        pass


# What would be wrong and is refused


def of_a_part(query: Tensor) -> None:
    F.scaled_dot_product_attention(query, query, query, torch.ones(LENGTH // 2, LENGTH // 2))


def causal_to_another(query: Tensor) -> None:
    key = sequence(1, length=12)
    F.scaled_dot_product_attention(query, key, key, is_causal=True)


def of_a_module(query: Tensor) -> None:
    vectors = query.flatten(0, 1)
    nn.MultiheadAttention(SIZE, 1, batch_first=True)(vectors, vectors, vectors)


def cut_twice(query: Tensor) -> None:
    with context_parallel(context(), buffers=[query], seq_dims=[2]):
        F.scaled_dot_product_attention(query, query, query)


def by_hand(query: Tensor) -> None:
    (query @ query.mT).softmax(-1) @ query


@two_ranks
@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (of_a_part, "UnsupportedError: .* attn_mask over all 8 keys .* found one over 4"),
        (causal_to_another, "UnsupportedError: .* found 4 queries and 12 keys on this rank"),
        (of_a_module, "UnsupportedError: .* found torch.nn.MultiheadAttention"),
        (cut_twice, "UnsupportedError: .* no context_parallel around this one, found one"),
        (by_hand, "ModelError: .* found no call; .*attn_implementation='sdpa'"),
    ],
)
def test_attention_of_a_part_is_refused(
    ranks: RankPool, attention: Callable[[Tensor], None], message: str
) -> None:
    for found in ranks.run(error_of, attention, LENGTH, None):
        assert re.search(message, found)


@two_ranks
@pytest.mark.parametrize(
    ("length", "method", "message"),
    [
        (
            7,
            None,
            r"MeshError: .* the 2 .* ranks can cut .* found 7 in dimension 2 of buffers",
        ),
        (
            8,
            "ring",
            "UnsupportedError: .* CUDA devices for attention='ring', found 'cpu'",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(
    ranks: RankPool, length: int, method: AttentionMethod | None, message: str
) -> None:
    for found in ranks.run(error_of, by_hand, length, method):
        assert re.search(message, found)


def error_of(
    attention: Callable[[Tensor], None], length: int, method: AttentionMethod | None
) -> str:
    query = sequence(0, length=length)
    try:
        with context_parallel(context(), buffers=[query], seq_dims=[2], attention=method):
            attention(query)
    except PolyshardError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@two_ranks
def test_a_mesh_without_names_is_refused(ranks: RankPool) -> None:
    for message in ranks.run(error_of_nameless_mesh):
        assert "expected a mesh whose dimensions have names" in message


def error_of_nameless_mesh() -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    try:
        with context_parallel(mesh, buffers=[torch.ones(2)], seq_dims=[0]):
            return "no error"
    except MeshError as error:
        return str(error)


@two_ranks
@pytest.mark.parametrize("needs", ["buffer", "recomputation"])
def test_a_backward_outside_is_never_silent(ranks: RankPool, needs: str) -> None:
    message = {"buffer": "modified by an inplace operation", "recomputation": "recomputed"}[needs]
    for found in ranks.run(backward_outside, needs):
        assert message in found.lower()


def backward_outside(needs: str) -> str:
    buffer = sequence(0)
    vectors = torch.ones_like(rows(buffer, 2), requires_grad=True)
    with context_parallel(context(), buffers=[buffer], seq_dims=[2]):
        loss = checkpoint(imported_attention, *[vectors] * 3, use_reentrant=False).sum()
        if needs == "buffer":
            loss = (vectors * buffer).sum()
    try:
        loss.backward()
    except (RuntimeError, CheckpointError) as error:
        return str(error)
    return "no error"
