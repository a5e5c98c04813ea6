"""Modules split by a plan train like one process; a plan that does not fit is refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from polyshard import (
    FSDP2Config,
    MeshContext,
    ParallelismSizes,
    clip_grad_norm,
    full_state_dict,
    parallelize,
)
from polyshard.conformance import RankPool
from polyshard.conformance.models import build_model
from polyshard.exceptions import PolyshardError

pytestmark = pytest.mark.strategy("fsdp2")

WIDTH, HEADS, VOCABULARY = 16, 4, 32


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        query, key, value = (
            layer(hidden).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, -1))
        return output


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down(F.gelu(self.up(hidden)))
        return output


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.feed_forward_norm, self.feed_forward = nn.LayerNorm(WIDTH), FeedForward()

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        output: Tensor = hidden + self.feed_forward(self.feed_forward_norm(hidden))
        return output


class Transformer(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


BLOCKS = {
    **{f"blocks.*.attention.{name}": "colwise" for name in ("query", "key", "value")},
    "blocks.*.attention.output": "rowwise",
    "blocks.*.feed_forward.up": "colwise",
    "blocks.*.feed_forward.down": "rowwise",
}
ENDS = {"embedding": "embedding_rowwise", "head": "colwise_gather_output"}
SEQUENCE = {
    "norm": "sequence_parallel",
    "blocks.*.attention_norm": "sequence_parallel",
    "blocks.*.feed_forward_norm": "sequence_parallel",
    "blocks.*.attention": "gather_sequence",
    "blocks.*.feed_forward": "gather_sequence",
}
WITHOUT_GATHERING = {k: v for k, v in SEQUENCE.items() if k != "blocks.*.feed_forward"}


@pytest.mark.parametrize(
    ("plan", "sequence_parallel", "tied"),
    [
        (BLOCKS, False, False),
        (BLOCKS, False, True),
        (BLOCKS | ENDS, False, True),
        (BLOCKS | ENDS | SEQUENCE, True, True),
        (BLOCKS | ENDS | SEQUENCE, True, False),
        (BLOCKS | ENDS | WITHOUT_GATHERING, True, True),
    ],
    ids=["blocks", "tied outside", "ends", "sequence", "sequence untied", "gathered twice"],
)
@pytest.mark.parametrize(
    "options",
    [{}, {"activation_checkpointing": True, "reshard_after_forward": True}],
    ids=str,
)
@pytest.mark.world_size(2, 4)
def test_training_equals_one_process(
    ranks: RankPool,
    plan: dict[str, str],
    sequence_parallel: bool,
    tied: bool,
    options: dict[str, Any],
) -> None:
    config = FSDP2Config(tp_plan=plan, sequence_parallel=sequence_parallel, **options)
    for loss, norm, weight in ranks.run(train, config, tied):
        assert max(loss, norm, weight) < 2e-6


@pytest.mark.world_size(2)
def test_torchs_own_styles_are_taken(ranks: RankPool) -> None:
    for differences in ranks.run(train_with_styles):
        assert max(differences) < 2e-6


def train_with_styles() -> tuple[float, float, float]:
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    return train(FSDP2Config(tp_plan={k: styles[v]() for k, v in BLOCKS.items()}), tied=True)


@pytest.mark.world_size(2)
def test_the_models_own_plan_is_taken(ranks: RankPool) -> None:
    for differences in ranks.run(train_with_own_plan):
        assert max(differences) < 2e-6


def train_with_own_plan() -> tuple[float, float, float]:
    names = {"colwise_gather_output": "colwise_rep", "embedding_rowwise": "rowwise_rep"}
    plan = {k: names.get(v, v) for k, v in (BLOCKS | ENDS).items()}
    plan["layers.*.not_in_this_model"] = "colwise"
    return train(FSDP2Config(), tied=True, own_plan=plan)


def train(
    config: FSDP2Config, tied: bool, own_plan: dict[str, str] | None = None
) -> tuple[float, float, float]:
    """Return the largest relative differences to plain training: of losses, norms and weights."""
    mesh = MeshContext.build(ParallelismSizes(tp_size=2)).mesh
    assert mesh is not None
    config = config.in_full_precision()
    plain, model = Transformer(tied=tied), Transformer(tied=tied)
    model._tp_plan = own_plan  # type: ignore[assignment]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    parallelize(model, config, mesh=mesh, optimizer=optimizers[1])
    losses, norms = 0.0, 0.0
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randint(0, VOCABULARY, (8, 9), generator=generator)
        share = batch.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
        expected, found = _loss(plain, batch), _loss(model, share)
        for loss in (expected, found):
            loss.backward()
        mean = _mean(found.detach(), mesh["dp"].get_group())
        losses = max(losses, (mean / expected.detach() - 1).abs().item())
        norm = clip_grad_norm(plain, 0.5)
        norms = max(norms, abs(clip_grad_norm(model, 0.5) / norm - 1))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weights = full_state_dict(model, rank0_only=False)
    assert weights.keys() == plain.state_dict().keys()
    differences = [
        ((weights[name] - value).abs().max() / value.abs().max()).item()
        for name, value in plain.state_dict().items()
    ]
    return losses, norms, max(differences)


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def _mean(value: Tensor, group: Any) -> Tensor:
    torch.distributed.all_reduce(value, group=group)
    return value / torch.distributed.get_world_size(group)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no plan": ({}, "a plan for the mesh dimension 'tp', since Transformer has none of its own"),
    "a misspelt name": (
        {"tp_plan": {"blocks.*.attention.querry": "colwise"}},
        "found 'blocks.*.attention.querry', which matches none of embedding, blocks, blocks.0,",
    ),
    "half a tie": (
        {"tp_plan": {"head": "colwise_gather_output"}},
        "'embedding.weight' and 'head.weight', which are tied, to be split alike, found no split",
    ),
    "parameters outside": (
        {"tp_plan": BLOCKS | ENDS | {"norm": "sequence_parallel"}, "sequence_parallel": True},
        "found 'blocks.0.attention_norm' (LayerNorm) outside of it",
    ),
    "resharding to few": (
        {"tp_plan": BLOCKS, "reshard_after_forward": 2},
        "expected true, false or none with tensor parallelism, found 2",
    ),
}


@pytest.mark.world_size(4)
@pytest.mark.parametrize("case", REFUSED)
def test_a_plan_that_does_not_fit_is_refused(ranks: RankPool, case: str) -> None:
    options, message = REFUSED[case]
    for found in ranks.run(refusal, FSDP2Config(mp_policy=None, **options)):
        assert message in found


def refusal(config: FSDP2Config, own_plan: dict[str, str] | None = None) -> str:
    mesh = MeshContext.build(ParallelismSizes(tp_size=2)).mesh
    model = Transformer(tied=True)
    model._tp_plan = own_plan  # type: ignore[assignment]
    try:
        parallelize(model, config, mesh=mesh)
    except PolyshardError as error:
        return str(error)
    return "no error"


@pytest.mark.world_size(2)
def test_an_unknown_style_of_the_model_is_refused(ranks: RankPool) -> None:
    for found in ranks.run(refusal, FSDP2Config(), {"head": "local_packed_rowwise"}):
        assert "for 'head', found 'local_packed_rowwise' in the model's own plan" in found


@pytest.mark.parametrize("option", [{"tp_plan": {"head": "colwise"}}, {"sequence_parallel": True}])
def test_without_a_dimension_to_split_over_it_is_refused(
    ranks: RankPool, option: dict[str, Any]
) -> None:
    for found in ranks.run(refusal_without_dimension, evolve(FSDP2Config(), **option)):
        assert f"FSDP2Config.{next(iter(option))}: expected a mesh dimension 'tp'" in found


def refusal_without_dimension(config: FSDP2Config) -> str:
    try:
        parallelize(build_model("plain"), config)
    except PolyshardError as error:
        return str(error)
    return "no error"
