"""What runs in each process of a job: ``python -m polyshard.processes._worker FOLDER``.

The folder is the job's. It holds what to run, and takes the result or the error. A process whose
folder or launcher is gone ends at once.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from socket import if_nameindex
from typing import Any

from polyshard.exceptions import PeerFailedError, PolyshardError
from polyshard.processes.environment import read_launch_environment
from polyshard.processes.launcher import default_threads
from polyshard.processes.process_group import (
    RankInfo,
    exit_process,
    final_barrier,
    join_process_group,
)

_LIFELINE_SECONDS = 0.5


def main() -> None:
    """Run this process's part of the job and end the process."""
    folder = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    try:
        job = json.loads((folder / "job.json").read_text())
        if not job["verbose"]:
            _print_to(folder / f"output{rank}.txt")
    except FileNotFoundError:
        exit_process(1)  # The job was ended while this process started.
    _end_with_the_job(folder, job["launcher"])
    # Not Python's handler, which a process that waits in torch's code would never get to.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    faulthandler.enable()
    _set_defaults(job["threads"] or default_threads(job["processes"]))
    try:
        result = _run(job, folder)
        _write(folder / f"result{rank}.json", result)
        final_barrier()
    except BaseException as error:  # torch's CheckpointException and SystemExit are no Exceptions
        traceback.print_exc()
        _write(folder / f"error{rank}.json", _describe(error))
        exit_process(1)
    exit_process(0)


def _run(job: dict[str, Any], folder: Path) -> object:
    module, _, name = job["target"].partition(":")
    with (folder / "events").open("a", buffering=1) as events:

        def tell(kind: str, what: object) -> None:
            if os.environ["RANK"] == "0":
                events.write(json.dumps({kind: what}) + "\n")

        with _warnings_told(tell):
            rank_info = _rank_info(job)
            function = getattr(import_module(module), name)
            result: object = function(job["arguments"], rank_info, partial(tell, "event"))
            return result


@contextmanager
def _warnings_told(tell: Callable[[str, object], None]) -> Iterator[None]:
    """Hand to the launcher what warnings say to users; those for developers stay in the log."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def show_and_tell(message: Warning | str, category: type[Warning], *where: Any) -> None:
            if issubclass(category, UserWarning):
                tell("warning", str(message))
            show(message, category, *where)

        warnings.showwarning = show_and_tell  # type: ignore[assignment]
        yield


def _rank_info(job: dict[str, Any]) -> RankInfo:
    launch_environment = read_launch_environment()
    if launch_environment is None or not job["join"]:
        return RankInfo.alone(job["device"])
    return join_process_group(launch_environment, job["device"])


def _describe(error: BaseException) -> dict[str, Any]:
    return {
        "type": type(error).__name__,
        "message": str(error),
        "notes": list(getattr(error, "__notes__", ())),
        "traceback": "".join(traceback.format_exception(error)),
        "foreseen": isinstance(error, PolyshardError),
        "by_peer": isinstance(error, PeerFailedError),
        "time": time.time(),
    }


def _write(path: Path, value: object) -> None:
    """Write a file that is there as a whole or not at all, whenever the process is ended."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(value))
    draft.replace(path)


def _set_defaults(threads: int) -> None:
    """Say how many threads to use, and keep gloo on this machine's own interface.

    torch reads both when it is imported and when a group is joined; what the user set stays.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    loopback = [name for _, name in if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])


def _print_to(path: Path) -> None:
    """Send to a file what this process prints, by Python or by the libraries beneath it."""
    with path.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)


def _end_with_the_job(folder: Path, launcher: int) -> None:
    """End the process when its launcher dies or gives the job up, even in mid-collective."""

    def watch() -> None:
        while os.getppid() == launcher and folder.exists():
            time.sleep(_LIFELINE_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="polyshard-lifeline", daemon=True).start()


if __name__ == "__main__":
    main()
