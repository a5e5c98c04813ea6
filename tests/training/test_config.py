"""The schema of a training run."""

from __future__ import annotations

import pytest

from polyshard import DDPConfig
from polyshard.structuring import KeyPathError, structure
from polyshard.training.config import ModelConfig, OptimizerConfig, TrainingConfig


def test_the_strategy_is_found_by_name() -> None:
    config = structure({"distributed": {"strategy": "DDP", "static_graph": True}}, TrainingConfig)
    assert config.distributed == DDPConfig(static_graph=True)


def test_it_survives_the_way_through_plain_values() -> None:
    config = TrainingConfig(
        distributed=DDPConfig(bucket_cap_mb=5), model=ModelConfig(layers=2), max_grad_norm=0.5
    )
    assert structure(config.to_dict(), TrainingConfig) == config


def test_without_a_strategy_it_is_plain() -> None:
    plain = structure({"distributed": None}, TrainingConfig)
    assert plain.distributed is None
    assert structure(plain.to_dict(), TrainingConfig) == plain


@pytest.mark.parametrize(
    ("values", "path", "problem"),
    [
        ({}, ("distributed",), "required key 'distributed' is missing"),
        ({"distributed": {"strategy": "nope"}}, ("distributed", "strategy"), "'nope'"),
        ({"distributed": {}}, ("distributed", "strategy"), "the name of a strategy"),
        (
            {"distributed": {"strategy": "ddp", "static_grap": True}},
            ("distributed", "static_grap"),
            "did you mean 'static_graph'",
        ),
        ({"distributed": None, "steps": True}, ("steps",), "an integer of at least 1"),
        ({"distributed": None, "model": {"heads": 5}}, ("model",), "divides the width"),
        (
            {"distributed": None, "optimizer": {"name": "sdg"}},
            ("optimizer", "name"),
            "one of 'sgd', 'adamw'",
        ),
    ],
)
def test_a_fault_is_reported_with_its_path(
    values: dict[str, object], path: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(KeyPathError) as refused:
        structure(values, TrainingConfig)
    assert refused.value.path == path
    assert problem in refused.value.problem


def test_the_usual_learning_rate_depends_on_the_optimizer() -> None:
    assert OptimizerConfig(name="sgd").lr == 0.02
    assert OptimizerConfig(name="adamw").lr == 0.001
    assert OptimizerConfig(name="adamw", lr=0.5).lr == 0.5


def test_a_batch_must_be_shared_evenly() -> None:
    config = TrainingConfig(distributed=None, batch_size=12, microbatches=3)
    config.check_shares(4)
    with pytest.raises(KeyPathError, match=r"batch_size: expected a multiple of 24 .* found 12"):
        config.check_shares(8)
