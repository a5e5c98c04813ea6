"""Every kind of rebuild under Megatron-FSDP; docs/reference/rebuild-matrix.md of the core."""

import pytest

from polyshard.conformance.rebuild_suite import RebuildConformance
from polyshard_megatron_fsdp import MegatronFSDPConfig

pytestmark = pytest.mark.strategy("megatron_fsdp")

REFUSALS = {
    "load on rank 0": "changed' on rank",
    "untie": "which are tied, found different ones; assign the same parameter",
    "tie": "to stay apart, found them tied to one parameter; tie them before parallelize",
    "adapter": "found others added or removed (blocks.1.up.bias",
    "new layer": "to stay, found another Linear in its place; replace its parameters instead",
    "add": "found others added or removed (head.bias); change what a model consists of before",
    "remove": "found others added or removed (blocks.1.up.bias); change what a model consists of",
    "resize": "found [66, 16]; resize the model before parallelize",
    "freeze": "found False; choose what is trained before parallelize",
    "frozen new": "found False; choose what is trained before parallelize",
    "empty": "a value for 'blocks.1.up.bias', found one on the meta device",
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
