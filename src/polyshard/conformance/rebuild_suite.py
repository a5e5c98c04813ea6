"""RebuildConformance: that every kind of rebuild trains right, or is refused in plain words.

Derive a test class that sets ``config``, and ``refusals`` for what the strategy cannot do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import attrs
import pytest

from polyshard.conformance import rebuilds
from polyshard.conformance.parity import Outcome, assert_parity, train_plain
from polyshard.conformance.rebuilds import CHANGES, RECIPE

if TYPE_CHECKING:
    from polyshard.config import DistributedConfig
    from polyshard.conformance.pool import RankPool
    from polyshard.conformance.rebuilds import When
    from polyshard.mesh import ParallelismSizes

__all__ = ["RebuildConformance"]

_Result = TypeVar("_Result")


class RebuildConformance:
    """Every kind of change to a parallelized model's parameters, inside ``rebuild`` and outside.

    Attributes:
        config: The config to test. It is used in full precision.
        sizes: Of the mesh; None is one data-parallel dimension over all ranks.
        refusals: A part of the error's text for each change that the strategy refuses. On one
            rank it refuses only what it must.
    """

    config: ClassVar[DistributedConfig]
    sizes: ClassVar[ParallelismSizes | None] = None
    refusals: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls) -> None:
        if unknown := sorted(cls.refusals.keys() - CHANGES.keys()):
            raise TypeError(
                f"{cls.__name__}.refusals: expected names out of {', '.join(CHANGES)}, found "
                f"{unknown[0]!r}"
            )

    def _run(
        self, ranks: RankPool, function: Callable[..., _Result], *arguments: Any
    ) -> list[_Result]:
        config = self.config.in_full_precision()
        return ranks.run(function, config, *arguments, sizes=self.sizes)

    @classmethod
    def refuses(cls, change: str, world_size: int) -> bool:
        """Tell whether a change is expected to be refused on so many ranks."""
        return CHANGES[change].expected is None or (change in cls.refusals and world_size > 1)

    @pytest.mark.parametrize("when", ["before", "after"])
    @pytest.mark.parametrize("change", CHANGES)
    def test_training_after(
        self, ranks: RankPool, world_size: int, change: str, when: When
    ) -> None:
        """Training goes on as a plain process would from the new values, or an error says why not.

        The first forward included, with an optimizer built before the change and one built after.
        """
        results = self._run(ranks, rebuilds.train_after, change, when)
        if self.refuses(change, world_size):
            self._assert_refused(results, self.refusals.get(change, ""))
        else:
            _assert_trained(results, change, when)

    @pytest.mark.parametrize("change", ["new", "load assign", "cast", "retie"])
    def test_optimizer_built_inside(self, ranks: RankPool, change: str) -> None:
        """An optimizer that the body built on its own Parameters trains right or is refused."""
        results = self._run(ranks, rebuilds.train_after, change, "inside")
        if any(isinstance(result, str) for result in results):
            self._assert_refused(results, "build")
        else:
            _assert_trained(results, change, "inside")

    @pytest.mark.parametrize(
        "change", [name for name, change in CHANGES.items() if change.replaces]
    )
    def test_unannounced_change_is_never_silent(self, ranks: RankPool, change: str) -> None:
        """Outside of ``rebuild`` it trains right all the same, or the next step says what to do."""
        results = self._run(ranks, rebuilds.train_unannounced, change)
        must_fail = CHANGES[change].expected is None
        if must_fail or any(isinstance(result, str) for result in results):
            cure = "parallelize" if must_fail else "polyshard.rebuild(model, config)"
            self._assert_refused(results, cure)
        else:
            _assert_trained(results, change, "before")

    @pytest.mark.parametrize("change", ["new", "load assign"])
    def test_hooks_apart(self, ranks: RankPool, change: str) -> None:
        """``pre_rebuild`` and ``post_rebuild`` do apart what ``rebuild`` does."""
        outcomes = self._run(ranks, rebuilds.train_after_hooks_apart, change)
        assert_parity(outcomes, rebuilds.train_plain_after(change, "before"), RECIPE)

    def test_a_body_that_fails_on_one_rank_fails_on_all(
        self, ranks: RankPool, world_size: int
    ) -> None:
        """Every rank raises the first error with its rank, and the model trains as before."""
        culprit = world_size - 1
        results = self._run(ranks, rebuilds.fail_in_body, culprit)
        for rank, (message, _) in enumerate(results):
            by_peer = f"rank {culprit} failed first: ValueError: raised in the body"
            assert (message == "raised in the body") if rank == culprit else (by_peer in message)
        recipe = attrs.evolve(RECIPE, steps=2 * RECIPE.steps)
        assert_parity([outcome for _, outcome in results], train_plain(recipe), recipe)

    def _assert_refused(self, results: list[Outcome | str], part: str) -> None:
        for rank, result in enumerate(results):
            assert isinstance(result, str), f"rank {rank} trained, expected an error with {part!r}"
            assert part in result


def _assert_trained(results: list[Outcome | str], change: str, when: When) -> None:
    errors = [result for result in results if isinstance(result, str)]
    assert not errors
    outcomes = [result for result in results if isinstance(result, Outcome)]
    assert_parity(outcomes, rebuilds.train_plain_after(change, when), RECIPE)
