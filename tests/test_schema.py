"""The schema accepts what the program accepts of a file, and refuses what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from attrs import field, frozen
from jsonschema import Draft202012Validator

from polyshard import DistributedConfig, hookimpl
from polyshard.exceptions import ConfigError, StrategyNotFoundError
from polyshard.fields import is_int, is_number, to_dtype_name
from polyshard.files import read_config
from polyshard.registry import StrategyRegistry, default_registry
from polyshard.schema import describe_class, file_schema
from polyshard.structuring import structure
from polyshard.training.config import TrainingConfig

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.yaml"))


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    """The validator of files that may name any installed strategy."""
    schema = file_schema(TrainingConfig, default_registry().available())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_are_valid(validator: Draft202012Validator, path: Path) -> None:
    values = read_config(path).values
    structure(values, TrainingConfig)
    assert list(validator.iter_errors(values)) == []


@pytest.mark.parametrize(
    "values",
    [
        {"distributed": None},
        {"distributed": "ddp"},
        {"distributed": {"strategy": "fsdp"}, "max_grad_norm": 0.5},
        {"distributed": {"strategy": "fsdp2", "mp_policy": {"param_dtype": "torch.bf16"}}},
        {"distributed": {"strategy": "fsdp2", "mp_policy": None, "unit_modules": "Block"}},
        {"distributed": {"strategy": "fsdp2", "unit_modules": ["Block", "Head"]}},
        {"distributed": {"strategy": "fsdp2", "tp_plan": {"a.*.b": "colwise"}}},
        {"distributed": {"strategy": "fsdp2", "reshard_after_forward": 4}},
        {"distributed": {"strategy": "fsdp2", "activation_checkpointing": "selective"}},
        {"distributed": {"strategy": "ddp", "autocast_dtype": "half", "bucket_cap_mb": 2.5}},
        {"distributed": None, "model": {"heads": 2}, "optimizer": {"lr": 1}},
    ],
)
def test_what_the_program_accepts_is_valid(
    validator: Draft202012Validator, values: dict[str, Any]
) -> None:
    structure(values, TrainingConfig)
    assert list(validator.iter_errors(values)) == []


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"distributed": {}},
        {"distributed": "dpd"},
        {"distributed": {"strategy": "nosuch"}},
        {"distributed": {"strategy": "ddp", "static_grap": True}},
        {"distributed": {"strategy": "ddp", "static_graph": "false"}},
        {"distributed": {"strategy": "ddp", "reshard_after_forward": True}},
        {"distributed": {"strategy": "ddp", "bucket_cap_mb": 0}},
        {"distributed": {"strategy": "ddp", "autocast_dtype": "float64"}},
        {"distributed": {"strategy": "fsdp2", "activation_checkpointing": "ful"}},
        {"distributed": {"strategy": "fsdp2", "mp_policy": {"param_dtype": "bf61"}}},
        {"distributed": {"strategy": "fsdp2", "mp_policy": {"parm_dtype": None}}},
        {"distributed": {"strategy": "fsdp2", "unit_modules": []}},
        {"distributed": {"strategy": "fsdp2", "forward_prefetch_depth": 0}},
        {"distributed": None, "steps": 0},
        {"distributed": None, "step": 1},
        {"distributed": None, "seed": None},
        {"distributed": None, "optimizer": {"name": "sdg"}},
    ],
)
def test_what_the_program_refuses_is_invalid(
    validator: Draft202012Validator, values: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError):
        structure(values, TrainingConfig)
    assert not validator.is_valid(values)


def test_every_field_has_its_description_and_its_default() -> None:
    schema = file_schema(TrainingConfig, ["ddp"])
    assert schema["properties"]["steps"] == {
        "description": "Optimizer steps.",
        "type": "integer",
        "minimum": 1,
        "default": 20,
    }
    fields = schema["$defs"]["OptimizerConfig"]["properties"]
    assert fields["momentum"]["default"] == 0.9
    # Which one is the default depends on the optimizer.
    assert "default" not in fields["lr"]


def test_a_strategy_is_chosen_by_any_of_its_names() -> None:
    schema = file_schema(TrainingConfig, ["fsdp", "fsdp2"])
    assert [name for name in schema["$defs"] if "FSDP" in name] == ["FSDP2Config"]
    with pytest.raises(StrategyNotFoundError, match="'nosuch'"):
        file_schema(TrainingConfig, ["nosuch"])


@frozen(kw_only=True)
class Parent(DistributedConfig):
    """A config from elsewhere.

    Attributes:
        depth: How deep.
        names: ``a`` to
            ``b``.
    """

    strategy: ClassVar[str] = "child"

    depth: int = field(default=1, validator=[is_int(1), is_number(0.5)])
    names: Mapping[str, int] = field(factory=dict)
    pair: tuple[str, ...] = ()
    unknown: Any = field(default=print)
    dtype: str | None = field(default=None, converter=to_dtype_name)


@frozen(kw_only=True)
class Child(Parent):
    inner: Inner | None = None


@frozen(kw_only=True)
class Inner:
    """Refers to itself."""

    again: Inner | None = None
    number: float


@frozen(kw_only=True)
class File:
    """Holds a strategy."""

    distributed: DistributedConfig


class Plugin:
    @hookimpl
    def parallelize(self, model: Any, optimizer: Any) -> Any:
        return model, optimizer


def test_configs_from_elsewhere_are_described_by_their_types() -> None:
    registry = StrategyRegistry(installed={})
    registry.register(Plugin(), config_class=Child)
    schema = file_schema(File, ["child"], registry=registry)
    Draft202012Validator.check_schema(schema)
    fields = schema["$defs"]["Child"]["properties"]
    assert fields["depth"]["description"] == "How deep."
    assert fields["depth"]["allOf"] == [
        {"type": "integer", "minimum": 1},
        {"type": "number", "minimum": 0.5},
    ]
    assert fields["names"]["additionalProperties"] == {"type": "integer"}
    assert fields["names"]["description"] == "`a` to `b`."
    assert fields["pair"]["items"] == {"type": "string"}
    assert fields["unknown"] == {}
    valid = {"strategy": "child", "inner": {"number": 1.5, "again": {"number": 2}}}
    validator = Draft202012Validator(schema)
    assert validator.is_valid({"distributed": valid})
    assert not validator.is_valid({"distributed": {"strategy": "child", "inner": {}}})


def test_a_class_without_a_docstring_has_that_of_its_parent() -> None:
    summary, described = describe_class(Child)
    assert summary == "A config from elsewhere."
    assert described["names"] == "`a` to `b`."
