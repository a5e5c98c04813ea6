"""DistributedConfig, the root of the config classes that name a strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self, TypeVar

from attrs import frozen

from polyshard._describe import describe_value
from polyshard.config.structuring import KeyPathError, Path, structure

__all__ = ["DistributedConfig", "structure_config"]

Config = TypeVar("Config", bound="DistributedConfig")


def structure_config(options: Mapping[str, Any], cls: type[Config], *, path: Path = ()) -> Config:
    """Build a strategy's config from a mapping, whose ``"strategy"`` key may be left out."""
    if not isinstance(options, Mapping):
        raise KeyPathError(f"expected a mapping, found {describe_value(options)}", path)
    named = options.get("strategy", cls.strategy)
    if named != cls.strategy:
        raise KeyPathError(
            f"expected {cls.strategy!r}, the strategy of {cls.__name__}, "
            f"found {describe_value(named)}",
            (*path, "strategy"),
        )
    fields = {key: value for key, value in options.items() if key != "strategy"}
    return structure(fields, cls, path=path)


@frozen(kw_only=True)
class DistributedConfig:
    """What every strategy's config has: a strategy name, and a dict form.

    Subclass it with ``attrs.frozen(kw_only=True)`` and set ``strategy`` to the name of the
    entry point. A subclass of a concrete config inherits the name, and so goes to the same
    strategy.

    Attributes:
        strategy: Name of the strategy's entry point in the group ``polyshard.strategies``.
        parallelism: Which sizes of ``ParallelismSizes`` may be more than 1 under the strategy,
            each by its name without ``_size``.
    """

    strategy: ClassVar[str]
    parallelism: ClassVar[frozenset[str]] = frozenset({"dp"})

    def to_dict(self) -> dict[str, Any]:
        """Return the config as plain values, with the strategy's name under ``"strategy"``.

        The result holds only what YAML and JSON can hold. A value that they cannot, such as a
        callable or a module class, is an error that names the field.

        Raises:
            ConfigError: A field holds something that a file cannot.
        """
        from polyshard.config.structuring import unstructure

        return {"strategy": self.strategy, **unstructure(self)}

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Self:
        """Build the config from plain values, as ``to_dict`` returns them.

        ``"strategy"`` may be left out. Types are taken as they are: ``"2"`` is not an int.

        Raises:
            ConfigError: A key is unknown (the nearest valid one is named), a value is not what
                its field accepts, or ``"strategy"`` names another strategy.
        """
        from polyshard.config.base import structure_config

        return structure_config(options, cls)

    def in_full_precision(self) -> Self:
        """Return this config with every computation and reduction in float32.

        Used where a strategy is compared with plain PyTorch. A config that lowers the
        precision of anything overrides it; this one lowers nothing.
        """
        return self
