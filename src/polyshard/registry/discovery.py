"""What is installed, read from metadata alone: no plugin is imported here.

A distribution announces a strategy in three entry-point groups: ``polyshard.strategies`` (name
to plugin), ``polyshard.configs`` (the same name to the config class) and, if it has any,
``polyshard.aliases`` (other names to that name).
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Mapping
from importlib.metadata import (
    Distribution,
    EntryPoint,
    PackageNotFoundError,
    entry_points,
    version,
)
from importlib.util import find_spec
from pathlib import Path
from pkgutil import get_importer

from attrs import evolve, field, frozen

from polyshard.exceptions import PluginError

__all__ = ["INSTALL_HINTS", "StrategyInfo", "canonical_strategy_name", "find_strategies"]

STRATEGIES = "polyshard.strategies"


CONFIGS = "polyshard.configs"


ALIASES = "polyshard.aliases"


CORE_DISTRIBUTION = "polyshard"


#: ``1`` leaves out every strategy that the core distribution does not ship itself.
DISABLE_AUTOLOAD = "POLYSHARD_DISABLE_PLUGIN_AUTOLOAD"


#: Comma-separated names; with it, those strategies alone exist. ``name@distribution`` chooses
#: one of two distributions that claim the same name.
ALLOW_LIST = "POLYSHARD_PLUGINS"


#: Distributions that are known to offer a strategy, for the message when one is not installed.
INSTALL_HINTS: Mapping[str, str] = {
    "megatron_fsdp": "polyshard-megatron-fsdp",
    "mfsdp": "polyshard-megatron-fsdp",
}


@frozen(kw_only=True)
class StrategyInfo:
    """What is known of a strategy without importing it.

    Attributes:
        name: Name of the entry point, in lower case with underscores.
        aliases: Other names for it.
        config_class: Where its config class is, as ``"module:Class"``; None if not announced.
        plugin: Where its hooks are, as ``"module"`` or ``"module:object"``.
        distribution: Name of the distribution that ships it.
        version: Version of that distribution.
        summary: First line of the plugin's docstring, or an empty string.
    """

    name: str
    aliases: tuple[str, ...] = ()
    config_class: str | None = None
    plugin: str = ""
    distribution: str = ""
    version: str = ""
    summary: str = ""
    _problem: str | None = None
    entry_point: EntryPoint | None = field(default=None, repr=False, eq=False)
    config_entry_point: EntryPoint | None = field(default=None, repr=False, eq=False)
    _requirer: Distribution | None = field(default=None, repr=False, eq=False)

    @property
    def problem(self) -> str | None:
        """Why the strategy cannot work, and the cure; None if nothing is known.

        The requirements of its distribution are looked at here, not when strategies are listed.
        """
        if self._problem is None and self._requirer is not None:
            return _missing_requirements(self._requirer)
        return self._problem

    @property
    def origin(self) -> str:
        """The distribution and its version, as error messages show them."""
        return f"{self.distribution} {self.version}".strip()


def canonical_strategy_name(name: str) -> str:
    """Return a strategy name in the one form in which names are compared."""
    return name.strip().lower().replace("-", "_")


def find_strategies(
    environment: Mapping[str, str] | None = None,
) -> dict[str, StrategyInfo]:
    """Return every installed strategy by name, in order of name.

    A strategy that is known to be unusable is listed with its problem.

    Args:
        environment: Where the two variables are read that restrict the result (default:
            ``os.environ``).

    Raises:
        PluginError: The allow-list names a strategy that is not installed.
    """
    environment = os.environ if environment is None else environment
    offers = _offers()
    if environment.get(DISABLE_AUTOLOAD, "") not in ("", "0"):
        offers = [offer for offer in offers if offer.distribution == CORE_DISTRIBUTION]
    allowed = _allow_list(environment.get(ALLOW_LIST))
    if allowed is not None:
        offers = _only_allowed(offers, allowed)
    return _by_name(offers)


def _offers() -> list[StrategyInfo]:
    """Read each distribution once; the first on the path wins, as it does for imports."""
    offering: dict[str, Distribution] = {}
    for point in entry_points(group=STRATEGIES):
        if point.dist is not None:
            offering.setdefault(_canonical_distribution(point.dist.name), point.dist)
    return [offer for name, dist in offering.items() for offer in _offers_of(dist, name)]


def _canonical_distribution(name: str) -> str:
    """Return a distribution's name in the form in which the packaging specifications compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _offers_of(distribution: Distribution, distribution_name: str) -> list[StrategyInfo]:
    groups: dict[str, list[EntryPoint]] = {STRATEGIES: [], CONFIGS: [], ALIASES: []}
    for entry_point in distribution.entry_points:
        if entry_point.group in groups:
            groups[entry_point.group].append(entry_point)
    configs = {canonical_strategy_name(point.name): point for point in groups[CONFIGS]}
    offers = []
    for point in groups[STRATEGIES]:
        name = canonical_strategy_name(point.name)
        config = configs.get(name)
        aliases = (a.name for a in groups[ALIASES] if canonical_strategy_name(a.value) == name)
        summary, fault = _inspect(point)
        offers.append(
            StrategyInfo(
                name=name,
                aliases=tuple(sorted(map(canonical_strategy_name, aliases))),
                config_class=config.value if config else None,
                plugin=point.value,
                distribution=distribution_name,
                version=distribution.version,
                summary=summary,
                problem=fault,
                entry_point=point,
                config_entry_point=config,
                requirer=distribution,
            )
        )
    return offers


def _missing_requirements(distribution: Distribution) -> str | None:
    """Return which declared requirements are not met, with the command that installs them."""
    from packaging.requirements import InvalidRequirement, Requirement

    faults: list[str] = []
    cures: list[str] = []
    for text in distribution.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            faults.append(f"needs {requirement}, which is not installed")
        else:
            if requirement.specifier.contains(found, prereleases=True):
                continue
            faults.append(f"needs {requirement}, found {found}")
        cures.append(f"'{requirement.name}{requirement.specifier}'")
    if not faults:
        return None
    owner = f"{distribution.metadata['Name']} {distribution.version}"
    return f"{owner} {' and '.join(faults)}; run: pip install {' '.join(cures)}"


def _inspect(point: EntryPoint) -> tuple[str, str | None]:
    """Return the first docstring line of a plugin, and what is wrong with its source, if any.

    The source is found and parsed, never run.
    """
    path = _source_of(point.module)
    if path is None:
        return "", f"the entry point {point.name!r} names {point.value!r}, which does not exist"
    if path.suffix != ".py":
        return "", None
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError, OSError) as error:
        return "", f"{point.module} cannot be read: {type(error).__name__}: {error}"
    docstring = ast.get_docstring(tree) or ""
    return docstring.partition("\n")[0].strip(), None


def _source_of(module: str) -> Path | None:
    """Find a module's file as an import would, without importing its parents."""
    package, *rest = module.split(".")
    try:
        # Asks every finder, those of editable installs too; for a top-level name none imports.
        spec = find_spec(package)
    except ValueError:
        return None
    name = package
    for part in rest:
        if spec is None:
            return None
        name = f"{name}.{part}"
        finders = map(get_importer, spec.submodule_search_locations or ())
        found = (finder.find_spec(name) for finder in finders if finder is not None)
        spec = next(filter(None, found), None)
    return Path(spec.origin) if spec is not None and spec.origin else None


def _allow_list(text: str | None) -> dict[str, str | None] | None:
    """Parse the allow-list into name to distribution (None: any); None without a list."""
    if text is None or not text.strip():
        return None
    allowed: dict[str, str | None] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, distribution = item.partition("@")
        allowed[canonical_strategy_name(name)] = (
            _canonical_distribution(distribution) if distribution else None
        )
    return allowed


def _only_allowed(
    offers: list[StrategyInfo], allowed: Mapping[str, str | None]
) -> list[StrategyInfo]:
    kept = [
        offer
        for offer in offers
        if offer.name in allowed and allowed[offer.name] in (None, offer.distribution)
    ]
    absent = [
        f"{name}@{distribution}" if distribution else name
        for name, distribution in allowed.items()
        if name not in {offer.name for offer in kept}
    ]
    if absent:
        installed = ", ".join(f"{o.name}@{o.distribution}" for o in offers) or "none"
        raise PluginError(
            f"{ALLOW_LIST} names {', '.join(absent)}, expected installed strategies: {installed}; "
            f"install what is missing or correct {ALLOW_LIST}"
        )
    return kept


def _by_name(offers: list[StrategyInfo]) -> dict[str, StrategyInfo]:
    """Return the strategies by name; a name or an alias that several offer is nobody's."""
    claims: dict[str, list[StrategyInfo]] = {}
    for offer in offers:
        for name in {offer.name, *offer.aliases}:
            claims.setdefault(name, []).append(offer)
    contested = {name: _contested(name, many) for name, many in claims.items() if len(many) > 1}
    alone = {
        offer.name: evolve(offer, aliases=tuple(a for a in offer.aliases if a not in contested))
        for offer in offers
        if offer.name not in contested
    }
    return dict(sorted((alone | contested).items()))


def _contested(name: str, claims: list[StrategyInfo]) -> StrategyInfo:
    """Return a strategy whose problem is that several distributions offer its name."""
    owners = " and ".join(
        sorted(c.origin if c.name == name else f"{c.origin} (for {c.name!r})" for c in claims)
    )
    choice = min(f"{claim.name}@{claim.distribution}" for claim in claims)
    return StrategyInfo(
        name=name,
        distribution=owners,
        problem=(
            f"{owners} both offer {name!r}; uninstall one, or choose one with {ALLOW_LIST}={choice}"
        ),
    )
