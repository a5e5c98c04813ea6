"""What config and mesh for 8 ranks cost beside `init_device_mesh` alone: nothing measurable.

That is to say: where torch makes groups, no more than the figure varies by from run to run; where
it makes one or none, a fraction of a millisecond. The ranks are real processes over gloo. By hand,
too, context parallelism gets the flattened dimension that gradients are reduced over. Each figure
is the median over rounds and ranks of the ratio, or difference, of the two, which are built in
turn, so that a slow moment of the machine hits both alike.

And what it costs to be told of a mistake in a config file: less than a second, since torch stays
unimported. Processor time is counted, which other programs do not lengthen much.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from tempfile import TemporaryDirectory

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from polyshard import (
    DistributedSetup,
    ParallelismSizes,
    available_strategies,
    process_groups,
)
from polyshard.conformance import RankPool

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


def compare(sizes: dict[str, int]) -> list[tuple[float, float]]:
    """Build both in turn, and return the seconds of each round; called on every rank."""
    rounds = []
    for _ in range(WARMUP + ROUNDS):
        alone = seconds(lambda: by_hand(sizes))
        rounds.append((alone, seconds(lambda: DistributedSetup.build("fsdp2", sizes))))
    return rounds[WARMUP:]


def seconds_to_refuse(strategy: str) -> float:
    """Let the command read a file with a misspelt key, in a process of its own."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(f"distributed: {{strategy: {strategy}, tp_sise: 2}}\n")
        command = [sys.executable, "-m", "polyshard.cli", "train", str(file)]
        before = getrusage(RUSAGE_CHILDREN)
        ran = subprocess.run(command, capture_output=True, text=True)
        after = getrusage(RUSAGE_CHILDREN)
    if ran.returncode != 2 or "tp_sise" not in ran.stderr:
        raise RuntimeError(f"expected the key to be refused, found {ran.stderr}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    print("processor seconds until a misspelt key is told")
    for strategy, info in available_strategies().items():
        if info.problem is None:
            taken = statistics.median(seconds_to_refuse(strategy) for _ in range(ROUNDS))
            print(f"  {strategy:34} {taken:5.2f}")
    print(f"config and mesh for {WORLD_SIZE} ranks, as a multiple of init_device_mesh")
    with RankPool(WORLD_SIZE, timeout=600) as ranks:
        for name, sizes in SIZES.items():
            pairs = [pair for answer in ranks.run(compare, sizes) for pair in answer]
            ratio = statistics.median(ours / alone for alone, ours in pairs)
            more = statistics.median(ours - alone for alone, ours in pairs)
            print(f"  {name:34} {ratio:5.2f}  ({more * 1e3:+.1f} ms)")


if __name__ == "__main__":
    main()
