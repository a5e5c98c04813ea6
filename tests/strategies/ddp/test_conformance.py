"""DDP passes the kit."""

import pytest

from polyshard import DDPConfig
from polyshard.conformance import StrategyConformance


@pytest.mark.strategy("ddp")
class TestDDP(StrategyConformance):
    config = DDPConfig(find_unused_parameters=True)
