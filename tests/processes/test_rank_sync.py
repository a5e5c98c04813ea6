"""Steps that all ranks take together fail on all of them, with the first error and its rank."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from polyshard.conformance import RankPool, RanksFailed
from polyshard.exceptions import PeerFailedError, RanksDisagreeError
from polyshard.mesh.devices import mesh_ranks
from polyshard.processes.process_group import world_size
from polyshard.processes.rank_sync import check_same_on_all_ranks, raise_on_all_ranks


def everyone() -> tuple[int, ...]:
    return tuple(range(world_size()))


def succeed() -> int:
    with raise_on_all_ranks("work", everyone()):
        pass
    with raise_on_all_ranks("more work", everyone()):
        pass
    return world_size()


def fail_on_rank_one() -> str:
    try:
        with raise_on_all_ranks("work", everyone()):
            if dist.get_rank() == 1:
                raise KeyError("the cause")
    except (KeyError, PeerFailedError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def fail_on_rank_one_in_a_collective() -> str:
    with raise_on_all_ranks("work", everyone()):
        if dist.get_rank() == 1:
            raise KeyError("the cause")
        dist.all_reduce(torch.zeros(1))
    return "no error"


def fail_everywhere() -> str:
    try:
        with raise_on_all_ranks("work", everyone()):
            raise ValueError(f"on rank {dist.get_rank()}")
    except ValueError as error:
        return str(error)


def fail_then_succeed() -> bool:
    fail_on_rank_one()
    succeed()
    return True


def fail_before_what_the_others_go_on_to() -> bool:
    try:
        with raise_on_all_ranks("work", everyone()):
            if dist.get_rank() == 1:
                raise KeyError("the cause")
            check_same_on_all_ranks("work", everyone(), {"fact": "of rank 0"})
    except (KeyError, PeerFailedError):
        pass
    return succeed() == world_size()


def subset() -> str:
    if dist.get_rank() == 0:
        return "not a member"
    with raise_on_all_ranks("work", (1,)):
        return "a member"


def compare(facts: list[dict[str, str]]) -> str:
    try:
        with raise_on_all_ranks("parallelize", everyone()):
            check_same_on_all_ranks("parallelize", everyone(), facts[dist.get_rank()])
    except (RanksDisagreeError, PeerFailedError) as error:
        return f"{type(error).__name__}: {error}"
    return "agreed"


def die_before_meeting() -> None:
    if dist.get_rank() == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    with raise_on_all_ranks("work", everyone()):
        pass


two_ranks = pytest.mark.world_size(2)


def test_they_succeed_together(ranks: RankPool, world_size: int) -> None:
    assert ranks.run(succeed) == [world_size] * world_size


def test_without_a_process_group_there_is_nobody_to_meet() -> None:
    assert succeed() == 1
    assert mesh_ranks(None) == (0,)


@two_ranks
def test_all_fail_if_one_does(ranks: RankPool) -> None:
    assert ranks.run(fail_on_rank_one) == [
        "PeerFailedError: work: rank 1 failed first: KeyError: 'the cause'",
        "KeyError: 'the cause'",
    ]


@two_ranks
def test_the_next_step_is_unharmed(ranks: RankPool) -> None:
    assert ranks.run(fail_then_succeed) == [True, True]
    assert ranks.run(fail_before_what_the_others_go_on_to) == [True, True]


@two_ranks
def test_each_raises_its_own_error_if_all_fail(ranks: RankPool) -> None:
    assert ranks.run(fail_everywhere) == ["on rank 0", "on rank 1"]


@two_ranks
def test_a_broken_connection_does_not_hide_the_first_error(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks.run(fail_on_rank_one_in_a_collective)
    assert caught.value.first.rank == 1
    assert caught.value.first.type_name == "KeyError"


@two_ranks
def test_only_members_meet(ranks: RankPool) -> None:
    assert ranks.run(subset) == ["not a member", "a member"]


@two_ranks
@pytest.mark.parametrize(
    ("facts", "named"),
    [
        (["plugin=x 1.0", "plugin=x 1.1"], ["plugin", "'x 1.0'", "'x 1.1'"]),
        (["model=M\nw [2]\nb [1]", "model=M\nw [3]\nb [1]"], ["model", "'w [2]'", "'w [3]'"]),
        (["model=M\nw [2]", "model=M\nw [2]\nb [1]"], ["model", "2 entries", "3 entries"]),
    ],
)
def test_ranks_with_different_facts_fail_together(
    ranks: RankPool, facts: list[str], named: list[str]
) -> None:
    answers = ranks.run(compare, [dict([fact.split("=")]) for fact in facts])
    assert sorted(a.partition(":")[0] for a in answers) == ["PeerFailedError", "RanksDisagreeError"]
    for answer in answers:
        assert "parallelize: expected the same on every rank" in answer
        assert all(word in answer for word in named)


@two_ranks
def test_ranks_with_the_same_facts_agree(ranks: RankPool) -> None:
    assert ranks.run(compare, [{"plugin": "x 1.0"}] * 2) == ["agreed", "agreed"]


@two_ranks
def test_a_dead_rank_ends_the_wait(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks.run(die_before_meeting)
    assert caught.value.first.rank == 1
