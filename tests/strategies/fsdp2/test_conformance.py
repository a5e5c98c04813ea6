"""FSDP2 passes the kit: as it comes, with parameters kept after forward, and with replicas."""

import pytest

from polyshard import FSDP2Config, ParallelismSizes
from polyshard.conformance import StrategyConformance

pytestmark = pytest.mark.strategy("fsdp2")


class TestFSDP2(StrategyConformance):
    config = FSDP2Config()


@pytest.mark.world_size(2)
class TestKeptAfterForward(StrategyConformance):
    config = FSDP2Config(reshard_after_forward=False, activation_checkpointing="full")


@pytest.mark.world_size(4)
class TestReplicas(StrategyConformance):
    config = FSDP2Config(defer_fsdp_grad_sync=False)
    sizes = ParallelismSizes(dp_replicate_size=2)
