"""The same training twice: in one plain process, and on every rank under a strategy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from polyshard.config.parallelism import ParallelismSizes
from polyshard.conformance.models import (
    build_model,
    global_batch,
    inputs_and_targets,
    loss_on,
    tables_of_places,
)
from polyshard.conformance.recipes import Outcome, Recipe, build_optimizer
from polyshard.lifecycle.gradients import accumulate, clip_grad_norm
from polyshard.lifecycle.parallelize import maybe_shard_optimizer, parallelize
from polyshard.lifecycle.state_dict import full_state_dict
from polyshard.mesh.context import MeshContext
from polyshard.transforms.context_parallel.context import context_parallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from polyshard.config.base import DistributedConfig

__all__ = [
    "PlainTraining",
    "Training",
    "mesh_of",
    "start",
    "train_plain",
    "train_under",
    "wrap",
]


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
