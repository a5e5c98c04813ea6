"""FSDP2 passes the kit."""

import pytest

from polyshard import FSDP2Config
from polyshard.conformance import StrategyConformance

pytestmark = pytest.mark.strategy("fsdp2")


class TestFSDP2(StrategyConformance):
    config = FSDP2Config()
