"""The tests of every distribution here use the ranks that Polyshard's kit offers."""

import signal
from pathlib import Path

import pytest

# A shell that starts the tests in the background ignores Ctrl-C for them, which processes pass on
# to those that they start; tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["polyshard.conformance.pytest_plugin"]

MEGATRON_FSDP = Path(__file__).parent / "plugins" / "polyshard-megatron-fsdp"


def pytest_itemcollected(item: pytest.Item) -> None:
    """Take the tests in the plugin's folder to be about its strategy; called for each test."""
    if item.path.is_relative_to(MEGATRON_FSDP):
        item.add_marker(pytest.mark.strategy("megatron_fsdp"))
