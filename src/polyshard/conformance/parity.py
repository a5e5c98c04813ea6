"""The same training twice, in one plain process and under a strategy, and their comparison.

A ``Recipe`` says what is trained. ``train_plain`` runs it in the calling process without any
distribution, ``train_under`` runs it on every rank on that rank's share of each batch, and
``assert_parity`` compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import attrs
import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from polyshard.config.parallelism import ParallelismSizes
from polyshard.conformance.models import (
    build_model,
    global_batch,
    inputs_and_targets,
    loss_on,
    tables_of_places,
)
from polyshard.lifecycle.gradients import accumulate, clip_grad_norm
from polyshard.lifecycle.parallelize import maybe_shard_optimizer, parallelize
from polyshard.lifecycle.state_dict import full_state_dict
from polyshard.mesh.context import MeshContext
from polyshard.transforms.context_parallel.context import context_parallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from polyshard.config.base import DistributedConfig

__all__ = [
    "TOLERANCE",
    "Outcome",
    "ParityError",
    "PlainTraining",
    "Recipe",
    "Training",
    "assert_parity",
    "assert_same_weights",
    "build_optimizer",
    "mesh_of",
    "start",
    "train_plain",
    "train_under",
    "wrap",
]

#: Largest relative difference in float32 between one process and several: some ten times the
#: rounding of one operation, and a thousandth of what the smallest known fault makes.
TOLERANCE = 1e-6


class ParityError(AssertionError):
    """Two runs that should have been the same were not."""


@frozen(kw_only=True)
class Recipe:
    """What is trained and how; every step has its own batch.

    Attributes:
        model: A name in ``models.MODELS``.
        optimizer: A name in ``OPTIMIZERS``; each has two parameter groups that differ.
        steps: Number of optimizer steps.
        microbatches: Into how many microbatches each batch is cut, with ``accumulate`` around
            each; None for the batch in one piece without ``accumulate``.
        unadapted: Where the model leaves out its adapter, whose parameters then get no gradient:
            in every second step, or in the first or the last microbatch of each step.
        max_norm: The norm to which gradients are clipped; None does not clip.
        norm_type: The p of that norm.
        evaluate: Whether there is a forward without gradients in each step, and where.
        zero_grad: What clears the gradients: the optimizer, the optimizer in place
            (``set_to_none=False``), or the model.
        decay: The factor of the learning rate from step to step, through torch's scheduler.
    """

    model: str = "plain"
    optimizer: str = "sgd"
    steps: int = 5
    microbatches: int | None = None
    unadapted: Literal["odd steps", "first microbatch", "last microbatch"] | None = None
    max_norm: float | None = None
    norm_type: float = 2.0
    evaluate: Literal["before step", "after step"] | None = None
    zero_grad: Literal["optimizer", "in place", "model"] = "optimizer"
    decay: float = 1.0

    def __str__(self) -> str:
        values = attrs.asdict(self)
        defaults = attrs.asdict(Recipe())
        told = [f"{k} {v}" for k, v in values.items() if k == "model" or v != defaults[k]]
        return ", ".join(told)

    def adapts(self, step: int, microbatch: int) -> bool:
        """Tell whether the model uses its adapter here."""
        return {
            None: True,
            "odd steps": step % 2 == 0,
            "first microbatch": microbatch > 0,
            "last microbatch": microbatch + 1 < (self.microbatches or 1),
        }[self.unadapted]


@frozen(kw_only=True)
class Outcome:
    """What a training came to; one rank's view, equal on all ranks if all is right.

    Attributes:
        losses: The loss of each step over the global batch.
        norms: The gradient norm that clipping found in each step; empty without clipping.
        evaluations: The loss of each evaluation.
        weights: The full state dict at the end, float32 tensors on the CPU.
    """

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    evaluations: tuple[float, ...]
    weights: Mapping[str, Tensor]


OPTIMIZERS: Mapping[str, Callable[[list[dict[str, Any]]], Optimizer]] = {
    # Momentum and dampening show a hidden step, and SGD a wrong scale, which AdamW hides.
    "sgd": lambda groups: SGD(groups, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "adamw": lambda groups: AdamW(groups, lr=1e-2, weight_decay=0.1),
    "adamw foreach": lambda groups: AdamW(groups, lr=1e-2, weight_decay=0.1, foreach=True),
}


def build_optimizer(name: str, model: nn.Module) -> Optimizer:
    """Build an optimizer with two groups, as scripts do it: chosen by name, on this model.

    Biases, norms and gains are not decayed and learn more slowly. ``"params"`` is not the first
    key of its group, and each group has a key of the user's own.
    """
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    decayed = [p for n, p in trained if _is_decayed(n)]
    others = [p for n, p in trained if not _is_decayed(n)]
    if not decayed or not others:
        raise ParityError(
            "expected parameters with and without weight decay, found the names "
            + ", ".join(n for n, _ in trained)
        )
    return OPTIMIZERS[name](
        [
            {"role": "decayed", "params": decayed},
            {"role": "others", "params": others, "weight_decay": 0.0, "lr": 5e-3},
        ]
    )


def _is_decayed(name: str) -> bool:
    return name.endswith("weight") and "norm" not in name


class PlainTraining:
    """A training in one process on the whole batch; what distribution changes is a method."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, recipe: Recipe) -> None:
        self.model = model
        self.optimizer = optimizer
        self.recipe = recipe
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, recipe.decay)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.evaluations: list[float] = []

    def train(self, steps: Iterable[int]) -> None:
        """Take these steps of the recipe."""
        for step in steps:
            self._clear_gradients()
            self.losses.append(self.backward(step))
            if self.recipe.max_norm is not None:
                self.norms.append(self.clip(self.recipe.max_norm, self.recipe.norm_type))
            if self.recipe.evaluate == "before step":
                self._evaluate(step)
            self.optimizer.step()
            self.scheduler.step()
            if self.recipe.evaluate == "after step":
                self._evaluate(step)

    def backward(self, step: int) -> float:
        """Add up the gradients of a step's batch, and return this process's loss on it."""
        pieces = self.recipe.microbatches or 1
        loss = 0.0
        for index, tokens in enumerate(global_batch(step).chunk(pieces)):
            sequences = inputs_and_targets(self.share(tokens))
            with self.accumulate(last=index + 1 == pieces), self.cut(*sequences):
                adapt = self.recipe.adapts(step, index)
                part = loss_on(self.model, *sequences, adapt=adapt) / pieces
                part.backward()  # type: ignore[no-untyped-call]
            loss += part.item()
        return loss

    def _clear_gradients(self) -> None:
        if self.recipe.zero_grad == "model":
            self.model.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=self.recipe.zero_grad == "optimizer")

    def _evaluate(self, step: int) -> None:
        self.model.eval()
        sequences = inputs_and_targets(self.share(global_batch(step + 100)))
        with torch.no_grad(), self.cut(*sequences):
            loss = loss_on(self.model, *sequences)
        self.evaluations.append(loss.item())
        self.model.train()

    def outcome(self) -> Outcome:
        """Return what the training came to so far."""
        return Outcome(
            losses=self.average(self.losses),
            norms=tuple(self.norms),
            evaluations=self.average(self.evaluations),
            weights=self.weights(),
        )

    def share(self, tokens: Tensor) -> Tensor:
        """Return the part of a batch that this process computes."""
        return tokens

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        """Return the context of one microbatch."""
        return nullcontext()

    def cut(self, *sequences: Tensor) -> AbstractContextManager[None]:
        """Return the context in which sequences are the parts that this process computes."""
        return nullcontext()

    def clip(self, max_norm: float, norm_type: float) -> float:
        """Clip the gradients and return their norm before."""
        parameters = self.model.parameters()
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type).item()

    def average(self, losses: Sequence[float]) -> tuple[float, ...]:
        """Return the mean over the processes of each of this process's losses."""
        return tuple(losses)

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the state dict."""
        return {name: value.clone() for name, value in self.model.state_dict().items()}


class Training(PlainTraining):
    """A training under a strategy, on every rank.

    Ranks that differ in the mesh dimension ``tp`` alone train on the same sequences, those that
    differ in ``cp`` on parts of the same ones; without a mesh each has sequences of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        recipe: Recipe,
        config: DistributedConfig,
        mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__(model, optimizer, recipe)
        self.config = config
        self.mesh = mesh
        self.device = next(model.parameters()).device

    def share(self, tokens: Tensor) -> Tensor:
        """Return this rank's equal part of a batch, on the device of the model."""
        index, count = self._place()
        if len(tokens) % count:
            raise ValueError(
                f"expected a number of ranks that divides {len(tokens)} sequences, found {count}; "
                "use 1, 2, 4 or 8 ranks"
            )
        return tokens.chunk(count)[index].to(self.device)

    def _place(self) -> tuple[int, int]:
        """Return which part of a batch is this rank's, and of how many."""
        if self.mesh is None:
            return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        index, count = 0, 1
        names = self.mesh.mesh_dim_names or ()
        for name, place, size in zip(
            names, self.mesh.get_coordinate() or (), self.mesh.shape, strict=True
        ):
            if name not in ("cp", "tp"):
                index, count = index * size + place, count * size
        return index, count

    def cut(self, *sequences: Tensor) -> AbstractContextManager[None]:
        """Return Polyshard's context for context-parallel ranks."""
        tables = tables_of_places(self.model)
        dims = [1] * len(sequences) + [0] * len(tables)
        return context_parallel(self.mesh, buffers=[*sequences, *tables], seq_dims=dims)

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        """Return Polyshard's context if the recipe has microbatches."""
        if self.recipe.microbatches is None:
            return nullcontext()
        return accumulate(self.model, last=last)

    def clip(self, max_norm: float, norm_type: float) -> float:
        """Clip through Polyshard."""
        return clip_grad_norm(self.model, max_norm, norm_type).item()

    def average(self, losses: Sequence[float]) -> tuple[float, ...]:
        """Return the mean over all ranks."""
        if not dist.is_initialized():
            return tuple(losses)
        total = torch.tensor(losses, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return tuple((total / dist.get_world_size()).tolist())

    def weights(self) -> dict[str, Tensor]:
        """Return the full state dict."""
        return full_state_dict(self.model, rank0_only=False)


@cache
def train_plain(recipe: Recipe) -> Outcome:
    """Run a recipe in this process, undistributed; the outcome is remembered for the next call."""
    model = build_model(recipe.model)
    training = PlainTraining(model, build_optimizer(recipe.optimizer, model), recipe)
    training.train(range(recipe.steps))
    return training.outcome()


@cache
def mesh_of(sizes: ParallelismSizes | None) -> DeviceMesh | None:
    """Return the mesh of these sizes, one for the life of a process; None is the default mesh."""
    return None if sizes is None else MeshContext.build(sizes).mesh


def wrap(
    config: DistributedConfig,
    recipe: Recipe,
    *,
    model: nn.Module | None = None,
    passed: bool = False,
    sizes: ParallelismSizes | None = None,
) -> tuple[nn.Module, Optimizer]:
    """Set a model and its optimizer up under a strategy as a script would, on every rank.

    Args:
        config: Names the strategy.
        recipe: What will be trained.
        model: The model (default: the recipe's, from seed 0 on every rank).
        passed: Whether the optimizer is built before and passed to ``parallelize``, or built on
            the parallelized model and given to ``maybe_shard_optimizer``.
        sizes: Of the mesh (default: one data-parallel dimension over all ranks).
    """
    model = build_model(recipe.model) if model is None else model
    early = build_optimizer(recipe.optimizer, model) if passed else None
    model, bound = parallelize(model, config, mesh=mesh_of(sizes), optimizer=early)
    optimizer = build_optimizer(recipe.optimizer, model) if bound is None else bound
    return model, maybe_shard_optimizer(model, optimizer)


def start(
    config: DistributedConfig,
    recipe: Recipe,
    *,
    model: nn.Module | None = None,
    passed: bool = False,
    sizes: ParallelismSizes | None = None,
) -> Training:
    """Return a training whose model and optimizer are those of ``wrap``."""
    wrapped, optimizer = wrap(config, recipe, model=model, passed=passed, sizes=sizes)
    return Training(wrapped, optimizer, recipe, config, mesh_of(sizes))


def train_under(
    config: DistributedConfig,
    recipe: Recipe,
    *,
    passed: bool = False,
    sizes: ParallelismSizes | None = None,
) -> Outcome:
    """Run a recipe under a strategy; called on every rank, with the arguments of ``wrap``."""
    training = start(config, recipe, passed=passed, sizes=sizes)
    training.train(range(recipe.steps))
    return training.outcome()


def assert_parity(
    found: Sequence[Outcome], expected: Outcome, recipe: Recipe, *, tolerance: float = TOLERANCE
) -> None:
    """Compare what each rank came to with what one process came to.

    Weights are compared only under SGD: where a gradient is nearly zero, AdamW turns its rounding
    into a step of full size.

    Args:
        found: The outcome of each rank.
        expected: The outcome of one process.
        recipe: What was trained.
        tolerance: Largest relative difference; for weights, relative to the tensor's largest.

    Raises:
        ParityError: They differ; the message has the largest difference and where it is.
    """
    for rank, outcome in enumerate(found):
        where = f"rank {rank}, {recipe}"
        for what in ("losses", "norms", "evaluations"):
            _compare_steps(
                f"{where}: {what}", getattr(outcome, what), getattr(expected, what), tolerance
            )
        if recipe.optimizer == "sgd":
            assert_same_weights(outcome.weights, expected.weights, tolerance, where=where)


def assert_same_weights(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerance: float = 0.0,
    *,
    where: str = "",
) -> None:
    """Compare two state dicts: names, shapes, dtypes and values.

    Args:
        found: The one to judge.
        expected: The one that is right.
        tolerance: Largest difference, relative to the largest value of the tensor.
        where: What the message begins with.

    Raises:
        ParityError: They differ; the message names the tensor that differs most.
    """
    if found.keys() != expected.keys():
        raise ParityError(
            f"{where}: expected exactly the tensors of one process, missing are "
            f"{sorted(expected.keys() - found.keys())}, unexpected are "
            f"{sorted(found.keys() - expected.keys())}"
        )
    differences = {
        name: _tensor_difference(f"{where}: {name}", found[name], expected[name])
        for name in expected
    }
    worst = max(differences, key=differences.__getitem__)
    if differences[worst] > tolerance:
        wrong = sum(difference > tolerance for difference in differences.values())
        raise ParityError(
            f"{where}: {wrong} of {len(differences)} tensors differ from one process; most does "
            f"{worst}, by {differences[worst]:.1e} of its largest value (tolerance {tolerance:g})"
        )


def _compare_steps(
    where: str, found: Sequence[float], expected: Sequence[float], tolerance: float
) -> None:
    if len(found) != len(expected):
        raise ParityError(f"{where}: expected {len(expected)} values, found {len(found)}")
    differences = [
        _as_difference(abs(f - e) / abs(e)) for f, e in zip(found, expected, strict=True)
    ]
    if max(differences, default=0.0) > tolerance:
        step = differences.index(max(differences))
        raise ParityError(
            f"{where} differ from one process, most in step {step}: expected "
            f"{expected[step]:.9g}, found {found[step]:.9g}, a relative difference of "
            f"{differences[step]:.1e} (tolerance {tolerance:g})"
        )


def _tensor_difference(where: str, found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two tensors relative to the largest value expected."""
    for what in ("shape", "dtype", "device"):
        if getattr(found, what) != getattr(expected, what):
            raise ParityError(
                f"{where}: expected {what} {getattr(expected, what)}, found {getattr(found, what)}"
            )
    if type(found) is not Tensor:
        raise ParityError(f"{where}: expected a plain tensor, found a {type(found).__name__}")
    scale = expected.abs().max().item() or 1.0
    return _as_difference((found - expected).abs().max().item() / scale)


def _as_difference(value: float) -> float:
    """Return the value, or infinity for NaN, which no comparison would find too large."""
    return math.inf if math.isnan(value) else value
