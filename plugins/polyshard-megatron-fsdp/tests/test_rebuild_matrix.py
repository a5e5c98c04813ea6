"""Every kind of rebuild under Megatron-FSDP; docs/reference/rebuild-matrix.md of the core."""

import pytest

from polyshard.conformance.rebuild_suite import RebuildConformance
from polyshard_megatron_fsdp import MegatronFSDPConfig

pytestmark = pytest.mark.strategy("megatron_fsdp")


class TestStage0(RebuildConformance):
    config = MegatronFSDPConfig(zero_dp_strategy=0)


class TestStage1(RebuildConformance):
    config = MegatronFSDPConfig(zero_dp_strategy=1)


class TestStage2(RebuildConformance):
    config = MegatronFSDPConfig(zero_dp_strategy=2)


class TestStage3(RebuildConformance):
    config = MegatronFSDPConfig(zero_dp_strategy=3)
