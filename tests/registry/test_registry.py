"""A config reaches the one plugin that its class names, and faulty plugins are told why."""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, ClassVar

import pluggy
import pytest
from attrs import frozen

from polyshard import DistributedConfig, hookimpl
from polyshard.exceptions import PluginError, PluginLoadError, StrategyNotFoundError
from polyshard.registry.discovery import find_strategies
from polyshard.registry.registry import HOOK_NAMES, StrategyRegistry

Install = Callable[..., Path]


@frozen(kw_only=True)
class AcmeConfig(DistributedConfig):
    strategy: ClassVar[str] = "acme"


@frozen(kw_only=True)
class OtherConfig(DistributedConfig):
    strategy: ClassVar[str] = "other"


class Answers:
    """A plugin whose hook says what it was asked."""

    def __init__(self, answer: str = "acme") -> None:
        self.answer = answer

    @hookimpl
    def parallelize(self, config: Any, model: Any, mesh: Any, optimizer: Any) -> Any:
        return (self.answer, model)


def ask(registry: StrategyRegistry, config: DistributedConfig) -> Any:
    return registry.dispatch("parallelize", config, model="m", mesh=None, optimizer=None)


@pytest.fixture
def registry() -> StrategyRegistry:
    registry = StrategyRegistry(installed={})
    registry.register(Answers(), config_class=AcmeConfig, aliases=("A-C-M-E",))
    return registry


def test_the_hooks_are_those_of_the_specs() -> None:
    assert {"parallelize", "shard_optimizer", "pre_rebuild", "post_rebuild"} <= HOOK_NAMES
    assert "hookimpl" not in HOOK_NAMES


def test_a_config_reaches_its_strategy_alone(registry: StrategyRegistry) -> None:
    registry.register(Answers("other"), config_class=OtherConfig)
    assert ask(registry, AcmeConfig()) == ("acme", "m")
    assert ask(registry, OtherConfig()) == ("other", "m")


def test_a_subclass_of_a_config_goes_to_the_same_strategy(registry: StrategyRegistry) -> None:
    @frozen(kw_only=True)
    class Mine(AcmeConfig):
        pass

    assert ask(registry, Mine()) == ("acme", "m")


@pytest.mark.parametrize("name", ["acme", "ACME", "a_c_m_e", "A-c-m-e"])
def test_names_and_aliases_are_found_in_any_case(registry: StrategyRegistry, name: str) -> None:
    assert registry.find(name).name == "acme"
    assert registry.config_class(name) is AcmeConfig


def test_an_unknown_strategy_names_the_nearest_and_what_is_installed(
    registry: StrategyRegistry,
) -> None:
    with pytest.raises(StrategyNotFoundError) as caught:
        registry.find("acmee")
    assert "did you mean 'acme'?" in str(caught.value)
    assert "installed are acme (module" in str(caught.value)


def test_a_known_strategy_that_is_not_installed_says_what_to_install() -> None:
    with pytest.raises(StrategyNotFoundError, match="pip install polyshard-megatron-fsdp"):
        StrategyRegistry(installed={}).find("Megatron-FSDP")


@pytest.mark.parametrize("config", [OtherConfig(), {"strategy": "acme"}, object()])
def test_a_config_without_strategy_is_refused(registry: StrategyRegistry, config: Any) -> None:
    with pytest.raises(StrategyNotFoundError, match="installed are acme"):
        ask(registry, config)


def test_a_taken_name_is_refused(registry: StrategyRegistry) -> None:
    with pytest.raises(PluginError, match=r"found 'acme', which module .* offers; .* 'strategy'"):
        registry.register(Answers(), config_class=AcmeConfig)
    for alias in ("Acme", "a-c-m-e"):
        with pytest.raises(PluginError, match=r"found 'a.*', which module .* offers; .* 'alias'"):
            registry.register(Answers(), config_class=OtherConfig, aliases=("free", alias))
    assert set(registry.available()) == {"acme"}


def test_a_name_that_is_an_alias_is_taken() -> None:
    registry = StrategyRegistry(installed={})
    registry.register(Answers(), config_class=AcmeConfig, aliases=("other",))
    with pytest.raises(PluginError, match=r"found 'other', which module .* offers"):
        registry.register(Answers(), config_class=OtherConfig)


def test_a_hook_without_implementation_goes_to_the_default_or_is_an_error(
    registry: StrategyRegistry,
) -> None:
    assert not registry.implements("post_rebuild", AcmeConfig())
    assert registry.dispatch("pre_rebuild", AcmeConfig(), model="m") is None
    with pytest.raises(PluginError, match=r"'acme' \(module .*\) does not implement .*'shard_opt"):
        registry.dispatch("shard_optimizer", AcmeConfig(), model="m", optimizer="o")


def test_an_exception_keeps_its_type_and_says_whose_it_is() -> None:
    class Raises:
        @hookimpl
        def parallelize(self) -> None:
            raise KeyError("theirs")

    registry = StrategyRegistry(installed={})
    registry.register(Raises(), config_class=AcmeConfig)
    with pytest.raises(KeyError, match="theirs") as caught:
        ask(registry, AcmeConfig())
    assert caught.value.__notes__ == [
        f"in hook 'parallelize' of strategy 'acme' (module {__name__})"
    ]


class TestObservers:
    def test_an_observer_wraps_every_strategy_and_every_default(
        self, registry: StrategyRegistry
    ) -> None:
        seen = []

        class Observer:
            @hookimpl(wrapper=True)
            def parallelize(self, config: Any) -> Generator[None, Any, Any]:
                result = yield
                seen.append((config.strategy, result))
                return result

            @hookimpl(wrapper=True)
            def pre_rebuild(self, model: Any) -> Generator[None, Any, Any]:
                seen.append(model)
                return (yield)

        registry.observe(Observer())
        registry.register(Answers("other"), config_class=OtherConfig)
        ask(registry, AcmeConfig())
        ask(registry, OtherConfig())
        registry.dispatch("pre_rebuild", AcmeConfig(), model="model")
        assert seen == [("acme", ("acme", "m")), ("other", ("other", "m")), "model"]

    def test_an_observer_cannot_answer_for_a_strategy(self, registry: StrategyRegistry) -> None:
        with pytest.raises(PluginError, match=r"observer Answers .* expected hooks with wrapper"):
            registry.observe(Answers("hijacked"))
        assert ask(registry, AcmeConfig()) == ("acme", "m")


class NoMarker:
    def parallelize(self, config: Any, model: Any, mesh: Any, optimizer: Any) -> None: ...


class OtherMarker:
    @pluggy.HookimplMarker("pytest")
    def shard_optimizer(self, config: Any, model: Any, optimizer: Any) -> None: ...


class Misspelt:
    @hookimpl
    def paralelize(self, config: Any) -> None: ...


class NothingAtAll:
    pass


class UnknownArgument:
    @hookimpl
    def parallelize(self, config: Any, modell: Any) -> None: ...


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (NoMarker(), "parallelize would never be called, because it does not carry the marker"),
        (OtherMarker(), "shard_optimizer would never be called"),
        (Misspelt(), r"found 'paralelize' \(did you mean 'parallelize'\?\)"),
        (NothingAtAll(), "expected at least one function marked with polyshard.hookimpl"),
        (UnknownArgument(), r"(?s)modell.*this is version 1 of the hook interface"),
    ],
)
def test_a_plugin_that_would_never_be_called_is_refused(plugin: object, message: str) -> None:
    registry = StrategyRegistry(installed={})
    with pytest.raises(PluginError, match=message) as caught:
        registry.register(plugin, config_class=AcmeConfig)
    assert f"strategy 'acme' (module {__name__})" in str(caught.value)
    registry.register(Answers(), config_class=AcmeConfig)
    assert ask(registry, AcmeConfig()) == ("acme", "m")


class TestBrokenPlugins:
    """One that cannot be imported harms only itself, and asking for it raises its real cause."""

    @pytest.fixture
    def make(self, install: Install) -> Callable[[str], StrategyRegistry]:
        def make(source: str) -> StrategyRegistry:
            install(
                "acme-bad",
                modules={"acme_bad": source},
                entry_points={
                    "polyshard.strategies": {"acme": "acme_bad"},
                    "polyshard.configs": {"acme": "acme_bad:Config"},
                },
            )
            registry = StrategyRegistry(find_strategies({}))
            registry.register(Answers("other"), config_class=OtherConfig)
            return registry

        return make

    def test_the_others_work(self, make: Callable[[str], StrategyRegistry]) -> None:
        registry = make("1 / 0")
        with pytest.raises(PluginLoadError, match=r"acme-bad 1.0\) cannot .* ZeroDivisionError"):
            ask(registry, AcmeConfig())
        assert ask(registry, OtherConfig()) == ("other", "m")

    def test_its_real_cause_is_raised(self, make: Callable[[str], StrategyRegistry]) -> None:
        with pytest.raises(PluginLoadError) as caught:
            make("1 / 0").config_class("acme")
        assert isinstance(caught.value.__cause__, ZeroDivisionError)

    @pytest.mark.parametrize("source", ["raise SystemExit('no')", "raise BaseException('no')"])
    def test_what_is_no_exception_is_its_problem_too(
        self, make: Callable[[str], StrategyRegistry], source: str
    ) -> None:
        with pytest.raises(PluginLoadError, match=r"cannot be loaded: \w+: no"):
            ask(make(source), AcmeConfig())

    def test_a_missing_dependency_is_named(self, make: Callable[[str], StrategyRegistry]) -> None:
        with pytest.raises(PluginLoadError, match="needs the module 'nosuchmodule', which is not"):
            ask(make("import nosuchmodule.inner"), AcmeConfig())

    def test_a_config_of_another_kind_is_refused(
        self, make: Callable[[str], StrategyRegistry]
    ) -> None:
        with pytest.raises(PluginError, match="'acme_bad:Config' to be a subclass of Distributed"):
            make("Config = dict").config_class("acme")
