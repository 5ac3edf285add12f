"""Is the discrepancy constant over the run? In the unit that does not move with the model's confidence.

D shrinks as a policy grows certain, whatever the engine's error is: near p = 1 an error of the logits hardly moves
log p. Its log-odds do move. eps = logit pi_s - logit mu of the sampled token, logit p = log p - log(1 - p), has nearly
one scale at all probabilities. Not quite: with independent errors of variance s^2 in each logit, eps has
s^2 (1 + sum q_v^2), q the shares of the other tokens in what the sampled one leaves, so that few rivals double it. An
intercept for each bin of mu and of the number of rivals takes out what is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mismatch_probe.stats.intervals import group_sums
from mismatch_probe.stats.log_slopes import Slope, log_slopes
from mismatch_probe.stats.ranks import rank_trend
from mismatch_probe.stats.trend import Trend
from mismatch_probe.stats.types import Floats, Ints

BIN_EDGES = (0.0, 0.01, 0.1, 0.5, 0.9, 1.0)
"""Bins of mu(a), each with its lower end."""
RIVAL_EDGES = (1.0, 1.5, 2.5, 5.0)
"""Bins of the number of rivals, exp of the entropy of pi_s among the other tokens, each with its lower end."""
BINS = len(BIN_EDGES[1:]) * len(RIVAL_EDGES)
RESOLVED = 1e-4
"""Smallest 1 - p whose log-odds a float32 log-prob still tells: log-softmax in float32 over logits of 16 to 32 is off
by up to 2e-6 nats, which at 1 - p = 1e-4 is 0.02 in log-odds and at 1e-6 would be 2. Nearer to 1, p counts as 1."""
DEFAULT_MARGIN = 0.25
MIN_STEPS = 4
NAME = "discrepancy_constancy"


def log_odds(log_p: Floats) -> Floats:
    """log p - log(1 - p) from log p in nats, (n,); accurate to rounding at both ends, +inf at log p >= 0, NaN kept."""
    near_one = log_p > -math.log(2)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_rest = np.where(
            near_one,
            np.log(-np.expm1(np.where(near_one, np.minimum(log_p, 0.0), -1.0))),
            np.log1p(-np.exp(np.where(near_one, -1.0, log_p))),
        )
    return np.asarray(log_p - log_rest)


def displacement(sampler: Floats, stale: Floats) -> Floats:
    """eps = logit pi_s - logit mu, (n,); NaN where either is null or its p counts as 1 (1 - p below RESOLVED).

    Args:
        sampler: log mu of the sampled tokens, nats, (n,). NaN = null, here and below.
        stale: log pi_s, nats, (n,).
    """
    nearest = math.log1p(-RESOLVED)
    with np.errstate(invalid="ignore"):
        resolved = (sampler <= nearest) & (stale <= nearest)
        return np.where(
            resolved, log_odds(np.where(resolved, stale, -1.0)) - log_odds(np.where(resolved, sampler, -1.0)), np.nan
        )


@dataclass(frozen=True, eq=False)
class StepDisplacement:
    """One step's sums over prompt groups and bins: tokens and eps^2, (G, B) each; ``saturated``: tokens left out."""

    step: int
    counts: Floats
    squares: Floats
    saturated: int

    @property
    def rms(self) -> Floats:
        """Root mean square of eps in each bin, (B,); NaN where a bin is empty."""
        with np.errstate(invalid="ignore"):
            return np.asarray(np.sqrt(self.squares.sum(axis=0) / self.counts.sum(axis=0)))


def rivals(stale: Floats, entropy: Floats) -> Floats:
    """How many tokens share what the sampled one leaves: exp of their entropy, (n,), at least 1; NaN where null.

    The entropy of a distribution is that of "a or not" plus (1 - p) times that of the rest.

    Args:
        stale: log pi_s of the sampled tokens, nats, (n,). NaN = null, here and below.
        entropy: entropy of pi_s at their prefixes, nats, (n,).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        rest = -np.expm1(stale)
        among = entropy + np.exp(stale) * stale + rest * np.log(rest)
        return np.asarray(np.exp(np.clip(among / rest, 0.0, 50.0)))


def step_displacement(
    step: int, sampler: Floats, stale: Floats, entropy: Floats, group: Ints, n_groups: int
) -> StepDisplacement:
    """Sums of one step; a token whose entropy is null counts as having one rival.

    Args:
        step: its number.
        sampler: log mu of the sampled tokens, nats, (n,). NaN = null, here and below.
        stale: log pi_s, nats, (n,).
        entropy: entropy of pi_s at their prefixes, nats, (n,).
        group: prompt group of each token, 0..G-1, (n,).
        n_groups: G.
    """
    eps = displacement(sampler, stale)
    used = ~np.isnan(eps)
    likely = np.searchsorted(BIN_EDGES[1:-1], np.exp(sampler[used]), side="right")
    others = np.nan_to_num(rivals(stale[used], entropy[used]), nan=1.0)
    crowded = np.searchsorted(RIVAL_EDGES[1:], others, side="right")
    cell = (group[used] * (len(BIN_EDGES) - 1) + likely) * len(RIVAL_EDGES) + crowded
    sums = group_sums([np.square(eps[used])], cell, n_groups * BINS).reshape(n_groups, BINS, 2)
    known = ~(np.isnan(sampler) | np.isnan(stale))
    return StepDisplacement(step, sums[..., 0], sums[..., 1], int((known & ~used).sum()))


def constancy(steps: Sequence[StepDisplacement], margin: float = DEFAULT_MARGIN, confidence: float = 0.95) -> Trend:
    """Does mean eps^2 within bins change over the run? ``constant``, ``changing``, ``undecided``, or null.

    log E[eps^2] is fitted by a line in the step, and by a line with a bend, each with an intercept a bin. ``constant``:
    the intervals of the whole change along the line, and of the bend's height, lie within the margin, a factor of
    1 + margin either way (two one-sided tests). ``changing``: not constant, and the line's interval leaves out 0, or
    the bend's does at a fifth of the error rate, or the steps' levels rise or fall in rank at half of it: a jump
    early in a short run is no line. Else ``undecided``.

    Args:
        steps: sums of steps, in any order; those without a token are passed over.
        margin: relative change over the whole run that still counts as none, above 0.
        confidence: of the interval; each one-sided test has half of what is left of 1.

    Returns:
        ``estimate`` is the relative change of mean eps^2 from the first step to the last, by the line; ``per_step``
        that of one step; ``excluded`` counts the tokens whose p counts as 1.
    """
    steps = sorted((s for s in steps if s.counts.any()), key=lambda s: s.step)
    tokens, excluded = int(sum(s.counts.sum() for s in steps)), sum(s.saturated for s in steps)
    base = Trend(NAME, margin=margin, steps=len(steps), tokens=tokens, excluded=excluded)

    def null(reason: str) -> Trend:
        return replace(base, reason=reason, sentence=f"Is the discrepancy constant? Not answered: {reason}.")

    if len(steps) < MIN_STEPS:
        return null(f"{len(steps)} exact steps have a discrepancy, {MIN_STEPS} are needed")
    fits = _fit(steps)
    if fits is None:
        return null("eps is 0 at every token, or no bin has tokens at enough steps")
    line, bend, levels = fits
    span = steps[-1].step - steps[0].step
    limit = math.log1p(margin)
    low, high = line.value - line.reach(confidence), line.value + line.reach(confidence)
    sure = bend.reach(confidence)
    tau, chance = rank_trend(levels)
    bent, ranked = abs(bend.value) > bend.reach(1 - (1 - confidence) / 5), chance < (1 - confidence) / 2
    if max(abs(low), abs(high)) < limit and abs(bend.value) + sure < limit:
        answer = "constant"
    elif low > 0 or high < 0 or bent or ranked:
        answer = "changing"
    else:
        answer = "undecided"
    estimate, ends = _change(line.value), (_change(low), _change(high))
    words = ""
    if answer == "changing" and low <= 0 <= high:
        words = _other_words(bend.value, bent, tau, chance)
    return replace(
        base,
        answer=answer,
        estimate=estimate,
        low=ends[0],
        high=ends[1],
        per_step=_change(line.value / span),
        sentence=(
            f"Is the discrepancy constant? {answer.capitalize()}: mean eps^2 (eps = logit pi_s - logit mu, within bins "
            f"of mu) changes by a factor of {factor(line.value)} [{factor(low)}, {factor(high)}] from step "
            f"{steps[0].step} to {steps[-1].step}. Constant means within {factor(-limit)} to {factor(limit)}."
            f"{words}"
        ),
    )


def _other_words(height: float, bent: bool, tau: float, chance: float) -> str:
    """What shows a change where the line does not. ``height``: log of mid-run over both ends."""
    if bent:
        return f" In mid-run it is {factor(height)} times what it is at the ends."
    return f" It {'rises' if tau > 0 else 'falls'} from step to step, in no straight line (rank test, p {chance:.2g})."


def factor(log_factor: float) -> str:
    """e^x in three digits."""
    return f"{math.exp(min(log_factor, 700.0)):.3g}"


def _change(log_factor: float) -> float:
    return math.expm1(min(log_factor, 700.0))


def _fit(steps: Sequence[StepDisplacement]) -> tuple[Slope, Slope, Floats] | None:
    """Log change along the line, log height of the bend (mid-run over the ends), and each step's level, 1 on average.

    None if they cannot be told.
    """
    counts = np.concatenate([s.counts.ravel() for s in steps])
    squares = np.concatenate([s.squares.ravel() for s in steps])
    bin_of = np.tile(np.arange(BINS), len(counts) // BINS)
    at = np.repeat([s.step for s in steps], [s.counts.size for s in steps])
    cluster = np.repeat(np.arange(len(counts) // BINS), BINS)
    useful = [
        b for b in range(BINS) if len(set(at[(bin_of == b) & (counts > 0)])) > 1 and squares[bin_of == b].sum() > 0
    ]
    keep = (counts > 0) & np.isin(bin_of, useful)
    if not keep.any():
        return None
    kind = np.searchsorted(useful, bin_of[keep])
    first, last = steps[0].step, steps[-1].step
    along = (2.0 * at[keep] - first - last) / (last - first)
    found: list[Slope] = []
    for covariates in (along[:, None], np.stack([along, np.square(along)], axis=1)):
        degree = covariates.shape[1]
        clusterings = [(cluster[keep], len(useful) + degree), (at[keep], 1 + degree)]
        slopes = log_slopes(counts[keep], squares[keep], kind, covariates, clusterings)
        if not slopes:
            return None
        found.append(slopes[-1])
    line, bend = found
    usual = np.bincount(kind, weights=squares[keep]) / np.bincount(kind, weights=counts[keep])
    _, order = np.unique(at[keep], return_inverse=True)
    levels = np.bincount(order, weights=squares[keep] / usual[kind]) / np.bincount(order, weights=counts[keep])
    return line.times(2.0), bend.times(-1.0), levels
