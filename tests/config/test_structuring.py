"""Configs come from plain mappings and go back to them, strictly at every level."""

from typing import Any, ClassVar

import pytest
from attrs import field, frozen

from polyshard import DistributedConfig, MixedPrecision
from polyshard.config.fields import is_int
from polyshard.config.structuring import KeyPathError, structure
from polyshard.exceptions import ConfigError


@frozen(kw_only=True)
class Inner:
    size: int = field(default=1, validator=is_int(1))


@frozen(kw_only=True)
class Outer(DistributedConfig):
    strategy: ClassVar[str] = "outer"
    tp_size: int = field(default=1, validator=is_int(1))
    inner: Inner = field(factory=Inner)
    precision: MixedPrecision | None = None
    plan: Any = None


def fault(mapping: Any) -> KeyPathError:
    with pytest.raises(KeyPathError) as caught:
        Outer.from_dict(mapping)
    return caught.value


def test_plain_values_become_nested_configs() -> None:
    config = Outer.from_dict({"inner": {"size": 3}, "precision": {"param_dtype": "bf16"}})
    assert config == Outer(inner=Inner(size=3), precision=MixedPrecision(param_dtype="bfloat16"))


def test_to_dict_and_from_dict_round_trip() -> None:
    config = Outer(tp_size=2, precision=MixedPrecision(reduce_dtype="fp16"), plan={"a": [1]})
    plain = config.to_dict()
    assert plain["strategy"] == "outer"
    assert plain["precision"]["reduce_dtype"] == "float16"
    assert Outer.from_dict(plain) == config


@pytest.mark.parametrize("none", [{"precision": None}, {}])
def test_none_is_a_value_of_an_optional_config(none: dict[str, Any]) -> None:
    assert Outer.from_dict(none).precision is None


def test_an_unknown_key_names_the_nearest() -> None:
    error = fault({"tp_sise": 2})
    assert error.path == ("tp_sise",)
    assert "Outer" in str(error)
    assert "has no field 'tp_sise' (did you mean 'tp_size'?)" in str(error)


def test_an_unknown_key_in_a_nested_config_has_its_path() -> None:
    error = fault({"inner": {"sise": 2}})
    assert error.path == ("inner", "sise")
    assert str(error).startswith("inner.sise: Inner")


@pytest.mark.parametrize(
    ("mapping", "path", "message"),
    [
        ({"tp_size": "2"}, (), "expected an integer of at least 1, found '2' (str)"),
        ({"inner": {"size": True}}, ("inner",), "expected an integer of at least 1, found True"),
        ({"precision": {"param_dtype": "bf17"}}, ("precision",), "found 'bf17' (str)"),
        ({"inner": 3}, ("inner",), "expected a mapping, found 3 (int)"),
        ({"inner": None}, ("inner",), "expected a mapping, found None"),
        ({1: 2}, (), "expected keys that are strings, found 1 (int)"),
        ([], (), "expected a mapping, found [] (list)"),
        ({"strategy": "ddp"}, ("strategy",), "expected 'outer', the strategy of Outer"),
    ],
)
def test_a_wrong_value_is_refused(mapping: Any, path: tuple[str, ...], message: str) -> None:
    error = fault(mapping)
    assert error.path[: len(path)] == path
    assert message in str(error)
    assert isinstance(error, ConfigError)


def test_a_missing_required_key_is_named() -> None:
    @frozen(kw_only=True)
    class Required:
        size: int

    with pytest.raises(KeyPathError, match="size"):
        structure({}, Required)


def test_what_a_file_cannot_hold_is_refused_by_field() -> None:
    with pytest.raises(ConfigError, match="plan: a file cannot hold <class 'int'>"):
        Outer(plan=int).to_dict()
