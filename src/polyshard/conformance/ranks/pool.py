"""A pool of ranks: worker processes that hold one process group for many tests.

Importing torch takes seconds; a pool pays for it once, and again after a failure.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from polyshard.conformance.ranks import pickling
from polyshard.conformance.ranks.failures import RanksFailed
from polyshard.conformance.ranks.process import Worker
from polyshard.conformance.ranks.worker import Returned, join_world

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from polyshard.conformance.ranks.failures import FailureKind, RankFailure

_Result = TypeVar("_Result")

_START_TIMEOUT = 120.0  # seconds; a loaded machine may need half a minute to import torch
_ADDRESS = {"MASTER_ADDR", "MASTER_PORT"}


class RankPool:
    """Runs a function on every rank of a process group and returns what each rank returned.

    Use it as a context manager; the processes start with the first ``run``. ::

        with RankPool(2) as ranks:
            assert ranks.run(my_module.my_rank) == [0, 1]

    The group spans ``world_size`` processes over gloo, and over nccl for CUDA tensors where each
    rank can have a device of its own. With ``process_group=False`` there is one process and no
    group. The calling process need not import torch.

    Workers have the environment, folder and import path that the caller had when it made the pool.
    They find ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE`` and ``LOCAL_WORLD_SIZE`` as torchrun sets
    them, run on one thread, and use Python's default warning filters (or ``PYTHONWARNINGS``);
    filters that a function sets end with it. What else a function changes, such as the random
    state or its modules, stays until the workers are replaced: after any failure, and whenever a
    function leaves another default process group or hundreds of open files behind.

    Attributes:
        timeout: Seconds that a run may take; it may be changed between runs.
        grace: Seconds that the other ranks get after the first failure; likewise.
    """

    def __init__(
        self,
        world_size: int,
        *,
        process_group: bool = True,
        timeout: float = 120.0,
        grace: float = 3.0,
    ) -> None:
        """Prepare a pool; it starts no process yet.

        Raises:
            ValueError: The size is below 1, or above 1 without a process group.
        """
        if world_size < 1:
            raise ValueError(f"world_size: expected 1 or more, found {world_size}")
        if world_size > 1 and not process_group:
            raise ValueError(f"world_size {world_size} needs a process group; leave it on")
        self.world_size = world_size
        self.process_group = process_group
        self.timeout = timeout
        self.grace = grace
        self._environment = dict(os.environ)
        self._cwd = Path.cwd()
        self._import_path = list(sys.path)
        self._workers: list[Worker] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of the running workers by rank; empty before the first run."""
        return tuple(worker.pid for worker in self._workers)

    def run(self, function: Callable[..., _Result], /, *args: Any, **kwargs: Any) -> list[_Result]:
        """Call ``function(*args, **kwargs)`` on every rank and return the results in rank order.

        The function must stand at the top level of a module, which may be a test file; arguments
        and results are pickled. What the ranks print is printed here, each line with its rank.

        Raises:
            RanksFailed: Some rank raised, crashed or did not return in time.
            TypeError: The function or an argument cannot be sent.
        """
        job = pickling.dumps((function, args, kwargs))
        try:
            if not self._workers:
                self._start()
            returned = self._exchange(_name(function), [job] * self.world_size, self.timeout)
        except BaseException:  # a failure, Ctrl-C, a test runner's timeout: the state is unknown
            self._kill()
            raise
        for worker in self._workers:
            _print_output(worker)
        if not all(answer.reusable for answer in returned):
            self._kill()
        return [pickle.loads(answer.result) for answer in returned]

    def close(self) -> None:
        """End the workers; a later ``run`` starts new ones."""
        self._end(Worker.close)

    def _kill(self) -> None:
        self._end(Worker.kill)

    def _end(self, how: Callable[[Worker], None]) -> None:
        for worker in self._workers:
            how(worker)
        self._workers.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="polyshard-ranks-")
        folder = Path(self._folder.name)
        store = str(folder / "store") if self.process_group else None
        jobs = []
        for rank in range(self.world_size):
            worker = Worker(rank, folder, env=self._environment_of(rank), cwd=self._cwd)
            self._workers.append(worker)
            place = (self._import_path, store, rank, self.world_size)
            jobs.append(pickling.dumps((join_world, place, {})))
        self._exchange("the start of the ranks", jobs, _START_TIMEOUT)

    def _environment_of(self, rank: int) -> dict[str, str]:
        place = {"RANK": rank, "LOCAL_RANK": rank}
        place |= {"WORLD_SIZE": self.world_size, "LOCAL_WORLD_SIZE": self.world_size}
        # An address is of no use here, and the caller's would be another job's.
        inherited = self._environment.items()
        environment = {k: v for k, v in inherited if k not in {*place, *_ADDRESS}}
        if self.process_group:
            environment |= {name: str(number) for name, number in place.items()}
        return environment | {"OMP_NUM_THREADS": "1"}

    def _exchange(self, name: str, jobs: Sequence[bytes], timeout: float) -> list[Returned]:
        """Give each rank its job and return the answers."""
        for worker, job in zip(self._workers, jobs, strict=True):
            worker.send(job)
        returned, failures = self._collect(timeout)
        if failures:
            raise RanksFailed(name, self.world_size, failures)
        return [returned[rank] for rank in range(self.world_size)]

    def _collect(self, timeout: float) -> tuple[dict[int, Returned], list[RankFailure]]:
        returned: dict[int, Returned] = {}
        failures: list[RankFailure] = []
        waiting = list(self._workers)
        deadline = time.monotonic() + timeout
        while waiting:
            left = max(0.0, deadline - time.monotonic())
            ready = wait([worker.connection for worker in waiting], left)
            if not ready:
                failures += _stuck(waiting, failures, timeout)
                break
            for worker in [worker for worker in waiting if worker.connection in ready]:
                waiting.remove(worker)
                answer = worker.receive()
                if isinstance(answer, Returned):
                    returned[worker.rank] = answer
                    continue
                if not failures:
                    deadline = min(deadline, time.monotonic() + self.grace)
                failures.append(answer)
        return returned, failures


def _stuck(
    workers: Sequence[Worker], failures: Sequence[RankFailure], timeout: float
) -> list[RankFailure]:
    """Describe the ranks that have not answered, with the stacks in which they are stuck."""
    for worker in workers:
        worker.ask_for_stacks()
    kind: FailureKind = "hung"
    message = f"no answer within {timeout:g} s"
    if failures:
        kind = "killed"
        message = f"it was still waiting or working after rank {failures[0].rank} had failed"
    return [worker.failure(kind, message, worker.stacks()) for worker in workers]


def _print_output(worker: Worker) -> None:
    for line in worker.output().splitlines():
        print(f"[rank {worker.rank}] {line}")


def _name(function: Callable[..., object]) -> str:
    name = getattr(function, "__qualname__", repr(function))
    return f"{function.__module__}.{name}"
