"""A job's processes are started, watched and ended as one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from polyshard.exceptions import LaunchError
from polyshard.processes.launcher import Job, JobFailedError, default_threads, launch

#: Which jobs take that do not look for a free one.
TORCHS_PORT = 29_500

JOBS = """
    import os
    import signal
    import sys
    import time
    import warnings

    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from polyshard import DistributedSetup
    from polyshard.exceptions import ConfigError


    def add_up(arguments, place, report):
        report({"from": place.rank})
        warnings.warn("for users", stacklevel=1)
        warnings.warn("for developers", DeprecationWarning, stacklevel=1)
        total = torch.tensor([place.rank + arguments["start"]])
        dist.all_reduce(total)
        return {"total": total.item(), "threads": torch.get_num_threads()}


    def say_where(arguments, place, report):
        return {"joined": dist.is_initialized(), "world_size": place.world_size}


    def say_port(arguments, place, report):
        dist.barrier()
        return int(os.environ["MASTER_PORT"])


    def fail_to_load_on_rank_1(arguments, place, report):
        if place.rank == 1:
            dcp.load({"weight": torch.zeros(1)}, checkpoint_id="gone", no_dist=True)
        dist.barrier()


    def fail_on_rank_1(arguments, place, report):
        if place.rank == 1:
            error = ConfigError if arguments["foreseen"] else ValueError
            raise error("it was rank 1")
        dist.barrier()  # in which this rank would wait for ever


    def save_on_rank_0(arguments, place, report):
        DistributedSetup.build("ddp", timeout_minutes=0.5 / 60)
        if place.rank == 0:
            time.sleep(arguments["seconds"])
        return place.rank


    def die_on_rank_1(arguments, place, report):
        if place.rank == 1:
            print("last words", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
"""


@pytest.fixture(autouse=True)
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the module ``some_jobs`` where the processes can import it."""
    (tmp_path / "some_jobs.py").write_text(dedent(JOBS))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def job(function: str, processes: int = 2, **arguments: Any) -> Job:
    return Job(
        target=f"some_jobs:{function}", arguments=arguments, processes=processes, device="cpu"
    )


def test_every_rank_returns_and_rank_0_reports() -> None:
    events: list[Any] = []
    warned: list[str] = []
    handler = signal.getsignal(signal.SIGTERM)
    results = launch(job("add_up", start=10), on_event=events.append, on_warning=warned.append)
    assert results == [{"total": 21, "threads": default_threads(2)}] * 2
    assert events == [{"from": 0}]
    assert warned == ["for users"]
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_job_meets_on_a_port_that_is_free() -> None:
    with socket.socket() as taken:
        # Whoever else has it, it is not free.
        with suppress(OSError):
            taken.bind(("127.0.0.1", TORCHS_PORT))
            taken.listen()
        (port, other) = launch(job("say_port"))
    assert port == other
    assert port != TORCHS_PORT


def test_a_process_that_starts_after_the_end_of_its_job_is_silent(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "polyshard.processes._worker", str(tmp_path / "gone")]
    done = subprocess.run(command, env=os.environ | {"RANK": "0"}, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")


def test_a_job_without_a_group_joins_none() -> None:
    alone = Job(target="some_jobs:say_where", arguments={}, device="cpu", join=False)
    assert launch(alone) == [{"joined": False, "world_size": 1}]


def test_the_others_wait_for_a_rank_that_saves_for_longer_than_a_collective_may() -> None:
    assert launch(job("save_on_rank_0", seconds=2)) == [0, 1]


def test_the_rank_that_fails_is_named_with_its_traceback() -> None:
    with pytest.raises(JobFailedError, match="rank 1 of 2 failed: ValueError: it was rank 1") as e:
        launch(job("fail_on_rank_1", foreseen=False))
    assert e.value.rank == 1
    assert "in fail_on_rank_1" in e.value.details


def test_an_error_of_polyshard_needs_no_traceback() -> None:
    with pytest.raises(JobFailedError, match="rank 1 of 2 failed: ConfigError: it was") as e:
        launch(job("fail_on_rank_1", foreseen=True))
    assert e.value.details == ""


def test_an_error_that_is_no_exception_is_told_as_any_other() -> None:
    with pytest.raises(JobFailedError, match="rank 1 of 2 failed: CheckpointException: ") as e:
        launch(job("fail_to_load_on_rank_1"))
    assert "gone/.metadata" in e.value.details


def test_a_rank_that_is_killed_is_named_with_its_last_words() -> None:
    with pytest.raises(JobFailedError, match="rank 1 of 2 was ended by SIGKILL") as e:
        launch(job("die_on_rank_1"))
    assert e.value.rank == 1
    assert "last words" in e.value.details


def test_a_target_that_does_not_exist_is_the_failure_of_a_rank() -> None:
    with pytest.raises(JobFailedError, match="has no attribute 'nothing'"):
        launch(job("nothing", processes=1))


def test_more_processes_than_memory_holds_are_refused() -> None:
    with pytest.raises(LaunchError, match=r"expected at most \d+ processes, .* found 1000000"):
        launch(job("add_up", processes=1_000_000))


def test_processes_that_the_system_refuses_are_an_error_with_a_cure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/gone/python")
    with pytest.raises(
        LaunchError, match=r"start 2 processes, but the system refused.*; start few"
    ):
        launch(job("say_where"))
