"""find_units: which modules of a model are sharded or checkpointed as one piece.

The pieces are usually the repeated blocks of a network. They are found in the model, or named
by the user; either way the report says what was found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from attrs import frozen
from torch import nn

from polyshard.exceptions import UnitError

__all__ = ["UnitReport", "UnitSpec", "find_units"]

#: A module class, its name alone or after its module and a dot, or several of these.
UnitSpec = type[nn.Module] | str | Sequence[type[nn.Module] | str]


@frozen
class UnitReport:
    """The units of a model.

    Attributes:
        modules: The units by their name in the model, in the order of registration.
    """

    modules: dict[str, nn.Module]

    @property
    def counts(self) -> dict[str, int]:
        """How many units there are of each class, by the class's full dotted path."""
        return dict(Counter(_path(type(module)) for module in self.modules.values()))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the units in the model."""
        return tuple(self.modules)

    def __str__(self) -> str:
        """Return one line, such as ``"24 x transformers...LlamaDecoderLayer"``."""
        return ", ".join(f"{n} x {path}" for path, n in self.counts.items()) or "no repeated block"


def find_units(model: nn.Module, spec: UnitSpec | None = None) -> UnitReport:
    """Find the modules that form units, and check that each can be one.

    Without a ``spec`` they are the classes that the model itself declares (``_no_split_modules``,
    as Hugging Face models do), or else the class that the entries of the longest
    ``nn.ModuleList`` or ``nn.Sequential`` have in common. A model without repeated blocks has no
    units, which is no error.

    Args:
        model: The model before it is wrapped.
        spec: The classes whose instances are units.

    Raises:
        UnitError: A class of ``spec`` has no instance in the model, a unit lies inside another,
            or a unit owns no parameters.
    """
    if spec is None:
        found = _declared_units(model) or _repeated_blocks(model)
    else:
        found = _instances(model, spec)
    _check_not_nested(found)
    _check_parameters(found)
    return UnitReport(found)


def _declared_units(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose class the model itself declares to be indivisible."""
    declared = set(getattr(model, "_no_split_modules", None) or ())
    matching = {name: module for name, module in _inner(model) if type(module).__name__ in declared}
    # A list for several tasks may name blocks inside blocks; the outer ones are the units.
    return {
        name: module for name, module in matching.items() if not _parents(name) & matching.keys()
    }


def _repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the instances of the class that the longest homogeneous list of blocks holds.

    Lists inside such a block do not count: not every rank need use each of a layer's experts.
    """
    lists: dict[str, list[nn.Module]] = {}
    for name, module in [("", model), *_inner(model)]:
        inside = any(outer in lists for outer in ("", *_parents(name)) if name)
        if not inside and _is_homogeneous(module):
            lists[name] = list(module.children())
    if not lists:
        return {}
    block = max(lists.values(), key=len)[0]
    matching = {
        name: module
        for name, module in _inner(model)
        if type(module) is type(block) and name not in lists
    }
    return {
        name: module for name, module in matching.items() if not _parents(name) & matching.keys()
    }


def _is_homogeneous(module: nn.Module) -> bool:
    """Whether a module is a list of several blocks of one class that own parameters."""
    if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
        return False
    owned = all(any(True for _ in entry.parameters()) for entry in module)
    return owned and len({type(entry) for entry in module}) == 1


def _instances(model: nn.Module, spec: UnitSpec) -> dict[str, nn.Module]:
    """Return the modules of the classes in ``spec``, every one of which must have some."""
    wanted = [spec] if isinstance(spec, str | type) else list(spec)
    if not wanted:
        raise UnitError(f"expected at least one module class, found none; {_candidates(model)}")
    found: set[str] = set()
    for entry in wanted:
        matching = [name for name, module in _inner(model) if _matches(type(module), entry)]
        if not matching:
            shown = entry if isinstance(entry, str) else _path(entry)
            raise UnitError(
                f"expected a class of modules in {type(model).__name__}, found {shown!r}, which "
                f"none of them has; {_candidates(model)}"
            )
        found.update(matching)
    return {name: module for name, module in _inner(model) if name in found}


def _matches(cls: type[nn.Module], entry: type[nn.Module] | str) -> bool:
    if isinstance(entry, str):
        return entry in (_path(cls), cls.__name__)
    return issubclass(cls, entry)


def _check_not_nested(units: dict[str, nn.Module]) -> None:
    for name, module in units.items():
        outer = _parents(name) & units.keys()
        if outer:
            parent = max(outer, key=len)
            raise UnitError(
                "expected units beside each other, found "
                f"{name!r} ({_path(type(module))}) inside {parent!r} "
                f"({_path(type(units[parent]))}); name only one of the two classes"
            )


def _check_parameters(units: dict[str, nn.Module]) -> None:
    empty = [name for name, module in units.items() if not any(True for _ in module.parameters())]
    if empty:
        raise UnitError(
            f"expected units that own parameters, found {empty[0]!r} "
            f"({_path(type(units[empty[0]]))}) and {len(empty) - 1} others that own none; leave "
            "their class out"
        )


def _candidates(model: nn.Module) -> str:
    counts = Counter(
        _path(type(module)) for _, module in _inner(model) if any(True for _ in module.parameters())
    )
    listed = ", ".join(f"{path} ({count})" for path, count in counts.most_common())
    return f"its classes are {listed or 'none'}"


def _inner(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module but the root, each once."""
    return ((name, module) for name, module in model.named_modules() if name)


def _parents(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[:end]) for end in range(1, len(parts))}


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
