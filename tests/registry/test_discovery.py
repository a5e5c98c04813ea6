"""What is installed is read from metadata, and nothing is imported to read it."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from polyshard._describe import describe_owner
from polyshard.exceptions import PluginError
from polyshard.registry.discovery import canonical_strategy_name, find_strategies

Install = Callable[..., Path]

PLUGIN = '"""Strategy of Acme.\n\nMore about it.\n"""\nraise RuntimeError("imported")\n'


def acme(install: Install, name: str = "acme-shard", module: str = "acme_shard") -> Path:
    return install(
        name,
        modules={module: PLUGIN},
        entry_points={
            "polyshard.strategies": {"Acme-Shard": module},
            "polyshard.configs": {"acme_shard": f"{module}:Config"},
            "polyshard.aliases": {"acme": "acme_shard", "other": "something_else"},
        },
    )


def test_a_distribution_is_listed_without_being_imported(install: Install) -> None:
    acme(install)
    info = find_strategies({})["acme_shard"]
    assert info.origin == "acme-shard 1.0"
    assert info.config_class == "acme_shard:Config"
    assert info.aliases == ("acme",)
    assert info.summary == "Strategy of Acme."
    assert info.problem is None
    assert "acme_shard" not in sys.modules


def test_two_distributions_with_one_name_are_both_named_and_one_can_be_chosen(
    install: Install,
) -> None:
    acme(install)
    acme(install, "rival", "rival_shard")
    problem = find_strategies({})["acme_shard"].problem
    assert problem is not None
    assert "acme-shard 1.0 and rival 1.0 both offer 'acme_shard'" in problem
    chosen = find_strategies({"POLYSHARD_PLUGINS": "ddp,acme-shard@rival"})
    assert chosen["acme_shard"].origin == "rival 1.0"
    assert set(chosen) == {"acme_shard", "ddp"}


@pytest.mark.parametrize("name", ["rival_shard", "acme"])
def test_an_alias_that_another_distribution_offers_is_nobodys(install: Install, name: str) -> None:
    acme(install)
    install(
        "rival",
        modules={"rival_shard": PLUGIN},
        entry_points={
            "polyshard.strategies": {name: "rival_shard"},
            "polyshard.aliases": {"acme": name},
        },
    )
    found = find_strategies({})
    assert found["acme_shard"].aliases == ()
    problem = str(found["acme"].problem)
    assert "acme-shard 1.0 (for 'acme_shard') and rival 1.0" in problem
    assert "both offer 'acme'; uninstall one, or choose one with POLYSHARD_PLUGINS=acme" in problem
    (choice,) = problem.split("POLYSHARD_PLUGINS=")[1:]
    (chosen,) = find_strategies({"POLYSHARD_PLUGINS": choice}).values()
    assert "acme" in (chosen.name, *chosen.aliases)
    assert chosen.problem is None


def test_the_allow_list_refuses_a_name_that_is_not_installed() -> None:
    with pytest.raises(PluginError, match=r"POLYSHARD_PLUGINS names nosuch.*ddp@polyshard"):
        find_strategies({"POLYSHARD_PLUGINS": "ddp,nosuch"})


@pytest.mark.parametrize(("value", "listed"), [("1", False), ("0", True), ("", True)])
def test_autoload_off_leaves_the_strategies_of_the_core(
    install: Install, value: str, listed: bool
) -> None:
    acme(install)
    found = find_strategies({"POLYSHARD_DISABLE_PLUGIN_AUTOLOAD": value})
    assert ("acme_shard" in found) is listed
    assert "ddp" in found


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("def broken(:", "acme_bad cannot be read: SyntaxError"),
        (None, "the entry point 'acme_bad' names 'acme_bad.missing', which does not exist"),
    ],
)
def test_a_plugin_that_cannot_be_read_is_listed_with_its_problem(
    install: Install, source: str | None, problem: str
) -> None:
    target = "acme_bad" if source else "acme_bad.missing"
    install(
        "acme-bad",
        modules={"acme_bad": source or ""},
        entry_points={"polyshard.strategies": {"acme_bad": target}},
    )
    found = find_strategies({})
    assert problem in str(found["acme_bad"].problem)
    assert found["ddp"].problem is None


@pytest.mark.parametrize(
    ("requirement", "problem"),
    [
        ("nosuchdist>=2", "acme-shard 1.0 needs nosuchdist>=2, which is not installed; "
         "run: pip install 'nosuchdist>=2'"),
        ("attrs>=99", "run: pip install 'attrs>=99'"),
        ("nosuchdist; python_version < '3'", None),
        ("nosuchdist; extra == 'more'", None),
        ("attrs>=1", None),
    ],
)  # fmt: skip
def test_a_missing_dependency_is_told_from_a_missing_plugin(
    install: Install, requirement: str, problem: str | None
) -> None:
    install(
        "acme-shard",
        modules={"acme_shard": PLUGIN},
        entry_points={"polyshard.strategies": {"acme_shard": "acme_shard"}},
        requires=[requirement],
    )
    found = find_strategies({})["acme_shard"].problem
    assert (problem is None and found is None) or (problem in str(found))


def test_a_plugin_in_a_namespace_package_is_found(install: Install) -> None:
    install(
        "acme-deep",
        modules={"acme_space.inner.plugin": PLUGIN},
        entry_points={"polyshard.strategies": {"deep": "acme_space.inner.plugin"}},
    )
    info = find_strategies({})["deep"]
    assert info.problem is None
    assert info.summary == "Strategy of Acme."


@pytest.mark.parametrize("name", ["Megatron-FSDP", "megatron_fsdp", " MEGATRON-fsdp "])
def test_names_are_compared_in_one_form(name: str) -> None:
    assert canonical_strategy_name(name) == "megatron_fsdp"


def test_the_owner_of_code_is_its_distribution_or_its_module() -> None:
    assert describe_owner(pytest.Item).startswith("pytest ")
    assert describe_owner(acme) == f"module {__name__}"
