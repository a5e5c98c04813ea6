"""Process groups for the dimensions of a mesh: none made twice, and all with one timeout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

__all__ = ["group_along", "group_timeout", "one_timeout"]

Rows = tuple[tuple[int, ...], ...]


#: By default group, since its end is the end of the others: the groups made for a set of rows.
_made: WeakKeyDictionary[ProcessGroup, dict[Rows, ProcessGroup]] = WeakKeyDictionary()


def group_along(ranks: torch.Tensor, dim: int) -> ProcessGroup:
    """Return this rank's group along a dimension of an array of all ranks.

    A group over all ranks is the job's default group, and a group that was made before is used
    again, those of single ranks included. Call it on every rank of the job.

    Args:
        ranks: Each rank of the job once, ascending within each row.
        dim: Along which the groups run.
    """
    rows: Rows = tuple(map(tuple, ranks.movedim(dim, -1).reshape(-1, ranks.size(dim)).tolist()))
    default, own = distributed_c10d._get_default_group(), dist.get_rank()
    if len(rows) == 1:
        return default
    made = _made.setdefault(default, {})
    if rows not in made:
        # Every rank makes every group, because torch counts them to name them.
        groups = [dist.new_group(list(row)) for row in rows]
        made[rows] = next(group for group, row in zip(groups, rows, strict=True) if own in row)
    return made[rows]


def group_timeout(group: ProcessGroup) -> timedelta | None:
    """Return how long a collective of a group may take; None if its backend has no such limit."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None


@contextmanager
def one_timeout(timeout: timedelta | None = None) -> Iterator[None]:
    """Give the groups that the body makes the timeout of the job's default group.

    torch gives every new group its own default of 10 or 30 minutes, whatever the default group was
    started with. Without a process group this does nothing.

    Args:
        timeout: What the default group, the job's store and all groups that are there get first
            (default: theirs stay as they are).
    """
    if not dist.is_initialized():
        yield
        return
    groups = distributed_c10d._world.pg_map
    if timeout is not None:
        distributed_c10d._get_default_store().set_timeout(timeout)
        _set_timeout(timeout, groups)
    before = set(groups)
    yield
    inherited = group_timeout(distributed_c10d._get_default_group())
    if inherited is not None:
        _set_timeout(inherited, groups.keys() - before)


def _set_timeout(timeout: timedelta, groups: Iterable[ProcessGroup]) -> None:
    for group in groups:
        if group_timeout(group) is not None:
            distributed_c10d._set_pg_timeout(timeout, group)
