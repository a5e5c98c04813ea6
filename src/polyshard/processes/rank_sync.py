"""Steps that all ranks take together: they succeed on all, or fail on all with the first error.

Ranks wait for each other in the job's key-value store rather than in a collective: a rank that
has failed cannot take part in a collective, and those that wait in one would wait for the whole
timeout.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import distributed_c10d

from polyshard.exceptions import PeerFailedError, RanksDisagreeError

__all__ = ["check_same_on_all_ranks", "raise_on_all_ranks"]


class _Scope:
    """What barriers are part of: the job, or another barrier.

    Every rank counts the same barriers of a set of ranks within a scope, so that the count gives
    each a key that all of them know. A rank that fails leaves its barrier and the count inside it,
    which is therefore not the job's: the others may go on to barriers that it never reaches.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self._barriers: Counter[tuple[int, ...]] = Counter()

    def next_key(self, members: tuple[int, ...]) -> str:
        """Return the key of the next barrier of these ranks."""
        self._barriers[members] += 1
        digest = hashlib.sha256(repr(members).encode()).hexdigest()[:16]
        return f"{self.key}/{digest}/{self._barriers[members]}"


#: The job, and the barriers that this rank is in, innermost last.
_scopes = [_Scope("polyshard")]


@contextmanager
def raise_on_all_ranks(action: str, members: Sequence[int]) -> Iterator[None]:
    """Run the body on all members and make it fail on all if it fails on one.

    The rank that fails raises its own error at once. The others raise ``PeerFailedError`` with
    the first error and its rank, also when theirs is only the broken connection that followed.

    Args:
        action: What is done, for the message.
        members: Global ranks that run the body; each of them must.

    Raises:
        PeerFailedError: Another member failed.
        RanksDisagreeError: A member did not get here within the job's timeout.
    """
    barrier = _open_barrier(action, tuple(members))
    if barrier is None:
        yield
        return
    _scopes.append(_Scope(barrier.key))
    try:
        yield
    except BaseException as error:
        barrier.report_failure(error)
        raise
    finally:
        _scopes.pop()
    barrier.wait_for_success()


def check_same_on_all_ranks(action: str, members: Sequence[int], facts: Mapping[str, str]) -> None:
    """Check that all members were started with the same facts.

    The first member to arrive states them. Long facts are compared by digest and fetched only
    where they differ. Call it inside ``raise_on_all_ranks``, so that the others learn of it.

    Raises:
        RanksDisagreeError: This rank's facts differ; the message shows each difference.
    """
    barrier = _open_barrier(f"{action} facts", tuple(members))
    if barrier is not None:
        barrier.compare(facts)


def _open_barrier(action: str, members: tuple[int, ...]) -> _StoreBarrier | None:
    """Return the barrier of the members, None if there is one alone."""
    if len(members) < 2 or not dist.is_initialized() or dist.get_backend() == "fake":
        return None
    return _StoreBarrier(action, len(members), _scopes[-1].next_key(members))


class _StoreBarrier:
    """One occasion on which a fixed set of ranks reports to the store."""

    def __init__(self, action: str, size: int, key: str) -> None:
        self.key = key
        self._action = action
        self._size = size
        self._rank = dist.get_rank()
        # The store of the default group is the one channel that needs no other rank to answer.
        self._store = distributed_c10d.PrefixStore(key, distributed_c10d._get_default_store())

    def report_failure(self, error: BaseException) -> None:
        """Record this rank's error unless another came first; then raise if it caused ours."""
        own = {"rank": self._rank, "error": f"{type(error).__name__}: {error}"}
        try:
            first = json.loads(self._store.compare_set("outcome", "", json.dumps(own)))
        except RuntimeError:
            return  # The store went down with the job; the rank's own error is what is left.
        if first is None or first["rank"] == self._rank:
            return
        if type(error) is RuntimeError or isinstance(error, dist.DistError):
            # What a torn connection looks like on the ranks that were waiting.
            raise self._peer_failed(first) from error
        error.add_note(f"rank {first['rank']} failed first: {first['error']}")

    def wait_for_success(self) -> None:
        if self._store.add("done", 1) == self._size:
            self._store.compare_set("outcome", "", "null")
        try:
            self._store.wait(["outcome"])
        except RuntimeError as error:
            arrived = self._store.add("done", 0)
            raise RanksDisagreeError(
                f"{self._action}: expected all {self._size} ranks to get here, found {arrived}; "
                "the others died, or never called it: call it on every rank"
            ) from error
        first = json.loads(self._store.get("outcome"))
        if first is not None:
            raise self._peer_failed(first)

    def compare(self, facts: Mapping[str, str]) -> None:
        stated = {
            name: {"rank": self._rank, "digest": hashlib.sha256(fact.encode()).hexdigest()}
            for name, fact in facts.items()
        }
        for name, fact in facts.items():
            self._store.set(f"{name}/{self._rank}", fact)
        first = json.loads(self._store.compare_set("facts", "", json.dumps(stated)))
        differences = [
            _difference(name, first[name]["rank"], self._fact(name, first), self._rank, fact)
            for name, fact in facts.items()
            if first[name]["digest"] != stated[name]["digest"]
        ]
        if differences:
            raise RanksDisagreeError(
                f"{self._action.removesuffix(' facts')}: expected the same on every rank, found "
                + "; ".join(differences)
            )

    def _fact(self, name: str, first: Mapping[str, Mapping[str, int]]) -> str:
        return self._store.get(f"{name}/{first[name]['rank']}").decode()

    def _peer_failed(self, first: Mapping[str, object]) -> PeerFailedError:
        rank, error = int(str(first["rank"])), str(first["error"])
        return PeerFailedError(
            f"{self._action}: rank {rank} failed first: {error}", rank=rank, error=error
        )


def _difference(name: str, first: int, theirs: str, rank: int, ours: str) -> str:
    """Show the first line in which two facts differ."""
    their_lines, our_lines = theirs.splitlines(), ours.splitlines()
    for their_line, our_line in zip(their_lines, our_lines, strict=False):
        if their_line != our_line:
            return f"{name} {their_line!r} on rank {first} and {our_line!r} on rank {rank}"
    return (
        f"{name} with {len(their_lines)} entries on rank {first} and with {len(our_lines)} entries "
        f"on rank {rank}"
    )
