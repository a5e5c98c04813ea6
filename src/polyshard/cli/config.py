"""``polyshard config``: what a config file comes to, and what one may hold."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from polyshard.config.files import ConfigSource, KeyPath
from polyshard.exceptions import PluginError
from polyshard.registry.registry import default_registry
from polyshard.registry.schema import file_schema
from polyshard.training.config import TrainingConfig, read_run

__all__ = ["config"]


@click.group()
def config() -> None:
    """Look at config files of `polyshard train`; torch is not imported."""


@config.command()
@click.argument("config_file", metavar="CONFIG.yaml", type=click.Path(path_type=Path))
@click.argument("assignments", metavar="[KEY=VALUE]...", nargs=-1)
def show(config_file: Path, assignments: Sequence[str]) -> None:
    """Print every value that a run would use, and where it comes from.

    Checks the file as `polyshard train` does. The output is YAML; a comment behind each value
    names the file and line, the command line, or the default.
    """
    source = read_run(config_file, assignments)
    values = source.structure(TrainingConfig).to_dict()
    lines = list(_lines(values, source, ()))
    width = max(len(text) for text, _ in lines)
    for text, origin in lines:
        click.echo(f"{text:{width}}  # {origin}" if origin else text)


@config.command()
@click.option("--strategy", metavar="NAME", help="Only this one.  [default: all that work]")
def schema(strategy: str | None) -> None:
    """Print a JSON Schema of the file, with the config of every installed strategy.

    Write it to a file and name that in your editor, or in the first line of a YAML file:
    # yaml-language-server: $schema=polyshard.schema.json
    """
    names = _usable_strategies() if strategy is None else [strategy]
    click.echo(json.dumps(file_schema(TrainingConfig, names), indent=2))


def _usable_strategies() -> list[str]:
    """Return the strategies whose config class can be imported; tell of the others."""
    registry = default_registry()
    usable = []
    for name in registry.available():
        try:
            registry.config_class(name)
        except PluginError as error:
            click.echo(f"polyshard: warning: left out: {error}", err=True)
        else:
            usable.append(name)
    return usable


def _lines(
    values: Mapping[str, Any], source: ConfigSource, path: KeyPath
) -> Iterator[tuple[str, str | None]]:
    """Return each line as YAML, with the origin of its value (None for a mapping of others)."""
    indent = "  " * len(path)
    for key, value in values.items():
        written = key if key.isidentifier() else json.dumps(key)
        if isinstance(value, Mapping) and value:
            yield f"{indent}{written}:", None
            yield from _lines(value, source, (*path, key))
        else:
            # JSON is YAML; quoted, a string cannot be taken for anything else.
            yield f"{indent}{written}: {json.dumps(value)}", _origin(source, (*path, key))


def _origin(source: ConfigSource, path: KeyPath) -> str:
    return source.locate(path) if source.has(path) else "default"
