"""rebuild: keep the strategy right while Parameters are replaced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from attrs import frozen
from torch import nn

from polyshard.config.base import DistributedConfig
from polyshard.lifecycle import rank_checks, wrapped_models
from polyshard.mesh.process_groups import one_timeout
from polyshard.processes.rank_sync import raise_on_all_ranks
from polyshard.registry.registry import default_registry

__all__ = ["post_rebuild", "pre_rebuild", "rebuild"]


@frozen(eq=False)
class RebuildSnapshot:
    """What ``pre_rebuild`` remembers for ``post_rebuild``; nothing else reads it."""

    config: DistributedConfig
    parts: Sequence[nn.Module]
    of_strategy: Sequence[object]
    versions: Sequence[rank_checks.ParameterVersions]

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that hold any of the parts."""
        return tuple(
            sorted({rank for part in self.parts for rank in wrapped_models.members_of(part)})
        )

    def check(self) -> None:
        """Raise if a parameter was changed on some ranks only."""
        for part, versions in zip(self.parts, self.versions, strict=True):
            rank_checks.check_same_changes(versions, part, wrapped_models.members_of(part))

    def restore(self) -> None:
        """Let the strategy take over what the parts hold now."""
        with one_timeout():
            for part, own in zip(self.parts, self.of_strategy, strict=True):
                default_registry().dispatch("post_rebuild", self.config, model=part, snapshot=own)


@contextmanager
def rebuild(
    model: nn.Module | Sequence[nn.Module], config: DistributedConfig | None
) -> Iterator[None]:
    """Keep the strategy right while the body replaces Parameters: reload, cast, re-tie.

    Wrap it around anything that touches the parameters after ``parallelize``, on every rank.
    Afterwards the model has the values that the body left in it. Also when the body raises the
    strategy is restored, and the body's error goes on.

    Args:
        model: What ``parallelize`` returned, or several such parts.
        config: The config that they were parallelized with; None does nothing.

    Raises:
        RebuildError: What the body did cannot be made right under the strategy, or it changed a
            parameter on some ranks only.
        PeerFailedError: Another rank failed inside.
    """
    with _restoring(pre_rebuild(model, config)):
        yield


def pre_rebuild(
    model: nn.Module | Sequence[nn.Module], config: DistributedConfig | None
) -> RebuildSnapshot | None:
    """Do what ``rebuild`` does before its body, for code that has no body to wrap.

    Whatever happens afterwards, call ``post_rebuild`` with the result, on every rank.
    """
    registry = default_registry()
    if config is None or not registry.implements("post_rebuild", config):
        return None
    parts = [model] if isinstance(model, nn.Module) else list(model)
    members = sorted({rank for part in parts for rank in wrapped_models.members_of(part)})
    with raise_on_all_ranks("pre_rebuild", members), one_timeout():
        own = [registry.dispatch("pre_rebuild", config, model=part) for part in parts]
    return RebuildSnapshot(
        config, parts, own, [rank_checks.parameter_versions(part) for part in parts]
    )


def post_rebuild(snapshot: RebuildSnapshot | None) -> None:
    """Do what ``rebuild`` does after its body; it raises the same errors."""
    with _restoring(snapshot):
        pass


@contextmanager
def _restoring(snapshot: RebuildSnapshot | None) -> Iterator[None]:
    if snapshot is None:
        yield
        return
    with raise_on_all_ranks("rebuild", snapshot.members):
        try:
            yield
            snapshot.check()
        except BaseException as error:
            try:
                snapshot.restore()
            except Exception as second:
                error.add_note(f"restoring the model failed as well: {second}")
            raise
        snapshot.restore()
