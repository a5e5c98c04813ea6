"""What the suite runs on every rank; each function returns what the suite then judges.

None of them raises for what the suite looks for: a rank that fails ends the pool's processes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, Literal
from weakref import ReferenceType, ref

import torch.distributed as dist
from attrs import define, frozen
from torch import Tensor, nn

from polyshard.conformance.models import build_model, stamp, stamps_of
from polyshard.conformance.recipes import Outcome, Recipe, build_optimizer
from polyshard.conformance.trainings import Training, mesh_of, start, wrap
from polyshard.exceptions import PeerFailedError, PolyshardError
from polyshard.lifecycle.gradients import accumulate
from polyshard.lifecycle.parallelize import maybe_shard_optimizer, parallelize
from polyshard.lifecycle.rebuild import rebuild
from polyshard.lifecycle.state_dict import full_state_dict
from polyshard.parameters.names import canonical_parameter_name
from polyshard.registry.hookspecs import hookimpl
from polyshard.registry.registry import observe

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from polyshard.config.base import DistributedConfig
    from polyshard.config.parallelism import ParallelismSizes

__all__ = ["Ending", "Wrapped"]


class BodyError(Exception):
    """What a scenario raises inside a context of the library's, to see it come out again."""


# Wrapping


@frozen(kw_only=True)
class Wrapped:
    """A model and its optimizer, as the user made them and as the strategy returned them.

    Attributes:
        weights: The full state dict before and after.
        groups: The optimizer's groups before and after: options, and the parameters' names.
        steps: Every step count in the optimizer's state afterwards.
        stamps: By parameter name, an attribute that the user had set on each Parameter.
    """

    weights: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
    groups: tuple[list[dict[str, Any]], list[dict[str, Any]]]
    steps: list[float]
    stamps: dict[str, str | None]


def wrap_and_compare(
    config: DistributedConfig,
    recipe: Recipe,
    passed: bool,
    sizes: ParallelismSizes | None,
) -> Wrapped:
    """Wrap a model and its optimizer, and train nothing."""
    plain = build_model(recipe.model)
    weights = {name: value.clone() for name, value in plain.state_dict().items()}
    groups = _groups(build_optimizer(recipe.optimizer, plain), plain)
    stamp(plain)
    model, optimizer = wrap(config, recipe, model=plain, passed=passed, sizes=sizes)
    return Wrapped(
        weights=(weights, full_state_dict(model, rank0_only=False)),
        groups=(groups, _groups(optimizer, model)),
        steps=[float(state["step"]) for state in optimizer.state.values() if "step" in state],
        stamps=stamps_of(model),
    )


def _groups(optimizer: Optimizer, model: nn.Module) -> list[dict[str, Any]]:
    """Return the groups with the parameters' own names in place of the parameters."""
    names = {id(p): canonical_parameter_name(n) for n, p in model.named_parameters()}
    return [
        {**group, "params": [names.get(id(p), "not in the model") for p in group["params"]]}
        for group in optimizer.param_groups
    ]


# Training


def train_with_seed_per_rank(
    config: DistributedConfig, recipe: Recipe, sizes: ParallelismSizes | None
) -> Outcome:
    """Train a model that each rank initialised with its own seed."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    training = start(config, recipe, model=build_model(recipe.model, seed=rank), sizes=sizes)
    training.train(range(recipe.steps))
    return training.outcome()


def train_and_drop(
    config: DistributedConfig, recipe: Recipe, sizes: ParallelismSizes | None
) -> list[str]:
    """Train a model, and return what of it is in memory after that."""
    watched = _train_and_watch(config, recipe, sizes)
    gc.collect()
    return [name for name, reference in watched.items() if reference() is not None]


def _train_and_watch(
    config: DistributedConfig, recipe: Recipe, sizes: ParallelismSizes | None
) -> dict[str, ReferenceType[Any]]:
    """Train a model, and return references to it that do not keep it in memory."""
    module = build_model(recipe.model)
    training = start(config, recipe, model=module, sizes=sizes)
    training.train(range(recipe.steps))
    with rebuild(training.model):
        pass
    watched = {
        "the module": module,
        "the model": training.model,
        "the optimizer": training.optimizer,
    }
    watched.update(training.model.named_parameters())
    return {name: ref(value) for name, value in watched.items()}


def train_after_interrupted_microbatch(
    config: DistributedConfig, recipe: Recipe, sizes: ParallelismSizes | None
) -> Outcome:
    """Leave ``accumulate`` by an exception first, then train without it."""
    training = start(config, recipe, sizes=sizes)
    with suppress(BodyError), accumulate(training.model, last=False):
        raise BodyError
    training.train(range(recipe.steps))
    return training.outcome()


def clip_twice(
    config: DistributedConfig, recipe: Recipe, max_norm: float, sizes: ParallelismSizes | None
) -> tuple[float, float]:
    """Return the norm that clipping finds, and the norm that it finds right afterwards."""
    training = start(config, recipe, sizes=sizes)
    training.backward(step=0)
    return training.clip(max_norm, 2.0), training.clip(max_norm, 2.0)


def train_with_wrong_optimizer(
    config: DistributedConfig,
    recipe: Recipe,
    mistake: Literal["built before", "not sharded"],
    sizes: ParallelismSizes | None,
) -> Outcome | str:
    """Train with an optimizer made at the wrong time; return the error if one says so."""
    module = build_model(recipe.model)
    before = build_optimizer(recipe.optimizer, module)
    try:
        model, _ = parallelize(module, config, mesh=mesh_of(sizes))
        if mistake == "built before":
            optimizer = maybe_shard_optimizer(model, before)
        else:
            optimizer = build_optimizer(recipe.optimizer, model)
        training = Training(model, optimizer, recipe, config, mesh_of(sizes))
        training.train(range(recipe.steps))
    except PolyshardError as error:
        return str(error)
    return training.outcome()


# A failure on one rank


@frozen(kw_only=True)
class Ending:
    """How a step that all ranks take together ended on one of them.

    Attributes:
        kind: "not called" where the strategy has no such hook, "returned", "raised" for the error
            that this rank was made to raise, or "peer failed".
        rank: For "peer failed", the rank that is named as the first to fail.
        message: The error's text.
    """

    kind: Literal["not called", "returned", "raised", "peer failed"]
    rank: int | None = None
    message: str = ""


@define(eq=False)
class _FailingObserver:
    """Notices that one hook was called, and raises after it on the rank that is to fail."""

    hook: str = ""
    fails: bool = False
    called: bool = False

    def _after(self, hook: str) -> None:
        if hook == self.hook:
            self.called = True
            if self.fails:
                raise BodyError(f"raised in {hook}")

    @hookimpl(wrapper=True)
    def parallelize(self) -> Iterator[Any]:
        result = yield
        self._after("parallelize")
        return result

    @hookimpl(wrapper=True)
    def shard_optimizer(self) -> Iterator[Any]:
        result = yield
        self._after("shard_optimizer")
        return result

    @hookimpl(wrapper=True)
    def pre_rebuild(self) -> Iterator[Any]:
        result = yield
        self._after("pre_rebuild")
        return result

    @hookimpl(wrapper=True)
    def post_rebuild(self) -> Iterator[Any]:
        result = yield
        self._after("post_rebuild")
        return result


@cache
def _failing_observer() -> _FailingObserver:
    """Return this process's observer, which does nothing until it is given a hook.

    There is one because an observer cannot be taken away again.
    """
    observer = _FailingObserver()
    observe(observer)
    return observer


@contextmanager
def _watching(hook: str, fails: bool) -> Iterator[_FailingObserver]:
    observer = _failing_observer()
    observer.hook, observer.fails, observer.called = hook, fails, False
    try:
        yield observer
    finally:
        observer.hook = ""


def fail_in_hook(
    config: DistributedConfig,
    recipe: Recipe,
    hook: str,
    culprit: int,
    sizes: ParallelismSizes | None,
) -> Ending:
    """Let one rank fail in a hook, and return how this rank's call ended."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    with _watching(hook, fails=rank == culprit) as observer:
        try:
            model, _ = wrap(config, recipe, sizes=sizes)
            with rebuild(model):
                pass
        except BodyError as error:
            return Ending(kind="raised", message=str(error))
        except PeerFailedError as error:
            return Ending(kind="peer failed", rank=error.rank, message=str(error))
        return Ending(kind="returned" if observer.called else "not called")
