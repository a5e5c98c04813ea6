"""A JSON Schema of config files, from the attrs classes that they are structured into.

Editors read it: they complete keys and values, show descriptions and underline mistakes. What
several fields must tell together, such as a number of heads that divides the width, is left to the
classes. JSON has no infinity and takes 2.0 for 2; the classes refuse both.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import attrs

from polyshard.config.base import DistributedConfig
from polyshard.config.fields import dtype_spellings, to_dtype_name
from polyshard.config.files import KeyPath
from polyshard.config.structuring import unstructure
from polyshard.exceptions import ConfigError
from polyshard.registry.discovery import StrategyInfo
from polyshard.registry.registry import StrategyRegistry, default_registry

__all__ = ["describe_class", "file_schema"]

Schema = dict[str, Any]


_DIALECT = "https://json-schema.org/draft/2020-12/schema"


_SCALARS = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


#: A YAML file may spell null as none, which an editor takes for a string.
_NULL = {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[Nn][Oo][Nn][Ee]$"}]}


def file_schema(
    cls: type[Any], strategies: Iterable[str], *, registry: StrategyRegistry | None = None
) -> Schema:
    """Return the schema of a file that is structured into an attrs class.

    Args:
        cls: The class. Where it holds a ``DistributedConfig``, the file chooses a strategy. What it
            says under ``elsewhere`` (see ``TrainingConfig``) may stand beside that strategy's
            fields.
        strategies: Their names or aliases.
        registry: Where they are looked up (default: the registry of this process).

    Raises:
        StrategyNotFoundError: No installed strategy has that name.
        PluginError: The config class of a strategy cannot be had.
    """
    registry = registry or default_registry()
    known = {info.name: info for info in map(registry.find, strategies)}
    configs = [(info, registry.config_class(name)) for name, info in known.items()]
    schema = {"$schema": _DIALECT, "title": cls.__name__, **_Definitions(configs).of_file(cls)}
    # By way of JSON, which has lists for what validators give as tuples.
    as_json: Schema = json.loads(
        json.dumps(schema), object_hook=lambda part: _NULL if part == {"type": "null"} else part
    )
    return as_json


def describe_class(cls: type) -> tuple[str, dict[str, str]]:
    """Return what a docstring says of a class, and of each attribute in its section for them.

    What it leaves out, the classes that it derives from may say.
    """
    summary, described = "", dict[str, str]()
    for base in reversed(cls.__mro__[:-1]):
        docstring = inspect.cleandoc(base.__doc__ or "").replace("``", "`")
        text, _, attributes = docstring.partition("\nAttributes:\n")
        entries = re.split(r"^(\w+): ", textwrap.dedent(attributes), flags=re.MULTILINE)[1:]
        described |= zip(entries[::2], map(_on_one_line, entries[1::2]), strict=True)
        summary = text.strip() or summary
    return summary, described


def _on_one_line(text: str) -> str:
    return " ".join(text.split())


class _Definitions:
    """The schemas of the classes of one file, each written once and referred to by name."""

    def __init__(self, configs: Iterable[tuple[StrategyInfo, type[DistributedConfig]]]) -> None:
        self._configs = list(configs)
        self._names: dict[type, str] = {}
        self._schemas: dict[str, Schema] = {}

    def of_file(self, cls: type[Any]) -> Schema:
        root = self._of_class(cls)
        elsewhere: Mapping[KeyPath, KeyPath] = getattr(cls, "elsewhere", {})
        for (_, key), (own, name) in elsewhere.items():
            value = {"$ref": f"{root['properties'][own]['$ref']}/properties/{name}"}
            for _, config in self._configs:
                self._schemas[self._names[config]]["properties"][key] = value
        once = [{"not": _with_both(*places)} for places in elsewhere.items()]
        return {**root, **({"allOf": once} if once else {}), "$defs": self._schemas}

    def _refer(self, cls: type[Any]) -> Schema:
        if cls not in self._names:
            taken = cls.__name__ in self._names.values()
            name = f"{cls.__module__}.{cls.__name__}" if taken else cls.__name__
            self._names[cls] = name  # before its fields, so that one may be of the class itself
            self._schemas[name] = self._of_class(cls)
        return {"$ref": f"#/$defs/{self._names[cls]}"}

    def _of_class(self, cls: type[Any]) -> Schema:
        summary, described = describe_class(cls)
        properties = {
            attribute.name: self._of_field(cls, attribute, described.get(attribute.name))
            for attribute in attrs.fields(cls)
        }
        return {
            "description": summary,
            "type": "object",
            "properties": properties,
            "required": [a.name for a in attrs.fields(cls) if a.default is attrs.NOTHING],
            "additionalProperties": False,
        }

    def _of_field(
        self, cls: type[Any], attribute: attrs.Attribute[Any], description: str | None
    ) -> Schema:
        schema = self._accepted(cls, attribute)
        converter: object = attribute.converter
        if converter is to_dtype_name:
            schema = _with_spellings(schema)
        if description:
            schema = {"description": description, **schema}
        return schema | _default(attribute)

    def _accepted(self, cls: type[Any], attribute: attrs.Attribute[Any]) -> Schema:
        """Return what a field's validators say, and what its type says if they say nothing."""
        said = [v.json_schema for v in _validators(attribute) if hasattr(v, "json_schema")]
        if len(said) == 1:
            return dict(said[0])
        return {"allOf": said} if said else self._of_type(_annotation(cls, attribute))

    def _of_type(self, annotation: Any) -> Schema:
        """Return the schema of a type; of one that no file can tell, a schema of everything."""
        origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
        if origin in (typing.Union, types.UnionType):
            return {"anyOf": [self._of_type(each) for each in arguments]}
        if origin is Literal:
            return {"enum": list(arguments)}
        if origin in (tuple, list):
            return {"type": "array", "items": self._of_type(arguments[0])}
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return {"type": "object", "additionalProperties": self._of_type(arguments[1])}
        if not isinstance(annotation, type):
            return {}
        if annotation in _SCALARS:
            return {"type": _SCALARS[annotation]}
        if issubclass(annotation, DistributedConfig):
            return self._of_strategies()
        return self._refer(annotation) if attrs.has(annotation) else {}

    def _of_strategies(self) -> Schema:
        """Return the schema of a strategy's name, or a mapping of it and of its config's fields."""
        names = {info.name: [info.name, *info.aliases] for info, _ in self._configs}
        every = [name for spellings in names.values() for name in spellings]
        description = {"description": "Name or alias of the strategy."}
        choices = []
        for info, cls in self._configs:
            reference = self._refer(cls)
            own = self._schemas[self._names[cls]]
            own["properties"] = {"strategy": description, **own["properties"]}
            chosen = {"properties": {"strategy": _spelled(names[info.name])}}
            choices.append({"if": {**chosen, "required": ["strategy"]}, "then": reference})
        mapping = {
            "type": "object",
            "properties": {"strategy": {**description, **_completed(every)}},
            "required": ["strategy"],
            "allOf": choices,
        }
        return {"anyOf": [mapping, _completed(every)]}


def _validators(attribute: attrs.Attribute[Any]) -> Iterable[Any]:
    """Return a field's validators, those that attrs has joined into one as well."""
    return getattr(attribute.validator, "_validators", (attribute.validator,))


def _annotation(cls: type, attribute: attrs.Attribute[Any]) -> Any:
    """Return the type of a field, None if it names something imported for type checkers only."""
    try:
        return typing.get_type_hints(cls)[attribute.name]
    except NameError:
        return None


def _with_spellings(schema: Schema) -> Schema:
    """Return the schema of a field for dtypes with every spelling that its converter takes."""
    if "anyOf" in schema:
        return {**schema, "anyOf": [_with_spellings(each) for each in schema["anyOf"]]}
    if "enum" in schema:
        return _completed([s for name in schema["enum"] for s in dtype_spellings(name)])
    return schema


def _completed(names: Iterable[str]) -> Schema:
    """Return the schema of names in every spelling, of which editors offer the usual ones."""
    return {"anyOf": [{"enum": list(names)}, _spelled(names)]}


def _spelled(names: Iterable[str]) -> Schema:
    """Return the schema of names in any case, with - or _, and with space around them."""
    pattern = "|".join("".join(map(_in_any_case, name)) for name in names)
    return {"type": "string", "pattern": rf"^\s*({pattern})\s*$"}


def _in_any_case(character: str) -> str:
    if character.isalpha():
        return f"[{character.upper()}{character.lower()}]"
    return "[-_]" if character == "_" else re.escape(character)


def _with_both(there: KeyPath, own: KeyPath) -> Schema:
    """Return the schema of a file that has a value in two places."""
    has = {path[0]: {"type": "object", "required": [path[1]]} for path in (there, own)}
    return {"properties": has, "required": list(has)}


def _default(attribute: attrs.Attribute[Any]) -> Schema:
    """Return what to write of a field's default: nothing if other fields decide, or no file can."""
    default: Any = attribute.default
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        if default.takes_self:
            return {}
        default = default.factory()
    if default is attrs.NOTHING:
        return {}
    try:
        plain = unstructure(default) if attrs.has(type(default)) else default
        json.dumps(plain)
        return {"default": plain}
    except (ConfigError, TypeError):
        return {}
