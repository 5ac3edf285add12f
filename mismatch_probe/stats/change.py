"""Change points: steps between which a series jumps, told from noise, from smooth growth and from wandering.

At each gap between two steps a line with a jump at the gap is fitted to the steps beside it, as many on either side, at
most WINDOW. A change passes two tests:

lasting: the fitted jump stands out of the noise in the whole window, without the step just before the gap, and without
    the step just after it, so that one bad step is no change of level. A straight trend is no jump, a bent one hardly.
sudden: the one difference across the gap, slope taken off, stands out of the other differences of the series, so that
    growth spread over several steps, and a random walk, are no jump.

The noise level of the first is from second differences, that of the other from first differences about their median
slope, each without its largest third. Each threshold is the quantile of the largest score of a series of independent
normal errors, simulated at the same steps, so that both together are passed by chance at most at the stated rate.
Sources: Eichinger and Kirch (2018), "A MOSUM procedure for the estimation of multiple random change points" (moving
windows, peaks); Gasser, Sroka and Jennen-Steinmetz (1986), "Residual variance and residual pattern in nonlinear
regression" (second differences at unequal spacing). Asking for both is this project's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mismatch_probe.stats.types import Floats, Ints

MIN_STEPS = 8
"""Fewest steps in which a change is looked for."""
MIN_SIDE = 3
"""Fewest steps on either side of a gap that is judged, and between two changes."""
WINDOW = 8
"""Most steps on either side that are fitted."""
DEFAULT_RATE = 0.01
SIMULATED = 20_000
_KEPT = 2 / 3
_CHUNK = 500
_SEED = 20_260_301


@dataclass(frozen=True)
class Change:
    """A jump between two consecutive steps of the series: fitted values on its two sides.

    ``score`` is how many times the thresholds it is, by the test that it passes by less; above 1.
    """

    before_step: int
    after_step: int
    before: float
    after: float
    score: float


@dataclass(frozen=True)
class Changes:
    """Changes of a series. ``reason`` says why none was looked for; then ``largest_score`` is NaN.

    ``steps`` counts the values used; a gap whose score is above 1 is a change.
    """

    changes: tuple[Change, ...]
    steps: int
    rate: float
    largest_score: float = math.nan
    reason: str = ""


def find_changes(steps: Ints, values: Floats, rate: float = DEFAULT_RATE) -> Changes:
    """Jumps of a series, ascending.

    Args:
        steps: step numbers, ascending, unequal spacing allowed, (n,).
        values: on a scale where the error is about the same at every step, (n,). What is not finite is left out.
        rate: chance that a series of independent normal errors about a straight line is said to change at all.

    Raises:
        ValueError: ``rate`` is not inside (0, 1), or the steps do not ascend.
    """
    if not 0 < rate < 1:
        raise ValueError(f"false-alarm rate {rate} is not between 0 and 1")
    if bool((np.diff(steps) <= 0).any()):
        raise ValueError("steps do not ascend")
    known = np.isfinite(values)
    at, y = steps[known].astype(np.float64), values[known]
    if len(y) < MIN_STEPS:
        return Changes((), len(y), rate, reason=f"{len(y)} of the {MIN_STEPS} steps needed")
    y = y - np.median(y)
    noise, wander = _levels_of_noise(at, y[None])
    if not min(noise[0], wander[0]) > 1e-12 * float(np.abs(y).max()):
        return Changes((), len(y), rate, reason="most steps lie on a line to the last digit: there is no noise level")
    spacing = tuple(np.diff(at).tolist())
    lasting, sudden = _scores(_contrasts(spacing), y[None], noise, wander)
    score = np.minimum(lasting[0] / _threshold(spacing, rate, 0), sudden[0] / _threshold(spacing, rate, 1))
    used = steps[known]
    found = []
    for gap in np.flatnonzero(score > 1):
        if score[gap] == score[max(0, gap - MIN_SIDE + 1) : gap + MIN_SIDE].max():
            last = int(gap) + MIN_SIDE - 1
            before, after = _ends(at, values[known], last)
            found.append(Change(int(used[last]), int(used[last + 1]), before, after, float(score[gap])))
    return Changes(tuple(found), len(y), rate, float(score.max()))


def _half(n: int, last: int) -> int:
    """Steps on either side of the gap after place ``last`` that are fitted."""
    return min(WINDOW, last + 1, n - 1 - last)


def _design(at: Floats, last: int, places: Ints) -> Floats:
    """Level, slope and jump at the given places, time measured from the middle of the gap."""
    time = at[places] - (at[last] + at[last + 1]) / 2
    return np.stack([np.ones(len(places)), time, places > last], axis=1)


def _ends(at: Floats, values: Floats, last: int) -> tuple[float, float]:
    """Fitted values just before and just after the gap."""
    half = _half(len(at), last)
    places = np.arange(last + 1 - half, last + 1 + half)
    fit = np.linalg.lstsq(_design(at, last, places), values[places], rcond=None)[0]
    ends = _design(at, last, np.array([last, last + 1])) @ fit
    return float(ends[0]), float(ends[1])


@lru_cache(maxsize=8)
def _contrasts(spacing: tuple[float, ...]) -> Floats:
    """Weights of the four estimates of each gap's jump, unit variance: (gaps, 4, 2 WINDOW), windows about the gap."""
    at = np.concatenate([[0.0], np.cumsum(spacing)])
    lasts = range(MIN_SIDE - 1, len(at) - MIN_SIDE)
    out = np.zeros((len(lasts), 4, 2 * WINDOW))
    for row, last in enumerate(lasts):
        half = _half(len(at), last)
        whole = np.arange(last + 1 - half, last + 1 + half)
        shift = WINDOW - last - 1
        for kind, left_out in enumerate((None, last, last + 1)):
            places = whole[whole != left_out]
            out[row, kind, places + shift] = np.linalg.pinv(_design(at, last, places))[2]
        slope = np.linalg.pinv(_design(at, last, whole))[1] * (at[last + 1] - at[last])
        out[row, 3, whole + shift] = -slope
        out[row, 3, [WINDOW - 1, WINDOW]] += (-1, 1)
    scaled: Floats = out / np.sqrt(np.square(out).sum(axis=2, keepdims=True))
    return scaled


def _scores(contrasts: Floats, values: Floats, noise: Floats, wander: Floats) -> tuple[Floats, Floats]:
    """Scores of both tests, lasting and sudden, (series, gaps) each; 0 where the estimates differ in sign."""
    padded = np.pad(values, ((0, 0), (WINDOW - MIN_SIDE, WINDOW - MIN_SIDE)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * WINDOW, axis=1)
    jumps = np.einsum("sgw,gkw->sgk", windows, contrasts)
    agree = (np.sign(jumps) == np.sign(jumps[..., :1])).all(axis=-1)
    size = np.where(agree[..., None], np.abs(jumps), 0.0)
    return size[..., :3].min(axis=-1) / noise[:, None], size[..., 3] / wander[:, None]


def _levels_of_noise(at: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Two estimates of the errors' deviation of each series, (series,) each, the largest third of the terms left out.

    From second differences: a value's distance from the line between its neighbours. From first differences about
    their median slope: the same for independent errors about a line, larger for anything that wanders.
    """
    share = (at[1:-1] - at[:-2]) / (at[2:] - at[:-2])
    second = values[:, 1:-1] - (1 - share) * values[:, :-2] - share * values[:, 2:]
    first = np.diff(values, axis=1)
    slope = np.median(first / np.diff(at), axis=1)
    first = first - slope[:, None] * np.diff(at)
    return _trimmed(second / np.sqrt(1 + np.square(share) + np.square(1 - share))), _trimmed(first / math.sqrt(2))


def _trimmed(errors: Floats) -> Floats:
    square = np.sort(np.square(errors), axis=1)
    level: Floats = np.sqrt(square[:, : math.ceil(_KEPT * errors.shape[1])].mean(axis=1))
    return level


@lru_cache(maxsize=8)
def _largest(spacing: tuple[float, ...]) -> Floats:
    """Largest scores of simulated series of independent normal errors at these steps, each test's ascending, (2, N)."""
    rng = np.random.default_rng(_SEED)
    at = np.concatenate([[0.0], np.cumsum(spacing)])
    contrasts = _contrasts(spacing)
    largest = []
    for _ in range(SIMULATED // _CHUNK):
        series = rng.normal(size=(_CHUNK, len(at)))
        scores = _scores(contrasts, series, *_levels_of_noise(at, series))
        largest.append([score.max(axis=1) for score in scores])
    return np.sort(np.concatenate(largest, axis=1), axis=1)


def _threshold(spacing: tuple[float, ...], rate: float, test: int) -> float:
    return float(np.quantile(_largest(spacing)[test], 1 - rate, method="higher"))
