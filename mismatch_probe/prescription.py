"""What each correction would have done to a recorded run, when to resynchronise, and one recommendation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from mismatch_probe.approximate import approximate
from mismatch_probe.diagnosis.finding import Diagnosis, Severity
from mismatch_probe.folder import Analysis
from mismatch_probe.stats.corrections import CORRECTIONS, Bounds, correction_weights
from mismatch_probe.stats.ratios import Levels
from mismatch_probe.stats.sync import Interval, LagEss, ReplayedStep, longest_interval, replay

DEFAULT_TOLERANCE = 0.1
"""Bias of an update, as a share of its target's length, below which nothing is corrected. Ours, no standard."""
_ENDS = ("", "_ci_low", "_ci_high")


@dataclass(frozen=True)
class Effect:
    """One correction over the steps where it can be rated, medians; NaN = null.

    ``bias`` is the length of update - target over the target's, ``worst`` its largest step's. ``bias_discrepancy`` and
    ``bias_lag`` are its parts. ``size`` is the update's length over the target's. ``variance`` is the weights' variance
    over their squared mean, ``cut`` the share of tokens that are clipped or masked, and ``steps`` how many were rated.
    """

    name: str
    bias: float
    worst: float
    bias_discrepancy: float
    bias_lag: float
    size: float
    variance: float
    cut: float
    steps: int


@dataclass(frozen=True)
class Prescription:
    """``refused`` names the findings that must be mended first; then ``advice`` is to mend them."""

    run: str
    advice: str
    reasons: tuple[str, ...]
    refused: tuple[str, ...]
    effects: tuple[Effect, ...]
    interval: Interval | None
    replayed: tuple[ReplayedStep, ...]
    level: str
    threshold: float
    tolerance: float

    @property
    def resyncs(self) -> list[int]:
        """Steps after which DLC would have resynchronised the sampler."""
        return [step.step for step in self.replayed if step.resync]


def prescribe(
    analysis: Analysis, diagnosis: Diagnosis | None, level: str, threshold: float, tolerance: float
) -> Prescription:
    """Rate the corrections and recommend one thing.

    Args:
        analysis: of the run.
        diagnosis: its findings, None where none were made.
        level: whose lag ESS the resync is judged on.
        threshold: of that ESS.
        tolerance: bias of an update, as a share of the target, that is left alone.

    Raises:
        InputError: the analysis cannot be read.
    """
    steps = analysis.steps[~approximate(analysis.steps)]
    judged = lag_ess(steps, level)
    interval, replayed = longest_interval(judged, threshold), tuple(replay(judged, threshold))
    weights = [_weights(analysis, int(step)) for step in steps["step"]]
    effects = tuple(_effect(steps, name, [of_step[name] for of_step in weights]) for name in CORRECTIONS)
    faults = [f for f in (diagnosis.findings if diagnosis else ()) if f.severity is Severity.ERROR]
    advice, reasons = _advice(effects, judged, replayed, interval, threshold, tolerance)
    if faults:
        named = ", ".join(dict.fromkeys(fault.code for fault in faults))
        advice = f"Mend {named} first. No correction is recommended: it would act on wrong numbers."
        reasons = [f"{fault.code}: {fault.summary}" for fault in faults]
    if diagnosis is None:
        reasons.append("no diagnosis was made, so a logging fault is not ruled out: mismatch-probe diagnose")
    refused = tuple(dict.fromkeys(fault.code for fault in faults))
    return Prescription(
        analysis.name, advice, tuple(reasons), refused, effects, interval, replayed, level, threshold, tolerance
    )


def lag_ess(steps: pd.DataFrame, level: str) -> list[LagEss]:
    """ESS of the lag against version lag, for the steps that know both; the oldest token's where a step mixes lags."""
    name = f"ess_lag_{level}"
    known = steps[steps[name].notna() & steps["version_lag_max"].notna()]
    columns = [f"{name}{end}" for end in _ENDS]
    return [
        LagEss(int(step), round(float(lag)), *map(float, ends))
        for step, lag, *ends in known[["step", "version_lag_max", *columns]].itertuples(index=False)
    ]


def _effect(steps: pd.DataFrame, name: str, weights: list[tuple[float, float]]) -> Effect:
    """One correction; ``weights`` has the variance of its weights and the share that it cuts, by step."""
    size, cosine = steps[f"gradient_{name}_relative_size"], steps[f"gradient_{name}_cosine"]
    bias = (1 + size**2 - 2 * size * cosine).clip(lower=0.0).pow(0.5).dropna()
    return Effect(
        name=name,
        bias=_median(bias),
        worst=float(bias.max()) if len(bias) else math.nan,
        bias_discrepancy=_median(steps[f"gradient_{name}_bias_discrepancy"]),
        bias_lag=_median(steps[f"gradient_{name}_bias_lag"]),
        size=_median(size),
        variance=_median(pd.Series([variance for variance, _ in weights], dtype=float)),
        cut=_median(pd.Series([cut for _, cut in weights], dtype=float)),
        steps=len(bias),
    )


def _weights(analysis: Analysis, step: int) -> dict[str, tuple[float, float]]:
    """By correction: relative variance of its token weights at one step, and the share that it clips or masks."""
    columns = ["sequence_id", "discrepancy", "lag", "advantage"]
    table = analysis.tokens_of(step, columns).dropna(subset=["discrepancy", "lag"])
    if table.empty:
        return dict.fromkeys(CORRECTIONS, (math.nan, math.nan))
    discrepancy, lag, advantage = (table[column].to_numpy(dtype=np.float64) for column in columns[1:])
    names, sequence = np.unique(table["sequence_id"].astype(str), return_inverse=True)
    levels = Levels(sequence.astype(np.int64), np.zeros(len(names), dtype=np.int64))
    bounds = Bounds(clip=float(analysis.record["options"]["clip_eps"]))
    log_cap = math.log(bounds.cap)
    weights = correction_weights(discrepancy, lag, advantage, levels, bounds)
    weights["dlc"] = np.exp(np.minimum(lag, log_cap))
    cuts = {"token_tis": (weights["token_tis"] == 0) | (discrepancy + lag > log_cap), "dlc": lag > log_cap}
    found = {}
    for name, weight in weights.items():
        mean = float(weight.mean())
        cut = cuts.get(name, weight == 0)
        found[name] = float(weight.var() / mean**2) if mean > 0 else math.nan, float(cut.mean())
    if np.isnan(advantage).all():
        found["ppo_clip"] = math.nan, math.nan  # whom it clips depends on the advantage
    return found


def _advice(
    effects: tuple[Effect, ...],
    judged: list[LagEss],
    replayed: tuple[ReplayedStep, ...],
    interval: Interval | None,
    threshold: float,
    tolerance: float,
) -> tuple[str, list[str]]:
    """One recommendation, with its reasons."""
    plain = effects[0]
    resyncs = [step for step in replayed if step.resync]
    reasons: list[str] = []
    if not judged and math.isnan(plain.bias):
        return "Nothing can be recommended: neither a lag nor a gradient is known at any step.", reasons
    if resyncs and interval is not None:
        every = max(1, interval.updates or interval.longest_seen)
        reasons.append(
            f"the ESS of the lag falls below {threshold:g} at step {resyncs[0].step}, at a version lag of "
            f"{resyncs[0].recorded_lag}"
        )
        with_dlc = plain.bias_discrepancy > tolerance
        if with_dlc:
            reasons.append(f"D alone biases the plain update by {plain.bias_discrepancy:.0%} of its target: centre it")
        what = "Use DLC with resynchronisation" if with_dlc else "Resynchronise the sampler"
        return f"{what}: every {every} updates, or whenever the ESS falls below {threshold:g}.", reasons
    if math.isnan(plain.bias) or plain.worst <= tolerance:
        size = (
            ""
            if math.isnan(plain.worst)
            else (f"the plain update is off by {plain.worst:.0%} of its target at worst, less than {tolerance:.0%}")
        )
        reasons += [size] if size else []
        if judged:
            lowest = min(judged, key=lambda one: one.ess)
            reasons.append(f"the ESS of the lag stays at {lowest.ess:.2f} or more (step {lowest.step})")
        return "No correction is needed.", reasons
    rated = [effect for effect in effects[1:] if not math.isnan(effect.bias)]
    best = min(rated, key=lambda effect: (effect.worst, effect.variance))
    reasons.append(
        f"the plain update is off by {plain.worst:.0%} of its target at worst, {best.name} by {best.worst:.0%}"
    )
    reasons.append("the ESS of the lag never falls below its threshold, so no resync would have been made")
    return f"Use {best.name}.", reasons


def _median(values: Any) -> float:
    known = pd.Series(values, dtype=float).dropna()
    return float(known.median()) if len(known) else math.nan
