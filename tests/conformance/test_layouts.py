"""A strategy is tried in the layouts that its config declares, and no test stands for others."""

from __future__ import annotations

import pytest

from polyshard import DDPConfig, DistributedConfig, FSDP2Config
from polyshard.conformance.layouts import layouts_of

pytest_plugins = ["pytester"]


@pytest.mark.parametrize(
    ("config", "two", "four"),
    [
        (DDPConfig(), ["DP 2"], ["DP 4"]),
        (
            FSDP2Config(),
            ["DP 2", "TP 2", "CP 2"],
            ["DP 4", "TP 2 x DP 2", "CP 2 x DP 2", "HSDP 2 x 2"],
        ),
    ],
)
def test_layouts_are_those_that_the_config_declares(
    config: DistributedConfig, two: list[str], four: list[str]
) -> None:
    assert (layouts_of(config, 2), layouts_of(config, 4)) == (two, four)


def test_each_layout_is_one_test_at_its_number_of_ranks(pytester: pytest.Pytester) -> None:
    pytester.makeconftest('pytest_plugins = ["polyshard.conformance.pytest_plugin"]')
    pytester.makepyfile(
        """
        from polyshard import DDPConfig, FSDP2Config, ParallelismSizes
        from polyshard.conformance import StrategyConformance

        class TestDDP(StrategyConformance):
            config = DDPConfig()

        class TestReplicas(StrategyConformance):
            config = FSDP2Config()
            sizes = ParallelismSizes(dp_replicate_size=2)
        """
    )
    result = pytester.runpytest("--collect-only", "-q", "-k", "layouts")
    collected = [line.rpartition("::")[2] for line in result.outlines if "::" in line]
    assert collected == [
        "test_layouts_of_two_ranks[DP 2-world2]",
        "test_layouts_of_four_ranks[DP 4-world4]",
    ]
