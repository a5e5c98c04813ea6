"""Training before and after one of the ``CHANGES``, under a strategy and in a plain process."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Literal

import torch.distributed as dist
from attrs import frozen

from polyshard.conformance.models import TinyModel, build_model, stamp, stamps_of
from polyshard.conformance.parameter_changes import CHANGES, Values
from polyshard.conformance.recipes import Outcome, Recipe, build_optimizer
from polyshard.conformance.trainings import PlainTraining, Training, mesh_of, start
from polyshard.exceptions import OptimizerError, PeerFailedError, RebuildError
from polyshard.lifecycle.parallelize import maybe_shard_optimizer, parallelize
from polyshard.lifecycle.rebuild import post_rebuild, pre_rebuild, rebuild
from polyshard.lifecycle.state_dict import load_full_state_dict

if TYPE_CHECKING:
    from polyshard.config.base import DistributedConfig
    from polyshard.config.parallelism import ParallelismSizes

__all__ = [
    "FRESH",
    "RECIPE",
    "Trained",
    "When",
    "fail_in_body",
    "train_after",
    "train_after_loading",
    "train_after_refusal",
    "train_parts_after_hooks",
    "train_plain_after",
    "train_unannounced",
]

#: Which optimizer steps after the rebuild: one that has stepped before it, one that was built
#: after it, or one that the body built on the parameters that it put there.
When = Literal["before", "after", "inside"]

RECIPE = Recipe(model="mixed", steps=2)
BEFORE, AFTER = range(RECIPE.steps), range(RECIPE.steps, 2 * RECIPE.steps)

#: The Parameter on which the body of a rebuild sets its own stamp.
FRESH = "blocks.2.down.weight"


@frozen(kw_only=True, eq=False)
class Trained:
    """What came of a training across a rebuild.

    Attributes:
        outcome: Of its steps.
        stamps: By parameter name, what is left of what was set on each Parameter.
    """

    outcome: Outcome
    stamps: dict[str, str | None]


def train_after(
    config: DistributedConfig, change: str, when: When, sizes: ParallelismSizes | None
) -> Trained | str:
    """Train after a change inside ``rebuild``, or return the error that refuses it.

    The first steps are taken before the change, unless the optimizer is built later.
    """
    module, values = _stamped_model(), _new_values()
    if when == "before":
        training = start(config, RECIPE, model=module, passed=True, sizes=sizes)
        training.train(BEFORE)
        model = training.model
    else:
        model, _ = parallelize(module, config, mesh=mesh_of(sizes))
    try:
        with rebuild(model):
            CHANGES[change].apply(module, values)
            module.get_parameter(FRESH).stamp = "fresh"  # type: ignore[attr-defined]
            optimizer = build_optimizer(RECIPE.optimizer, module) if when == "inside" else None
    except (RebuildError, PeerFailedError) as error:
        return str(error)
    if when != "before":
        optimizer = optimizer or build_optimizer(RECIPE.optimizer, model)
        try:
            optimizer = maybe_shard_optimizer(model, optimizer)
        except OptimizerError as error:
            return str(error)
        training = Training(model, optimizer, RECIPE, config, mesh_of(sizes))
    training.train(AFTER)
    return Trained(outcome=training.outcome(), stamps=stamps_of(model))


def train_after_loading(config: DistributedConfig, sizes: ParallelismSizes | None) -> Outcome:
    """Train after a load of new values that the first rank alone has."""
    training = start(config, RECIPE, passed=True, sizes=sizes)
    training.train(BEFORE)
    first = not dist.is_initialized() or dist.get_rank() == 0
    load_full_state_dict(training.model, _new_values() if first else None)
    training.train(AFTER)
    return training.outcome()


def train_after_refusal(
    config: DistributedConfig, change: str, sizes: ParallelismSizes | None
) -> tuple[str, Outcome]:
    """Return the error that refuses a change, and how training goes on after it."""
    module = build_model(RECIPE.model)
    training = start(config, RECIPE, model=module, passed=True, sizes=sizes)
    training.train(BEFORE)
    refusal = ""
    try:
        with rebuild(training.model):
            CHANGES[change].apply(module, _new_values())
    except RebuildError as error:
        refusal = str(error)
    training.train(AFTER)
    return refusal, training.outcome()


def train_unannounced(
    config: DistributedConfig, change: str, sizes: ParallelismSizes | None
) -> Outcome | str:
    """Train after a change outside of ``rebuild``, or return the error that refuses it."""
    module = build_model(RECIPE.model)
    training = start(config, RECIPE, model=module, passed=True, sizes=sizes)
    training.train(BEFORE)
    try:
        CHANGES[change].apply(module, _new_values())
        training.train(AFTER)
    except RebuildError as error:
        return str(error)
    return training.outcome()


def train_parts_after_hooks(
    config: DistributedConfig, change: str, recipe: Recipe, sizes: ParallelismSizes | None
) -> list[Outcome]:
    """Train two models after a change of both between ``pre_rebuild`` and ``post_rebuild``."""
    modules = [build_model(recipe.model) for _ in range(2)]
    trainings = [start(config, recipe, model=m, passed=True, sizes=sizes) for m in modules]
    for training in trainings:
        training.train(BEFORE)
    snapshot = pre_rebuild([training.model for training in trainings])
    for module in modules:
        CHANGES[change].apply(module, _new_values())
    post_rebuild(snapshot)
    for training in trainings:
        training.train(AFTER)
    return [training.outcome() for training in trainings]


def fail_in_body(
    config: DistributedConfig, culprit: int, sizes: ParallelismSizes | None
) -> tuple[str, Outcome]:
    """Fail on one rank after changes on all; return what this rank raised and how it goes on."""
    module = build_model(RECIPE.model)
    training = start(config, RECIPE, model=module, passed=True, sizes=sizes)
    raised = ""
    try:
        with rebuild(training.model):
            CHANGES["new over storage"].apply(module, _new_values())
            if (dist.get_rank() if dist.is_initialized() else 0) == culprit:
                raise ValueError("raised in the body")
    except (ValueError, PeerFailedError) as error:
        raised = f"{type(error).__name__}: {error}"
    training.train([*BEFORE, *AFTER])
    return raised, training.outcome()


@cache
def train_plain_after(change: str, when: When, recipe: Recipe = RECIPE) -> Outcome:
    """Do in this process, undistributed, what ``train_after`` does."""
    model = build_model(recipe.model)
    training = PlainTraining(model, build_optimizer(recipe.optimizer, model), recipe)
    if when == "before":
        training.train(BEFORE)
    expected = CHANGES[change].expected
    if expected is None:
        raise ValueError(f"{change!r} must be refused, and nothing comes of it")
    expected(model, _new_values())
    training.train(AFTER)
    return training.outcome()


def _stamped_model() -> TinyModel:
    model = build_model(RECIPE.model)
    stamp(model)
    return model


def _new_values() -> Values:
    """Return new values by name, as a file has them: each name its own tensor, tied or not."""
    state = build_model(RECIPE.model, seed=1).state_dict()
    return {name: value.clone() for name, value in state.items()}
