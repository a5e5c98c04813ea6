"""Training on parts of sequences is training on the whole of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from polyshard import (
    DistributedSetup,
    MeshContext,
    ParallelismSizes,
    resolve_config,
)
from polyshard.conformance import RankPool

BATCH, HEADS, LENGTH, SIZE = 2, 4, 8, 16

two_ranks = pytest.mark.world_size(2)


class Case(NamedTuple):
    strategy: str
    options: Mapping[str, Any]


CASES = [
    Case("fsdp2", {"mp_policy": None}),
    Case("fsdp2", {"mp_policy": None, "activation_checkpointing": "full"}),
    Case("fsdp2", {"mp_policy": None, "activation_checkpointing": "selective"}),
    Case("megatron_fsdp", {}),
    Case("megatron_fsdp", {"activation_checkpointing": True}),
]
STEPS, SEQUENCES, MICROBATCHES, VOCABULARY = 3, 4, 2, 64


@pytest.mark.world_size(2, 4)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.strategy(case.strategy)) for case in CASES],
    ids=str,
)
def test_training_is_that_on_whole_sequences(ranks: RankPool, case: Case) -> None:
    expected, expected_weights = train_plain()
    for found, weights in ranks.run(train, case):
        assert found == pytest.approx(expected, rel=1e-6)
        for name, value in expected_weights.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6)


@two_ranks
@pytest.mark.gpu
@pytest.mark.strategy("fsdp2")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_on_cuda(ranks: RankPool, checkpointing: bool) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a CUDA device for each of 2 ranks")
    expected, _ = train_plain()
    case = Case("fsdp2", {"mp_policy": None, "activation_checkpointing": checkpointing})
    for found, _ in ranks.run(train, case, "cuda"):
        assert found == pytest.approx(expected, rel=1e-3)


def train(case: Case, device: str = "cpu") -> tuple[list[float], dict[str, Tensor]]:
    """Train Llama on two context-parallel ranks; the others are data-parallel."""
    config = resolve_config(case.strategy, **case.options)
    setup = DistributedSetup(config, MeshContext.build(ParallelismSizes(cp_size=2), device=device))
    model, _ = setup.parallelize(llama())
    optimizer = setup.shard_optimizer(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    data = setup.mesh_context.submesh("dp")
    assert data is not None
    found = []
    for number in range(STEPS):
        share = batch(number).chunk(data.size())[data.get_local_rank()].to(setup.device)
        loss = torch.zeros((), dtype=torch.float64, device=setup.device)
        for index, tokens in enumerate(share.chunk(MICROBATCHES)):
            buffers = of_sequence(tokens)
            last = index + 1 == MICROBATCHES
            with (
                setup.accumulate(model, last=last),
                setup.context_parallel(buffers=buffers, seq_dims=[1] * 4),
            ):
                part = loss_of(model, *buffers) / MICROBATCHES
                part.backward()
            loss += part.detach()
        dist.all_reduce(loss)
        found += [loss.item() / dist.get_world_size(), setup.clip_grad_norm(model, 0.5)]
        optimizer.step()
        optimizer.zero_grad()
    return found, setup.full_state_dict(model, rank0_only=False)


@cache
def train_plain() -> tuple[list[float], dict[str, Tensor]]:
    """Train Llama on whole sequences; return losses and norms in turn, and the weights."""
    model = llama()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for number in range(STEPS):
        loss = loss_of(model, *of_sequence(batch(number)))
        loss.backward()
        found += [loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()]
        optimizer.step()
        optimizer.zero_grad()
    return found, {name: value.clone() for name, value in model.state_dict().items()}


def llama() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def batch(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH + 1), generator=generator)


def of_sequence(tokens: Tensor) -> list[Tensor]:
    """Return inputs, targets, positions and padding mask, each (sequences, length)."""
    inputs = tokens[:, :-1]
    positions = torch.arange(LENGTH, device=tokens.device).expand_as(inputs)
    return [inputs, tokens[:, 1:], positions, torch.ones_like(inputs)]


def loss_of(
    model: nn.Module, inputs: Tensor, targets: Tensor, positions: Tensor, mask: Tensor
) -> Tensor:
    logits = model(inputs, position_ids=positions, attention_mask=mask).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
