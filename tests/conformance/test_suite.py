"""The suites find each mistake that a strategy can make, and no other."""

import math
import shutil
from pathlib import Path

import pytest

from polyshard.conformance import RankPool, RebuildConformance, StrategyConformance

pytest_plugins = ["pytester"]

SOURCE = Path(__file__).parent / "faulty_strategy.py"
METADATA = "Metadata-Version: 2.1\nName: polyshard-faulty\nVersion: 1.0\n"
ENTRY_POINTS = """\
[polyshard.strategies]
faulty = polyshard_faulty

[polyshard.configs]
faulty = polyshard_faulty:FaultyConfig
"""

#: By test of the suite: the mistakes that it finds, each with the case of the test that does.
FOUND = {
    "test_wrapping_changes_no_weights": [
        ("takes a hidden step", {"model": "plain", "passed": False}),
        ("casts a buffer", {"model": "buffers", "passed": False}),
        ("keeps a wrapper's prefix", {"model": "plain", "passed": True}),
        ("forgets a tied name", {"model": "tied", "passed": False}),
    ],
    "test_sharding_takes_no_step": [
        ("takes a hidden step", {"optimizer": "adamw", "passed": False}),
    ],
    "test_groups_survive": [
        ("makes one group", {"model": "tied", "passed": False}),
    ],
    "test_attributes_survive_wrapping": [
        ("drops attributes", {"model": "tied", "passed": False}),
    ],
    "test_what_a_script_drops_is_freed": [("keeps all models", {})],
    "test_the_model_of_rank_0_is_trained": [
        ("leaves each rank its own weights", {"model": "tied"}),
        ("leaves each rank its own buffers", {"model": "buffers"}),
    ],
    "test_training_equals_one_process": [
        ("adds, averages not", {"model": "plain", "optimizer": "sgd", "passed": False}),
        ("averages all but one", {"model": "frozen", "optimizer": "sgd", "passed": False}),
    ],
    "test_layouts_of_two_ranks": [("adds, averages not", {"layout": "DP 2"})],
    "test_learning_rate_schedule_is_followed": [("ignores the schedule", {})],
    "test_evaluation_changes_nothing": [
        ("evaluation clears gradients", {"model": "tied", "evaluate": "before step"}),
    ],
    "test_methods_equal_one_process": [
        ("averages after forward alone", {}),
        ("drops the model's attributes", {}),
    ],
    "test_wrong_optimizer_is_never_silent": [
        ("steps nothing", {"mistake": "built before"}),
    ],
    "test_microbatches_equal_one_batch": [
        ("forgets the last microbatch", {"model": "frozen", "optimizer": "sgd"}),
    ],
    "test_accumulate_restores_when_its_body_raises": [("never leaves a microbatch", {})],
    "test_clipping_equals_one_process": [
        ("only measures", {"model": "tied", "norm_type": 2.0}),
        ("knows the 2-norm alone", {"model": "frozen", "norm_type": 1.0}),
        ("knows the 2-norm alone", {"model": "tied", "norm_type": math.inf}),
        ("returns the norm after", {"model": "tied", "norm_type": 2.0}),
    ],
    "test_infinite_maximum_only_measures": [("clips always", {})],
    "test_clipping_accumulated_gradients": [("forgets the last microbatch", {})],
    "test_clipping_shrinks_gradients": [("only measures", {})],
    "test_training_after": [
        ("leaves them alone", {"change": "new", "when": "before", "world_size": 2}),
        ("restores old values", {"change": "load assign", "when": "after", "world_size": 2}),
        ("makes another parameter", {"change": "retie", "when": "before", "world_size": 2}),
        ("keeps stale attributes", {"change": "new", "when": "after", "world_size": 2}),
    ],
    "test_hooks_apart_on_several_parts": [("restores old values", {})],
    "test_loading_what_the_first_rank_has": [("loads nothing", {})],
    "test_a_body_that_fails_on_one_rank_fails_on_all": [("leaves them alone", {"world_size": 2})],
}


@pytest.fixture(scope="module")
def faulty_ranks(tmp_path_factory):
    site = tmp_path_factory.mktemp("site")
    shutil.copy(SOURCE, site / "polyshard_faulty.py")
    metadata = site / "polyshard_faulty-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(METADATA)
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        with RankPool(2) as ranks:
            yield ranks


def run(ranks, fault, test, case):
    import polyshard_faulty

    class Suite(StrategyConformance, RebuildConformance):
        config = polyshard_faulty.FaultyConfig(fault=fault)

    getattr(Suite(), test)(ranks, **case)


@pytest.mark.parametrize(
    ("test", "fault", "case"),
    [
        pytest.param(test, fault, case, id=f"{test}-{fault}")
        for test, found in FOUND.items()
        for fault, case in found
    ],
)
def test_fault_is_found(faulty_ranks, test, fault, case):
    run(faulty_ranks, "none", test, case)
    with pytest.raises(AssertionError):
        run(faulty_ranks, fault, test, case)


SUITE = """
    import pytest
    from polyshard import DistributedConfig
    from polyshard.conformance import Deviation, StrategyConformance

    class TestSmall(StrategyConformance):
        config = DistributedConfig()
        deviations = (Deviation({deviation}),)

        @pytest.mark.parametrize("number", [1, 2, 3, 4])
        def test_small(self, number):
            assert number > 2
"""


@pytest.mark.parametrize(
    ("deviation", "outcomes"),
    [
        ('"test_small", "a reason", number=1', {"passed": 2, "failed": 1, "xfailed": 1}),
        ('"test_small", "a reason", number=3', {"passed": 1, "failed": 3}),
        ('"test_small", "a reason"', {"failed": 2, "xfailed": 2}),
        ('"test_small", "a reason", ratio=1', {"passed": 2, "failed": 2}),
        ('"test_smal", "a reason"', {"errors": 1}),
    ],
    ids=["a case that fails", "a case that passes", "all cases", "no such case", "no such test"],
)
def test_deviation_is_a_strict_xfail(pytester, deviation, outcomes):
    pytester.makeconftest('pytest_plugins = ["polyshard.conformance.pytest_plugin"]')
    pytester.makepyfile(SUITE.format(deviation=deviation))
    pytester.runpytest("-k", "test_small").assert_outcomes(**outcomes)
