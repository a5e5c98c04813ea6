"""Which rank a process is, as its environment says."""

from __future__ import annotations

import pytest

from polyshard.exceptions import LaunchError
from polyshard.processes.environment import LaunchEnvironment, read_launch_environment

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "12345",
}
SLURM = {
    "SLURM_JOB_ID": "70017",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[007-008,012]",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
}


def test_without_variables_there_is_no_group() -> None:
    assert read_launch_environment({"PATH": "/bin"}) is None


def test_torchrun_says_it_all() -> None:
    assert read_launch_environment(TORCHRUN) == LaunchEnvironment(
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        master_addr="10.0.0.1",
        master_port=12345,
    )


def test_what_is_found_is_written_as_torchrun_writes_it() -> None:
    found = read_launch_environment(TORCHRUN)
    assert found is not None
    assert found.as_environment() == TORCHRUN


def test_a_slurm_step_is_a_group() -> None:
    found = read_launch_environment(SLURM)
    assert found is not None
    assert (found.rank, found.world_size) == (4, 5)
    assert (found.local_rank, found.local_world_size) == (0, 1)
    assert found.master_addr == "gpu007"


def test_every_task_of_a_slurm_step_finds_the_same_meeting_place() -> None:
    other = SLURM | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}
    here, there = read_launch_environment(SLURM), read_launch_environment(other)
    assert here is not None
    assert there is not None
    assert (here.master_addr, here.master_port) == (there.master_addr, there.master_port)
    assert there.local_world_size == 2


@pytest.mark.parametrize("other", [{"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "70018"}])
def test_steps_and_jobs_on_one_machine_do_not_meet(other: dict[str, str]) -> None:
    here, there = read_launch_environment(SLURM), read_launch_environment(SLURM | other)
    assert here is not None
    assert there is not None
    assert here.master_port != there.master_port


def test_no_slurm_job_meets_at_the_port_that_torch_takes_by_default() -> None:
    for job in range(30_000):
        found = read_launch_environment(SLURM | {"SLURM_JOB_ID": str(job)})
        assert found is not None
        assert 1024 < found.master_port < 29_500


def test_a_given_address_goes_before_the_one_from_slurm() -> None:
    found = read_launch_environment(SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "4242"})
    assert found is not None
    assert (found.master_addr, found.master_port) == ("head", 4242)


def test_a_slurm_batch_script_is_no_group() -> None:
    batch = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    assert read_launch_environment(batch) is None


def test_a_slurm_step_of_one_task_is_no_group() -> None:
    assert read_launch_environment(SLURM | {"SLURM_STEP_NUM_TASKS": "1"}) is None


def test_torchrun_inside_a_slurm_task_goes_first() -> None:
    found = read_launch_environment(SLURM | TORCHRUN | {"TORCHELASTIC_RUN_ID": "x"})
    assert found is not None
    assert (found.rank, found.world_size) == (3, 4)


def test_variables_by_hand_that_contradict_slurm_are_refused() -> None:
    with pytest.raises(LaunchError) as refused:
        read_launch_environment(SLURM | TORCHRUN)
    for part in ("RANK=3", "WORLD_SIZE=4", "SLURM_PROCID=4", "5 tasks"):
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("RANK", "4"),
        ("RANK", "-1"),
        ("RANK", "one"),
        ("WORLD_SIZE", "0"),
        ("LOCAL_RANK", "2.0"),
        ("LOCAL_WORLD_SIZE", "1"),
        ("MASTER_PORT", "70000"),
    ],
)
def test_a_bad_value_is_refused_by_name(variable: str, value: str) -> None:
    with pytest.raises(LaunchError, match=rf"variable {variable}: expected .*, found '{value}'"):
        read_launch_environment(TORCHRUN | {variable: value})


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"])
def test_a_missing_variable_is_named(variable: str) -> None:
    incomplete = {name: value for name, value in TORCHRUN.items() if name != variable}
    with pytest.raises(LaunchError, match=rf"is set but {variable} is not"):
        read_launch_environment(incomplete)
