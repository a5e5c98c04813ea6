"""DistributedConfig, the root of the config classes that name a strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from attrs import frozen

__all__ = ["DistributedConfig"]


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
        from polyshard.structuring import unstructure

        return {"strategy": self.strategy, **unstructure(self)}

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Self:
        """Build the config from plain values, as ``to_dict`` returns them.

        ``"strategy"`` may be left out. Types are taken as they are: ``"2"`` is not an int.

        Raises:
            ConfigError: A key is unknown (the nearest valid one is named), a value is not what
                its field accepts, or ``"strategy"`` names another strategy.
        """
        from polyshard.structuring import structure_config

        return structure_config(options, cls)

    def in_full_precision(self) -> Self:
        """Return this config with every computation and reduction in float32.

        Used where a strategy is compared with plain PyTorch. A config that lowers the
        precision of anything overrides it; this one lowers nothing.
        """
        return self
