"""Every option does what it says, is refused, or says that it has no effect."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from polyshard import clip_grad_norm, full_state_dict, maybe_shard_optimizer, parallelize
from polyshard.conformance.models import TinyModel, build_model, global_batch, loss_of
from polyshard.conformance.parity import assert_parity
from polyshard.conformance.recipes import Recipe, build_optimizer
from polyshard.conformance.trainings import train_plain, train_under
from polyshard.exceptions import ModelError, PolyshardError, UnitError, UnsupportedError
from polyshard_megatron_fsdp import MegatronFSDPConfig
from polyshard_megatron_fsdp.megatron_fsdp import version

pytestmark = pytest.mark.world_size(2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"overlap_grad_reduce": False},
        {"overlap_param_gather": False},
        {"average_in_collective": True},
        {"disable_bucketing": True},
        {"activation_checkpointing": True},
        {"report_nan_in_param_grad": True},
        {"preserve_fp32_weights": True, "grad_reduce_in_fp32": True},
    ],
    ids=str,
)
def test_options_change_no_result(ranks, stage, options):
    config = MegatronFSDPConfig(zero_dp_strategy=stage, **options)
    recipe = Recipe(model="tied", steps=3, microbatches=3)
    assert_parity(ranks.run(train_under, config, recipe), train_plain(recipe), recipe)


def summed_norm(stage: int) -> tuple[float, float]:
    """Return the gradient norm with averaging and with ``calculate_per_token_loss``."""
    norms = []
    for summed in (False, True):
        config = MegatronFSDPConfig(zero_dp_strategy=stage, calculate_per_token_loss=summed)
        model, _ = parallelize(build_model("plain"), config)
        loss_of(model, global_batch(0).chunk(dist.get_world_size())[dist.get_rank()]).backward()
        norms.append(float(clip_grad_norm(model, float("inf"))))
    return norms[0], norms[1]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_per_token_loss_sums_gradients(ranks, world_size, stage):
    for averaged, summed in ranks.run(summed_norm, stage):
        assert summed == pytest.approx(world_size * averaged, rel=1e-6)


def recomputed(checkpointing: bool) -> int:
    """Count the forwards of one block in one forward and backward of the model."""
    config = MegatronFSDPConfig(activation_checkpointing=checkpointing)
    module = build_model("plain")
    calls = []
    module.blocks[0].norm.register_forward_hook(lambda *_: calls.append(1))
    model, _ = parallelize(module, config)
    loss_of(model, global_batch(0)).backward()
    return len(calls)


def test_activation_checkpointing_computes_blocks_again(ranks):
    assert ranks.run(recomputed, False) == [1, 1]
    assert ranks.run(recomputed, True) == [2, 2]


def messages_of(options: dict[str, Any]) -> list[str]:
    """Wrap two models and return what the plugin's logger said."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    version.warn_once.cache_clear()
    version.logger.addHandler(handler)
    for _ in range(2):
        parallelize(build_model("plain"), MegatronFSDPConfig(**options))
    version.logger.removeHandler(handler)
    return heard


@pytest.mark.parametrize(
    "options",
    [
        {"check_for_nan_in_grad": True},
        {"check_for_nan_in_grad": False, "overlap_grad_reduce": False},
        {"check_for_nan_in_grad": False, "overlap_param_gather": False},
    ],
    ids=str,
)
def test_options_without_effect_say_so_once(ranks, options):
    first, *others = ranks.run(messages_of, options)
    assert len(first) == 1
    assert list(options)[-1] in first[0]
    assert "has no effect" in first[0]
    assert not any(others), "expected one rank to say it"


def refusal(options: dict[str, Any]) -> str:
    try:
        parallelize(build_model("plain"), MegatronFSDPConfig(**options))
    except UnsupportedError as error:
        return str(error)
    raise AssertionError("expected the option to be refused")


@pytest.mark.parametrize(
    ("option", "needed"),
    [
        ("nccl_ub", "CUDA and NCCL"),
        ("fsdp_double_buffer", "CUDA"),
        ("keep_fp8_transpose_cache", "Transformer Engine"),
    ],
)
def test_options_that_cannot_work_are_refused(ranks, option, needed):
    for message in ranks.run(refusal, {option: True}):
        assert f"{option}=True needs {needed}" in message


class Nested(TinyModel):
    """A model with blocks inside blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].inner = build_model("plain").blocks[0]


def wrap_with_units(spec: Any, kind: type[nn.Module]) -> str:
    config = MegatronFSDPConfig(megatron_fsdp_unit_modules=spec)
    try:
        model, _ = parallelize(kind(), config)
    except PolyshardError as error:
        return f"{type(error).__name__}: {error}"
    return " ".join(cls.__name__ for cls in model.fsdp_unit_modules)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (None, "Block"),
        ("Block", "Block"),
        ("polyshard.conformance.models.Block", "Block"),
        (["Block"], "Block"),
        (["Linear", "Embedding"], "Linear Embedding"),
    ],
)
def test_units_are_found(ranks, spec, expected):
    for found in ranks.run(wrap_with_units, spec, TinyModel):
        assert sorted(found.split()) == sorted(expected.split())


@pytest.mark.parametrize(
    ("spec", "kind", "expected"),
    [
        ("Blocks", TinyModel, "'Blocks', which none of them has; its classes are"),
        ("SiLU", TinyModel, "which none of them has"),
        (["Block"], Nested, "found 'blocks.0.inner'"),
    ],
)
def test_units_that_do_not_fit_are_refused(ranks, spec, kind, expected):
    for message in ranks.run(wrap_with_units, spec, kind):
        assert message.startswith(UnitError.__name__)
        assert expected in message


class NoBlocks(nn.Module):
    """Two layers that are not alike, and so no repeated block."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(33, 8)
        self.head = nn.Linear(8, 33)

    def forward(self, tokens: Any, adapt: bool = True) -> Any:
        return self.head(self.embedding(tokens))


def train_without_blocks(stage: int) -> float:
    config = MegatronFSDPConfig(zero_dp_strategy=stage)
    plain, module = NoBlocks(), NoBlocks()
    module.load_state_dict(plain.state_dict())
    for parameter in (*plain.parameters(), *module.parameters()):
        dist.broadcast(parameter.detach(), 0)
    model, _ = parallelize(module, config)
    optimizer = maybe_shard_optimizer(model, build_optimizer("sgd", model))
    reference = build_optimizer("sgd", plain)
    for step in range(3):
        for subject, one in ((model, optimizer), (plain, reference)):
            one.zero_grad()
            loss_of(subject, global_batch(step)).backward()
            one.step()
    weights = full_state_dict(model, rank0_only=False)
    return max(float((weights[n] - w).abs().max()) for n, w in plain.state_dict().items())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_model_without_blocks_is_one_unit(ranks, stage):
    assert max(ranks.run(train_without_blocks, stage)) < 1e-6


def refusal_of_parameter(parameter: Tensor) -> str:
    model = build_model("plain")
    model.extra = nn.Parameter(parameter, requires_grad=False)
    try:
        parallelize(model, MegatronFSDPConfig())
    except ModelError as error:
        return str(error)
    raise AssertionError("expected the parameter to be refused")


@pytest.mark.parametrize(
    ("parameter", "expected"),
    [
        (torch.tensor(1.0), "found the scalar 'extra'; give it the shape (1,)"),
        (torch.ones(4).double(), "found 'extra' of torch.float64; cast it before parallelize"),
        (torch.ones(4, dtype=torch.int8), "found 'extra' of torch.int8"),
    ],
    ids=["scalar", "float64", "int8"],
)
def test_parameters_that_cannot_be_sharded_are_refused_by_name(ranks, parameter, expected):
    for message in ranks.run(refusal_of_parameter, parameter):
        assert expected in message
