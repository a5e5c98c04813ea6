"""A training step through Polyshard beside the same strategy written by hand, on two ranks.

Time and peak memory, as ratios: Polyshard over by hand. Both run in the same processes, step by
step in turn, so that a slow moment of the machine hits both alike.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import polyshard
from polyshard.conformance.pool import RankPool

WIDTH, BLOCKS, BATCH = 512, 6, 32
WARMUP, STEPS = 3, 30

Step = Callable[[], None]


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    batch = torch.randn(BATCH, WIDTH)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def ddp_by_hand() -> Step:
    model = DistributedDataParallel(build())
    return step_of(model, adamw(model))


def fsdp2_by_hand() -> Step:
    model = build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return step_of(model, adamw(model))


def megatron_fsdp_by_hand() -> Step:
    from megatron_fsdp import fully_shard_model, fully_shard_optimizer

    from polyshard_megatron_fsdp import _cpu

    # What no script can do without where there is no CUDA; a script for CUDA has neither.
    _cpu.prepare(torch.device("cpu"))
    model = fully_shard_model(
        build(),
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


def through_polyshard(strategy: str) -> Step:
    config = polyshard.resolve_config(strategy).in_full_precision()
    model, _ = polyshard.parallelize(build(), config)
    return step_of(model, polyshard.maybe_shard_optimizer(model, adamw(model), config))


BY_HAND = {"ddp": ddp_by_hand, "fsdp2": fsdp2_by_hand, "megatron_fsdp": megatron_fsdp_by_hand}


def timed(step: Step) -> float:
    dist.barrier()
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def peak_growth(step: Step) -> int:
    """Return by how many bytes the process grows at most during a step."""
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    step()
    return status_bytes("VmHWM") - before


def status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def measure(strategy: str) -> dict[str, Any]:
    """Run both forms in turn; called on every rank."""
    steps = {"by hand": BY_HAND[strategy](), "polyshard": through_polyshard(strategy)}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(WARMUP + STEPS):
        for name, step in steps.items():
            seconds = timed(step)
            if index >= WARMUP:
                times[name].append(seconds)
    peaks = {name: max(peak_growth(step) for _ in range(5)) for name, step in steps.items()}
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "time": medians["polyshard"] / medians["by hand"],
        "memory": (peaks["polyshard"] + 1) / (peaks["by hand"] + 1),
        "step": medians["by hand"],
    }


def main() -> None:
    print("a training step through Polyshard, as a multiple of the strategy written by hand")
    with RankPool(2, timeout=600) as ranks:
        for strategy in BY_HAND:
            result = ranks.run(measure, strategy)[0]
            print(
                f"  {strategy:14} time {result['time']:5.3f}  peak memory {result['memory']:5.3f}"
                f"  (by hand {result['step'] * 1e3:.0f} ms)"
            )


if __name__ == "__main__":
    main()
