"""How messages name things: a value with its type, an owner with its version, the nearest word.

Every config class imports this module, and few processes have an error to describe: what costs
milliseconds to import is imported by the function that needs it.
"""

from __future__ import annotations

import typing

__all__ = ["describe_owner"]


def nearest(word: str, candidates: typing.Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the closest candidate, or an empty string."""
    from difflib import get_close_matches

    close = get_close_matches(word, list(candidates), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def describe_value(value: object) -> str:
    """Return a value with its type, cut to a readable length, as error messages show it."""
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"


def describe_owner(thing: object) -> str:
    """Return the distribution and version that ship a class, function or module.

    Falls back to the module's name for code that no distribution owns, such as a script.
    """
    from importlib.metadata import PackageNotFoundError, packages_distributions, version

    module = getattr(thing, "__module__", None) or getattr(thing, "__name__", "")
    package = str(module).partition(".")[0]
    for name in packages_distributions().get(package, ()):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return f"module {module}"
