"""DDP passes the kit: as it comes, and with parameters that some steps do not use."""

import pytest

from polyshard import DDPConfig
from polyshard.conformance import Deviation, StrategyConformance

pytestmark = pytest.mark.strategy("ddp")

NEEDS_FIND_UNUSED = "torch refuses parameters without gradient unless find_unused_parameters is on"


class TestDDP(StrategyConformance):
    config = DDPConfig()
    deviations = (
        Deviation("test_training_equals_one_process", NEEDS_FIND_UNUSED, model="adapter"),
        Deviation(
            "test_a_microbatch_leaves_parameters_out",
            NEEDS_FIND_UNUSED,
            unadapted="last microbatch",
        ),
    )


@pytest.mark.world_size(2)
class TestUnusedParameters(StrategyConformance):
    config = DDPConfig(
        find_unused_parameters=True,
        gradient_as_bucket_view=True,
        activation_checkpointing="selective",
    )
