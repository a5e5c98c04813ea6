"""rebuild: keep the strategy right while Parameters are replaced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from attrs import frozen
from torch import nn

from polyshard.lifecycle import rank_checks, wrapped_models
from polyshard.lifecycle.wrapped_models import WrappedModel
from polyshard.mesh.devices import mesh_ranks
from polyshard.mesh.process_groups import one_timeout
from polyshard.processes.rank_sync import raise_on_all_ranks
from polyshard.registry.registry import default_registry

__all__ = ["post_rebuild", "pre_rebuild", "rebuild"]


@frozen(eq=False)
class _Part:
    """A parallelized model as it was before the body.

    Attributes:
        known: What is remembered of it.
        of_strategy: What the strategy's ``pre_rebuild`` returned.
        versions: What its parameters held.
    """

    known: WrappedModel
    of_strategy: object
    versions: rank_checks.ParameterVersions

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that the model is spread over."""
        return mesh_ranks(self.known.mesh)


@frozen(eq=False)
class RebuildSnapshot:
    """What ``pre_rebuild`` remembers for ``post_rebuild``; nothing else reads it."""

    parts: Sequence[_Part]

    def check(self) -> None:
        """Raise if a parameter was changed on some ranks only."""
        for part in self.parts:
            rank_checks.check_same_changes(part.versions, part.known.model, part.members)

    def restore(self) -> None:
        """Let each strategy take over what its models hold now."""
        with one_timeout():
            for part in self.parts:
                default_registry().dispatch(
                    "post_rebuild",
                    part.known.config,
                    model=part.known.model,
                    snapshot=part.of_strategy,
                )


@contextmanager
def rebuild(model: nn.Module | Sequence[nn.Module]) -> Iterator[None]:
    """Keep the strategy right while the body replaces Parameters: reload, cast, re-tie.

    Wrap it around anything that touches the parameters after ``parallelize``, on every rank.
    Afterwards the model has the values that the body left in it. Also when the body raises the
    strategy is restored, and the body's error goes on.

    Args:
        model: What ``parallelize`` returned or the module given to it, or several of them. For a
            model that was never parallelized nothing is done.

    Raises:
        ModelError: It is a part of a parallelized model, or holds more than one.
        RebuildError: What the body did cannot be made right under the strategy, or it changed a
            parameter on some ranks only.
        PeerFailedError: Another rank failed inside.
    """
    with _restoring(pre_rebuild(model)):
        yield


def pre_rebuild(model: nn.Module | Sequence[nn.Module]) -> RebuildSnapshot | None:
    """Do what ``rebuild`` does before its body, for code that has no body to wrap.

    Whatever happens afterwards, call ``post_rebuild`` with the result, on every rank.
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    known = [k for m in models if (k := wrapped_models.find(m)) is not None and _has_rebuild(k)]
    if not known:
        return None
    with raise_on_all_ranks("pre_rebuild", _members(known)), one_timeout():
        parts = [_before(one) for one in known]
    return RebuildSnapshot(parts)


def post_rebuild(snapshot: RebuildSnapshot | None) -> None:
    """Do what ``rebuild`` does after its body; it raises the same errors."""
    with _restoring(snapshot):
        pass


def _has_rebuild(known: WrappedModel) -> bool:
    return default_registry().implements("post_rebuild", known.config)


def _before(known: WrappedModel) -> _Part:
    own = default_registry().dispatch("pre_rebuild", known.config, model=known.model)
    return _Part(known, own, rank_checks.parameter_versions(known.model))


def _members(models: Iterable[WrappedModel]) -> tuple[int, ...]:
    """Return the ranks that hold any of the models."""
    return tuple(sorted({rank for known in models for rank in mesh_ranks(known.mesh)}))


@contextmanager
def _restoring(snapshot: RebuildSnapshot | None) -> Iterator[None]:
    if snapshot is None:
        yield
        return
    with raise_on_all_ranks("rebuild", _members(part.known for part in snapshot.parts)):
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
