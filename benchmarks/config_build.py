"""What config and mesh for 8 ranks cost through Polyshard, beside `init_device_mesh` alone.

The ranks are real processes over gloo. By hand, too, context parallelism gets the flattened
dimension that gradients are reduced over. Each figure is the median over rounds and ranks of the
ratio of the two, which are built in turn, so that a slow moment of the machine hits both alike.
"""

import statistics
import time
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from polyshard import DistributedSetup, ParallelismSizes, process_groups
from polyshard.conformance.pool import RankPool

WORLD_SIZE = 8
WARMUP, ROUNDS = 2, 10
SIZES = {
    "data parallel": {},
    "HSDP": {"dp_replicate_size": 2},
    "data and tensor parallel": {"tp_size": 2},
    "tensor parallel alone": {"tp_size": 8},
    "data, context and tensor parallel": {"cp_size": 2, "tp_size": 2},
}


def seconds(build: Callable[[], object]) -> float:
    # Groups that an earlier round made would be used again.
    process_groups._made.clear()
    dist.barrier()
    begin = time.perf_counter()
    build()
    return time.perf_counter() - begin


def by_hand(sizes: dict[str, int]) -> None:
    axes = ParallelismSizes(**sizes).resolve(WORLD_SIZE).axes()
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(map(str, axes)))
    if "cp" in axes:
        mesh["dp", "cp"]._flatten("dp_cp")


def compare(sizes: dict[str, int]) -> tuple[list[float], float]:
    """Build both in turn; called on every rank."""
    ratios, alone = [], 0.0
    for _ in range(WARMUP + ROUNDS):
        alone = seconds(lambda: by_hand(sizes))
        ratios.append(seconds(lambda: DistributedSetup.build("fsdp2", sizes)) / alone)
    return ratios[WARMUP:], alone


def main() -> None:
    print(f"config and mesh for {WORLD_SIZE} ranks, as a multiple of init_device_mesh")
    with RankPool(WORLD_SIZE, timeout=600) as ranks:
        for name, sizes in SIZES.items():
            answers = ranks.run(compare, sizes)
            ratio = statistics.median(r for ratios, _ in answers for r in ratios)
            alone = statistics.median(alone for _, alone in answers)
            print(f"  {name:34} {ratio:5.2f}  (alone {alone * 1e3:.1f} ms)")


if __name__ == "__main__":
    main()
