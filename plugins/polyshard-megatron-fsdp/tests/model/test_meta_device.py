"""Models that start on the meta device: everything gets a value, or is refused by name."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from polyshard import full_state_dict, maybe_shard_optimizer, parallelize
from polyshard.config.parallelism import ParallelismSizes
from polyshard.conformance.models import WIDTH, Block, TinyModel
from polyshard.conformance.parity import assert_parity
from polyshard.conformance.recipes import Outcome, Recipe, build_optimizer
from polyshard.conformance.trainings import PlainTraining, Training, mesh_of
from polyshard.exceptions import ModelError, UnsupportedError
from polyshard_megatron_fsdp import MegatronFSDPConfig

RECIPE = Recipe(steps=3)


class ResettableBlock(Block):
    """A block that can initialize what it owns itself."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)


class MetaModel(TinyModel):
    """A model without values, whose modules can all give their parameters one."""

    def __init__(self) -> None:
        with torch.device("meta"):
            super().__init__()
            self.blocks = nn.ModuleList(ResettableBlock() for _ in range(3))


class Scale(nn.Module):
    """A parameter on the meta device beside a buffer that has values."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.empty(WIDTH, device="meta"))
        self.register_buffer("offset", torch.full((WIDTH,), 3.0), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.factor)


class ModelWithBuffer(MetaModel):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()

    def adapt(self, hidden: Tensor) -> Tensor:
        return hidden * self.scale.factor + self.scale.offset


def train_from_meta(
    kind: type[TinyModel], stage: int, sizes: ParallelismSizes | None, seed_per_rank: bool
) -> tuple[Outcome, Outcome, float]:
    """Train, and train a plain model from the weights that the wrap made; their spread too."""
    config = MegatronFSDPConfig(zero_dp_strategy=stage, init_fsdp_with_meta_device=True)
    torch.manual_seed(100 + dist.get_rank() * seed_per_rank)
    model, _ = parallelize(kind(), config, mesh=mesh_of(sizes))
    start = full_state_dict(model, rank0_only=False)
    reference = kind().to_empty(device="cpu")
    if isinstance(reference, ModelWithBuffer):
        reference.scale = Scale().to_empty(device="cpu")
        reference.scale.offset.fill_(3.0)
    reference.load_state_dict(start)
    plain = PlainTraining(reference, build_optimizer("sgd", reference), RECIPE)
    plain.train(range(RECIPE.steps))
    optimizer = maybe_shard_optimizer(model, build_optimizer("sgd", model))
    training = Training(model, optimizer, RECIPE, config)
    training.train(range(RECIPE.steps))
    return training.outcome(), plain.outcome(), float(start["embedding.weight"].std())


@pytest.mark.world_size(2)
@pytest.mark.parametrize("seed_per_rank", [False, True])
@pytest.mark.parametrize("kind", [MetaModel, ModelWithBuffer])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_from_meta_equals_one_process(ranks, stage, kind, seed_per_rank):
    for found, expected, spread in ranks.run(train_from_meta, kind, stage, None, seed_per_rank):
        assert 0.5 < spread < 1.5, "expected the embedding's own initialization"
        assert_parity([found], expected, RECIPE)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("stage", [1, 3])
def test_replicas_start_alike(ranks, stage):
    sizes = ParallelismSizes(dp_replicate_size=2)
    for found, expected, _ in ranks.run(train_from_meta, MetaModel, stage, sizes, True):
        assert_parity([found], expected, RECIPE)


class NoReset(MetaModel):
    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.blocks = nn.ModuleList(Block() for _ in range(3))


class BufferOnMeta(MetaModel):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(3, device="meta"))


class Tied(MetaModel):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class PartlyOnMeta(MetaModel):
    def __init__(self) -> None:
        super().__init__()
        self.head.bias = nn.Parameter(torch.zeros(33))


def refusal(kind: type[TinyModel], flag: bool) -> str:
    try:
        parallelize(kind(), MegatronFSDPConfig(init_fsdp_with_meta_device=flag))
    except (ModelError, UnsupportedError) as error:
        return str(error)
    raise AssertionError("expected the model to be refused")


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("kind", "flag", "expected"),
    [
        (NoReset, True, "'gain' of 'blocks.0': Block has no reset_parameters()"),
        (BufferOnMeta, True, "the buffer 'table' of 'BufferOnMeta'"),
        (Tied, True, "the tied parameter 'embedding.weight' and 'head.weight'"),
        (PartlyOnMeta, True, "'weight' of 'head', whose other parameters have values"),
        (MetaModel, False, "on the meta device (embedding.weight, ...)"),
    ],
)
def test_what_would_get_no_value_is_refused_by_name(ranks, kind, flag, expected):
    for message in ranks.run(refusal, kind, flag):
        assert expected in message
