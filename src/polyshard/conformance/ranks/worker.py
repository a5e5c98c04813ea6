"""The process of one rank: takes one job after another from the pool's pipe, and answers each.

Started by ``_process.Worker``; imports torch only when it joins a process group.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import queue
import signal
import sys
import threading
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from polyshard.conformance.ranks.failures import RankFailure

# A process group that a function leaves behind keeps its sockets, and a process may often have no
# more than 1,024 files open.
_MANY_OPEN_FILES = 512


@dataclass(frozen=True)
class Returned:
    """A worker's answer to a job that returned; the other answer is a RankFailure."""

    result: bytes
    """The pickled return value."""
    reusable: bool
    """Whether the next job would find the process as this one did."""


def main() -> None:
    """Serve the pool whose pipe, and the file for whose stack dumps, the command line gives."""
    rank, descriptor, stacks_file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    connection: Connection[Any, Any] = Connection(descriptor)
    # Open as long as the process lives: the handler writes to the bare descriptor.
    stacks = open(stacks_file, "w")  # noqa: SIM115
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_jobs, args=(connection, jobs), daemon=True).start()
    modules = 0
    while True:
        connection.send_bytes(pickle.dumps(_run(rank, jobs.get())))
        if len(sys.modules) > modules:
            modules = len(sys.modules)
            _exempt_modules_from_collection()


def _read_jobs(connection: Connection[Any, Any], jobs: queue.SimpleQueue[bytes]) -> None:
    """Queue what the pool sends; end the process once the pool is gone.

    A thread of its own, so that a rank stuck in a collective does not outlive the pool.
    """
    while True:
        try:
            jobs.put(connection.recv_bytes())
        except (EOFError, OSError):
            _flush()
            os._exit(0)  # gloo aborts now and then in the interpreter's own exit


def _run(rank: int, job: bytes) -> Returned | RankFailure:
    world = _default_group()
    try:
        # Filters that the function sets end with it.
        with warnings.catch_warnings():
            function, args, kwargs = pickle.loads(job)
            result = _pickled_result(function(*args, **kwargs))
    except BaseException as error:  # torch's CheckpointException and SystemExit are no Exceptions
        if error.__traceback__ is not None:
            error.__traceback__ = error.__traceback__.tb_next  # not this frame
        return RankFailure.from_exception(rank, error)
    finally:
        _flush()
    return Returned(result, reusable=world is _default_group() and not _many_open_files())


def _exempt_modules_from_collection() -> None:
    """Keep what is alive between two jobs, which is modules, out of later garbage collections.

    Megatron-FSDP collects at each wrap, which takes 0.3 s when it looks at all of torch.
    """
    gc.collect()
    gc.freeze()


def _pickled_result(result: object) -> bytes:
    try:
        return pickle.dumps(result)
    except Exception as error:
        error.add_note(f"while pickling the return value, of type {type(result).__name__}")
        raise


def _default_group() -> object:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return None
    return distributed.group.WORLD


def _many_open_files() -> bool:
    return len(os.listdir("/dev/fd")) > _MANY_OPEN_FILES


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def join_world(search_path: list[str], store_file: str | None, rank: int, world_size: int) -> None:
    """Make this process what a test expects to run in: one rank of a process group.

    The pool's first job in every worker. ``store_file`` is where the ranks meet; None is for no
    process group, and torch is left to the test to import.
    """
    sys.path[:] = search_path
    if store_file is None:
        return
    import torch

    backend = _choose_backend(torch.cuda.device_count(), rank, world_size)
    torch.distributed.init_process_group(
        backend, init_method=f"file://{store_file}", rank=rank, world_size=world_size
    )


def _choose_backend(devices: int, rank: int, world_size: int) -> str:
    import torch

    if devices >= world_size:
        torch.cuda.set_device(rank)
        return "cpu:gloo,cuda:nccl"
    # Fewer devices than ranks: hide them, lest code that looks for a device shares one among ranks.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return "gloo"
