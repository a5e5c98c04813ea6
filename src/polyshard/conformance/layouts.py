"""How ranks are divided among kinds of parallelism where a strategy is put to the test."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from attrs import asdict

from polyshard.config.parallelism import ParallelismSizes

if TYPE_CHECKING:
    from polyshard.config.base import DistributedConfig

__all__ = ["LAYOUTS", "layouts_of"]

#: By the names that tests have.
LAYOUTS: Mapping[str, ParallelismSizes] = MappingProxyType(
    {
        "DP 2": ParallelismSizes(dp_size=2),
        "TP 2": ParallelismSizes(dp_size=1, tp_size=2),
        "CP 2": ParallelismSizes(dp_size=1, cp_size=2),
        "DP 4": ParallelismSizes(dp_size=4),
        "TP 2 x DP 2": ParallelismSizes(dp_size=2, tp_size=2),
        "CP 2 x DP 2": ParallelismSizes(dp_size=2, cp_size=2),
        "HSDP 2 x 2": ParallelismSizes(dp_size=4, dp_replicate_size=2),
    }
)


def layouts_of(config: DistributedConfig, world_size: int) -> list[str]:
    """Return the names of the layouts of so many ranks that the config's strategy declares."""
    return [
        name
        for name, sizes in LAYOUTS.items()
        if _ranks(sizes) == world_size and _declares(config, sizes)
    ]


def _ranks(sizes: ParallelismSizes) -> int:
    return math.prod(sizes.axes().values())


def _declares(config: DistributedConfig, sizes: ParallelismSizes) -> bool:
    several = {name for name, size in asdict(sizes).items() if (size or 1) > 1}
    return several <= {f"{kind}_size" for kind in config.parallelism}
