"""A run with sizes of its own is the plain run, on fewer shares of each batch."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from polyshard import ParallelismSizes
from polyshard.config.structuring import KeyPathError, structure
from polyshard.conformance import RankPool
from polyshard.mesh.process_groups import group_timeout
from polyshard.processes.process_group import RankInfo
from polyshard.training.config import TrainingConfig
from polyshard.training.jobs import run

TINY = {"model": {"layers": 2, "width": 8, "heads": 2}, "steps": 3, "seed": 1}
FSDP2 = {"strategy": "fsdp2", "mp_policy": None}


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "text.txt"
    path.write_text("It was the best of times, it was the worst. " * 40)
    return {"path": str(path)}


def losses(values: dict[str, Any]) -> list[float]:
    config = structure(values, TrainingConfig)
    size = dist.get_world_size() if dist.is_initialized() else 1
    config.check_shares(size)
    rank = dist.get_rank() if dist.is_initialized() else 0
    place = RankInfo(rank=rank, world_size=size, device=torch.device("cpu"))
    arguments = {"config": config.to_dict(), "weights": None}
    found: list[float] = run(arguments, place, lambda step: None)["losses"]
    return found


@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    "sizes", [{"tp_size": 2}, {"dp_replicate_size": 2}, {"tp_size": 4}, {"cp_size": 2}]
)
def test_it_trains_as_one_process_does(
    ranks: RankPool, data: dict[str, Any], sizes: dict[str, int]
) -> None:
    values = {"data": data, **TINY}
    expected = losses({"distributed": None, **values})
    for found in ranks.run(losses, {"distributed": FSDP2, "parallelism": sizes, **values}):
        assert found == pytest.approx(expected, rel=1e-6)


def timeouts(values: dict[str, Any]) -> set[timedelta | None]:
    losses(values)
    return {group_timeout(group) for group in distributed_c10d._world.pg_map}


@pytest.mark.world_size(2)
def test_the_timeout_of_the_config_reaches_every_group(
    ranks: RankPool, data: dict[str, Any]
) -> None:
    parallel = {"distributed": FSDP2, "parallelism": {"tp_size": 2}, "timeout_minutes": 2.5}
    values = {"data": data, **parallel, **TINY}
    assert ranks.run(timeouts, values) == [{timedelta(minutes=2.5)}] * 2


@pytest.mark.parametrize("minutes", [0, -1, True, "5", float("inf"), 1e9])
def test_a_timeout_is_a_number_of_minutes(minutes: object) -> None:
    with pytest.raises(KeyPathError, match="more than 0 up to 525600, found") as refused:
        structure({"distributed": None, "timeout_minutes": minutes}, TrainingConfig)
    assert refused.value.path == ("timeout_minutes",)


@pytest.mark.parametrize(
    ("strategy", "sizes", "path", "problem"),
    [
        ("ddp", {"tp_size": 2}, ("parallelism", "tp_size"), r"strategy 'ddp' .* found tp_size=2"),
        ("fsdp2", {"cp_size": 3}, ("data", "sequence_length"), "of the 3 .* ranks, found 64"),
        ("fsdp2", {"tp_sise": 2}, ("parallelism", "tp_sise"), "did you mean 'tp_size'"),
        ("fsdp2", {"tp_size": "2"}, ("parallelism", "tp_size"), "an integer of at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_their_key(
    strategy: str, sizes: dict[str, Any], path: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(KeyPathError, match=problem) as refused:
        structure({"distributed": strategy, "parallelism": sizes}, TrainingConfig)
    assert refused.value.path == path


def test_tensor_parallel_ranks_share_one_part_of_a_batch() -> None:
    config = TrainingConfig(
        distributed=FSDP2, parallelism=ParallelismSizes(tp_size=2), batch_size=6
    )
    config.check_shares(4)
    with pytest.raises(KeyPathError, match=r"a multiple of 4 \(4 data-parallel ranks x 1 "):
        config.check_shares(8)
    with pytest.raises(KeyPathError, match=r"parallelism: .* the 3 ranks of the job, .* tp_size=2"):
        config.check_shares(3)
