"""resolve_config: a name, an alias, a mapping or an instance becomes a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve, fields

from polyshard._describe import describe_value
from polyshard.config.base import DistributedConfig, structure_config
from polyshard.config.parallelism import ParallelismSizes
from polyshard.config.structuring import KeyPathError, structure
from polyshard.exceptions import ConfigError, MeshError
from polyshard.registry.registry import StrategyRegistry, default_registry

__all__ = ["check_parallelism", "resolve_config"]


def resolve_config(
    strategy: str | Mapping[str, Any] | DistributedConfig,
    *,
    registry: StrategyRegistry | None = None,
    **options: Any,
) -> DistributedConfig:
    """Return the config that is meant, checked; neither torch nor the plugin is imported.

    Args:
        strategy: A strategy's name or alias in any case, a mapping with the name under
            ``"strategy"``, or a config, to which ``options`` are then applied.
        registry: Where the name is looked up (default: the registry of this process).
        **options: Fields of the config.

    Raises:
        StrategyNotFoundError: No installed strategy has that name.
        ConfigError: A key is unknown or a value is not what its field accepts.
    """
    if isinstance(strategy, DistributedConfig):
        return _evolve(strategy, options)
    if isinstance(strategy, Mapping):
        options = {**strategy, **options}
        strategy = _name_in(options)
    if not isinstance(strategy, str):
        raise ConfigError(
            "expected the name of a strategy, a mapping or a DistributedConfig, found "
            + describe_value(strategy)
        )
    options.pop("strategy", None)
    cls = (registry or default_registry()).config_class(strategy)
    return structure_config(options, cls)


def _evolve(config: DistributedConfig, options: dict[str, Any]) -> DistributedConfig:
    if not options:
        return config
    # Structuring first, so that an unknown key is reported as it is for a mapping.
    structure(options, type(config))
    return evolve(config, **options)


def _name_in(options: dict[str, Any]) -> str:
    name = options.get("strategy")
    if not isinstance(name, str):
        raise KeyPathError(
            f"expected the name of a strategy, found {describe_value(name)}", ("strategy",)
        )
    return name


def check_parallelism(config: DistributedConfig, sizes: ParallelismSizes) -> None:
    """Raise if a size is more than 1 that the strategy does not declare in ``parallelism``.

    Raises:
        MeshError: The message names strategy, distribution, the size and what is supported.
    """
    names = [attribute.name for attribute in fields(ParallelismSizes)]
    supported = [name for name in names if name.removesuffix("_size") in config.parallelism]
    for name in names:
        size = getattr(sizes, name)
        if (size or 1) > 1 and name not in supported:
            info = default_registry().find(config.strategy)
            raise MeshError(
                f"strategy {info.name!r} ({info.origin}): expected no sizes above 1 but "
                f"{', '.join(supported)}, found {name}={size}; leave it out, or choose a strategy "
                "that supports it",
                field=name,
            )
