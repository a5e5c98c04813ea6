"""Fields take values with the types they have, and errors name field, class and owner."""

import math
from typing import Any

import pytest
import torch
from attrs import field, frozen

from polyshard.config.fields import (
    is_bool,
    is_dtype,
    is_int,
    is_number,
    is_one_of,
    is_str,
    optional,
    to_dtype_name,
)
from polyshard.exceptions import ConfigError


@frozen(kw_only=True)
class Example:
    flag: bool = field(default=False, validator=is_bool)
    name: str = field(default="x", validator=is_str)
    count: int = field(default=1, validator=is_int(1))
    rate: float = field(default=1.0, validator=is_number(0, exclusive=True))
    any_rate: float = field(default=1.0, validator=is_number())
    mode: object = field(default=False, validator=is_one_of(False, True, "full"))
    limit: int | None = field(default=None, validator=optional(is_int(0)))
    dtype: object = field(default=None, converter=to_dtype_name, validator=optional(is_dtype))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("flag", "false"),
        ("flag", 0),
        ("flag", None),
        ("name", ""),
        ("name", 1),
        ("count", "2"),
        ("count", True),
        ("count", 2.0),
        ("count", 0),
        ("count", -2),
        ("rate", 0),
        ("rate", "1e-5"),
        ("rate", True),
        ("rate", math.nan),
        ("any_rate", math.inf),
        ("mode", 0),
        ("mode", 1),
        ("mode", "Full"),
        ("limit", -1),
        ("limit", "none"),
    ],
)
def test_a_value_that_merely_looks_right_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Example(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"Example.{name} (module {__name__}): expected ")
    assert f"found {value!r} ({type(value).__name__})" in message


@pytest.mark.parametrize(
    ("name", "value"),
    [("count", 3), ("rate", 2), ("rate", 1e-5), ("mode", "full"), ("mode", True), ("limit", 0),
     ("any_rate", -3)],
)  # fmt: skip
def test_a_value_that_is_right_is_kept(name: str, value: Any) -> None:
    assert getattr(Example(**{name: value}), name) is value


@pytest.mark.parametrize("spelling", ["bf16", "bfloat16", "torch.bfloat16", "BF16", torch.bfloat16])
def test_every_usual_spelling_of_a_dtype_is_accepted(spelling: object) -> None:
    assert Example(dtype=spelling).dtype == "bfloat16"


def test_an_optional_dtype_may_be_none() -> None:
    assert Example(dtype=None).dtype is None


@pytest.mark.parametrize("value", ["int8", "bfloat", "", 16, torch.int64, True])
def test_what_is_no_floating_point_dtype_is_refused(value: object) -> None:
    with pytest.raises(
        ConfigError, match=r"Example.dtype .* a floating-point dtype such as 'bf16'"
    ):
        Example(dtype=value)


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(ConfigError) as caught:
        Example(flag="x" * 1000)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 250
