"""The schema accepts what the program accepts of a file, and refuses what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from attrs import field, frozen
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from polyshard import DistributedConfig, hookimpl
from polyshard.config.fields import is_int, is_number, to_dtype_name
from polyshard.exceptions import ConfigError, StrategyNotFoundError
from polyshard.registry.registry import StrategyRegistry, default_registry
from polyshard.registry.schema import describe_class, file_schema
from polyshard.training.config import TrainingConfig, read_run

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))

ACCEPTED = [
    "distributed: null",
    "distributed: None",
    "distributed: ddp",
    "distributed: DDP",
    "distributed: Distributed-Data_Parallel",
    pytest.param("distributed: Megatron-FSDP", marks=pytest.mark.strategy("megatron_fsdp")),
    "distributed: {strategy: FSDP}",
    "distributed: {strategy: ' Fsdp2 '}",
    "distributed: {strategy: fsdp}\nmax_grad_norm: 0.5",
    "distributed: ddp\nmax_grad_norm: none",
    "distributed: ddp\noptimizer: {lr: 1e-3}",
    "distributed: {strategy: fsdp2, mp_policy: {param_dtype: torch.bf16}}",
    "distributed: {strategy: fsdp2, mp_policy: {param_dtype: BF16, reduce_dtype: Torch.Float32}}",
    "distributed: {strategy: fsdp2, mp_policy: null, unit_modules: Block}",
    "distributed: {strategy: fsdp2, mp_policy: none}",
    "distributed: {strategy: fsdp2, unit_modules: [Block, Head]}",
    "distributed: {strategy: fsdp2, tp_plan: {a.*.b: colwise}}",
    "distributed: {strategy: fsdp2, reshard_after_forward: 4}",
    "distributed: {strategy: fsdp2, reshard_after_forward: false}",
    "distributed: {strategy: fsdp2, activation_checkpointing: selective}",
    "distributed: {strategy: fsdp2, tp_size: 2}",
    "distributed: {strategy: fsdp2, dp_size: none, dp_replicate_size: 2}",
    "distributed: {strategy: fsdp2, dp_size: 4}\nparallelism: {tp_size: 2}",
    "distributed: fsdp2\nparallelism: {tp_size: 2, dp_size: null}",
    "distributed: {strategy: ddp, autocast_dtype: half, bucket_cap_mb: 2.5}",
    "distributed: null\nmodel: {heads: 2}\noptimizer: {lr: 1}",
]

REFUSED = [
    "steps: 1",
    "distributed: {}",
    "distributed: dpd",
    "distributed: dd-p",
    "distributed: [ddp]",
    "distributed: {strategy: nosuch}",
    "distributed: {strategy: null}",
    "distributed: {strategy: ddp, static_grap: true}",
    "distributed: {strategy: ddp, static_graph: 'false'}",
    "distributed: {strategy: DDP, reshard_after_forward: true}",
    "distributed: {strategy: ddp, bucket_cap_mb: 0}",
    "distributed: {strategy: ddp, autocast_dtype: float64}",
    "distributed: {strategy: fsdp2, activation_checkpointing: ful}",
    "distributed: {strategy: fsdp2, mp_policy: {param_dtype: bf61}}",
    "distributed: {strategy: fsdp2, mp_policy: {parm_dtype: null}}",
    "distributed: {strategy: fsdp2, unit_modules: []}",
    "distributed: {strategy: fsdp2, tp_plan: {a: colwize}}",
    "distributed: {strategy: fsdp2, tp_plan: {}}",
    "distributed: {strategy: fsdp2, reshard_after_forward: 1}",
    "distributed: {strategy: fsdp2, forward_prefetch_depth: 0}",
    "distributed: {strategy: fsdp2, tp_size: 0}",
    "distributed: {strategy: fsdp2, tp_size: none}",
    "distributed: {strategy: fsdp2, tp_sise: 2}",
    "distributed: {strategy: fsdp2, tp_size: 2}\nparallelism: {tp_size: 2}",
    "distributed: fsdp2\nparallelism: {tp_size: '2'}",
    "distributed: fsdp2\nparallelism: none",
    "distributed: null\nsteps: 0",
    "distributed: null\nsteps: 1.5",
    "distributed: null\nsteps: true",
    "distributed: null\nstep: 1",
    "distributed: null\nseed: null",
    "distributed: null\ntp_size: 2",
    "distributed: null\noptimizer: {name: sdg}",
]


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    """The validator of files that may name any installed strategy."""
    schema = file_schema(TrainingConfig, default_registry().available())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def _as_an_editor_reads(path: Path) -> Any:
    return YAML(typ="safe", pure=True).load(path)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_are_valid(validator: Draft202012Validator, path: Path) -> None:
    read_run(path).structure(TrainingConfig)
    assert list(validator.iter_errors(_as_an_editor_reads(path))) == []


@pytest.mark.parametrize("text", ACCEPTED)
def test_what_the_program_accepts_is_valid(
    validator: Draft202012Validator, text: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    read_run(path).structure(TrainingConfig)
    assert list(validator.iter_errors(_as_an_editor_reads(path))) == []


@pytest.mark.parametrize("text", REFUSED)
def test_what_the_program_refuses_is_invalid(
    validator: Draft202012Validator, text: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        read_run(path).structure(TrainingConfig)
    assert not validator.is_valid(_as_an_editor_reads(path))


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
