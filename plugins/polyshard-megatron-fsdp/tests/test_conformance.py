"""Everything that Polyshard promises of a strategy, under every stage and on every kind of mesh."""

from __future__ import annotations

import pytest

from polyshard.config.parallelism import ParallelismSizes
from polyshard.conformance.suite import StrategyConformance
from polyshard_megatron_fsdp import MegatronFSDPConfig

# On one rank nothing is wrapped, whatever the stage; that is tested once, for the default one.
several_ranks = pytest.mark.world_size(2, 4)


@several_ranks
class TestStage0(StrategyConformance):
    config = MegatronFSDPConfig(zero_dp_strategy=0)


@several_ranks
class TestStage1(StrategyConformance):
    config = MegatronFSDPConfig(zero_dp_strategy=1)


@several_ranks
class TestStage2(StrategyConformance):
    config = MegatronFSDPConfig(zero_dp_strategy=2)


class TestStage3(StrategyConformance):
    config = MegatronFSDPConfig(zero_dp_strategy=3)


@pytest.mark.world_size(4)
class TestReplicas(StrategyConformance):
    config = MegatronFSDPConfig()
    sizes = ParallelismSizes(dp_replicate_size=2)


@pytest.mark.world_size(4)
class TestShardedReplicas(StrategyConformance):
    config = MegatronFSDPConfig(outer_dp_sharding_strategy=1)
    sizes = ParallelismSizes(dp_replicate_size=2)
