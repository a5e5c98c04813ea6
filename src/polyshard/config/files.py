"""Config files, read strictly: whatever is not understood is an error with its line."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from attrs import evolve, field, frozen
from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from polyshard._describe import describe_value
from polyshard.config.structuring import KeyPathError, structure
from polyshard.exceptions import ConfigError

__all__ = ["ConfigSource", "parse_assignment", "parse_assignments", "read_config"]

T = TypeVar("T")


KeyPath = tuple[str | int, ...]


#: The line of each key and list entry, as far as the parser tells.
Lines = Mapping[KeyPath, int]


@frozen
class ConfigSource:
    """The values of a config file, with where each of them stands.

    Attributes:
        name: The file as the user wrote it.
        values: What it holds, as plain values.
    """

    name: str
    values: dict[str, Any]
    _lines: Lines = field(factory=dict)
    _assigned: frozenset[KeyPath] = field(default=frozenset())
    _moved: Mapping[KeyPath, KeyPath] = field(factory=dict)

    def assign(self, assignments: Iterable[str]) -> Self:
        """Return a copy in which ``key=value`` pairs, with dots for nesting, are set.

        Raises:
            ConfigError: A pair is malformed, or leads through something that is no mapping.
        """
        values = self.values
        assigned: set[KeyPath] = set(self._assigned)
        for text in assignments:
            path, value = parse_assignment(text)
            values = _assign(values, path, value, text)
            assigned.add(path)
        return evolve(self, values=values, assigned=frozenset(assigned))

    def expand(self, key: str, inner: str) -> Self:
        """Return a copy in which a plain string under ``key`` is a mapping of ``inner`` to it."""
        value = self.values.get(key)
        if not isinstance(value, str):
            return self
        return evolve(self, values={**self.values, key: {inner: value}})

    def move(self, elsewhere: Mapping[KeyPath, KeyPath]) -> Self:
        """Return a copy whose values stand in their own place, if the file has them in another.

        What the command line sets in one of the two places replaces what the file has in the
        other. Faults and origins are still told of the place where a value was written.

        Args:
            elsewhere: The other place of each value -> its own.

        Raises:
            ConfigError: The file has a value in both places, or the command line sets both.
        """
        values, moved = self.values, dict(self._moved)
        for there, own in elsewhere.items():
            if not _has(values, there):
                continue
            values, value = _without_value(values, there)
            if _has(values, own):
                if self._is_assigned(there) == self._is_assigned(own):
                    raise ConfigError(
                        f"expected one value, found two that mean the same: {self._name(there)}, "
                        f"and {self._name(own)}; leave one of them out"
                    )
                if self._is_assigned(own):
                    continue
            with self.located():
                values = _with_value(values, own, value)
            moved[own] = there
        return evolve(self, values=values, moved=moved)

    def structure(self, cls: type[T]) -> T:
        """Build an attrs class from the values.

        Raises:
            ConfigError: The first fault, with the file and line where it stands.
        """
        with self.located():
            return structure(self.values, cls)

    @contextmanager
    def located(self) -> Iterator[None]:
        """Say where in the file a key stands that the body finds fault with."""
        try:
            yield
        except KeyPathError as error:
            written = KeyPathError(error.problem, self._written(error.path))
            raise ConfigError(f"{self.locate(written.path)}: {written}") from error

    def has(self, path: KeyPath) -> bool:
        """Whether a value was given at this path, by the file or the command line."""
        return _has(self.values, path)

    def locate(self, path: KeyPath) -> str:
        """Return where a key stands: file and line, or the command line if it was set there."""
        path = self._written(path)
        if self._is_assigned(path):
            return "command line"
        steps = range(len(path), 0, -1)
        line = next((self._lines[path[:n]] for n in steps if path[:n] in self._lines), None)
        return f"{self.name}:{line}" if line else self.name

    def _name(self, path: KeyPath) -> str:
        return f"{self.locate(path)}: {'.'.join(map(str, path))}"

    def _is_assigned(self, path: KeyPath) -> bool:
        return any(path[: len(assigned)] == assigned for assigned in self._assigned)

    def _written(self, path: KeyPath) -> KeyPath:
        """Return where a value was written, for a mapping the first that came from elsewhere."""
        moved = (there for own, there in self._moved.items() if path and own[: len(path)] == path)
        return next(moved, path)


def read_config(path: Path) -> ConfigSource:
    """Read a YAML 1.2, TOML or JSON file, told apart by its suffix.

    Keys that stand twice are refused. In YAML, plain ``none``, ``None``, ``null`` and ``~`` are
    all None, and ``1e-5`` is a number.

    Raises:
        ConfigError: The file is missing, unreadable, malformed, or holds no mapping.
    """
    parse = _PARSERS.get(path.suffix.lower())
    if parse is None:
        raise ConfigError(
            f"{path}: expected a file that ends in {', '.join(_PARSERS)}, found {path.suffix!r}"
        )
    try:
        values, lines = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected text in UTF-8, found {error}") from error
    except _Malformed as error:
        place = f"{path}:{error.line}" if error.line else str(path)
        raise ConfigError(f"{place}: {error}") from error
    if values is None:
        raise ConfigError(f"{path}: expected a mapping, found an empty file")
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping, found {describe_value(values)}")
    return ConfigSource(str(path), values, lines)


def parse_assignment(text: str) -> tuple[tuple[str, ...], Any]:
    """Split ``a.b=value`` into its path and its value, which is read as YAML.

    Raises:
        ConfigError: It is not of that form.
    """
    key, equals, value = text.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path):
        raise ConfigError(f"expected key=value, with dots for nested keys, found {text!r}")
    try:
        return path, _parse_yaml(value)[0]
    except _Malformed as error:
        raise ConfigError(f"{text!r}: expected a value as YAML writes it: {error}") from error


def parse_assignments(texts: Iterable[str]) -> dict[str, Any]:
    """Collect ``a.b=value`` pairs into a nested mapping.

    Raises:
        ConfigError: A pair is malformed, or two contradict each other.
    """
    values: dict[str, Any] = {}
    for text in texts:
        path, value = parse_assignment(text)
        values = _assign(values, path, value, text)
    return values


def _assign(values: Mapping[str, Any], path: KeyPath, value: Any, text: str) -> dict[str, Any]:
    try:
        return _with_value(values, path, value)
    except KeyPathError as error:
        raise ConfigError(f"{text!r}: {error}") from error


def _with_value(
    values: Mapping[Any, Any], path: KeyPath, value: Any, above: KeyPath = ()
) -> dict[Any, Any]:
    """Return a copy of nested mappings in which one value is set."""
    key, rest = path[0], path[1:]
    if not rest:
        return {**values, key: value}
    inner = values.get(key)
    inner = {} if inner is None else inner
    if not isinstance(inner, Mapping):
        raise KeyPathError(f"expected a mapping, found {describe_value(inner)}", (*above, key))
    return {**values, key: _with_value(inner, rest, value, (*above, key))}


def _without_value(values: Mapping[Any, Any], path: KeyPath) -> tuple[dict[Any, Any], Any]:
    """Return a copy of nested mappings that lacks one value, and the value."""
    key, rest = path[0], path[1:]
    if not rest:
        return {other: values[other] for other in values if other != key}, values[key]
    inner, value = _without_value(values[key], rest)
    return {**values, key: inner}, value


def _has(values: object, path: KeyPath) -> bool:
    """Whether nested mappings hold a value at this path."""
    for key in path:
        if not isinstance(values, Mapping) or key not in values:
            return False
        values = values[key]
    return True


class _Malformed(Exception):
    """The text is not of its format; the line is None where the parser does not tell."""

    def __init__(self, problem: str, line: int | None) -> None:
        super().__init__(problem)
        self.line = line


class _Constructor(SafeConstructor):
    """YAML 1.2, and a plain ``none`` in any case is None, as people mean it."""

    def construct_plain_or_quoted(self, node: ScalarNode) -> str | None:
        value: str = self.construct_scalar(node)
        return None if node.style is None and value.lower() == "none" else value


_Constructor.add_constructor("tag:yaml.org,2002:str", _Constructor.construct_plain_or_quoted)


def _parse_yaml(text: str) -> tuple[Any, Lines]:
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    try:
        return yaml.load(text), dict(_lines_in(yaml.compose(text), ()))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise _Malformed(_sentence(error), mark.line + 1 if mark else None) from error
    except (YAMLError, ValueError) as error:
        raise _Malformed(str(error), None) from error


def _sentence(error: MarkedYAMLError) -> str:
    return " ".join(str(part) for part in (error.problem, error.context) if part)


def _lines_in(node: Node | None, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    entries: Iterable[tuple[str | int, Node, Node]] = ()
    if isinstance(node, MappingNode):
        entries = ((key.value, key, value) for key, value in node.value)
    elif isinstance(node, SequenceNode):
        entries = ((index, value, value) for index, value in enumerate(node.value))
    for step, marked, value in entries:
        yield (*path, step), marked.start_mark.line + 1
        yield from _lines_in(value, (*path, step))


def _parse_toml(text: str) -> tuple[Any, Lines]:
    try:
        return tomllib.loads(text), dict(_lines_in_toml(text))
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        raise _Malformed(str(error), int(line[1]) if line else None) from error


def _lines_in_toml(text: str) -> Iterator[tuple[KeyPath, int]]:
    """Find the lines of tables and of keys in them; tomllib keeps none."""
    table: KeyPath = ()
    for line, written in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[([^\[\]]+)\]", written):
            table = _toml_key(header[1])
            yield table, line
        elif key := re.match(r"\s*([^=#\[]+)=", written):
            yield (*table, *_toml_key(key[1])), line


def _toml_key(written: str) -> KeyPath:
    return tuple(part.strip().strip("\"'") for part in written.split("."))


def _parse_json(text: str) -> tuple[Any, Lines]:
    try:
        values = json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        raise _Malformed(error.msg, error.lineno) from error
    try:
        return values, _parse_yaml(text)[1]  # JSON is YAML, but for tabs in odd places.
    except _Malformed:
        return values, {}


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise _Malformed(f"found duplicate key {key!r}", None)
        values[key] = value
    return values


_PARSERS = {".yaml": _parse_yaml, ".yml": _parse_yaml, ".toml": _parse_toml, ".json": _parse_json}
