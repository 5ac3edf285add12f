"""Numerics that grow over the run while the lag stays as it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mismatch_probe.diagnosis.evidence import Evidence
from mismatch_probe.diagnosis.finding import Finding, NotTestable, Number, Result, Severity
from mismatch_probe.diagnosis.words import nats, percent
from mismatch_probe.run import Bools, Floats, Ints
from mismatch_probe.stats.constancy import BINS, step_displacement
from mismatch_probe.stats.log_slopes import Slope, log_slopes
from mismatch_probe.stats.student import t_quantile

MIN_STEPS = 4
GROWN = 1.25
"""Growth over the run, in rms of the change in log-odds, below which it is no matter."""
_GROUPS, _STEPS = 0.999, 0.95
"""Confidence of the slope over prompt groups, and over steps, of which there are few."""


def check_growth(evidence: Evidence) -> Result:
    """MP308."""
    steps = np.unique(evidence.step_of_token[evidence.usable])
    if len(steps) < MIN_STEPS:
        why = f"a slope over steps needs {MIN_STEPS} of them, {len(steps)} can be compared"
        return Result(not_testable=(NotTestable(("MP308",), why),))
    plain = _plain(evidence, steps)
    if plain is None:
        why = "probabilities are 1 to float32 in all or all but one step"
        return Result(not_testable=(NotTestable(("MP308",), why),))
    robust = _robust(evidence, steps, evidence.tokens.sampler, evidence.tokens.stale, evidence.usable)
    lag = _robust(evidence, steps, evidence.tokens.stale, evidence.tokens.trainer, evidence.usable)
    span = float(steps[-1] - steps[0])
    sure = all(plain.value - t_quantile((1 + c) / 2, df) * e > 0 for c, (e, df) in _judged(plain))
    grown = math.exp(plain.value * span)
    if not (sure and len(plain.errors) == 2 and grown >= GROWN and robust.value >= plain.value / 2):
        return Result()
    low, high = (plain.value + sign * plain.reach(_STEPS) for sign in (-1, 1))
    first, last = (_rms(evidence, evidence.step_of_token == step) for step in (steps[0], steps[-1]))
    summary = (
        f"numerics grow, {lag.words()}: rms D rises by {percent(math.expm1(plain.value))} "
        f"[{percent(math.expm1(low))}, {percent(math.expm1(high))}] a step in log-odds at equal confidence, the median "
        f"by {percent(math.expm1(robust.value))}; rms D {nats(first)} nats at step {steps[0]}, {nats(last)} at step "
        f"{steps[-1]}"
    )
    numbers = (
        Number("rise of rms D a step, log", plain.value, "1/step", low, high),
        Number("rise of median |D| a step, log", robust.value, "1/step", robust.low, robust.high),
        *(() if lag.still else (Number("rise of median |L| a step, log", lag.value, "1/step", lag.low, lag.high),)),
        Number("factor over the run", grown),
    )
    return Result((Finding("MP308", Severity.WARNING, summary, 1 - 1 / grown, numbers, tuple(map(int, steps))),))


@dataclass(frozen=True)
class _Line:
    """Slope of a log level over steps with its interval; ``still``: the level is 0, so that nothing could rise."""

    value: float
    low: float
    high: float
    still: bool = False

    def words(self) -> str:
        """What the lag does."""
        if self.still:
            return "there is no lag"
        if math.isnan(self.value):
            return "the lag is not known"
        state = "lag rises too" if self.low > 0 else "lag falls" if self.high < 0 else "lag flat"
        return f"{state} ({percent(math.expm1(self.value))} a step)"


def _judged(slope: Slope) -> list[tuple[float, tuple[float, int]]]:
    return list(zip((_GROUPS, _STEPS), slope.errors, strict=False))


def _plain(evidence: Evidence, steps: Ints) -> Slope | None:
    """Slope a step of log rms of the change in log-odds, at equal probability and number of rivals."""
    tokens, counts, squares, at = evidence.tokens, [], [], []
    for step in steps:
        mine = evidence.usable & (evidence.step_of_token == step)
        names, group = np.unique(evidence.group_of_token[mine], return_inverse=True)
        found = step_displacement(
            int(step),
            tokens.sampler[mine],
            tokens.stale[mine],
            tokens.entropy[mine],
            group.astype(np.int64),
            len(names),
        )
        counts.append(found.counts)
        squares.append(found.squares)
        at.append(np.full(found.counts.shape, float(step)))
    count, square, when = (np.concatenate(parts).ravel() for parts in (counts, squares, at))
    kind = np.tile(np.arange(BINS), len(count) // BINS)
    cluster = np.repeat(np.arange(len(count) // BINS), BINS)
    useful = [b for b in range(BINS) if len(set(when[(kind == b) & (count > 0)])) > 1 and square[kind == b].sum() > 0]
    keep = (count > 0) & np.isin(kind, useful)
    if not keep.any():
        return None
    clusterings = [(cluster[keep], len(useful) + 1), (np.searchsorted(steps, when[keep]), 2)]
    bins = np.searchsorted(useful, kind[keep])
    slopes = log_slopes(count[keep], square[keep], bins, when[keep][:, None], clusterings)
    return slopes[0].times(0.5) if slopes else None


def _robust(evidence: Evidence, steps: Ints, first: Floats, second: Floats, usable: Bools) -> _Line:
    """Line through the log of each step's median |second - first|."""
    size = np.where(usable, np.abs(second - first), np.nan)
    levels = []
    for step in steps:
        mine = size[evidence.step_of_token == step]
        known = mine[~np.isnan(mine)]
        levels.append(float(np.median(known)) if len(known) else math.nan)
    level = np.array(levels)
    if not np.nanmax(np.append(level, -1.0)) > 1e-12:
        return _Line(math.nan, math.nan, math.nan, still=not np.isnan(level).all())
    known = level > 1e-12
    if known.sum() < MIN_STEPS - 1:
        return _Line(math.nan, math.nan, math.nan)
    x = steps[known] - steps[known].mean()
    y = np.log(level[known])
    value = float((x * y).sum() / np.square(x).sum())
    rest = y - y.mean() - value * x
    freedom = len(x) - 2
    error = math.sqrt(float(np.square(rest).sum()) / freedom / float(np.square(x).sum()))
    reach = t_quantile((1 + _STEPS) / 2, freedom) * error
    return _Line(value, value - reach, value + reach)


def _rms(evidence: Evidence, mine: Bools) -> float:
    return float(np.sqrt(np.square(evidence.discrepancy[evidence.usable & mine]).mean()))


CHECKS = (check_growth,)
