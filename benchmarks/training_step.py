"""A training step through Polyshard beside the same strategy written by hand, on two ranks.

Time and peak memory, as ratios: Polyshard over by hand. For the time both run in the same
processes, step by step in turn, so that a slow moment of the machine hits both alike; for the
memory each has processes of its own, since what one frees the other would use again.
"""

import gc
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import polyshard
from polyshard.conformance import RankPool

WIDTH, BATCH = 512, 32
BLOCKS, BLOCKS_FOR_MEMORY = 6, 24  # 25 and 100 MB of parameters, the more the less noise
WARMUP, STEPS = 3, 30

Step = Callable[[], None]


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))


def build(blocks: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks)))


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    batch = torch.randn(BATCH, WIDTH)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def ddp_by_hand(blocks: int) -> Step:
    model = DistributedDataParallel(build(blocks))
    return step_of(model, adamw(model))


def fsdp2_by_hand(blocks: int) -> Step:
    model = build(blocks)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return step_of(model, adamw(model))


def megatron_fsdp_by_hand(blocks: int) -> Step:
    from megatron_fsdp import fully_shard_model, fully_shard_optimizer

    from polyshard_megatron_fsdp.megatron_fsdp.patches.cuda_shim import prepare

    # What no script can do without where there is no CUDA; a script for CUDA has neither.
    prepare(torch.device("cpu"))
    model = fully_shard_model(
        build(blocks),
        device_mesh=init_device_mesh(
            "cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp")
        ),
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[Block],
        device=torch.device("cpu"),
    )
    model.ddp_config.gradient_reduce_div_fusion = False
    return step_of(model, fully_shard_optimizer(adamw(model)))


def through_polyshard(strategy: str, blocks: int) -> Step:
    config = polyshard.resolve_config(strategy).in_full_precision()
    model, _ = polyshard.parallelize(build(blocks), config)
    return step_of(model, polyshard.maybe_shard_optimizer(model, adamw(model)))


BY_HAND: dict[str, Callable[[int], Step]] = {
    "ddp": ddp_by_hand,
    "fsdp2": fsdp2_by_hand,
    "megatron_fsdp": megatron_fsdp_by_hand,
}


def forms_of(strategy: str) -> dict[str, Callable[[int], Step]]:
    """Return both ways to a step of a strategy, given the number of blocks."""
    return {"by hand": BY_HAND[strategy], "polyshard": partial(through_polyshard, strategy)}


def median_seconds(strategy: str) -> dict[str, float]:
    """Run both forms in turn; called on every rank."""
    steps = {name: form(BLOCKS) for name, form in forms_of(strategy).items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(WARMUP + STEPS):
        for name, step in steps.items():
            seconds = timed(step)
            if index >= WARMUP:
                times[name].append(seconds)
    return {name: statistics.median(values) for name, values in times.items()}


def timed(step: Step) -> float:
    dist.barrier()
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def peak_bytes(strategy: str, form: str) -> int:
    """Return how much more the process holds at most during steps than before there was a model."""
    build_step = forms_of(strategy)[form]
    several_steps(build_step(1))  # imports what is needed, which is not to count
    gc.collect()
    before = status_bytes("VmRSS")
    step = build_step(BLOCKS_FOR_MEMORY)
    several_steps(step)
    Path("/proc/self/clear_refs").write_text("5")
    several_steps(step)
    return status_bytes("VmHWM") - before


def several_steps(step: Step) -> None:
    for _ in range(WARMUP):
        step()


def status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def measure_times() -> dict[str, dict[str, float]]:
    """Return the seconds of a step by strategy and form."""
    times = {}
    for strategy in BY_HAND:
        with RankPool(2, timeout=600) as ranks:
            times[strategy] = ranks.run(median_seconds, strategy)[0]
    return times


def measure_memory(strategy: str, form: str) -> int:
    """Return the bytes that the rank with most of them needs."""
    with RankPool(2, timeout=600) as ranks:
        return max(ranks.run(peak_bytes, strategy, form))


def main() -> None:
    print("a training step through Polyshard, as a multiple of the strategy written by hand")
    times = measure_times()
    # glibc then gives freed tensors back, where it would keep some by chance; ranks inherit it.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(64 * 1024)
    for strategy, seconds in times.items():
        memory = {form: measure_memory(strategy, form) for form in forms_of(strategy)}
        print(
            f"  {strategy:14} time {seconds['polyshard'] / seconds['by hand']:5.3f}"
            f"  peak memory {memory['polyshard'] / memory['by hand']:5.3f}"
            f"  (by hand {seconds['by hand'] * 1e3:.0f} ms, {memory['by hand'] / 2**20:.0f} MiB)"
        )


if __name__ == "__main__":
    main()
