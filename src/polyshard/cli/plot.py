"""A comparison as a picture: losses, their distance from the reference, time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, NamedTuple

from polyshard.training.comparison import Comparison, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot"]

_MIB = 1024**2
_LABEL_WIDTH = 20
# A logarithmic axis has no zero, where runs that come out exactly equal belong.
_SHOWN_FOR_ZERO = 1e-9


class _Line(NamedTuple):
    """A run, with how it is drawn in every part of the picture."""

    label: str
    run: Run
    color: str
    width: float


def plot(comparison: Comparison, path: Path) -> None:
    """Draw a comparison to a PNG file; trials that failed are left out.

    Args:
        comparison: What to draw.
        path: Where to write it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    lines = _lines(comparison)
    figure = Figure(figsize=(12, 8), layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.15))
    FigureCanvasAgg(figure)
    losses, distances, times, memory = figure.subplots(2, 2).flat
    _draw_losses(losses, lines)
    _draw_distances(distances, lines, comparison.tolerance.loss)
    _draw_times(times, lines)
    _draw_memory(memory, lines)
    ranks = comparison.trials[0].world_size if comparison.trials else 1
    figure.suptitle(f"The same {comparison.config.steps} steps in one process and on {ranks} ranks")
    figure.savefig(path, dpi=120)


def _lines(comparison: Comparison) -> list[_Line]:
    """Return the reference and the trials, each thinner than those that it is drawn over."""
    ran = [(t.candidate.label, t.run) for t in comparison.trials if t.run is not None]
    trials = [
        _Line(label, run, f"C{index % 10}", max(1.0, 5.0 - 1.5 * index))
        for index, (label, run) in enumerate(ran)
    ]
    return [_Line("reference", comparison.reference, "0.35", 10.0), *trials]


def _draw_losses(axes: Axes, lines: Sequence[_Line]) -> None:
    for line in lines:
        alpha = 0.4 if line is lines[0] else 1.0
        _draw_over_steps(axes, line, line.run.losses, alpha)
    _finish(axes, "Training loss", "step", "nats per byte")
    axes.legend()


def _draw_distances(axes: Axes, lines: Sequence[_Line], tolerance: float) -> None:
    reference, *trials = lines
    for line in trials:
        pairs = zip(line.run.losses, reference.run.losses, strict=True)
        distances = [max(abs(a - b) / abs(b), _SHOWN_FOR_ZERO) for a, b in pairs]
        _draw_over_steps(axes, line, distances, 1.0)
    axes.axhline(tolerance, color="C3", linestyle="--", linewidth=1)
    axes.annotate(
        "tolerance", (1, tolerance), textcoords="offset points", xytext=(0, 4), color="C3"
    )
    axes.set_yscale("log")
    axes.set_ylim(bottom=_SHOWN_FOR_ZERO)
    _finish(axes, "Distance of the loss from the reference", "step", "relative difference")


def _draw_over_steps(axes: Axes, line: _Line, values: Sequence[float], alpha: float) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.plot(
        range(1, len(values) + 1),
        values,
        color=line.color,
        linewidth=line.width,
        alpha=alpha,
        solid_capstyle="round",
        label=line.label,
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_times(axes: Axes, lines: Sequence[_Line]) -> None:
    medians = [line.run.median_step_seconds * 1000 for line in lines]
    bars = axes.barh(range(len(lines)), medians, color=[line.color for line in lines])
    axes.bar_label(bars, [f"{value:.0f} ms" for value in medians], padding=4)
    _finish_bars(axes, lines, "Step time, median", "milliseconds")


def _draw_memory(axes: Axes, lines: Sequence[_Line]) -> None:
    """Draw what a rank holds between steps; its peak is written, as torch dwarfs the rest."""
    places, colors = range(len(lines)), [line.color for line in lines]
    parameters = [max(line.run.parameter_bytes) / _MIB for line in lines]
    optimizer = [max(line.run.optimizer_bytes) / _MIB for line in lines]
    axes.barh(places, parameters, color=colors)
    bars = axes.barh(places, optimizer, left=parameters, color=colors, alpha=0.5)
    peaks = [f"peak {max(line.run.peak_rss_bytes) / _MIB:.0f} MiB" for line in lines]
    axes.bar_label(bars, peaks, padding=4)
    _finish_bars(axes, lines, "Memory per rank", "MiB: parameters (dark), optimizer state (light)")


def _finish_bars(axes: Axes, lines: Sequence[_Line], title: str, unit: str) -> None:
    labels = [fill(line.label, _LABEL_WIDTH) for line in lines]
    axes.set_yticks(range(len(lines)), labels)
    axes.invert_yaxis()
    axes.margins(x=0.3)
    _finish(axes, title, unit, "")


def _finish(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
    axes.set_axisbelow(True)
