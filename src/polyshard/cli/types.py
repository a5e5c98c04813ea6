"""Values of command-line options."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

from polyshard.config.files import parse_assignments
from polyshard.exceptions import ConfigError

__all__ = ["OUTPUT_FILE", "STRATEGY", "StrategyChoice"]


class StrategyChoice(NamedTuple):
    """A strategy's name, and what is set of its config."""

    name: str
    options: Mapping[str, Any]


class _Strategy(click.ParamType):  # type: ignore[type-arg]
    """``NAME`` or ``NAME:key=value,...``, the values written as in YAML."""

    name = "NAME[:key=value,...]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> StrategyChoice:
        if isinstance(value, StrategyChoice):
            return value
        name, _, options = value.partition(":")
        # A comma inside a value, as in a list, is not followed by another key.
        pairs = re.split(r",(?=\s*[\w.]+\s*=)", options) if options.strip() else []
        try:
            return StrategyChoice(name, parse_assignments(pairs))
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class _OutputFile(click.Path):
    """A file that will be written; that its folder is there is found out before the work."""

    def __init__(self, *suffixes: str) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)
        self._suffixes = suffixes

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"expected a folder at {path.parent.absolute()}, found none", param, ctx)
        if self._suffixes and path.suffix not in self._suffixes:
            expected = " or ".join(self._suffixes)
            self.fail(f"expected a name that ends in {expected}, found {path.name!r}", param, ctx)
        return path


STRATEGY = _Strategy()
OUTPUT_FILE = _OutputFile
