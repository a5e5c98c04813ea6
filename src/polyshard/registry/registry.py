"""StrategyRegistry: from a config to the one plugin that answers for it.

A plugin is loaded when its strategy is first asked for, and then checked: it must implement at
least one hook, and each under the right name, marker and arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from inspect import getmembers_static, ismodule, isroutine
from threading import RLock
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pluggy import PluginManager, PluginValidationError

from polyshard._describe import describe_owner
from polyshard.config.base import DistributedConfig
from polyshard.exceptions import PluginError, PluginLoadError, StrategyNotFoundError
from polyshard.registry import hookspecs
from polyshard.registry.discovery import (
    INSTALL_HINTS,
    StrategyInfo,
    canonical_strategy_name,
    find_strategies,
)

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "StrategyRegistry",
    "available_strategies",
    "default_registry",
    "observe",
    "register",
]

HOOK_NAMES = frozenset(
    name
    for name, value in vars(hookspecs).items()
    if hasattr(value, f"{hookspecs.PROJECT_NAME}_spec")
)


class StrategyRegistry:
    """The strategies that can be asked for, and the observers that wrap all of them.

    Args:
        installed: What the entry points offer (default: looked up at the first use).
    """

    def __init__(self, installed: Mapping[str, StrategyInfo] | None = None) -> None:
        self._installed = dict(installed) if installed is not None else None
        self._registered: dict[str, StrategyInfo] = {}
        self._config_classes: dict[str, type[DistributedConfig]] = {}
        self._manager = PluginManager(hookspecs.PROJECT_NAME)
        self._manager.add_hookspecs(hookspecs)
        self._answers: dict[int, frozenset[str]] = {}
        self._loaded: dict[str, object] = {}
        self._named: dict[str, object] = {}
        self._lock = RLock()
        self._defaults: object = None

    def available(self) -> dict[str, StrategyInfo]:
        """Return every strategy by name, importing none; those with a problem are listed too."""
        if self._installed is None:
            self._installed = find_strategies()
        return {**self._installed, **self._registered}

    def find(self, name: str) -> StrategyInfo:
        """Return what is known of the strategy with this name or alias, in any case.

        Raises:
            StrategyNotFoundError: None has it; the message lists what is installed.
        """
        info = self._holder(canonical_strategy_name(name))
        if info is None:
            raise StrategyNotFoundError(self._not_found(name))
        return info

    def config_class(self, name: str) -> type[DistributedConfig]:
        """Import and return the config class of a strategy; the plugin itself is not loaded.

        Raises:
            StrategyNotFoundError: No installed strategy has that name.
            PluginError: The strategy announces no config class, or something else.
            PluginLoadError: The module of the config class cannot be imported.
        """
        info = self.find(name)
        if info.name in self._config_classes:
            return self._config_classes[info.name]
        if info.config_entry_point is None:
            raise PluginError(
                f"strategy {info.name!r} ({info.origin}): "
                + (info.problem or "expected its config class in 'polyshard.configs', found none")
            )
        cls = _load(info.config_entry_point, info)
        if not (isinstance(cls, type) and issubclass(cls, DistributedConfig)):
            raise PluginError(
                f"strategy {info.name!r} ({info.origin}): expected {info.config_class!r} to be a "
                f"subclass of DistributedConfig, found {cls!r}"
            )
        return cls

    def load(self, name: str) -> object:
        """Import a strategy's plugin, check it, and return it; the hooks that need it do the same.

        Raises:
            StrategyNotFoundError: No installed strategy has that name.
            PluginError: The plugin does not follow the hook interface.
            PluginLoadError: It cannot be imported.
        """
        with self._lock:
            info = self.find(name)
            if info.name in self._loaded:
                return self._loaded[info.name]
            if info.entry_point is None:
                raise PluginError(f"strategy {info.name!r}: {info.problem}")
            plugin = _load(info.entry_point, info)
            self._add(plugin, info)
            return plugin

    def register(
        self,
        plugin: object,
        *,
        config_class: type[DistributedConfig],
        aliases: tuple[str, ...] = (),
    ) -> None:
        """Add a strategy that no entry point announces, under its config class's name.

        Args:
            plugin: Module or object with the hooks.
            config_class: Its config; ``config_class.strategy`` is the name.
            aliases: Other names.

        Raises:
            PluginError: The name or an alias is taken, or the plugin does not follow the hook
                interface.
        """
        name = canonical_strategy_name(config_class.strategy)
        others = tuple(map(canonical_strategy_name, aliases))
        for wanted in (name, *others):
            if (taken := self._holder(wanted)) is not None:
                kind = "strategy" if wanted == name else "alias"
                raise PluginError(
                    f"expected a name that is free, found {wanted!r}, which {taken.origin} offers; "
                    f"give {config_class.__name__} another {kind!r}"
                )
        info = StrategyInfo(
            name=name,
            aliases=others,
            config_class=f"{config_class.__module__}:{config_class.__qualname__}",
            plugin=getattr(plugin, "__name__", type(plugin).__qualname__),
            distribution=describe_owner(config_class),
            summary=(getattr(plugin, "__doc__", None) or "").partition("\n")[0],
        )
        with self._lock:
            self._add(plugin, info)
            self._registered[name] = info
            self._config_classes[name] = config_class

    def observe(self, plugin: object) -> None:
        """Add an observer: hooks with ``wrapper=True`` that are run around every strategy's.

        Raises:
            PluginError: One of its hooks is not a wrapper, which would answer for strategies.
        """
        owner = describe_owner(plugin if ismodule(plugin) else type(plugin))
        who = f"observer {getattr(plugin, '__name__', type(plugin).__qualname__)}"
        for hook, options in _implementations(plugin).items():
            if not options.get("wrapper"):
                raise PluginError(
                    f"{who} ({owner}): expected hooks with wrapper=True, found {hook!r} without; "
                    "only a strategy may answer a hook"
                )
        with self._lock:
            self._check_and_register(plugin, who, owner)

    def implements(self, hook: str, config: DistributedConfig) -> bool:
        """Whether the strategy of this config has its own implementation of a hook."""
        return hook in self._answers[id(self._plugin(config))]

    def dispatch(self, hook: str, config: DistributedConfig, **arguments: Any) -> Any:
        """Call a hook on the strategy that the config names, and on no other.

        Observers wrap the call. Where the strategy does not implement the hook, the core's
        default does. An exception keeps its type and gains a note that says whose it is.

        Raises:
            StrategyNotFoundError: No installed strategy has that config.
            PluginError: The strategy does not implement the hook and it has no default.
        """
        plugin = self._plugin(config)
        if hook not in self._answers[id(plugin)]:
            plugin = self._default(hook, config)
        # A fresh caller each time: a cached one would let in strategies that are loaded later.
        others = [p for p in (*self._loaded.values(), self._defaults) if p is not plugin]
        caller = self._manager.subset_hook_caller(hook, others)
        try:
            return caller(config=config, **arguments)
        except BaseException as error:
            info = self.find(config.strategy)
            error.add_note(f"in hook {hook!r} of strategy {info.name!r} ({info.origin})")
            raise

    def _default(self, hook: str, config: DistributedConfig) -> object:
        if self._defaults is None:
            # Needs torch, which a registry that only lists strategies must not load.
            defaults = import_module("polyshard.strategies.fallback")
            self._check_and_register(defaults, "the defaults", describe_owner(defaults))
            self._defaults = defaults
        if hook not in self._answers[id(self._defaults)]:
            raise PluginError(
                f"strategy {config.strategy!r} ({self.find(config.strategy).origin}) does not "
                f"implement the hook {hook!r}, which has no default"
            )
        return self._defaults

    def _plugin(self, config: DistributedConfig) -> object:
        name = getattr(config, "strategy", None)
        if not isinstance(config, DistributedConfig) or not isinstance(name, str):
            raise StrategyNotFoundError(
                f"expected a DistributedConfig that names its strategy, found {config!r} "
                f"({describe_owner(type(config))}); {self._installed_text()}"
            )
        if name not in self._named:
            self._named[name] = self.load(name)
        return self._named[name]

    def _add(self, plugin: object, info: StrategyInfo) -> None:
        self._check_and_register(plugin, f"strategy {info.name!r}", info.origin)
        self._loaded[info.name] = plugin

    def _check_and_register(self, plugin: object, who: str, owner: str) -> None:
        hooks = _checked_hooks(plugin, who, owner)
        try:
            self._manager.register(plugin, who)
        except PluginValidationError as error:
            if self._manager.is_registered(plugin):
                self._manager.unregister(plugin)
            raise PluginError(
                f"{who} ({owner}): {error}; this is version {hookspecs.API_VERSION} of the hook "
                "interface, see polyshard.registry.hookspecs for the arguments of each hook"
            ) from error
        except ValueError as error:
            raise PluginError(f"{who} ({owner}) is registered already") from error
        self._answers[id(plugin)] = hooks

    def _holder(self, name: str) -> StrategyInfo | None:
        """Return the strategy with this name or alias, in the form in which names are compared."""
        strategies = self.available()
        by_alias = (info for info in strategies.values() if name in info.aliases)
        return strategies.get(name) or next(by_alias, None)

    def _not_found(self, name: str) -> str:
        from polyshard._describe import nearest

        strategies = self.available()
        names = [*strategies, *(alias for info in strategies.values() for alias in info.aliases)]
        hint = INSTALL_HINTS.get(canonical_strategy_name(name))
        cure = f"; to use it, run: pip install {hint}" if hint else nearest(name, names)
        return f"no installed strategy is called {name!r}{cure}; {self._installed_text()}"

    def _installed_text(self) -> str:
        listed = [f"{i.name} ({i.origin})" for i in self.available().values() if not i.problem]
        return "installed are " + (", ".join(listed) or "none")


def _load(entry_point: EntryPoint, info: StrategyInfo) -> Any:
    """Import what an entry point names, and say which of two things is missing if it fails."""
    try:
        return entry_point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, with which a module may refuse, is no Exception
        raise PluginLoadError(_load_failure(info, error)) from error


def _load_failure(info: StrategyInfo, error: BaseException) -> str:
    what = f"strategy {info.name!r} ({info.origin}) cannot be loaded"
    if info.problem:
        return f"{what}: {info.problem}"
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        own = info.plugin.partition(".")[0]
        if package != own:
            return (
                f"{what}: it needs the module {package!r}, which is not installed; run: "
                f"pip install --upgrade {info.distribution}"
            )
    return f"{what}: {type(error).__name__}: {error}"


def _checked_hooks(plugin: object, who: str, owner: str) -> frozenset[str]:
    """Return the hooks that a plugin implements, or say which mistake makes it have none."""
    from polyshard._describe import nearest

    found = _implementations(plugin)
    for name in found:
        if name not in HOOK_NAMES:
            raise PluginError(
                f"{who} ({owner}): expected hooks named {', '.join(sorted(HOOK_NAMES))}, "
                f"found {name!r}{nearest(name, HOOK_NAMES)}; this is version "
                f"{hookspecs.API_VERSION} of the hook interface"
            )
    unmarked = _own_functions(plugin).keys() & HOOK_NAMES - found.keys()
    if unmarked:
        raise PluginError(
            f"{who} ({owner}): {', '.join(sorted(unmarked))} would never be called, because it "
            "does not carry the marker polyshard.hookimpl; add it, or rename the function"
        )
    if not found:
        raise PluginError(
            f"{who} ({owner}): expected at least one function marked with polyshard.hookimpl "
            f"({', '.join(sorted(HOOK_NAMES))}), found none"
        )
    return frozenset(found)


def _implementations(plugin: object) -> dict[str, Mapping[str, Any]]:
    """Return the name under which each marked function answers, with its marker's options."""
    marker = f"{hookspecs.PROJECT_NAME}_impl"
    marked = {
        name: getattr(function, marker)
        for name, function in _own_functions(plugin).items()
        if isinstance(getattr(function, marker, None), dict)
    }
    return {options.get("specname") or name: options for name, options in marked.items()}


def _own_functions(plugin: object) -> dict[str, Any]:
    """Return the functions of a plugin; for a module, those it merely imported are left out."""
    functions = {name: member for name, member in getmembers_static(plugin) if isroutine(member)}
    if isinstance(plugin, ModuleType):
        return {n: f for n, f in functions.items() if f.__module__ == plugin.__name__}
    return functions


@cache
def default_registry() -> StrategyRegistry:
    """Return the registry of this process, which the public functions use."""
    return StrategyRegistry()


def available_strategies() -> dict[str, StrategyInfo]:
    """Return what is known of each installed strategy, by name; nothing is imported."""
    return default_registry().available()


def register(
    plugin: object, *, config_class: type[DistributedConfig], aliases: tuple[str, ...] = ()
) -> None:
    """Add a strategy that no entry point announces; see ``StrategyRegistry.register``."""
    default_registry().register(plugin, config_class=config_class, aliases=aliases)


def observe(plugin: object) -> None:
    """Wrap the hooks of every strategy; see ``StrategyRegistry.observe``."""
    default_registry().observe(plugin)
