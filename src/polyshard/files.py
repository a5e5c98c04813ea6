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

from polyshard.exceptions import ConfigError
from polyshard.fields import describe_value
from polyshard.structuring import KeyPathError, structure

__all__ = ["ConfigSource", "parse_assignment", "parse_assignments", "read_config"]

T = TypeVar("T")
KeyPath = tuple[str | int, ...]


@frozen
class ConfigSource:
    """The values of a config file, with where each of them stands.

    Attributes:
        name: The file as the user wrote it.
        values: What it holds, as plain values.
    """

    name: str
    values: dict[str, Any]
    _root: Node | None = None
    _assigned: frozenset[KeyPath] = field(default=frozenset())

    def assign(self, assignments: Iterable[str]) -> Self:
        """Return a copy in which ``key=value`` pairs, with dots for nesting, are set.

        Raises:
            ConfigError: A pair is malformed, or leads through something that is no mapping.
        """
        values = self.values
        assigned: set[KeyPath] = set(self._assigned)
        for text in assignments:
            path, value = parse_assignment(text)
            values = _with_value(values, path, value, text)
            assigned.add(path)
        return evolve(self, values=values, assigned=frozenset(assigned))

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
            raise ConfigError(f"{self.locate(error.path)}: {error}") from error

    def locate(self, path: KeyPath) -> str:
        """Return where a key stands: file and line, or the command line if it was set there."""
        if any(path[: len(assigned)] == assigned for assigned in self._assigned):
            return "command line"
        line = _line_of(self._root, path)
        return f"{self.name}:{line}" if line else self.name


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
        values, root = parse(path.read_text(encoding="utf-8"))
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
    return ConfigSource(str(path), values, root)


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
        values = _with_value(values, path, value, text)
    return values


def _with_value(
    values: Mapping[str, Any], path: tuple[str, ...], value: Any, text: str
) -> dict[str, Any]:
    """Return a copy of nested mappings in which one value is set."""
    key, *rest = path
    if not rest:
        return {**values, key: value}
    inner = values.get(key)
    inner = {} if inner is None else inner
    if not isinstance(inner, Mapping):
        raise ConfigError(
            f"{text!r}: expected {key!r} to be a mapping, found {describe_value(inner)}"
        )
    return {**values, key: _with_value(inner, tuple(rest), value, text)}


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


def _parse_yaml(text: str) -> tuple[Any, Node | None]:
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    try:
        return yaml.load(text), yaml.compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise _Malformed(_sentence(error), mark.line + 1 if mark else None) from error
    except (YAMLError, ValueError) as error:
        raise _Malformed(str(error), None) from error


def _sentence(error: MarkedYAMLError) -> str:
    return " ".join(str(part) for part in (error.problem, error.context) if part)


def _parse_toml(text: str) -> tuple[Any, None]:
    try:
        return tomllib.loads(text), None
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        raise _Malformed(str(error), int(line[1]) if line else None) from error


def _parse_json(text: str) -> tuple[Any, None]:
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates), None
    except json.JSONDecodeError as error:
        raise _Malformed(error.msg, error.lineno) from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise _Malformed(f"found duplicate key {key!r}", None)
        values[key] = value
    return values


_PARSERS = {".yaml": _parse_yaml, ".yml": _parse_yaml, ".toml": _parse_toml, ".json": _parse_json}


def _line_of(node: Node | None, path: KeyPath) -> int | None:
    """Return the line of the key at the end of the path, or of the last one that is there."""
    line = None
    for step in path:
        found = _child(node, step)
        if found is None:
            break
        marked, node = found
        line = marked.start_mark.line + 1
    return line


def _child(node: Node | None, step: str | int) -> tuple[Node, Node] | None:
    """Return the node that bears the position of a key or index, and the node of its value."""
    if isinstance(node, MappingNode):
        return next(((key, value) for key, value in node.value if key.value == step), None)
    if isinstance(node, SequenceNode) and isinstance(step, int) and step < len(node.value):
        return node.value[step], node.value[step]
    return None
