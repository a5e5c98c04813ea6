"""StrategyConformance: the tests that every strategy passes.

Derive a test class that sets ``config``; that is all. docs/how-to/test-your-strategy.md shows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import pytest

from polyshard.conformance import methods, scenarios
from polyshard.conformance.layouts import LAYOUTS, layouts_of
from polyshard.conformance.models import MODELS, build_model, stamp, stamps_of
from polyshard.conformance.parity import assert_parity, assert_same_weights
from polyshard.conformance.recipes import Outcome, Recipe
from polyshard.conformance.trainings import train_plain, train_under

if TYPE_CHECKING:
    from polyshard.config.base import DistributedConfig
    from polyshard.config.parallelism import ParallelismSizes
    from polyshard.conformance.ranks.pool import RankPool

__all__ = ["Deviation", "StrategyConformance"]

_Result = TypeVar("_Result")

# Models that have what "plain" has, and a difficulty each.
_tied_and_frozen = pytest.mark.parametrize("model", ["tied", "frozen"])
# "mixed" has what several others have, and is for rebuilds and layouts.
_every_model = pytest.mark.parametrize("model", sorted(MODELS.keys() - {"mixed"}))
_either_optimizer = pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
_either_time = pytest.mark.parametrize("passed", [False, True], ids=["built after", "passed"])


class Deviation:
    """A test of the suite that a strategy fails, and why: a strict xfail.

    ``Deviation("test_clipping_equals_one_process", "ignores norm_type", norm_type=1.0)`` stands
    for the test's cases with that argument at every world size; without arguments, for all cases.
    """

    def __init__(self, test: str, reason: str, **case: object) -> None:
        """Describe the deviation; ``case`` holds arguments of the test, ``world_size`` too."""
        self.test = test
        self.reason = reason
        self.case = case

    def covers(self, test: str, arguments: dict[str, object]) -> bool:
        """Tell whether a test with these arguments is meant."""
        missing = object()
        return test == self.test and all(
            arguments.get(name, missing) == value for name, value in self.case.items()
        )


class StrategyConformance:
    """Everything that Polyshard promises of a strategy, on every model, step by step.

    Override the attributes, never a test. A test class is about one config; a strategy with
    several modes has several classes.

    Attributes:
        config: The config to test. It is used in full precision.
        sizes: Of the mesh, data parallelism only; None is one dimension over all ranks. With None
            the strategy is tried in every layout that it declares, too.
        deviations: What the strategy fails.
    """

    config: ClassVar[DistributedConfig]
    sizes: ClassVar[ParallelismSizes | None] = None
    deviations: ClassVar[tuple[Deviation, ...]] = ()

    def __init_subclass__(cls) -> None:
        for deviation in cls.deviations:
            if not callable(getattr(cls, deviation.test, None)):
                raise TypeError(
                    f"{cls.__name__}.deviations: expected the name of a test, found "
                    f"{deviation.test!r}"
                )
        if cls.sizes is not None:
            cls.test_layouts_of_two_ranks = cls.test_layouts_of_four_ranks = None  # type: ignore[method-assign, assignment]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Repeat a test of layouts for those that the strategy declares; called by pytest."""
        marker = metafunc.definition.get_closest_marker("world_size")
        if "layout" in metafunc.fixturenames and marker is not None:
            metafunc.parametrize("layout", layouts_of(self.config, *marker.args))

    @pytest.fixture(autouse=True)
    def _expect_deviations(self, request: pytest.FixtureRequest) -> None:
        callspec = getattr(request.node, "callspec", None)
        arguments = callspec.params if callspec is not None else {}
        for deviation in self.deviations:
            if deviation.covers(request.function.__name__, arguments):
                request.applymarker(pytest.mark.xfail(reason=deviation.reason, strict=True))

    def _run(
        self, ranks: RankPool, scenario: Callable[..., _Result], *arguments: Any, **options: Any
    ) -> list[_Result]:
        """Run a scenario on every rank, with the config first and the sizes last."""
        config = self.config.in_full_precision()
        return ranks.run(scenario, config, *arguments, **options, sizes=self.sizes)

    def _assert_trains_like_one_process(self, ranks: RankPool, recipe: Recipe) -> None:
        assert_parity(self._run(ranks, train_under, recipe), train_plain(recipe), recipe)

    # Wrapping

    @_every_model
    @_either_time
    def test_wrapping_changes_no_weights(self, ranks: RankPool, model: str, passed: bool) -> None:
        """After ``parallelize`` and ``maybe_shard_optimizer`` the weights are what they were.

        They are found by the user's own names in the full state dict, buffers included.
        """
        recipe = Recipe(model=model)
        for rank, wrapped in enumerate(
            self._run(ranks, scenarios.wrap_and_compare, recipe, passed=passed)
        ):
            before, after = wrapped.weights
            assert_same_weights(after, before, where=f"rank {rank} after wrapping")

    @_either_optimizer
    @_either_time
    def test_sharding_takes_no_step(self, ranks: RankPool, optimizer: str, passed: bool) -> None:
        """The optimizer that comes back has not counted a step."""
        recipe = Recipe(optimizer=optimizer)
        for wrapped in self._run(ranks, scenarios.wrap_and_compare, recipe, passed=passed):
            assert not any(wrapped.steps), "expected step counts of 0"

    @_tied_and_frozen
    @_either_time
    def test_groups_survive(self, ranks: RankPool, model: str, passed: bool) -> None:
        """The optimizer's groups hold the same parameters with the same options, in order."""
        recipe = Recipe(model=model, optimizer="adamw")
        for wrapped in self._run(ranks, scenarios.wrap_and_compare, recipe, passed=passed):
            before, after = wrapped.groups
            assert after == before

    @_tied_and_frozen
    @_either_time
    def test_attributes_survive_wrapping(self, ranks: RankPool, model: str, passed: bool) -> None:
        """What the user set on a Parameter is on the one that is trained, under all its names."""
        plain = build_model(model)
        stamp(plain)
        expected = stamps_of(plain)
        for wrapped in self._run(
            ranks, scenarios.wrap_and_compare, Recipe(model=model), passed=passed
        ):
            assert wrapped.stamps == expected

    @pytest.mark.parametrize("model", ["tied", "buffers"])
    def test_the_model_of_rank_0_is_trained(self, ranks: RankPool, model: str) -> None:
        """Ranks that initialised the model differently all train that of rank 0."""
        recipe = Recipe(model=model)
        outcomes = self._run(ranks, scenarios.train_with_seed_per_rank, recipe)
        assert_parity(outcomes, train_plain(recipe), recipe)

    def test_what_a_script_drops_is_freed(self, ranks: RankPool) -> None:
        """Once the script has dropped them, nothing keeps a trained model and its optimizer."""
        for kept in self._run(ranks, scenarios.train_and_drop, Recipe(model="tied", max_norm=0.1)):
            assert not kept, f"expected everything to be freed, found {', '.join(kept)} in memory"

    # Training

    @_every_model
    @_either_optimizer
    @_either_time
    def test_training_equals_one_process(
        self, ranks: RankPool, model: str, optimizer: str, passed: bool
    ) -> None:
        """Losses, and weights under SGD, are those of one process with the whole batch."""
        recipe = Recipe(model=model, optimizer=optimizer, unadapted="odd steps")
        outcomes = self._run(ranks, train_under, recipe, passed=passed)
        assert_parity(outcomes, train_plain(recipe), recipe)

    def test_training_in_a_plain_process(self) -> None:
        """Without a process group everything means one rank; this runs in pytest's process."""
        recipe = Recipe(max_norm=0.1, microbatches=3)
        outcome = train_under(self.config.in_full_precision(), recipe)
        assert_parity([outcome], train_plain(recipe), recipe)

    def test_training_with_foreach_optimizer(self, ranks: RankPool) -> None:
        """An optimizer that handles many parameters in one operation works."""
        recipe = Recipe(model="frozen", optimizer="adamw foreach")
        self._assert_trains_like_one_process(ranks, recipe)

    def test_learning_rate_schedule_is_followed(self, ranks: RankPool) -> None:
        """A scheduler on the optimizer that came back changes the rate of the steps."""
        self._assert_trains_like_one_process(ranks, Recipe(decay=0.5))

    @pytest.mark.parametrize("zero_grad", ["in place", "model"])
    def test_gradients_are_cleared(
        self, ranks: RankPool, zero_grad: Literal["in place", "model"]
    ) -> None:
        """``optimizer.zero_grad`` in place and ``model.zero_grad`` clear them as the default."""
        self._assert_trains_like_one_process(ranks, Recipe(zero_grad=zero_grad))

    @pytest.mark.parametrize("model", ["tied", "buffers"])
    @pytest.mark.parametrize("evaluate", ["before step", "after step"])
    def test_evaluation_changes_nothing(
        self, ranks: RankPool, model: str, evaluate: Literal["before step", "after step"]
    ) -> None:
        """A forward without gradients sees the present weights, and training goes on as before.

        Also between backward and step.
        """
        self._assert_trains_like_one_process(ranks, Recipe(model=model, evaluate=evaluate))

    @pytest.mark.world_size(2)
    def test_layouts_of_two_ranks(self, ranks: RankPool, layout: str) -> None:
        """Ranks that share heads and features, or places of a sequence, train the same model."""
        self._assert_trains_in_layout(ranks, layout)

    @pytest.mark.world_size(4)
    def test_layouts_of_four_ranks(self, ranks: RankPool, layout: str) -> None:
        """Also where some of the ranks have data of their own, or are replicas."""
        self._assert_trains_in_layout(ranks, layout)

    def _assert_trains_in_layout(self, ranks: RankPool, layout: str) -> None:
        recipe = Recipe(
            model="mixed", steps=2, microbatches=3, max_norm=0.1, evaluate="before step"
        )
        config = self.config.in_full_precision()
        outcomes = ranks.run(train_under, config, recipe, sizes=LAYOUTS[layout])
        assert_parity(outcomes, train_plain(recipe), recipe)

    @pytest.mark.parametrize("mistake", ["built before", "not sharded"])
    def test_wrong_optimizer_is_never_silent(
        self, ranks: RankPool, mistake: Literal["built before", "not sharded"]
    ) -> None:
        """An optimizer built before and not passed, or not sharded, trains right or is refused.

        The error names the call that is missing.
        """
        recipe = Recipe()
        outcomes = self._run(ranks, scenarios.train_with_wrong_optimizer, recipe, mistake)
        errors = [outcome for outcome in outcomes if isinstance(outcome, str)]
        if len(errors) != len(outcomes):
            trained = [outcome for outcome in outcomes if isinstance(outcome, Outcome)]
            assert_parity(trained, train_plain(recipe), recipe)
        cure = "parallelize" if mistake == "built before" else "maybe_shard_optimizer"
        assert all(cure in error for error in errors), f"expected {cure!r} in {errors}"

    # Other methods than forward

    def test_methods_equal_one_process(self, ranks: RankPool) -> None:
        """Methods beside forward train and generate as in one process, attributes are readable.

        Ranks generate for different numbers of tokens, and one of them none; another one raises.
        """
        methods.assert_methods_work(self._run(ranks, methods.use_methods))

    # Accumulation and clipping

    @_tied_and_frozen
    @_either_optimizer
    def test_microbatches_equal_one_batch(
        self, ranks: RankPool, model: str, optimizer: str
    ) -> None:
        """Gradients accumulated over three microbatches are those of the whole batch."""
        recipe = Recipe(model=model, optimizer=optimizer, microbatches=3)
        whole = Recipe(model=model, optimizer=optimizer)
        assert_parity(self._run(ranks, train_under, recipe), train_plain(whole), recipe)

    @pytest.mark.parametrize("unadapted", ["first microbatch", "last microbatch"])
    def test_a_microbatch_leaves_parameters_out(
        self, ranks: RankPool, unadapted: Literal["first microbatch", "last microbatch"]
    ) -> None:
        """A parameter without gradient in one microbatch keeps those of the others."""
        recipe = Recipe(model="adapter", microbatches=3, unadapted=unadapted)
        self._assert_trains_like_one_process(ranks, recipe)

    def test_accumulate_restores_when_its_body_raises(self, ranks: RankPool) -> None:
        """A microbatch that fails leaves nothing behind: later steps synchronise."""
        recipe = Recipe()
        outcomes = self._run(ranks, scenarios.train_after_interrupted_microbatch, recipe)
        assert_parity(outcomes, train_plain(recipe), recipe)

    @_tied_and_frozen
    @pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
    def test_clipping_equals_one_process(
        self, ranks: RankPool, model: str, norm_type: float
    ) -> None:
        """The norm is that of one process, and so is what clipping by it makes of training."""
        recipe = Recipe(model=model, max_norm=0.1, norm_type=norm_type)
        self._assert_trains_like_one_process(ranks, recipe)

    def test_infinite_maximum_only_measures(self, ranks: RankPool) -> None:
        """The norm is that of one process, and gradients stay as they are."""
        self._assert_trains_like_one_process(ranks, Recipe(max_norm=math.inf))

    def test_clipping_accumulated_gradients(self, ranks: RankPool) -> None:
        """Clipping sees the gradients of all microbatches."""
        self._assert_trains_like_one_process(ranks, Recipe(max_norm=0.1, microbatches=3))

    def test_clipping_shrinks_gradients(self, ranks: RankPool) -> None:
        """After clipping, the norm is the one that was asked for."""
        for first, second in self._run(ranks, scenarios.clip_twice, Recipe(), 0.1):
            assert first > 0.2, "the gradients were too small for this test"
            assert second == pytest.approx(0.1, rel=1e-4)

    # A failure on one rank

    @pytest.mark.parametrize(
        "hook", ["parallelize", "shard_optimizer", "pre_rebuild", "post_rebuild"]
    )
    def test_a_failure_on_one_rank_is_told_on_all(
        self, ranks: RankPool, world_size: int, hook: str
    ) -> None:
        """A rank that fails in a hook raises its own error, the others one that names it."""
        culprit = world_size - 1
        endings = self._run(ranks, scenarios.fail_in_hook, Recipe(), hook, culprit)
        if all(ending.kind == "not called" for ending in endings):
            pytest.skip(f"the strategy has no {hook}, or needs none for {world_size} ranks")
        assert endings[culprit].kind == "raised"
        for ending in endings[:culprit]:
            assert (ending.kind, ending.rank) == ("peer failed", culprit)
            assert f"raised in {hook}" in ending.message
