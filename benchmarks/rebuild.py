"""What `rebuild` costs on two ranks: processor time by count of parameters, memory by their size.

Snapshot and restore should grow linearly, hold no copy of tensor data in between, and add at most
one shard at the peak. The check for unannounced rebuilds runs in every forward, and should take
less than 1 % of a step.
"""

import gc
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

import polyshard
from polyshard.conformance import RankPool
from polyshard.lifecycle.state_dict import parameter_bytes
from polyshard.parameters.guard import ParameterGuard

FEW, MANY = 1_000, 10_000
FEWER = 5  # times fewer under Megatron-FSDP, which wraps the most in over 25 minutes
SMALL = 64  # rows and columns of a layer that is not nothing
LAYERS, WIDTH = 8, 1_536  # 72 MiB in float32, few tensors: what is held in between would show
REPEATS = 5
STRATEGIES = ("ddp", "fsdp2", *(["megatron_fsdp"] if find_spec("megatron_fsdp") else []))


class Layers(nn.Module):
    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def wrap(strategy: str, count: int, width: int) -> tuple[Layers, nn.Module]:
    config = polyshard.resolve_config(strategy).in_full_precision()
    module = Layers(count, width)
    model, _ = polyshard.parallelize(module, config)
    return module, model


def replace_all(module: Layers) -> None:
    for layer in module.layers:
        layer.weight = nn.Parameter(layer.weight.detach())


def seconds(function: Callable[[], object]) -> float:
    """Return the least processor time of some calls, in which other processes count least."""
    times = []
    for _ in range(REPEATS):
        begin = time.process_time()
        function()
        times.append(time.process_time() - begin)
    return min(times)


def measure_time(strategy: str, count: int) -> float:
    """Time `rebuild` around a replacement of all parameters; called on every rank."""
    module, model = wrap(strategy, count, 2)

    def rebuild() -> None:
        with polyshard.rebuild(model):
            replace_all(module)

    return seconds(rebuild)


def measure_check(strategy: str) -> tuple[float, float]:
    """Time the check in each forward, and a step of small layers; called on every rank."""
    _, model = wrap(strategy, FEW, SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = polyshard.maybe_shard_optimizer(model, optimizer)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(SMALL, SMALL)).sum().backward()
        optimizer.step()

    guard = ParameterGuard.of(model)
    assert guard is not None
    return seconds(lambda: ParameterGuard.before_forward(guard)), seconds(step)


def measure_memory(strategy: str) -> dict[str, float]:
    """Return the growth inside and at the peak, in shards; called on every rank."""
    module, model = wrap(strategy, LAYERS, WIDTH)
    value = torch.zeros(WIDTH, WIDTH)
    shard = parameter_bytes(model)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    with polyshard.rebuild(model):
        inside = status_bytes("VmRSS") - before
        # One tensor for all, so that what grows is not the new values.
        for layer in module.layers:
            layer.weight = nn.Parameter(value)
    return {"inside": inside / shard, "peak": (status_bytes("VmHWM") - before) / shard}


def status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def main() -> None:
    print(f"rebuild on two ranks: ten times the parameters, then {LAYERS} large ones")
    with RankPool(2, timeout=600) as ranks:
        for strategy in STRATEGIES:
            divisor = FEWER if strategy == "megatron_fsdp" else 1
            few = ranks.run(measure_time, strategy, FEW // divisor)[0]
            many = ranks.run(measure_time, strategy, MANY // divisor)[0]
            check, step = ranks.run(measure_check, strategy)[0]
            memory = ranks.run(measure_memory, strategy)[0]
            print(
                f"  {strategy:14} {few * 1e3:6.0f} ms and {many * 1e3:6.0f} ms "
                f"({many / few:4.1f} x); the check {check * 1e3:.2f} ms, {check / step:.2%} of a "
                f"step; memory held inside {memory['inside']:5.3f} shards, peak "
                f"{memory['peak']:5.3f} shards",
                flush=True,
            )


if __name__ == "__main__":
    main()
