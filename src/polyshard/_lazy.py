"""Public names that are resolved at first access, so that a package is quick to import."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(
    module: dict[str, Any], homes: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and the ``__dir__`` of a module.

    Args:
        module: Its ``globals()``; a name that was resolved is kept there.
        homes: By public name, the module that defines it.
    """

    def __getattr__(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {module['__name__']!r} has no attribute {name!r}")
        value = module[name] = getattr(import_module(homes[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*module, *homes})

    return __getattr__, __dir__
