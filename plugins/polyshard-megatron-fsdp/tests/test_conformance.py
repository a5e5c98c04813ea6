import pytest

from polyshard.conformance.suite import StrategyConformance
from polyshard_megatron_fsdp import MegatronFSDPConfig

pytestmark = pytest.mark.strategy("megatron_fsdp")


class TestStage0(StrategyConformance):
    config = MegatronFSDPConfig(zero_dp_strategy=0)


class TestStage1(StrategyConformance):
    config = MegatronFSDPConfig(zero_dp_strategy=1)


class TestStage2(StrategyConformance):
    config = MegatronFSDPConfig(zero_dp_strategy=2)


class TestStage3(StrategyConformance):
    config = MegatronFSDPConfig(zero_dp_strategy=3)
