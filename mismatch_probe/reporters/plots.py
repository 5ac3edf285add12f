"""Figures from the tables: the decomposition, ESS, prefix KL, and the distributions of D and of L."""

from __future__ import annotations

import difflib
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from mismatch_probe.errors import NothingToJudgeError, UsageError
from mismatch_probe.folder import Analysis, write_bytes
from mismatch_probe.noise import floor_tops
from mismatch_probe.reporters import plot_style as style
from mismatch_probe.reporters.ess_report import ess_report
from mismatch_probe.reporters.plot_style import Line
from mismatch_probe.stats.breakdown import LEVELS, Rule, Status


def draw(analysis: Analysis, only: Sequence[str] | None, level: str, threshold: float, format: str) -> list[Path]:
    """Draw figures into ``plots/`` of the analysis folder.

    Args:
        analysis: the tables.
        only: names of figures; None draws all.
        level, threshold: where breakdown is judged.
        format: png or svg.

    Returns:
        The files written.

    Raises:
        UsageError: an unknown figure.
        NothingToJudgeError: the tables hold nothing to draw.
        OutputError: the folder cannot be written.
    """
    for name in only or ():
        if name not in FIGURES:
            near = difflib.get_close_matches(name, FIGURES, 1)
            raise UsageError(
                f"--only {name}: unknown{f', did you mean {near[0]}?' if near else ''}. Figures: {', '.join(FIGURES)}"
            )
    paths = []
    for name in only or FIGURES:
        with rc_context(style.RC):
            figure = FIGURES[name](analysis, level, threshold)
            if figure is None:
                continue
            note = _approximation_note(analysis)
            if note:
                figure.suptitle(f"{figure.get_suptitle()}\n{note}", x=0.01, ha="left")
            content = io.BytesIO()
            # Without a date the same tables give the same bytes.
            figure.savefig(content, format=format, metadata={"Date": None} if format == "svg" else {"Software": None})
        path = analysis.folder / "plots" / f"{name}.{format}"
        write_bytes(path, content.getvalue())
        paths.append(path)
    if not paths:
        raise NothingToJudgeError(
            f"{analysis.folder}: nothing to draw, every quantity is null. See reasons in steps.parquet"
        )
    return paths


def _approximation_note(analysis: Analysis) -> str:
    steps = analysis.steps
    kinds = {"nearest checkpoint": steps["nearest_gap_max"] > 0, "engine for log mu": steps["sampler_from_engine"] > 0}
    return "; ".join(f"{of.sum()} of {len(of)} steps approximate: {kind}" for kind, of in kinds.items() if of.any())


def plot_decomposition(analysis: Analysis, level: str, threshold: float) -> Figure | None:
    """Size (rms) and mean of D and of L over steps, with intervals; None where all are null."""
    steps = analysis.steps
    if steps[["discrepancy_rms", "lag_rms", "log_ratio_rms"]].isna().all(axis=None):
        return None
    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    figure.suptitle(f"{analysis.name}: the log-ratio, split", x=0.01, ha="left")
    parts = {"discrepancy": ("numerics D", style.BLUE), "lag": ("stale weights L", style.ORANGE)}
    if steps[["discrepancy_rms", "lag_rms"]].isna().all(axis=None):
        parts = {"log_ratio": ("total d (no split)", style.PURPLE)}
    for axes, quantity in ((upper, "rms"), (lower, "mean")):
        lines = [Line(f"{part}_{quantity}", label, colour) for part, (label, colour) in parts.items()]
        style.draw_lines(axes, steps, lines, label=axes is upper, log_if_wide=axes is upper)
        axes.set_ylabel(f"{quantity}, nats a token")
    if "discrepancy" in parts:
        style.draw_floor(upper, steps["step"].to_numpy(), floor_tops(steps))
    lower.axhline(0, color=style.GREY, linewidth=0.8, zorder=1)
    lower.set_xlabel("training step")
    broken = _breakdown_steps(analysis, level, threshold)
    style.mark_breakdown((upper, lower), broken, style.breakdown_text(broken, level, threshold))
    return figure


def plot_ess(analysis: Analysis, level: str, threshold: float) -> Figure | None:
    """ESS of the lag, discrepancy and total ratio over steps, a panel each, with the threshold; None where null."""
    steps = analysis.steps
    ratios = {"lag": "lag: stale weights", "discrepancy": "discrepancy: numerics", "total": "total: as logged"}
    if steps[[f"ess_{ratio}_{lvl}" for ratio in ratios for lvl in LEVELS]].isna().all(axis=None):
        return None
    figure = Figure(figsize=(7.6, 3.6), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    figure.suptitle(f"{analysis.name}: effective sample size of the importance weights", x=0.01, ha="left")
    colours = (style.SKY, style.BLUE, style.GREEN)
    for axes, (ratio, title) in zip(panels, ratios.items(), strict=True):
        lines = [Line(f"ess_{ratio}_{lvl}", lvl, colour) for lvl, colour in zip(LEVELS, colours, strict=True)]
        style.draw_lines(axes, steps, lines, label=False)
        axes.set_title(title, loc="left")
        axes.axhline(threshold, color=style.RED, linewidth=1, linestyle=(0, (4, 2)), zorder=1)
        axes.set_xlabel("training step")
        axes.set_ylim(0, 1.04)
        if steps[[line.column for line in lines]].isna().all(axis=None):
            axes.text(0.5, 0.75, "not identifiable", transform=axes.transAxes, ha="center", color=style.GREY)
    panels[0].set_ylabel("ESS, share of n")
    style.label_threshold(panels[1], threshold)
    broken = _breakdown_steps(analysis, level, threshold)
    style.mark_breakdown(panels[:1], broken)
    handles: list[Any] = [style.handle(colour, f"{lvl} level") for lvl, colour in zip(LEVELS, colours, strict=True)]
    _legend(figure, handles, broken)
    return figure


def plot_prefix_kl(analysis: Analysis, level: str, threshold: float) -> Figure | None:
    """Exact KL between pi and pi_s on the sampler's prefixes, both ways, over steps, and on the trainer's own where
    fresh responses were drawn; None where null.
    """
    steps = analysis.steps
    lines = [
        Line("prefix_kl_stale_trainer", r"KL($\pi_s$ ‖ $\pi$)", style.BLUE),
        Line("prefix_kl_trainer_stale", r"KL($\pi$ ‖ $\pi_s$)", style.ORANGE),
    ]
    full = "full_kl_fresh_trainer_stale"
    if steps[full].notna().any():
        lines.append(Line(full, r"full KL($\pi$ ‖ $\pi_s$)", style.GREEN))
    columns = [line.column for line in lines]
    if steps[columns].isna().all(axis=None):
        return None
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    figure.suptitle(
        f"{analysis.name}: {'prefix and full' if len(lines) > 2 else 'prefix'} KL of the lag", x=0.01, ha="left"
    )
    all_zero = not steps[columns].fillna(0).any(axis=None)
    style.draw_lines(axes, steps, lines, label=not all_zero, log_if_wide=True)
    axes.set_ylabel("nats a token, exact over the vocabulary")
    axes.set_xlabel("training step")
    if all_zero:
        text = "zero at every step: by the recorded versions,\nsampler and trainer hold the same weights"
        axes.text(0.5, 0.6, text, transform=axes.transAxes, ha="center", color=style.GREY)
    broken = _breakdown_steps(analysis, level, threshold)
    style.mark_breakdown((axes,), broken, style.breakdown_text(broken, level, threshold))
    return figure


def plot_distributions(analysis: Analysis, level: str, threshold: float) -> Figure | None:
    """Distribution of D and of L over the tokens of each step, as quantile bands; None where null."""
    tokens = analysis.tokens(["discrepancy", "lag", "log_ratio"])
    parts = {
        "discrepancy": (r"numerics: D = log $\pi_s$ − log $\mu$", style.BLUE),
        "lag": (r"stale weights: L = log $\pi$ − log $\pi_s$", style.ORANGE),
    }
    if tokens.empty or tokens[list(parts)].isna().all(axis=None):
        parts = {"log_ratio": (r"total: d = log $\pi$ − log $\mu$ (no split)", style.PURPLE)}
    if tokens.empty or tokens[list(parts)].isna().all(axis=None):
        return None
    figure = Figure(figsize=(7.6, 3.6), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(parts)))
    figure.suptitle(f"{analysis.name}: distribution over tokens", x=0.01, ha="left")
    for axes, (part, (title, colour)) in zip(panels, parts.items(), strict=True):
        values = tokens[["step", part]].dropna()
        if values.empty:
            axes.text(0.5, 0.5, "not identifiable", transform=axes.transAxes, ha="center", color=style.GREY)
        else:
            style.draw_quantiles(axes, values, part, colour)
        if part == "discrepancy" and not values.empty:
            top = floor_tops(analysis.steps)
            style.draw_floor(axes, analysis.steps["step"].to_numpy(), top, -top)
        axes.set_title(title, loc="left")
        axes.set_xlabel("training step")
    panels[0].set_ylabel("nats")
    broken = _breakdown_steps(analysis, level, threshold)
    style.mark_breakdown(panels, broken)
    _legend(figure, style.quantile_legend(), broken)
    return figure


def plot_bias(analysis: Analysis, level: str, threshold: float) -> Figure | None:
    """Score bias of D and of L: its size, and whether it keeps its direction from step to step; None where null."""
    steps = analysis.steps
    parts = {"discrepancy": ("numerics", style.BLUE), "lag": ("stale weights", style.ORANGE)}
    if steps[[f"bias_{part}_tv" for part in parts]].isna().all(axis=None):
        return None
    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    figure.suptitle(f"{analysis.name}: score bias", x=0.01, ha="left")
    sizes = [Line(f"bias_{part}_tv", label, colour) for part, (label, colour) in parts.items()]
    style.draw_lines(upper, steps, sizes, log_if_wide=True)
    upper.set_ylabel("total variation, mean")
    cosines = [Line(f"bias_{part}_cosine_previous", label, colour) for part, (label, colour) in parts.items()]
    style.draw_lines(lower, steps, cosines)
    for part, (_, colour) in parts.items():
        lower.plot(steps["step"], steps[f"bias_{part}_split_half_cosine"], color=colour, linewidth=1, linestyle=":")
    lower.axhline(0, color=style.GREY, linewidth=0.8, zorder=1)
    lower.set_ylim(-1.05, 1.05)
    lower.set_ylabel("cosine with the\nanalysed step before")
    dotted = "dotted: between halves of the prompt groups (near 0, the direction is noise)"
    lower.text(0.01, 0.03, dotted, transform=lower.transAxes, color=style.GREY, fontsize=7.5)
    lower.set_xlabel("training step")
    broken = _breakdown_steps(analysis, level, threshold)
    style.mark_breakdown((upper, lower), broken, style.breakdown_text(broken, level, threshold))
    return figure


Draw = Callable[[Analysis, str, float], Figure | None]
FIGURES: dict[str, Draw] = {
    "decomposition": plot_decomposition,
    "ess": plot_ess,
    "prefix-kl": plot_prefix_kl,
    "bias": plot_bias,
    "distributions": plot_distributions,
}


def _breakdown_steps(analysis: Analysis, level: str, threshold: float) -> list[int]:
    report = ess_report(analysis, Rule(level, threshold))
    return [step.step for step in report.judged if step.status(threshold) is Status.BREAKDOWN]


def _legend(figure: Figure, handles: list[Any], broken: list[int]) -> None:
    if broken:
        handles = [*handles, style.breakdown_patch(style.breakdown_steps(broken))]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=4 if len(handles) <= 4 else 3,
        frameon=False,
        handlelength=1.4,
    )
