"""A mixture of experts, of which each rank uses others in every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from polyshard import clip_grad_norm, full_state_dict, maybe_shard_optimizer, parallelize
from polyshard.conformance import RankPool
from polyshard.registry.resolve import resolve_config
from polyshard.transforms.units import find_units

WIDTH, EXPERTS, LAYERS, STEPS = 8, 4, 3, 4


class Experts(nn.Module):
    """Sends each row to the expert that it scores highest."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, hidden: Tensor) -> Tensor:
        scores = self.router(hidden).softmax(-1)
        chosen = scores.argmax(-1)
        output = hidden.clone()
        for index, expert in enumerate(self.experts):
            rows = chosen == index
            if rows.any():
                output[rows] += expert(hidden[rows]) * scores[rows, index, None]
        return output


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.LayerNorm(WIDTH), Experts()) for _ in range(LAYERS))
    return nn.Sequential(nn.Sequential(*layers), nn.Linear(WIDTH, WIDTH))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def unused(model: nn.Module) -> int:
    return sum(p.grad is None for p in model.parameters())


def train(name: str, options: dict[str, Any]) -> tuple[list[float], list[float], float, int]:
    """Return the norms, those of a plain process, the distance of the weights, and what was left.

    The last is how many parameters this rank alone would have left without a gradient.
    """
    config = resolve_config(name, **options).in_full_precision()
    model, _ = parallelize(build(), config)
    optimizer = maybe_shard_optimizer(model, SGD(model.parameters(), lr=0.1), config)
    plain, alone = build(), build()
    plain_optimizer = SGD(plain.parameters(), lr=0.1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    norms, plain_norms = [], []
    for step in range(STEPS):
        model(batch(step, rank)).square().mean().backward()
        norms.append(clip_grad_norm(model, 0.5))
        optimizer.step()
        optimizer.zero_grad()
        for each in range(ranks):
            (plain(batch(step, each)).square().mean() / ranks).backward()
        plain_norms.append(float(nn.utils.clip_grad_norm_(plain.parameters(), 0.5)))
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    alone(batch(0, rank)).square().mean().backward()
    weights, expected = full_state_dict(model, rank0_only=False), plain.state_dict()
    distance = max(float((weights[name] - value).abs().max()) for name, value in expected.items())
    return norms, plain_norms, distance, unused(alone)


def case(name: str, **options: Any) -> Any:
    return pytest.param(name, options, marks=pytest.mark.strategy(name))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        case("ddp", find_unused_parameters=True),
        case("fsdp2", reduce_scatter_unused_params=True),
        *(case("megatron_fsdp", zero_dp_strategy=stage) for stage in range(4)),
        case("megatron_fsdp", average_in_collective=True),
    ],
)
@pytest.mark.world_size(2, 4)
def test_training_equals_one_process(ranks: RankPool, name: str, options: dict[str, Any]) -> None:
    results = ranks.run(train, name, options)
    assert any(left for *_, left in results), "every rank used every expert"
    for norms, expected, distance, _ in results:
        assert norms == pytest.approx(expected, rel=1e-6)
        assert distance < 1e-6


def test_layers_are_units_and_not_their_experts() -> None:
    assert find_units(build()).names == ("0.0", "0.1", "0.2")
