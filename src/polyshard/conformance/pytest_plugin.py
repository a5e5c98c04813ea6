"""Multi-rank tests under pytest: ranks to run on, at the world sizes and for the strategies asked.

Load it in the ``conftest.py`` at the root of a repository::

    pytest_plugins = ["polyshard.conformance.pytest_plugin"]

A test that uses the fixture ``ranks`` (a ``RankPool``) or ``world_size`` runs once for each
``--world-size``, by default for 1 and 2, or for the sizes of its marker ``world_size(4)``. A test
with the marker ``strategy("ddp")`` is left out when ``--strategy`` asks for others.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import pytest

from polyshard.conformance.ranks.pool import RankPool
from polyshard.registry.discovery import canonical_strategy_name, find_strategies

if TYPE_CHECKING:
    from collections.abc import Iterator

DEFAULT_WORLD_SIZES = (1, 2)

# Asserts in an installed module say what they compared only if pytest rewrites them at import.
pytest.register_assert_rewrite("polyshard.conformance.suite", "polyshard.conformance.rebuild_suite")

_MARKERS = (
    "world_size(*sizes): world sizes at which the test runs, in place of the default ones",
    "strategy(name): the strategy that the test is about, by its registered name",
    "gpu: needs a CUDA device; skipped where there is none",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options; called once by pytest."""
    group = parser.getgroup("polyshard")
    group.addoption(
        "--world-size",
        action="append",
        type=_positive,
        default=[],
        metavar="N",
        help="run multi-rank tests at this world size only (repeatable; default: 1 and 2, and "
        "tests marked world_size at the sizes that they name)",
    )
    group.addoption(
        "--strategy",
        action="append",
        default=[],
        metavar="NAME",
        help="of the tests marked strategy, run those of this one only (repeatable; default: all)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers and check the strategies asked for; called once by pytest."""
    for line in _MARKERS:
        config.addinivalue_line("markers", line)
    _requested_strategies(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeat a test at each of its world sizes; called by pytest for each test function.

    The scope makes pytest run all tests of one size before those of the next, so that one pool
    is alive at a time.
    """
    if "world_size" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("world_size")
    requested = metafunc.config.getoption("--world-size")
    sizes = marker.args if marker else requested or DEFAULT_WORLD_SIZES
    metafunc.parametrize("world_size", sizes, indirect=True, scope="session", ids="world{}".format)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what the options leave out; called by pytest after collection."""
    sizes = config.getoption("--world-size")
    strategies = _requested_strategies(config)
    wanted = [item for item in items if _has_size(item, sizes) and _is_about(item, strategies)]
    if len(wanted) < len(items):
        kept = set(wanted)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = wanted


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked gpu where there is none; called by pytest before each test."""
    if item.get_closest_marker("gpu") and not _has_cuda():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def world_size(request: pytest.FixtureRequest) -> int:
    """The number of ranks at which the test runs."""
    size: int = request.param
    return size


@pytest.fixture(scope="session")
def ranks(world_size: int) -> Iterator[RankPool]:
    """A pool of ``world_size`` ranks, shared by all tests that run at that size."""
    with RankPool(world_size) as pool:
        yield pool


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(f"expected 1 or more, found {text}")
    return number


def _requested_strategies(config: pytest.Config) -> set[str]:
    """Return the registered names behind ``--strategy``; a name of none is a usage error."""
    requested = set(map(canonical_strategy_name, config.getoption("--strategy")))
    if not requested:
        return requested
    found = find_strategies()
    registered = {name: name for name in found}
    registered |= {alias: name for name, info in found.items() for alias in info.aliases}
    if unknown := sorted(requested - registered.keys()):
        raise pytest.UsageError(
            f"--strategy {unknown[0]}: expected one that is installed ({', '.join(found)})"
        )
    return {registered[name] for name in requested}


def _has_size(item: pytest.Item, sizes: list[int]) -> bool:
    callspec = getattr(item, "callspec", None)
    size = callspec.params.get("world_size") if callspec else None
    return not sizes or size is None or size in sizes


def _is_about(item: pytest.Item, strategies: set[str]) -> bool:
    names = {
        canonical_strategy_name(name)
        for mark in item.iter_markers("strategy")
        for name in mark.args
    }
    return not strategies or not names or not names.isdisjoint(strategies)


@cache
def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
