"""The process's place among the ranks: read from the environment, joined, and left.

torchrun and SLURM both say in environment variables which rank a process is. Reading them does
not import torch.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn, Self

from attrs import field, frozen

from polyshard.exceptions import LaunchError

if TYPE_CHECKING:
    import torch

__all__ = ["Place", "Surroundings", "find_surroundings", "join_group", "leave", "meet"]

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
#: A rank that waits this long for another has waited for one that will not come.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
#: How long ranks that are done wait for one that is not.
_LONGEST_SAVE = timedelta(days=1)
#: Minutes; whoever asks for more than a year means something else.
LONGEST_TIMEOUT = 365 * 24 * 60
# Below the range from which Linux gives out ports by itself, and torch's default of 29500.
_SLURM_PORTS = range(15_000, 29_500)
# A machine's jobs have numbers near each other; so have the steps of a job, which may run at once.
_STRIDE_OF_STEPS = 1_009


@frozen(kw_only=True)
class Surroundings:
    """What the environment says about the group of processes that this one belongs to.

    Attributes:
        rank: Of this process, from 0.
        world_size: Number of processes.
        local_rank: Of this process among those of its machine.
        local_world_size: Number of processes on this machine.
        master_addr: Where rank 0 can be reached.
        master_port: The port there.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int

    def as_environment(self) -> dict[str, str]:
        """Return the variables as torchrun would have set them."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


@frozen(kw_only=True)
class Place:
    """A process among the ranks, and the device that it trains on."""

    rank: int
    world_size: int
    device: torch.device = field(eq=False)

    @classmethod
    def alone(cls, device: str | None) -> Self:
        """Return the place of a process without a group."""
        return cls(rank=0, world_size=1, device=choose_device(device, 0, 1))


def find_surroundings(environment: Mapping[str, str] = os.environ) -> Surroundings | None:
    """Return the group that torchrun or SLURM started this process in, None if neither did.

    A SLURM step of one task is no group. torchrun's variables go first, except where somebody
    set them by hand and they contradict SLURM's.

    Raises:
        LaunchError: A variable is missing, is not what it should be, or contradicts another.
    """
    torchrun = _from_torchrun(environment)
    slurm = _from_slurm(environment)
    if torchrun is None or slurm is None:
        return torchrun or slurm
    # Under `srun torchrun ...` each SLURM task is one launcher, which counts its own ranks.
    started_by_torchrun = "TORCHELASTIC_RUN_ID" in environment
    ours = (torchrun.rank, torchrun.world_size)
    theirs = (slurm.rank, slurm.world_size)
    if not started_by_torchrun and ours != theirs:
        raise LaunchError(
            f"expected torchrun's and SLURM's variables to agree, found RANK={ours[0]} "
            f"WORLD_SIZE={ours[1]}, and SLURM_PROCID={theirs[0]} in a step of {theirs[1]} tasks; "
            "unset those that do not describe this job"
        )
    return torchrun


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


def join_group(surroundings: Surroundings, device: str | None = None) -> Place:
    """Join the process group, over nccl where each rank has a CUDA device and over gloo elsewhere.

    Call it on every rank.

    Raises:
        LaunchError: There are fewer devices than processes.
    """
    import torch
    import torch.distributed as dist

    chosen = choose_device(device, surroundings.local_rank, surroundings.local_world_size)
    os.environ.update(surroundings.as_environment())
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=chosen, timeout=COLLECTIVE_TIMEOUT)
    else:
        dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    return Place(rank=surroundings.rank, world_size=surroundings.world_size, device=chosen)


def meet() -> None:
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


def leave(status: int) -> NoReturn:
    """End the process at once, with everything written that it printed.

    gloo's threads now and then abort a process that exits in the ordinary way. After success,
    call ``meet`` first: a rank that leaves early takes its connections along.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _from_torchrun(environment: Mapping[str, str]) -> Surroundings | None:
    if not {"RANK", "WORLD_SIZE"} & environment.keys():
        return None
    missing = [name for name in _TORCHRUN if not environment.get(name)]
    if missing:
        present = [name for name in _TORCHRUN if name in environment]
        raise LaunchError(
            f"{', '.join(present)} is set but {', '.join(missing)} is not; start the job with "
            "torchrun, or unset them to have the processes started here"
        )
    world_size = _integer(environment, "WORLD_SIZE", 1)
    local_rank = _integer(environment, "LOCAL_RANK", 0, world_size - 1)
    local_world_size = world_size
    if "LOCAL_WORLD_SIZE" in environment:
        local_world_size = _integer(environment, "LOCAL_WORLD_SIZE", local_rank + 1, world_size)
    return Surroundings(
        rank=_integer(environment, "RANK", 0, world_size - 1),
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_addr=environment["MASTER_ADDR"],
        master_port=_integer(environment, "MASTER_PORT", 0, 65_535),
    )


def _from_slurm(environment: Mapping[str, str]) -> Surroundings | None:
    # A batch script, which runs once, has SLURM_PROCID and SLURM_NTASKS too; only srun makes steps.
    if not {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"} & environment.keys():
        return None
    counted_by = "SLURM_STEP_NUM_TASKS"
    if counted_by not in environment:
        counted_by = "SLURM_NTASKS"
    world_size = _integer(environment, counted_by, 1)
    if world_size == 1:
        return None
    rank = _integer(environment, "SLURM_PROCID", 0, world_size - 1)
    local_rank = _integer(environment, "SLURM_LOCALID", 0, world_size - 1)
    port = _slurm_port(environment)
    if "MASTER_PORT" in environment:
        port = _integer(environment, "MASTER_PORT", 0, 65_535)
    return Surroundings(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=_tasks_on_this_node(environment, world_size),
        master_addr=environment.get("MASTER_ADDR") or _first_node(environment),
        master_port=port,
    )


def _slurm_port(environment: Mapping[str, str]) -> int:
    """Choose a port that every task of a step finds, and tasks of other steps seldom."""
    job = _integer(environment, "SLURM_JOB_ID", 0)
    step = _integer(environment, "SLURM_STEP_ID", 0) if "SLURM_STEP_ID" in environment else 0
    return _SLURM_PORTS[(job + _STRIDE_OF_STEPS * step) % len(_SLURM_PORTS)]


def _tasks_on_this_node(environment: Mapping[str, str], world_size: int) -> int:
    """Read this node's entry of SLURM's short form, in which ``2(x3),1`` is 2,2,2,1."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", str(world_size))
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise _bad_value("SLURM_STEP_TASKS_PER_NODE", "a list such as 2(x3),1", text)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[_integer(environment, "SLURM_NODEID", 0, len(counts) - 1)]


def _first_node(environment: Mapping[str, str]) -> str:
    """Read the first name of SLURM's short form, in which ``a[07-09,12],b`` starts with a07."""
    text = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", text)
    if match is None:
        raise _bad_value("SLURM_STEP_NODELIST", "a list such as node[01-04]", text)
    return match[1] + (match[2] or "")


def _integer(
    environment: Mapping[str, str], name: str, minimum: int, maximum: int | None = None
) -> int:
    text = environment.get(name, "")
    expected = f"an integer of at least {minimum}"
    if maximum is not None:
        expected = f"an integer from {minimum} to {maximum}"
    if not re.fullmatch(r"\d+", text.strip()):
        raise _bad_value(name, expected, text)
    number = int(text)
    if number < minimum or (maximum is not None and number > maximum):
        raise _bad_value(name, expected, text)
    return number


def _bad_value(name: str, expected: str, found: str) -> LaunchError:
    return LaunchError(f"environment variable {name}: expected {expected}, found {found!r}")
