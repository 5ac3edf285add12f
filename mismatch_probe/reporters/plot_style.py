"""How the figures look: colour-blind safe (Okabe and Ito), direct labels, intervals as bands, breakdown marked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from mismatch_probe.reporters.format import ranges
from mismatch_probe.stats.types import Floats, Ints

BLUE, ORANGE, GREEN, SKY, PURPLE, RED, GREY = (
    *("#0072B2", "#D55E00", "#009E73", "#56B4E9", "#CC79A7"),
    *("#B3123B", "#666666"),
)

RC: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "figure.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "savefig.dpi": 200,
    "svg.hashsalt": "mismatch-probe",
    "svg.fonttype": "none",
}

_BANDS = ((0.01, 0.99, 0.16), (0.05, 0.95, 0.22), (0.25, 0.75, 0.35))
_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)

_WIDE = 30.0
"""Ratio of largest to smallest value from which a logarithmic axis reads better."""
_LABEL_POINTS = 11.0
_SHADE = 0.10


@dataclass(frozen=True)
class Line:
    """A column of the steps table as a line; its interval becomes a band."""

    column: str
    label: str
    colour: str


def draw_lines(
    axes: Axes, steps: pd.DataFrame, lines: Sequence[Line], label: bool = True, log_if_wide: bool = False
) -> None:
    """Lines with bands, labelled at their right end.

    With ``log_if_wide`` the axis is logarithmic where the positive values span more than a factor of thirty; zeros
    then have no place, and a line of text says where they are.
    """
    columns = {line.column: steps[line.column].to_numpy(dtype=float) for line in lines}
    everything = np.concatenate(list(columns.values()))
    positive = everything[everything > 0]
    logarithmic = log_if_wide and len(positive) > 0 and positive.max() / positive.min() > _WIDE
    step = steps["step"].to_numpy()
    for line in lines:
        value = columns[line.column]
        unknown = pd.Series(np.nan, index=steps.index)  # some columns have no interval
        ends = (steps.get(f"{line.column}_ci_{end}", unknown) for end in ("low", "high"))
        low, high = (np.asarray(end, dtype=np.float64) for end in ends)
        if logarithmic:
            value, low, high = (np.where(part > 0, part, np.nan) for part in (value, low, high))
        axes.fill_between(*_wide(step, low, high), color=line.colour, alpha=0.18, linewidth=0)
        axes.plot(step, value, color=line.colour, marker="o", markersize=2.8, zorder=3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlim(step.min() - 0.5, step.max() + 0.5)
    if logarithmic:
        axes.set_yscale("log")
        _note_zeros(axes, step, lines, columns)
    elif log_if_wide:
        axes.set_ylim(bottom=0)
    if label:
        _label_ends(axes, step, lines, columns)


def draw_floor(axes: Axes, step: Ints, top: Floats, bottom: Floats | None = None) -> None:
    """The probe's noise floor as a grey band, from ``bottom`` or the axis up, and its size in words."""
    known = top[~np.isnan(top)]
    if not len(known):
        return
    low, high = axes.get_ylim()
    if bottom is None:
        bottom = np.full(len(top), low if axes.get_yscale() == "log" else 0.0)
    axes.fill_between(*_wide(step, bottom, np.maximum(top, bottom)), color=GREY, alpha=0.3, linewidth=0, zorder=0)
    axes.set_ylim(low, high)  # a floor far below the curves is named and not shown
    text = f"grey: the probe's noise floor, up to {known.max():.1e}"
    axes.text(0.01, 0.02, text, transform=axes.transAxes, va="bottom", color=GREY, fontsize=7.5)


def _wide(step: Ints, *series: Floats) -> list[Any]:
    """A single step is drawn as a short stretch: a band of no width would not be seen."""
    if len(step) != 1:
        return [step, *series]
    return [np.array([step[0] - 0.15, step[0] + 0.15]), *(np.repeat(values, 2) for values in series)]


def _note_zeros(axes: Axes, step: Ints, lines: Sequence[Line], columns: dict[str, Floats]) -> None:
    zeros = {line.label: [int(s) for s in step[columns[line.column] == 0]] for line in lines}
    where = {label: ranges(numbers) for label, numbers in zeros.items() if numbers}
    if where:
        text = "\n".join(f"{label}: zero at step {numbers}" for label, numbers in where.items())
        axes.text(0.01, 0.98, text, transform=axes.transAxes, va="top", color=GREY, fontsize=7.5)


def _label_ends(axes: Axes, step: Ints, lines: Sequence[Line], columns: dict[str, Floats]) -> None:
    """Labels at the last known values, pushed apart where they would overlap."""
    ends = []
    for line in lines:
        known = np.flatnonzero(~np.isnan(columns[line.column]))
        if len(known) and (axes.get_yscale() != "log" or columns[line.column][known[-1]] > 0):
            ends.append((float(columns[line.column][known[-1]]), float(step[known[-1]]), line))
    ends.sort(key=lambda end: end[0])
    axes.autoscale_view()
    scale = 72.0 / axes.figure.dpi
    heights = [float(axes.transData.transform((x, y))[1]) * scale for y, x, _ in ends]
    middle = sum(heights) / len(heights) if heights else 0.0
    crowded = len(heights) > 1 and min(np.diff(heights)) < _LABEL_POINTS
    for rank, ((y, x, line), height) in enumerate(zip(ends, heights, strict=True)):
        wanted = middle + (rank - (len(ends) - 1) / 2) * _LABEL_POINTS if crowded else height
        axes.annotate(
            line.label,
            (x, y),
            xytext=(6, wanted - height),
            textcoords="offset points",
            color=line.colour,
            va="center",
            annotation_clip=False,
        )


def mark_breakdown(panels: Iterable[Axes], broken: Sequence[int], text: str = "") -> None:
    """Shade every breakdown step; ``text`` above the first panel says what the shade means."""
    panels = list(panels)
    for axes in panels:
        for step in broken:
            axes.axvspan(step - 0.5, step + 0.5, color=RED, alpha=_SHADE, linewidth=0, zorder=0)
    if broken and text:
        panels[0].annotate(
            text,
            (1, 1),
            xycoords="axes fraction",
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            va="bottom",
            color=RED,
            fontsize=8,
        )


def breakdown_text(broken: Sequence[int], level: str, threshold: float) -> str:
    """What the shade means."""
    return f"breakdown: {level} ESS surely < {threshold:g}, at step {ranges(list(broken))}"


def breakdown_steps(broken: Sequence[int]) -> str:
    """The same where the figure shows level and threshold already."""
    return f"breakdown, step {ranges(list(broken))}"


def breakdown_patch(text: str) -> Patch:
    """The shade as a legend handle."""
    return Patch(color=RED, alpha=2 * _SHADE, linewidth=0, label=text)


def draw_quantiles(axes: Axes, values: pd.DataFrame, part: str, colour: str) -> None:
    """Bands of quantiles a step, the median, and the extremes as points."""
    grouped = values.groupby("step")[part]
    quantiles = grouped.quantile(np.array(_QUANTILES)).unstack()
    steps = quantiles.index.to_numpy()
    for low, high, alpha in _BANDS:
        band = _wide(steps, quantiles[low].to_numpy(), quantiles[high].to_numpy())
        axes.fill_between(*band, color=colour, alpha=alpha, linewidth=0)
    places, middle = _wide(steps, quantiles[0.5].to_numpy())
    axes.plot(places, middle, color=colour, linewidth=1.4)
    for extreme in (grouped.min(), grouped.max()):
        axes.plot(extreme.index, extreme, linestyle="none", marker=".", markersize=3, color=colour)
    axes.axhline(0, color=GREY, linewidth=0.8, zorder=1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlim(steps.min() - 0.5, steps.max() + 0.5)
    if not values[part].any():
        axes.set_ylim(-1, 1)
        axes.text(0.5, 0.6, "zero at every token", transform=axes.transAxes, ha="center", color=GREY)


def quantile_legend() -> list[Patch | Line2D]:
    """Handles of the bands, the median and the extremes."""
    shown = np.cumsum([alpha for *_, alpha in _BANDS])  # the bands lie over one another
    bands: list[Patch | Line2D] = [
        Patch(color=GREY, alpha=alpha, linewidth=0, label=f"{low:.0%} to {high:.0%}")
        for (low, high, _), alpha in zip(_BANDS, shown, strict=True)
    ]
    return [
        *bands,
        Line2D([], [], color=GREY, linewidth=1.4, label="median"),
        Line2D([], [], color=GREY, marker=".", linestyle="none", label="extremes"),
    ]


def handle(colour: str, label: str) -> Line2D:
    """A line as a legend handle."""
    return Line2D([], [], color=colour, marker="o", markersize=2.8, label=label)


def label_threshold(axes: Axes, threshold: float) -> None:
    """Name the threshold line, where it does not cross the curves."""
    axes.annotate(
        f"threshold {threshold:g}",
        (0.5, threshold),
        xycoords=("axes fraction", "data"),
        xytext=(0, 2),
        textcoords="offset points",
        ha="center",
        va="bottom",
        color=RED,
        fontsize=8,
    )
