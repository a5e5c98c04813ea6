"""The schema of a training run."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyshard import DDPConfig, ParallelismSizes
from polyshard.config.structuring import KeyPathError, structure
from polyshard.exceptions import ConfigError
from polyshard.training.config import ModelConfig, OptimizerConfig, TrainingConfig, read_run


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


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("distributed: fsdp2\n")
    return path


@pytest.mark.parametrize(
    ("text", "assignments"),
    [
        ("distributed: fsdp2\n", ["distributed.tp_size=2"]),
        ("distributed: fsdp2\n", ["parallelism.tp_size=2"]),
        ("distributed: {strategy: fsdp2, tp_size: 2}\n", []),
        ("distributed: {strategy: fsdp2, tp_size: 4}\n", ["parallelism.tp_size=2"]),
        ("distributed: fsdp2\nparallelism: {tp_size: 4}\n", ["distributed.tp_size=2"]),
        ("distributed: null\n", ["distributed=fsdp2", "distributed.tp_size=2"]),
    ],
)
def test_sizes_may_stand_beside_the_strategy(run: Path, text: str, assignments: list[str]) -> None:
    run.write_text(text)
    config = read_run(run, assignments).structure(TrainingConfig)
    assert config.distributed is not None
    assert config.distributed.strategy == "fsdp2"
    assert config.parallelism == ParallelismSizes(tp_size=2)


@pytest.mark.parametrize(
    ("text", "assignments", "message"),
    [
        (
            "distributed:\n  strategy: fsdp2\n  tp_size: 2\nparallelism:\n  tp_size: 2\n",
            [],
            r"run\.yaml:3: distributed\.tp_size, and .*run\.yaml:5: parallelism\.tp_size;",
        ),
        (
            "distributed:\n  strategy: fsdp2\n  tp_sise: 2\n",
            [],
            r"run\.yaml:3: distributed\.tp_sise: FSDP2Config .*did you mean 'tp_size'.*"
            "beside them may be dp_size, dp_replicate_size, tp_size",
        ),
        (
            "distributed:\n  strategy: fsdp2\n  mp_policy: {tp_size: 2}\n",
            [],
            r"run\.yaml:3: distributed\.mp_policy\.tp_size: .* cast_forward_inputs$",
        ),
        (
            "distributed:\n  strategy: fsdp2\n  tp_size: 0\n",
            [],
            r"run\.yaml:3: distributed\.tp_size: .* an integer of at least 1, found 0",
        ),
        (
            "distributed:\n  strategy: ddp\n  tp_size: 2\n",
            [],
            r"run\.yaml:3: distributed\.tp_size: strategy 'ddp' .* found tp_size=2",
        ),
        ("distributed: ddp\n", ["distributed.tp_size=2"], r"^command line: distributed\.tp_size: "),
        (
            "distributed: fsdp2\nparallelism: {pp_size: 2}\n",
            [],
            r"run\.yaml:2: parallelism\.pp_size: strategy 'fsdp2' .* found pp_size=2",
        ),
        (
            "distributed: fsdp2\n",
            ["distributed.ep_size=2"],
            r"^command line: distributed\.ep_size: strategy 'fsdp2' .* found ep_size=2",
        ),
    ],
)
def test_a_wrong_size_is_told_where_it_stands(
    run: Path, text: str, assignments: list[str], message: str
) -> None:
    run.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_run(run, assignments).structure(TrainingConfig)


def test_sizes_that_do_not_fit_the_ranks_are_told_where_one_stands(run: Path) -> None:
    source = read_run(run, ["distributed.tp_size=2"])
    config = source.structure(TrainingConfig)
    with (
        pytest.raises(ConfigError, match=r"^command line: distributed\.tp_size: .* the 3 ranks"),
        source.located(),
    ):
        config.check_shares(3)
