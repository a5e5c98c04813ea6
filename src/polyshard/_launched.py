"""What runs in each process of a job: ``python -m polyshard._launched FOLDER``.

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
from importlib import import_module
from pathlib import Path
from socket import if_nameindex
from typing import Any

from polyshard.exceptions import PeerFailedError, PolyshardError
from polyshard.group import Place, find_surroundings, join_group, leave, meet
from polyshard.launch import default_threads

_LIFELINE_SECONDS = 0.5


def main() -> None:
    """Run this process's part of the job and end the process."""
    folder = Path(sys.argv[1])
    _end_with_the_job(folder)
    # Not Python's handler, which a process that waits in torch's code would never get to.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    faulthandler.enable()
    job = json.loads((folder / "job.json").read_text())
    _set_defaults(job["threads"] or default_threads(job["processes"]))
    rank = int(os.environ["RANK"])
    try:
        result = _run(job, folder)
        (folder / f"result{rank}.json").write_text(json.dumps(result))
        meet()
    except BaseException as error:  # torch's CheckpointException and SystemExit are no Exceptions
        traceback.print_exc()
        (folder / f"error{rank}.json").write_text(json.dumps(_describe(error)))
        leave(1)
    leave(0)


def _run(job: dict[str, Any], folder: Path) -> object:
    place = _place(job)
    module, _, function = job["target"].partition(":")
    with (folder / "events").open("a", buffering=1) as events:

        def report(event: object) -> None:
            if place.rank == 0:
                events.write(json.dumps(event) + "\n")

        result: object = getattr(import_module(module), function)(job["arguments"], place, report)
        return result


def _place(job: dict[str, Any]) -> Place:
    surroundings = find_surroundings()
    if surroundings is None or not job["join"]:
        return Place.alone(job["device"])
    return join_group(surroundings, job["device"])


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


def _set_defaults(threads: int) -> None:
    """Say how many threads to use, and keep gloo on this machine's own interface.

    torch reads both when it is imported and when a group is joined; what the user set stays.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    loopback = [name for _, name in if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])


def _end_with_the_job(folder: Path) -> None:
    """End the process when its launcher dies or gives the job up, even in mid-collective."""
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher and folder.exists():
            time.sleep(_LIFELINE_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="polyshard-lifeline", daemon=True).start()


if __name__ == "__main__":
    main()
