"""Ranks on which megatron-fsdp runs as it is."""

from collections.abc import Iterator

import pytest

from polyshard.conformance import RankPool


@pytest.fixture(scope="module")
def bare_ranks() -> Iterator[RankPool]:
    """Two ranks on which nothing is patched, but what running without CUDA takes."""
    with RankPool(2, timeout=60) as pool:
        yield pool


@pytest.fixture(scope="module")
def four_bare_ranks() -> Iterator[RankPool]:
    """Four such ranks."""
    with RankPool(4, timeout=60) as pool:
        yield pool
