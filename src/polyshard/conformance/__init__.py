"""The kit that every strategy passes: ranks to run on, and the tests to run on them.

Public names are resolved at first access: ranks alone need neither torch nor pytest.
"""

from typing import TYPE_CHECKING

from polyshard._lazy import lazy_names

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

__getattr__, __dir__ = lazy_names(globals(), _HOMES)
