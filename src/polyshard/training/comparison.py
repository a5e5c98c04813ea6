"""Runs of the same training, side by side: how far each is from the reference, and at what cost.

A trial is equal to the reference if the loss and the gradient norm of every step, and every final
weight, are within a tolerance. Losses and norms are compared relative to the reference's value;
weights relative to the largest of their tensor, since fp32 arithmetic in another order moves the
small ones of a tensor as far as the large ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol, Self

from attrs import evolve, field, frozen

from polyshard.config.base import DistributedConfig
from polyshard.exceptions import PolyshardError
from polyshard.processes.launcher import Job, JobFailedError, default_threads, launch
from polyshard.training.config import TrainingConfig

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Candidate",
    "Comparison",
    "Difference",
    "Run",
    "Tolerance",
    "Trial",
    "Watcher",
    "compare",
    "measure_difference",
]


@frozen(kw_only=True)
class Tolerance:
    """How far apart fp32 runs of the same training may be and still count as equal.

    Attributes:
        loss: Of a step's loss, relative.
        grad_norm: Of a step's gradient norm, relative.
        weight: Of a final weight, relative to the largest of its tensor; None if weights say
            nothing.
    """

    loss: float = 1e-6
    grad_norm: float = 1e-6
    weight: float | None = 1e-6

    @classmethod
    def under(cls, optimizer: str) -> Self:
        """Return what can be asked for under an optimizer.

        AdamW divides each gradient by its own size. Where one is almost zero, its rounding alone
        decides where the weight goes, so that single weights end up apart.
        """
        return cls(grad_norm=1e-5, weight=None) if optimizer == "adamw" else cls()


@frozen(kw_only=True)
class Run:
    """What one training came to.

    Attributes:
        losses: Mean loss over the whole batch, per step, in nats per byte.
        grad_norms: Global norm of the gradients, per step.
        step_seconds: Time of each step on rank 0.
        peak_rss_bytes: Largest resident memory, per rank.
        parameter_bytes: Bytes held for parameters between steps, per rank.
        optimizer_bytes: Bytes held for the optimizer's state, per rank.
    """

    losses: list[float]
    grad_norms: list[float]
    step_seconds: list[float]
    peak_rss_bytes: list[int]
    parameter_bytes: list[int]
    optimizer_bytes: list[int]

    @property
    def median_step_seconds(self) -> float:
        """The median time of a step."""
        return median(self.step_seconds)


@frozen(kw_only=True)
class Difference:
    """How far a run is from the reference, at its worst.

    Attributes:
        loss: Of a step's loss, relative to the reference's.
        loss_absolute: The same in nats.
        grad_norm: Of a step's gradient norm, relative.
        weight: Of a final weight, relative to the largest of its tensor in the reference.
        weight_absolute: The same as it is.
        worst_weight: Name of the tensor with the largest relative difference.
    """

    loss: float
    loss_absolute: float
    grad_norm: float
    weight: float
    weight_absolute: float
    worst_weight: str

    def excesses(self, tolerance: Tolerance) -> list[str]:
        """Return, in words, each difference that is larger than it may be, or not a number."""
        parts = [
            ("a loss", self.loss, tolerance.loss),
            ("a gradient norm", self.grad_norm, tolerance.grad_norm),
            (f"a final weight ({self.worst_weight})", self.weight, tolerance.weight),
        ]
        return [
            f"{what} is off by {value:.1e} relative, more than {limit:.0e}"
            for what, value, limit in parts
            if limit is not None and not value <= limit
        ]


@frozen(kw_only=True)
class Candidate:
    """A strategy to try.

    Attributes:
        strategy: Its name.
        options: What the user set of its config.
        distribution: Who ships it.
        version: Version of that distribution.
        config: Its config; None if it cannot be made.
        problem: Why not.
    """

    strategy: str
    options: Mapping[str, Any] = field(factory=dict)
    distribution: str = ""
    version: str = ""
    config: DistributedConfig | None = None
    problem: str | None = None

    @property
    def label(self) -> str:
        """The name with its options, as tables and plots show it."""
        options = ", ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.strategy} ({options})" if options else self.strategy


@frozen(kw_only=True)
class Trial:
    """What became of a candidate.

    Attributes:
        candidate: Which.
        world_size: Number of ranks.
        run: What it came to; None if it failed.
        difference: From the reference; None if it failed.
        problem: Why it is not equal to the reference; None if it is.
        details: More on the problem, such as the traceback of the rank that failed.
    """

    candidate: Candidate
    world_size: int
    run: Run | None = None
    difference: Difference | None = None
    problem: str | None = None
    details: str = ""

    @property
    def equal(self) -> bool:
        """Whether it ran and came out equal to the reference."""
        return self.problem is None


@frozen(kw_only=True)
class Comparison:
    """The reference and every trial.

    Attributes:
        config: The training that all of them did; its ``distributed`` is None.
        reference: Plain PyTorch in one process.
        trials: One for each candidate, in their order.
    """

    config: TrainingConfig
    reference: Run
    trials: list[Trial]

    @property
    def tolerance(self) -> Tolerance:
        """What counts as equal."""
        return Tolerance.under(self.config.optimizer.name)


class Watcher(Protocol):
    """Who is told how the runs go on."""

    def begin(self, label: str) -> None:
        """Take note that a run is being started."""

    def step(self, label: str, step: Mapping[str, Any]) -> None:
        """Take note of a step."""

    def warn(self, label: str, message: str) -> None:
        """Take note of a warning."""

    def end(self, label: str, problem: str | None) -> None:
        """Take note that a run is over, and whether it came out well."""


def compare(
    candidates: Sequence[Candidate],
    config: TrainingConfig,
    watcher: Watcher,
    *,
    world_size: int,
    device: str | None = None,
    verbose: bool = False,
) -> Comparison:
    """Run the training in one plain process and then under each candidate.

    A candidate that fails is a trial with a problem; the others go on.

    Args:
        candidates: What to try.
        config: The training; its ``distributed`` is None.
        watcher: Is told of each run; the first has the label ``"reference"``.
        world_size: Number of ranks of each trial.
        device: ``"cpu"``, ``"cuda"``, or None for CUDA where there is a device.
        verbose: Let through what the processes print.

    Raises:
        LaunchError: The reference failed, or the processes cannot be started.
    """
    with TemporaryDirectory(prefix="polyshard-compare-") as name:
        bench = _TrialRunner(Path(name), config, watcher, world_size, device, verbose)
        reference = bench.run_reference()
        return Comparison(
            config=config,
            reference=reference,
            trials=[bench.run_trial(candidate, reference) for candidate in candidates],
        )


@frozen
class _TrialRunner:
    """Where the runs of one comparison are made."""

    folder: Path
    config: TrainingConfig
    watcher: Watcher
    world_size: int
    device: str | None
    verbose: bool

    def run_reference(self) -> Run:
        self.watcher.begin("reference")
        reference = self._run("reference", self.config, 1)
        self.watcher.end("reference", None)
        return reference

    def run_trial(self, candidate: Candidate, reference: Run) -> Trial:
        trial = Trial(candidate=candidate, world_size=self.world_size, problem=candidate.problem)
        self.watcher.begin(candidate.label)
        if candidate.config is not None:
            config = evolve(self.config, distributed=candidate.config)
            try:
                run = self._run(candidate.label, config, self.world_size)
            except PolyshardError as error:
                trial = _failed(trial, error)
            else:
                weights = self._weights(candidate.label), self._weights("reference")
                tolerance = Tolerance.under(self.config.optimizer.name)
                trial = _judged(trial, run, reference, *weights, tolerance)
        self.watcher.end(candidate.label, trial.problem)
        return trial

    def _run(self, label: str, config: TrainingConfig, processes: int) -> Run:
        job = Job(
            target="polyshard.training.jobs:run",
            arguments={"config": config.to_dict(), "weights": str(self._weights(label))},
            processes=processes,
            device=self.device,
            join=config.distributed is not None,
            # The reference gets no more than a rank, or its step times would be its threads'.
            threads=default_threads(self.world_size),
        )
        results = launch(
            job,
            on_event=lambda step: self.watcher.step(label, step),
            on_warning=lambda message: self.watcher.warn(label, message),
            verbose=self.verbose,
        )
        return _merge(results)

    def _weights(self, label: str) -> Path:
        name = "reference" if label == "reference" else "trial"
        return self.folder / f"{name}.pt"


def _merge(results: Sequence[Mapping[str, Any]]) -> Run:
    """Join what the ranks returned; losses and norms are the same on all of them."""
    first = results[0]
    return Run(
        losses=first["losses"],
        grad_norms=first["grad_norms"],
        step_seconds=first["step_seconds"],
        peak_rss_bytes=[result["peak_rss_bytes"] for result in results],
        parameter_bytes=[result["parameter_bytes"] for result in results],
        optimizer_bytes=[result["optimizer_bytes"] for result in results],
    )


def _failed(trial: Trial, error: PolyshardError) -> Trial:
    details = list(getattr(error, "__notes__", ()))
    if isinstance(error, JobFailedError):
        details.append(error.details)
    return evolve(trial, problem=str(error), details="\n".join(filter(None, details)))


def _judged(
    trial: Trial,
    run: Run,
    reference: Run,
    weights: Path,
    reference_weights: Path,
    tolerance: Tolerance,
) -> Trial:
    import torch

    difference = measure_difference(
        run, reference, torch.load(weights), torch.load(reference_weights)
    )
    problem = "; ".join(difference.excesses(tolerance)) or None
    return evolve(trial, run=run, difference=difference, problem=problem)


def measure_difference(
    run: Run,
    reference: Run,
    weights: Mapping[str, Tensor],
    reference_weights: Mapping[str, Tensor],
) -> Difference:
    """Return how far a run is from the reference, at its worst.

    Args:
        run: The run.
        reference: What it should have come to.
        weights: Its final weights by name, on the CPU.
        reference_weights: The reference's. One that ``weights`` lacks is infinitely far off.
    """
    apart = {
        name: float((weights[name] - expected).abs().max()) if name in weights else math.inf
        for name, expected in reference_weights.items()
    }
    relative = {
        name: _relative(apart[name], float(expected.abs().max()))
        for name, expected in reference_weights.items()
    }
    worst_weight = max(relative, key=lambda name: _badness(relative[name]))
    losses = list(zip(run.losses, reference.losses, strict=True))
    norms = zip(run.grad_norms, reference.grad_norms, strict=True)
    return Difference(
        loss=_worst(_relative(abs(a - b), abs(b)) for a, b in losses),
        loss_absolute=_worst(abs(a - b) for a, b in losses),
        grad_norm=_worst(_relative(abs(a - b), abs(b)) for a, b in norms),
        weight=relative[worst_weight],
        weight_absolute=_worst(apart.values()),
        worst_weight=worst_weight,
    )


def _relative(difference: float, scale: float) -> float:
    if scale == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return difference / scale


def _worst(differences: Iterable[float]) -> float:
    return max(differences, key=_badness)


def _badness(difference: float) -> tuple[bool, float]:
    """Return what to sort by, such that a difference that is not a number is the largest."""
    return math.isnan(difference), difference
