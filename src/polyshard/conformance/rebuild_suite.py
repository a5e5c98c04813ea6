"""RebuildConformance: that every kind of rebuild trains right, or is refused in plain words.

Derive a test class that sets ``config``, and ``refusals`` for what the strategy cannot do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import attrs
import pytest

from polyshard.conformance import rebuild_scenarios
from polyshard.conformance.models import build_model, stamp, stamps_of
from polyshard.conformance.parameter_changes import CHANGES
from polyshard.conformance.parity import assert_parity
from polyshard.conformance.rebuild_scenarios import FRESH, RECIPE, Trained
from polyshard.conformance.recipes import Outcome
from polyshard.conformance.trainings import train_plain

if TYPE_CHECKING:
    from polyshard.config.base import DistributedConfig
    from polyshard.config.parallelism import ParallelismSizes
    from polyshard.conformance.ranks.pool import RankPool
    from polyshard.conformance.rebuild_scenarios import When

__all__ = ["TELLING", "RebuildConformance"]

_Result = TypeVar("_Result")

_CURES = ("before parallelize", "polyshard.rebuild(model)")

#: The changes by which one layout can differ from another: full tensors, the layout's own, the
#: attributes that a cast takes away, and a refusal.
TELLING = ("new", "load own assign", "cast", "untie")


class RebuildConformance:
    """Every kind of change to a parallelized model's parameters, inside ``rebuild`` and outside.

    The model has tied and frozen parameters, and a buffer.

    Attributes:
        config: The config to test. It is used in full precision.
        sizes: Of the mesh; None is one data-parallel dimension over all ranks.
        refusals: A part of the error's text for each change that the strategy refuses. On one
            rank it refuses only what it must.
        changes: The names of the changes to try. All of them for a strategy and each of its
            modes, ``TELLING`` for another layout of the same.
    """

    config: ClassVar[DistributedConfig]
    sizes: ClassVar[ParallelismSizes | None] = None
    refusals: ClassVar[Mapping[str, str]] = {}
    changes: ClassVar[Collection[str]] = CHANGES.keys()

    def __init_subclass__(cls) -> None:
        for attribute in ("refusals", "changes"):
            if unknown := sorted(set(getattr(cls, attribute)) - CHANGES.keys()):
                raise TypeError(
                    f"{cls.__name__}.{attribute}: expected names out of {', '.join(CHANGES)}, "
                    f"found {unknown[0]!r}"
                )

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give each test those of the class's changes that it is about."""
        possible = [name for name in self.changes if CHANGES[name].expected is not None]
        about = {
            "test_training_after": possible,
            "test_refusal_leaves_the_model_as_it_was": [
                name for name in self.changes if name not in possible
            ],
            "test_optimizer_built_inside": [
                name for name in ("new", "load assign", "cast", "retie") if name in self.changes
            ],
            # What one rank does alone to its own values cannot be seen without asking the others.
            "test_unannounced_change_is_never_silent": [
                name for name in self.changes if name != "load on rank 0"
            ],
        }
        if metafunc.function.__name__ in about:
            metafunc.parametrize("change", about[metafunc.function.__name__])

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
    def test_training_after(
        self, ranks: RankPool, world_size: int, change: str, when: When
    ) -> None:
        """Training goes on as a plain process would from the new values, or an error says why not.

        The first forward included, with an optimizer built before the change and one built after.
        What the user set on a Parameter is on it after the wrap and the change; a fresh value wins.
        """
        results = self._run(ranks, rebuild_scenarios.train_after, change, when)
        if self.refuses(change, world_size):
            _assert_refused(results, self.refusals[change])
        else:
            _assert_trained(results, change, when)

    def test_refusal_leaves_the_model_as_it_was(self, ranks: RankPool, change: str) -> None:
        """What no strategy takes is refused, and training goes on as if it had not been tried."""
        results = self._run(ranks, rebuild_scenarios.train_after_refusal, change)
        _assert_refused([refusal for refusal, _ in results], self.refusals.get(change, "expected"))
        _assert_as_before([outcome for _, outcome in results])

    def test_optimizer_built_inside(self, ranks: RankPool, change: str) -> None:
        """An optimizer that the body built on its own Parameters trains right or is refused."""
        results = self._run(ranks, rebuild_scenarios.train_after, change, "inside")
        if any(isinstance(result, str) for result in results):
            _assert_refused(results, "build")
        else:
            _assert_trained(results, change, "inside")

    def test_unannounced_change_is_never_silent(
        self, ranks: RankPool, world_size: int, change: str
    ) -> None:
        """Outside of ``rebuild`` it trains right all the same, or the next step says what to do."""
        results = self._run(ranks, rebuild_scenarios.train_unannounced, change)
        must_fail = CHANGES[change].expected is None
        if must_fail or any(isinstance(result, str) for result in results):
            _assert_refused(results, *_CURES, self.refusals.get(change, _CURES[0]))
        else:
            outcomes = [result for result in results if isinstance(result, Outcome)]
            assert_parity(outcomes, rebuild_scenarios.train_plain_after(change, "before"), RECIPE)

    def test_hooks_apart_on_several_parts(self, ranks: RankPool) -> None:
        """``pre_rebuild`` and ``post_rebuild`` do apart what ``rebuild`` does, of a list of models.

        The last thing before them is a forward without gradients.
        """
        recipe = attrs.evolve(RECIPE, evaluate="after step")
        expected = rebuild_scenarios.train_plain_after("new", "before", recipe)
        for outcomes in self._run(ranks, rebuild_scenarios.train_parts_after_hooks, "new", recipe):
            assert_parity(outcomes, expected, recipe)

    def test_loading_what_the_first_rank_has(self, ranks: RankPool) -> None:
        """``load_full_state_dict`` of unsharded tensors, then training from these values."""
        outcomes = self._run(ranks, rebuild_scenarios.train_after_loading)
        assert_parity(outcomes, rebuild_scenarios.train_plain_after("load", "before"), RECIPE)

    def test_a_body_that_fails_on_one_rank_fails_on_all(
        self, ranks: RankPool, world_size: int
    ) -> None:
        """That rank raises its own error, the others that one with its rank.

        The model trains as before.
        """
        culprit = world_size - 1
        results = self._run(ranks, rebuild_scenarios.fail_in_body, culprit)
        own = "ValueError: raised in the body"
        for rank, (message, _) in enumerate(results):
            by_peer = f"PeerFailedError: rebuild: rank {culprit} failed first: {own}"
            assert message == own if rank == culprit else message.startswith(by_peer)
        _assert_as_before([outcome for _, outcome in results])


def _assert_refused(results: Sequence[object], *parts: str) -> None:
    """Check that every rank returned an error whose text has one of these parts."""
    for rank, result in enumerate(results):
        assert isinstance(result, str), f"rank {rank} trained, expected an error with {parts}"
        assert any(part in result for part in parts), result


def _assert_trained(results: Sequence[Trained | str], change: str, when: When) -> None:
    trained = [result for result in results if isinstance(result, Trained)]
    assert len(trained) == len(results), results
    outcomes = [result.outcome for result in trained]
    assert_parity(outcomes, rebuild_scenarios.train_plain_after(change, when), RECIPE)
    model = build_model(RECIPE.model)
    stamp(model)
    for result in trained:
        assert result.stamps == stamps_of(model) | {FRESH: "fresh"}


def _assert_as_before(outcomes: Sequence[Outcome]) -> None:
    """Check that training went on as if nothing had been tried in between."""
    recipe = attrs.evolve(RECIPE, steps=2 * RECIPE.steps)
    assert_parity(outcomes, train_plain(recipe), recipe)
