"""Run a function in several processes of this machine, as one job that ends as a whole.

torch's elastic launcher starts and watches the processes; ``_worker`` is what runs in them.
They meet on a free port, and none outlives the job.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from attrs import asdict, frozen

from polyshard.exceptions import LaunchError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

__all__ = [
    "Interrupted",
    "Job",
    "JobFailedError",
    "check_capacity",
    "default_processes",
    "default_threads",
    "launch",
]

#: What a process needs to import torch and join a group, before it builds any model.
_BYTES_PER_PROCESS = 256 * 1024**2


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


_ELASTIC_LOGGER = "torch.distributed.elastic"


_POLL_SECONDS = 0.1


_SHUTDOWN_SECONDS = 5


_TAIL_CHARACTERS = 4_000


@frozen(kw_only=True)
class Job:
    """What to run in each process.

    Attributes:
        target: ``"module:function"``; it is called as ``function(arguments, place, report)`` and
            returns what JSON can hold. Rank 0's ``report(event)`` hands an event to the launcher.
        arguments: Given to the function; what JSON can hold.
        processes: How many.
        device: ``"cpu"`` or ``"cuda"``; None is CUDA where there is a device.
        join: Whether the processes form a process group.
        threads: Threads of each process; None divides the cores among them.
    """

    target: str
    arguments: Mapping[str, Any]
    processes: int = 1
    device: str | None = None
    join: bool = True
    threads: int | None = None


class JobFailedError(LaunchError):
    """A process of a job failed; the others were ended.

    Attributes:
        rank: The rank that failed first.
        details: Its traceback, or the end of what it wrote if it left none; may be empty.
    """

    def __init__(self, message: str, *, rank: int, details: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.details = details


class Interrupted(BaseException):
    """A signal ended the job; its processes are gone.

    Attributes:
        signal: Which one.
    """

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.signal = number


def launch(
    job: Job,
    *,
    on_event: Callable[[Any], None] = lambda event: None,
    on_warning: Callable[[str], None] = lambda message: None,
    verbose: bool = False,
) -> list[Any]:
    """Run a job and return what its function returned in each process, in order of rank.

    Must be called in the main thread, where signals arrive.

    Args:
        job: What to run.
        on_event: Called in another thread with each event that rank 0 reports.
        on_warning: Called in another thread with each ``UserWarning`` on rank 0.
        verbose: Let through what the processes and the launcher print.

    Raises:
        LaunchError: The processes cannot be started.
        JobFailedError: One of them failed; the job ends within seconds.
        Interrupted: SIGINT, SIGTERM or SIGHUP arrived.
    """
    check_capacity(job)
    with TemporaryDirectory(prefix="polyshard-job-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        what = {**asdict(job, recurse=False), "verbose": verbose, "launcher": os.getpid()}
        (folder / "job.json").write_text(json.dumps(what))
        told = {"event": on_event, "warning": on_warning}
        with _following(folder / "events", told), _same_signal_handlers():
            _run_elastic(job, folder, verbose)
        return [
            json.loads((folder / f"result{rank}.json").read_text()) for rank in range(job.processes)
        ]


def default_threads(processes: int) -> int:
    """Return how many threads each of so many processes can have a core for, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // processes)


def default_processes(device: str | None) -> int:
    """Return how many processes to start if nobody says: one for each CUDA device, or one."""
    if device == "cpu":
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def check_capacity(job: Job) -> None:
    """Raise if this machine has not enough devices or memory for that many processes.

    Raises:
        LaunchError: It has not; the message says how many it has enough for.
    """
    from polyshard.processes.process_group import choose_device

    if choose_device(job.device, 0, job.processes).type != "cpu":
        return
    available = _available_memory()
    if available is None:
        return
    most = max(1, available // _BYTES_PER_PROCESS)
    if job.processes > most:
        raise LaunchError(
            f"expected at most {most} processes, as many as the {available / 1024**3:.1f} GiB of "
            f"free memory can hold at {_BYTES_PER_PROCESS // 1024**2} MiB each, found "
            f"{job.processes}; start fewer"
        )


def _available_memory() -> int | None:
    """Return the bytes that new processes can have, by the machine and by the container."""
    limits = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        limits.append(int(fields["MemAvailable"].split()[0]) * 1024)
    limit, usage = (Path("/sys/fs/cgroup") / f"memory.{name}" for name in ("max", "current"))
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        limits.append(max(0, int(text) - int(usage.read_text())))
    return min(limits, default=None)


def _run_elastic(job: Job, folder: Path, verbose: bool) -> None:
    if not verbose:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=job.processes,
        run_id=uuid.uuid4().hex,
        role="rank",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=_POLL_SECONDS,
        shutdown_timeout=_SHUTDOWN_SECONDS,
        signals_to_handle=",".join(number.name for number in _SIGNALS),
        logs_specs=DefaultLogsSpecs(str(folder / "logs")),
    )
    command = ("-P", "-m", "polyshard.processes._worker", str(folder))
    try:
        with _silence(verbose):
            elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        raise _first_failure(error.failures, folder, job.processes) from None
    except SignalException as error:
        raise Interrupted(error.sigval) from None
    except (OSError, RendezvousError) as error:
        # Whatever was started ends by itself, once the job's folder is gone.
        raise LaunchError(
            f"expected to start {job.processes} processes, but the system refused: {error}; "
            "start fewer, or raise the limits of this account (ulimit -a shows them)"
        ) from error


@contextmanager
def _silence(verbose: bool) -> Iterator[None]:
    """Keep the launcher's log to itself: what went wrong is told by the error."""
    logger = logging.getLogger(_ELASTIC_LOGGER)
    handler = logging.NullHandler()
    before = logger.propagate
    logger.addHandler(handler)
    logger.propagate = verbose
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(handler)


@contextmanager
def _same_signal_handlers() -> Iterator[None]:
    """Put back the signal handlers that the launcher replaces."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _following(path: Path, told: Mapping[str, Callable[[Any], None]]) -> Iterator[None]:
    """Pass on each line that is added to a file while the body runs, by its one key."""
    path.touch()
    ended = threading.Event()

    def follow() -> None:
        with path.open() as lines:
            partial = ""
            while True:
                last_round = ended.wait(_POLL_SECONDS)
                while line := lines.readline():
                    partial += line
                    if partial.endswith("\n"):
                        for kind, what in json.loads(partial).items():
                            told[kind](what)
                        partial = ""
                if last_round:
                    return

    thread = threading.Thread(target=follow, name="polyshard-events", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _first_failure(
    failures: Mapping[int, ProcessFailure], folder: Path, processes: int
) -> JobFailedError:
    """Describe the failure that caused the others."""
    told = {rank: _read_error(folder, rank) for rank in failures}
    ended = signal.SIGTERM  # how the launcher ends the ranks that had not failed
    crashed = [r for r in failures if told[r] is None and failures[r].exitcode != -ended]
    if crashed:
        rank = min(crashed)
        message = f"rank {rank} of {processes} {_how_it_ended(failures[rank].exitcode)}"
        return JobFailedError(message, rank=rank, details=_output_of(folder, rank))
    errors = {rank: error for rank, error in told.items() if error is not None}
    if not errors:
        rank = min(failures)
        message = f"rank {rank} of {processes} was ended from outside by SIGTERM"
        return JobFailedError(message, rank=rank, details="")
    # A rank that failed because of another is not the one to name.
    rank = min(errors, key=lambda r: (errors[r]["by_peer"], errors[r]["time"]))
    error = errors[rank]
    failed = JobFailedError(
        f"rank {rank} of {processes} failed: {error['type']}: {error['message']}",
        rank=rank,
        details="" if error["foreseen"] else error["traceback"],
    )
    for note in error["notes"]:
        failed.add_note(note)
    return failed


def _read_error(folder: Path, rank: int) -> dict[str, Any] | None:
    path = folder / f"error{rank}.json"
    if not path.exists():
        return None
    error: dict[str, Any] = json.loads(path.read_text())
    return error


def _how_it_ended(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exited with status {exit_code} before it was done"
    name = signal.Signals(-exit_code).name
    hint = " (the system does that when memory runs out)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"


def _output_of(folder: Path, rank: int) -> str:
    """Return the end of what a rank printed."""
    path = folder / f"output{rank}.txt"
    return path.read_text(errors="replace")[-_TAIL_CHARACTERS:].strip() if path.exists() else ""
