"""The kit that every strategy passes: ranks to run on, and the tests to run on them.

Public names are resolved at first access: ranks alone need neither torch nor pytest.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyshard.conformance.ranks.failures import RanksFailed as RanksFailed
    from polyshard.conformance.ranks.pool import RankPool as RankPool
    from polyshard.conformance.rebuild_suite import RebuildConformance as RebuildConformance
    from polyshard.conformance.suite import Deviation as Deviation
    from polyshard.conformance.suite import StrategyConformance as StrategyConformance

_HOMES = {
    "Deviation": "polyshard.conformance.suite",
    "RankPool": "polyshard.conformance.ranks.pool",
    "RanksFailed": "polyshard.conformance.ranks.failures",
    "RebuildConformance": "polyshard.conformance.rebuild_suite",
    "StrategyConformance": "polyshard.conformance.suite",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
