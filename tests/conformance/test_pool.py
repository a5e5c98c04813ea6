"""RankPool: what a run returns, and what is told of a rank that does not return."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

from polyshard.conformance import RankPool, RanksFailed

marks_left_by_runs = []


@pytest.fixture(scope="module")
def ranks():
    with RankPool(2, grace=1.0) as pool:
        yield pool


@pytest.fixture(scope="module")
def lone():
    """One rank without a process group; it starts fast, since it does not import torch."""
    with RankPool(1, process_group=False) as pool:
        yield pool


def failures_of(pool, function, *args):
    with pytest.raises(RanksFailed) as caught:
        pool.run(function, *args)
    return caught.value


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def ends(pid):
    deadline = time.monotonic() + 30
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_running(pid)


# What the ranks run.


@dataclass
class ParameterSlot:
    rank: int
    size: int
    environment: tuple[str | None, ...]


def place():
    import torch.distributed as dist

    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    environment = tuple(map(os.environ.get, names))
    if not dist.is_initialized():
        return ParameterSlot(-1, -1, environment)
    time.sleep(0.1 * (dist.get_world_size() - dist.get_rank()))  # rank 0 answers last
    return ParameterSlot(dist.get_rank(), dist.get_world_size(), environment)


def barrier_unless(rank, failing, *args):
    import torch.distributed as dist

    dist.barrier()  # every rank has loaded this file
    if dist.get_rank() == rank:
        failing(*args)
    dist.barrier()


def leave_mark():
    marks_left_by_runs.append(os.getpid())
    return len(marks_left_by_runs)


def apply(function, value, *, times):
    for _ in range(times):
        value = function(value)
    return value


def double(place):
    return ParameterSlot(place.rank * 2, place.size, place.environment)


class SpecialError(LookupError):
    pass


def raise_with_note():
    error = SpecialError("nothing here")
    error.add_note("looked everywhere")
    raise error


def raise_unpicklable():
    class LocalError(Exception):
        def __init__(self, lock):
            self.lock = lock

    raise LocalError(threading.Lock())


def raise_unprintable():
    class SilentError(Exception):
        def __str__(self):
            raise RuntimeError

    raise SilentError


def kill_self(number):
    print("last words", flush=True)
    os.kill(os.getpid(), number)


def launch_environment():
    return os.environ.get("SET_LATER"), Path.cwd()


def return_lock():
    return threading.Lock()


def leave_group():
    import torch.distributed as dist

    dist.destroy_process_group()


def open_many_files():
    for _ in range(600):
        os.dup(0)


def turn_warnings_to_errors():
    warnings.simplefilter("error")


def warn():
    warnings.warn("only a warning", UserWarning, stacklevel=1)


def test_results_come_in_rank_order(ranks):
    assert ranks.run(place) == [
        ParameterSlot(0, 2, ("0", "0", "2", "2")),
        ParameterSlot(1, 2, ("1", "1", "2", "2")),
    ]


def test_one_rank_has_a_process_group():
    with RankPool(1) as pool:
        assert pool.run(place) == [ParameterSlot(0, 1, ("0", "0", "1", "1"))]


def test_without_process_group_nothing_tells_of_ranks(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with RankPool(1, process_group=False) as pool:
        assert pool.run(place) == [ParameterSlot(-1, -1, (None,) * 4)]


def test_ranks_started_late_see_what_the_caller_had_when_it_made_the_pool(tmp_path, monkeypatch):
    folder = Path.cwd()
    with RankPool(1, process_group=False) as pool:
        monkeypatch.setenv("SET_LATER", "1")
        monkeypatch.chdir(tmp_path)
        assert pool.run(launch_environment) == [(None, folder)]


@pytest.mark.parametrize(("size", "process_group"), [(0, True), (-1, True), (2, False)])
def test_impossible_sizes_are_refused(size, process_group):
    with pytest.raises(ValueError, match="world_size"):
        RankPool(size, process_group=process_group)


def test_arguments_may_be_functions_and_objects_of_the_test_file(lone):
    assert lone.run(apply, double, ParameterSlot(3, 2, ()), times=2) == [ParameterSlot(12, 2, ())]


def test_runs_share_their_processes(ranks):
    first = ranks.run(os.getpid)
    assert ranks.run(os.getpid) == first == list(ranks.pids)


def test_prints_are_printed_with_the_rank(ranks, capsys):
    ranks.run(print, "once")
    ranks.run(print, "twice")
    assert capsys.readouterr().out.splitlines() == [
        f"[rank {rank}] {word}" for word in ("once", "twice") for rank in (0, 1)
    ]


def test_warning_filters_end_with_the_function(lone):
    lone.run(turn_warnings_to_errors)
    lone.run(warn)


@pytest.mark.parametrize("job", [(lambda: None,), (print, threading.Lock())])
def test_what_cannot_be_sent_is_refused_before_any_rank_sees_it(lone, job):
    pids = lone.run(os.getpid)
    with pytest.raises(TypeError, match="top level of a module"):
        lone.run(*job)
    assert lone.run(os.getpid) == pids


def test_the_rank_that_raises_is_told_of_first_and_the_others_where_they_waited(ranks):
    error = failures_of(ranks, barrier_unless, 1, raise_with_note)
    assert list(error.failures) == [1, 0]
    assert error.first is error.failures[1]
    assert error.failures[0].kind == "killed"
    assert error.failures[0].type_name == ""
    assert "rank 1 had failed" in error.failures[0].message
    assert "in barrier" in error.failures[0].traceback
    assert "2 of 2 ranks failed" in str(error)
    assert str(error).index("rank 1 raised") < str(error).index("rank 0 killed")


def test_an_exception_is_told_by_type_message_notes_and_traceback(lone):
    failure = failures_of(lone, raise_with_note).first
    assert failure.kind == "raised"
    assert failure.type_name == f"{__name__}.SpecialError"
    assert failure.is_a(LookupError)
    assert not failure.is_a(ValueError)
    assert failure.message == "nothing here"
    assert failure.notes == ("looked everywhere",)
    assert "in raise_with_note" in failure.traceback


@pytest.mark.parametrize(
    ("function", "name"), [(raise_unpicklable, "LocalError"), (raise_unprintable, "SilentError")]
)
def test_exceptions_need_neither_pickle_nor_print(lone, function, name):
    failure = failures_of(lone, function).first
    assert failure.type_name.endswith(f"{function.__name__}.<locals>.{name}")


def test_exit_is_a_failure_not_the_end_of_the_rank(lone):
    assert failures_of(lone, sys.exit, 0).first.type_name == "SystemExit"


def test_a_result_that_cannot_be_pickled_is_that_ranks_failure(lone):
    failure = failures_of(lone, return_lock).first
    assert failure.type_name == "TypeError"
    assert "return value" in failure.notes[0]


def test_a_crash_comes_before_the_errors_that_it_causes(ranks):
    error = failures_of(ranks, barrier_unless, 1, kill_self, signal.SIGSEGV)
    assert error.first.rank == 1
    assert error.first.kind == "crashed"
    assert "SIGSEGV" in error.first.message
    assert "last words" in error.first.output
    assert "last words" in str(error)
    assert error.failures[0].kind in {"raised", "killed"}


def test_a_process_that_exits_is_a_crash_with_its_status(lone):
    failure = failures_of(lone, os._exit, 3).first
    assert failure.kind == "crashed"
    assert "status 3" in failure.message


def test_a_hang_names_the_stuck_ranks_and_their_stacks(ranks, monkeypatch):
    ranks.run(leave_mark)  # start them, and have them load this file, before the clock runs
    monkeypatch.setattr(ranks, "timeout", 2.0)
    error = failures_of(ranks, barrier_unless, 1, time.sleep, 60)
    assert {failure.kind for failure in error.failures.values()} == {"hung"}
    assert "within 2 s" in error.first.message
    assert "in barrier" in error.failures[0].traceback
    assert "in barrier_unless" in error.failures[1].traceback


def test_a_failure_leaves_neither_processes_nor_state(lone):
    lone.run(leave_mark)
    pids = lone.pids
    assert lone.run(leave_mark)[0] > 1
    failures_of(lone, raise_with_note)
    assert not any(map(is_running, pids))
    assert lone.run(leave_mark) == [1]


@pytest.mark.parametrize(("pool", "function"), [("ranks", leave_group), ("lone", open_many_files)])
def test_processes_are_replaced_after_what_a_later_run_would_feel(request, pool, function):
    pool = request.getfixturevalue(pool)
    pids = pool.run(os.getpid)
    pool.run(function)
    assert not any(map(is_running, pids))
    assert len(pool.run(place)) == len(pids)


def test_an_interrupted_run_leaves_nothing_running(lone):
    pids = lone.run(os.getpid)
    main_thread = threading.get_ident()
    timer = threading.Timer(0.5, signal.pthread_kill, (main_thread, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        lone.run(time.sleep, 60)
    assert not any(map(is_running, pids))


def test_close_leaves_nothing_behind_and_the_pool_usable():
    pool = RankPool(1, process_group=False)
    with pool:
        (pid,) = pool.run(os.getpid)
    assert pool.pids == ()
    assert not is_running(pid)
    with pool:
        assert pool.run(os.getpid) != [pid]


def test_ranks_do_not_outlive_a_killed_caller(tmp_path):
    script = tmp_path / "caller.py"
    script.write_text(
        "import os, time\n"
        "from polyshard.conformance import RankPool\n"
        "pool = RankPool(1, process_group=False)\n"
        "pool.run(os.getpid)\n"
        "print(*pool.pids, flush=True)\n"
        "pool.run(time.sleep, 60)\n"
    )
    caller = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    with contextlib.closing(caller.stdout):
        (pid,) = map(int, caller.stdout.readline().split())
        caller.kill()
        caller.wait()
    assert ends(pid)


def test_the_caller_does_not_import_torch():
    program = "import sys, polyshard.conformance.ranks.pool; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
