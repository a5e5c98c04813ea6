"""Config objects from plain mappings and back, strictly.

cattrs walks the classes; what is added here is that an unknown key is an error that names the
nearest valid one, that values are taken with the types they have, and that the error knows the
path to the key, so that a file reader can add the line. Only what builds a config from a mapping
imports cattrs: a config class called by name does without.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from polyshard._describe import describe_owner, describe_value, nearest
from polyshard.exceptions import ConfigError

if TYPE_CHECKING:
    import cattrs

__all__ = ["KeyPathError", "UnknownKeyError", "structure", "unstructure"]

T = TypeVar("T")


Path = tuple[str | int, ...]


class KeyPathError(ConfigError):
    """A ConfigError that knows where in the mapping the fault is.

    Attributes:
        path: Keys from the root of the mapping to the fault.
        problem: The message without the path.
    """

    def __init__(self, problem: str, path: Path) -> None:
        self.path = path
        self.problem = problem
        where = ".".join(map(str, path))
        super().__init__(f"{where}: {problem}" if where else problem)


class UnknownKeyError(KeyPathError):
    """A key that is no field of its class.

    Attributes:
        cls: The class.
        key: The key.
    """

    def __init__(
        self, cls: type[Any], key: str, path: Path, *, beside: typing.Iterable[str] = ()
    ) -> None:
        """Name the nearest valid key: a field, or one that the file may have ``beside`` them."""
        self.cls = cls
        self.key = key
        own, more = [a.name for a in attrs.fields(cls)], list(beside)
        super().__init__(
            f"{cls.__name__} ({describe_owner(cls)}) has no field {key!r}"
            f"{nearest(key, [*own, *more])}; its fields are {', '.join(own) or 'none'}"
            + (f"; beside them may be {', '.join(more)}" if more else ""),
            path,
        )


def structure(value: object, cls: type[T], *, path: Path = ()) -> T:
    """Build an instance of an attrs class from a mapping of plain values.

    Args:
        value: The mapping; nested attrs classes are mappings inside it.
        cls: The attrs class.
        path: Where the mapping stands in a larger one, for the error.

    Raises:
        KeyPathError: The first fault found, with its path.
    """
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise KeyPathError(f"expected a mapping, found {describe_value(value)}", path)
    for key in value:
        if not isinstance(key, str):
            raise KeyPathError(f"expected keys that are strings, found {describe_value(key)}", path)
    from cattrs.errors import BaseValidationError

    try:
        return _converter().structure(value, cls)
    except BaseValidationError as error:
        fault = next(_faults(error, path))
        raise fault from fault.__cause__


def unstructure(config: object, *, path: Path = ()) -> dict[str, Any]:
    """Return an attrs instance as plain values that YAML and JSON can hold.

    Raises:
        KeyPathError: A field holds something else.
    """
    return {
        field.name: _plain(getattr(config, field.name), (*path, field.name))
        for field in attrs.fields(type(config))  # type: ignore[arg-type]
    }


def _plain(value: object, path: Path) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {key: _plain(inner, (*path, key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, (*path, index)) for index, inner in enumerate(value)]
    if attrs.has(type(value)):
        return unstructure(value, path=path)
    raise KeyPathError(
        f"a file cannot hold {describe_value(value)}; write this field as plain values", path
    )


def _faults(error: BaseException, path: Path) -> Iterator[KeyPathError]:
    """Turn cattrs' tree of exceptions into a flat sequence of errors with paths."""
    from cattrs.errors import BaseValidationError, ForbiddenExtraKeysError

    if isinstance(error, BaseValidationError):
        for inner in error.exceptions:
            yield from _faults(inner, (*path, *_steps(inner)))
    elif isinstance(error, ForbiddenExtraKeysError):
        for key in sorted(error.extra_fields):
            fault: KeyPathError = UnknownKeyError(error.cl, key, (*path, key))
            fault.__cause__ = error
            yield fault
    elif isinstance(error, KeyPathError):
        yield KeyPathError(error.problem, (*path, *error.path))
    else:
        name = error.field if isinstance(error, ConfigError) else None
        fault = KeyPathError(_message(error), path if name is None else (*path, name))
        fault.__cause__ = error
        yield fault


def _steps(error: BaseException) -> Iterator[str | int]:
    from cattrs.errors import AttributeValidationNote, IterableValidationNote

    for note in getattr(error, "__notes__", ()):
        if isinstance(note, AttributeValidationNote):
            yield note.name
        elif isinstance(note, IterableValidationNote):
            yield note.index


def _message(error: BaseException) -> str:
    if isinstance(error, KeyError):
        return f"the required key {error.args[0]!r} is missing"
    return str(error)


def _is_attrs(annotation: object) -> bool:
    """Whether a field of this type is a nested config: an attrs class, perhaps optional."""
    return attrs.has(_without_none(annotation))


def _without_none(annotation: Any) -> Any:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        others = [a for a in typing.get_args(annotation) if a is not type(None)]
        return others[0] if len(others) == 1 else annotation
    return annotation


def _structure_nested(value: object, annotation: Any) -> object:
    if value is None and _without_none(annotation) is not annotation:
        return None
    return structure(value, _without_none(annotation))


def _pass_through(value: object, _: object) -> object:
    """Leave a value for its field's own validator to judge."""
    return value


def _annotation(cls: type, attribute: attrs.Attribute[Any]) -> object:
    """Return the type of a field, None if it names something imported for type checkers only."""
    try:
        return typing.get_type_hints(cls)[attribute.name]
    except NameError:
        return None


def _structure_hook(cls: type[Any], converter: cattrs.Converter) -> Any:
    """Make the function that builds one attrs class: nested ones by type, all else as it is.

    A field with a converter of its own builds what it holds itself, even a nested class.
    """
    from cattrs.gen import make_dict_structure_fn, override

    overrides = {}
    for attribute in attrs.fields(cls):
        nested = attribute.converter is None and _is_attrs(_annotation(cls, attribute))
        overrides[attribute.name] = override(
            struct_hook=_structure_nested if nested else _pass_through
        )
    return make_dict_structure_fn(
        cls,
        converter,
        _cattrs_forbid_extra_keys=True,
        **overrides,  # type: ignore[arg-type]
    )


@cache
def _converter() -> cattrs.Converter:
    import cattrs

    converter = cattrs.Converter()
    converter.register_structure_hook_factory(attrs.has, _structure_hook)
    return converter
