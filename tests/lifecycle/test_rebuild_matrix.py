"""Every kind of rebuild under the strategies of the core; docs/reference/rebuild-matrix.md."""

import pytest

from polyshard import DDPConfig, FSDP2Config
from polyshard.config.parallelism import ParallelismSizes
from polyshard.conformance.rebuild_suite import TELLING, RebuildConformance

REFUSALS = {
    "load on rank 0": "changed' on rank",
    "untie": "which are tied, found different ones; assign the same parameter",
    "tie": "to stay apart, found them tied to one parameter; tie them before parallelize",
    "adapter": "found others added or removed (blocks.1.up.bias",
    "new layer": "to stay, found another Linear in its place; replace its parameters instead",
    "add": "found others added or removed (head.bias); change what a model consists of before",
    "remove": "found others added or removed (blocks.1.up.bias); change what a model consists of",
    "resize": "found [66, 16]; resize the model before parallelize",
    "empty": "a value for 'blocks.1.up.bias', found one on the meta device",
}


@pytest.mark.strategy("ddp")
class TestDDP(RebuildConformance):
    config = DDPConfig()
    refusals = REFUSALS


@pytest.mark.strategy("fsdp2")
class TestFSDP2(RebuildConformance):
    config = FSDP2Config()
    refusals = REFUSALS


@pytest.mark.strategy("fsdp2")
@pytest.mark.world_size(4)
class TestFSDP2Replicas(RebuildConformance):
    config = FSDP2Config()
    sizes = ParallelismSizes(dp_replicate_size=2)
    refusals = REFUSALS
    changes = TELLING


@pytest.mark.strategy("fsdp2")
@pytest.mark.world_size(4)
class TestFSDP2ContextParallel(RebuildConformance):
    config = FSDP2Config()
    sizes = ParallelismSizes(cp_size=2)
    refusals = REFUSALS
    changes = TELLING
