"""The pool's side of one worker process: start it, talk to it, look at it, kill it.

POSIX only, as torch's own multi-process tests are.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any

from polyshard.conformance.ranks.failures import FailureKind, RankFailure

if TYPE_CHECKING:
    from pathlib import Path

    from polyshard.conformance.ranks.worker import Returned

_MAIN = "from polyshard.conformance.ranks.worker import main; main()"
_OUTPUT_LIMIT = 8_000  # characters, the last ones, of what a rank wrote
_STACKS_PATIENCE = 2.0  # seconds


class Worker:
    """One rank's process, with a pipe to it and files for its output and its stacks."""

    def __init__(self, rank: int, folder: Path, *, env: dict[str, str], cwd: Path) -> None:
        self.rank = rank
        self._output = folder / f"rank{rank}.log"
        self._stacks = folder / f"rank{rank}.stacks"
        self._stacks.touch()
        self._output_start = 0
        self.connection: Connection[Any, Any]
        self.connection, theirs = Pipe()
        with theirs, self._output.open("wb") as output:
            self._process = subprocess.Popen(
                # -P: the current directory is no place to import from unless the caller's path
                # has it. Not -m, which would make a second copy of the module as __main__.
                [sys.executable, "-P", "-c", _MAIN, str(rank), str(theirs.fileno()), self._stacks],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=cwd,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches the pool, which ends its workers
            )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def send(self, job: bytes) -> None:
        """Send a pickled job; that the process is gone is seen by ``receive``."""
        self._output_start = self._output.stat().st_size
        try:
            self.connection.send_bytes(job)
        except OSError:
            return

    def receive(self) -> Returned | RankFailure:
        """Return the worker's answer, or how its process ended without one."""
        try:
            answer: Returned | RankFailure = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return self.failure("crashed", self._how_it_ended())
        if isinstance(answer, RankFailure):
            return replace(answer, output=self.output())
        return answer

    def failure(self, kind: FailureKind, message: str, stacks: str = "") -> RankFailure:
        """Describe a failure that the process could not tell of itself."""
        return RankFailure(
            rank=self.rank, kind=kind, message=message, traceback=stacks, output=self.output()
        )

    def output(self) -> str:
        """Return the end of what the process wrote since the last job was sent."""
        with self._output.open("rb") as file:
            file.seek(self._output_start)
            return file.read().decode(errors="replace")[-_OUTPUT_LIMIT:]

    def ask_for_stacks(self) -> None:
        """Have faulthandler dump the Python stack of every thread; ``stacks`` reads them."""
        self._process.send_signal(signal.SIGUSR1)

    def stacks(self) -> str:
        """Return the dumped stacks, once the dump has stopped growing."""
        deadline = time.monotonic() + _STACKS_PATIENCE
        dump = ""
        while time.monotonic() < deadline:
            time.sleep(0.05)
            seen, dump = dump, self._stacks.read_text()
            if dump and dump == seen:
                break
        return dump

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "closed its pipe to the pool and runs on"
        if status < 0:
            return f"the process was ended by signal {signal.Signals(-status).name}"
        return f"the process exited with status {status} before it answered"

    def close(self) -> None:
        """End an idle process by closing its pipe."""
        self.connection.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the process whatever it is doing, with everything that it started."""
        self.connection.close()
        if self._process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
