"""Validators and converters for the fields of config classes.

They check types as they are: ``"2"`` is not an int, ``"false"`` is not a bool and ``True`` is
not an int. Every error says which field of which class, and which distribution ships it. They
are public because the authors of strategies need the same for their own configs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from attrs import Attribute

from polyshard._describe import describe_owner, describe_value
from polyshard.exceptions import ConfigError

__all__ = [
    "accepts",
    "dtype_spellings",
    "is_bool",
    "is_dtype",
    "is_instance",
    "is_int",
    "is_number",
    "is_one_of",
    "is_str",
    "optional",
    "reject",
    "to_dtype_name",
]

Validator = Callable[[Any, "Attribute[Any]", Any], None]


AnyValidator = TypeVar("AnyValidator", bound=Validator)


_DTYPES = {
    "float64": ("fp64", "double"),
    "float32": ("fp32", "float"),
    "float16": ("fp16", "half"),
    "bfloat16": ("bf16",),
}


_DTYPE_NAMES = {spelling: name for name, others in _DTYPES.items() for spelling in (name, *others)}


def reject(instance: object, attribute: Attribute[Any], value: object, expected: str) -> NoReturn:
    """Raise the error of a validator: which field of which class, and what it expected.

    Raises:
        ConfigError: Always.
    """
    raise ConfigError(
        f"{type(instance).__name__}.{attribute.name} ({describe_owner(type(instance))}): "
        f"expected {expected}, found {describe_value(value)}",
        field=attribute.name,
    )


def accepts(schema: Mapping[str, Any]) -> Callable[[AnyValidator], AnyValidator]:
    """Say in JSON Schema what a validator accepts of a file, in place of what its type says.

    ``polyshard config schema`` reads it. The validator that is decorated stays as it is.
    """

    def mark(validator: AnyValidator) -> AnyValidator:
        validator.json_schema = schema  # type: ignore[attr-defined]
        return validator

    return mark


@accepts({"type": "boolean"})
def is_bool(instance: object, attribute: Attribute[Any], value: object) -> None:
    """Accept True and False, and nothing that merely looks like them."""
    if not isinstance(value, bool):
        reject(instance, attribute, value, "true or false")


@accepts({"type": "string", "minLength": 1})
def is_str(instance: object, attribute: Attribute[Any], value: object) -> None:
    """Accept a non-empty string."""
    if not isinstance(value, str) or not value:
        reject(instance, attribute, value, "a non-empty string")


def is_int(minimum: int) -> Validator:
    """Accept an int of at least ``minimum``; a bool or a float is none."""

    @accepts({"type": "integer", "minimum": minimum})
    def validate(instance: object, attribute: Attribute[Any], value: object) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            reject(instance, attribute, value, f"an integer of at least {minimum}")

    return validate


def is_number(
    minimum: float = -math.inf, maximum: float = math.inf, *, exclusive: bool = False
) -> Validator:
    """Accept a finite int or float of at least (or more than) ``minimum``, up to ``maximum``."""
    bounds = ["a finite number"]
    limits: dict[str, float] = {}
    if minimum > -math.inf:
        bounds.append(f"more than {minimum}" if exclusive else f"of at least {minimum}")
        limits["exclusiveMinimum" if exclusive else "minimum"] = minimum
    if maximum < math.inf:
        bounds.append(f"up to {maximum}")
        limits["maximum"] = maximum

    @accepts({"type": "number", **limits})
    def validate(instance: object, attribute: Attribute[Any], value: object) -> None:
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not math.isfinite(value)
            or not minimum <= value <= maximum
            or (exclusive and value == minimum)
        ):
            reject(instance, attribute, value, " ".join(bounds))

    return validate


def is_one_of(*choices: object) -> Validator:
    """Accept exactly these values, where 1 is not True."""

    @accepts({"enum": list(choices)})
    def validate(instance: object, attribute: Attribute[Any], value: object) -> None:
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            reject(instance, attribute, value, "one of " + ", ".join(map(repr, choices)))

    return validate


def is_instance(cls: type) -> Validator:
    """Accept an instance of a nested config class."""

    def validate(instance: object, attribute: Attribute[Any], value: object) -> None:
        if not isinstance(value, cls):
            reject(instance, attribute, value, f"a {cls.__name__} or a mapping of its fields")

    return validate


def optional(validator: Validator) -> Validator:
    """Accept None as well as what ``validator`` accepts."""

    def validate(instance: object, attribute: Attribute[Any], value: object) -> None:
        if value is not None:
            validator(instance, attribute, value)

    schema = getattr(validator, "json_schema", None)
    return validate if schema is None else accepts({"anyOf": [schema, {"type": "null"}]})(validate)


def to_dtype_name(value: object) -> Any:
    """Convert a floating-point dtype in any usual spelling to its name, such as ``"bfloat16"``.

    ``"bf16"``, ``"bfloat16"``, ``"torch.bfloat16"`` and ``torch.bfloat16`` are the same. What is
    no such dtype is returned as it is, for ``is_dtype`` to refuse. torch is not imported.
    """
    if isinstance(value, str) or type(value).__module__ == "torch":
        return _DTYPE_NAMES.get(str(value).strip().lower().removeprefix("torch."), value)
    return value


def dtype_spellings(name: str) -> tuple[str, ...]:
    """Return every way in which a file may write the dtype of this name, in lower case."""
    short = (name, *_DTYPES[name])
    return (*short, *(f"torch.{spelling}" for spelling in short))


@accepts({"enum": list(_DTYPES)})
def is_dtype(instance: object, attribute: Attribute[Any], value: object) -> None:
    """Accept the name of a floating-point dtype, as ``to_dtype_name`` writes it."""
    if not isinstance(value, str) or value not in _DTYPES:
        expected = (
            "a floating-point dtype such as 'bf16', 'bfloat16', 'torch.bfloat16' or "
            f"torch.bfloat16 ({', '.join(_DTYPES)})"
        )
        reject(instance, attribute, value, expected)
