"""LaunchEnvironment: what torchrun or SLURM says about the job of this process.

Reading it does not import torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from attrs import frozen

from polyshard.exceptions import LaunchError

__all__ = ["LaunchEnvironment", "read_launch_environment"]

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


# Below the range from which Linux gives out ports by itself, and torch's default of 29500.
_SLURM_PORTS = range(15_000, 29_500)


# A machine's jobs have numbers near each other; so have the steps of a job, which may run at once.
_STRIDE_OF_STEPS = 1_009


@frozen(kw_only=True)
class LaunchEnvironment:
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


def read_launch_environment(
    environment: Mapping[str, str] = os.environ,
) -> LaunchEnvironment | None:
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


def _from_torchrun(environment: Mapping[str, str]) -> LaunchEnvironment | None:
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
    return LaunchEnvironment(
        rank=_integer(environment, "RANK", 0, world_size - 1),
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_addr=environment["MASTER_ADDR"],
        master_port=_integer(environment, "MASTER_PORT", 0, 65_535),
    )


def _from_slurm(environment: Mapping[str, str]) -> LaunchEnvironment | None:
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
    return LaunchEnvironment(
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
