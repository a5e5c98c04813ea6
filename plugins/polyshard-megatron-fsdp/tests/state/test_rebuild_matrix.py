"""Every kind of rebuild under Megatron-FSDP; docs/reference/rebuild-matrix.md of the core."""

import pytest

from polyshard.config.parallelism import ParallelismSizes
from polyshard.conformance.parameter_changes import CHANGES
from polyshard.conformance.rebuild_suite import TELLING, RebuildConformance
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


#: Where parameters are sharded, each is cut in its own way, and torch knows of none of them.
SHARDED_REFUSALS = REFUSALS | {
    "exchange": "laid out as it was, or as a full tensor",
    "set": "call load_state_dict with the full tensors, on every rank",
}

#: torch sends and cuts one parameter after the other, and fails at the first whose part is not what
#: it takes it for, on some ranks, while the others wait. Nothing is asked of the strategy before;
#: that it is never silent is tested in test_load.py.
SHARDED_CHANGES = [name for name in CHANGES if name != "set from rank 0"]

# On one rank nothing is wrapped, whatever the stage; that is tested once, for the default one.
several_ranks = pytest.mark.world_size(2, 4)


@several_ranks
class TestStage0(RebuildConformance):
    config = MegatronFSDPConfig(zero_dp_strategy=0)
    refusals = REFUSALS


@several_ranks
class TestStage1(RebuildConformance):
    config = MegatronFSDPConfig(zero_dp_strategy=1)
    refusals = SHARDED_REFUSALS
    changes = SHARDED_CHANGES


@several_ranks
class TestStage2(RebuildConformance):
    config = MegatronFSDPConfig(zero_dp_strategy=2)
    refusals = SHARDED_REFUSALS
    changes = SHARDED_CHANGES


class TestStage3(RebuildConformance):
    config = MegatronFSDPConfig(zero_dp_strategy=3)
    refusals = SHARDED_REFUSALS
    changes = SHARDED_CHANGES


@pytest.mark.world_size(4)
class TestReplicas(RebuildConformance):
    config = MegatronFSDPConfig()
    sizes = ParallelismSizes(dp_replicate_size=2)
    refusals = SHARDED_REFUSALS
    changes = TELLING


@pytest.mark.world_size(4)
class TestShardedReplicas(RebuildConformance):
    config = MegatronFSDPConfig(outer_dp_sharding_strategy=1)
    sizes = ParallelismSizes(dp_replicate_size=2)
    refusals = SHARDED_REFUSALS
    changes = TELLING


@pytest.mark.world_size(4)
class TestContextParallel(RebuildConformance):
    config = MegatronFSDPConfig()
    sizes = ParallelismSizes(cp_size=2)
    refusals = SHARDED_REFUSALS
    changes = TELLING
