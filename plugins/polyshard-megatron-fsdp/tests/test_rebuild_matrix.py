"""Every kind of rebuild under Megatron-FSDP; docs/reference/rebuild-matrix.md of the core."""

import pytest

from polyshard.conformance.rebuild_suite import RebuildConformance
from polyshard_megatron_fsdp import MegatronFSDPConfig

pytestmark = pytest.mark.strategy("megatron_fsdp")

REFUSALS = {
    "load on rank 0": "changed' on rank",
    "untie": "to have one value, tied as they were wrapped, found different values; give both",
    "tie": "to be two parameters, as they were wrapped, found them tied; tie them before",
    "adapter": "a parameter 'blocks.1.up.weight', found none; put one there again",
    "new layer": "found another Linear in its place; replace its parameters instead",
    "add": "found a new one, 'head.bias'; add it before parallelize",
    "remove": "a parameter 'blocks.1.up.bias', found none; put one there again",
    "resize": "found [66, 16]; keep the shape",
    "freeze": "found False; choose what is trained before parallelize",
    "frozen new": "found False; choose what is trained before parallelize",
    "empty": "a value for 'blocks.1.up.bias', found one on the meta device; load it",
}


class TestStage0(RebuildConformance):
    config = MegatronFSDPConfig(zero_dp_strategy=0)
    refusals = REFUSALS


class TestStage1(RebuildConformance):
    config = MegatronFSDPConfig(zero_dp_strategy=1)
    refusals = REFUSALS


class TestStage2(RebuildConformance):
    config = MegatronFSDPConfig(zero_dp_strategy=2)
    refusals = REFUSALS


class TestStage3(RebuildConformance):
    config = MegatronFSDPConfig(zero_dp_strategy=3)
    refusals = REFUSALS
