"""The process's place among the ranks: read from the environment, joined, and left.

torchrun and SLURM both say in environment variables which rank a process is. Reading them does
not import torch.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn, Self

from attrs import field, frozen

from polyshard.exceptions import LaunchError
from polyshard.processes.environment import LaunchEnvironment

if TYPE_CHECKING:
    import torch

__all__ = ["RankInfo", "join_process_group", "exit_process", "final_barrier", "world_size"]


def world_size() -> int:
    """Return the number of ranks of the job, 1 without a process group."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


#: A rank that waits this long for another has waited for one that will not come.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)


#: How long ranks that are done wait for one that is not.
_LONGEST_SAVE = timedelta(days=1)


#: Minutes; whoever asks for more than a year means something else.
LONGEST_TIMEOUT = 365 * 24 * 60


@frozen(kw_only=True)
class RankInfo:
    """A process among the ranks, and the device that it trains on."""

    rank: int
    world_size: int
    device: torch.device = field(eq=False)

    @classmethod
    def alone(cls, device: str | None) -> Self:
        """Return the place of a process without a group."""
        return cls(rank=0, world_size=1, device=choose_device(device, 0, 1))


def choose_device(wanted: str | None, local_rank: int, local_world_size: int) -> torch.device:
    """Return the device of a rank: a CUDA device of its own, or the CPU.

    Args:
        wanted: ``"cpu"`` or ``"cuda"``; None is CUDA where there is a device.
        local_rank: Of this process on its machine.
        local_world_size: Processes on the machine.

    Raises:
        LaunchError: There are fewer devices than processes.
    """
    import torch

    devices = torch.cuda.device_count() if wanted != "cpu" else 0
    if devices == 0 and wanted != "cuda":
        return torch.device("cpu")
    if devices < local_world_size:
        raise LaunchError(
            f"expected at most {devices} processes, one for each CUDA device of this machine, "
            f"found {local_world_size}; start fewer, or add --device cpu"
        )
    return torch.device("cuda", local_rank)


def join_process_group(
    launch_environment: LaunchEnvironment, device: str | None = None
) -> RankInfo:
    """Join the process group, over nccl where each rank has a CUDA device and over gloo elsewhere.

    Call it on every rank.

    Raises:
        LaunchError: There are fewer devices than processes.
    """
    import torch
    import torch.distributed as dist

    chosen = choose_device(
        device, launch_environment.local_rank, launch_environment.local_world_size
    )
    os.environ.update(launch_environment.as_environment())
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=chosen, timeout=COLLECTIVE_TIMEOUT)
    else:
        dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    return RankInfo(
        rank=launch_environment.rank, world_size=launch_environment.world_size, device=chosen
    )


def final_barrier() -> None:
    """Wait until every rank has come this far; without a group do nothing.

    One of them may be saving for longer than a collective waits: ranks meet in the store first.
    A job whose ranks do not all get here is ended by what started it.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if not dist.is_initialized():
        return
    store = distributed_c10d.PrefixStore("polyshard/end", distributed_c10d._get_default_store())
    if store.add("arrived", 1) == dist.get_world_size():
        store.set("complete", "")
    store.wait(["complete"], _LONGEST_SAVE)
    # The rank that holds the store leaves when all have heard, and not before.
    dist.barrier()


def exit_process(status: int) -> NoReturn:
    """End the process at once, with everything written that it printed.

    gloo's threads now and then abort a process that exits in the ordinary way. After success,
    call ``final_barrier`` first: a rank that leaves early takes its connections along.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
