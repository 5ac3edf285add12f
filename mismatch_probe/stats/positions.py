"""The running importance weight by position: is the mass all there, and is a re-weighted KL identifiable?

At place t of the response the prefix was drawn by the sampler; the weight W_t = prod_{s<t} pi/mu of what came before
turns an average over the sampler's prefixes into one over the trainer's own. Its mean is 1 at every place where the
logged log-probs are those that sampled and the sampler's sequences cover the trainer's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mismatch_probe.stats.ess import ess
from mismatch_probe.stats.intervals import ClusterIntervals
from mismatch_probe.stats.ratios import Levels
from mismatch_probe.stats.tails import pareto_k, pareto_k_limit
from mismatch_probe.stats.types import Bools, Floats, Ints

MIN_EFFECTIVE_SEQUENCES = 20.0
NEARLY_EQUAL = 0.9
"""ESS as a share of n from which weights count as nearly equal, whatever their tail."""
WIDEST_MASS = 0.2
"""Widest interval of a mean weight that still counts as knowing it."""
_CHUNK = 512
"""Places whose sums over groups are held at once."""


@dataclass(frozen=True, eq=False)
class Places:
    """One entry a place t = 0, 1, ... in the counted tokens of the responses, (T,).

    ``alive``: sequences that have a token there. ``mean_weight`` with its interval: mean of W_t over all sequences,
    that of an ended one kept as it was; ``missing_mass`` is 1 minus it where the interval lies below 1, else 0.
    ``effective``: Kish's effective number of sequences. ``pareto_k`` of the weights, NaN where they are equal or tie.
    ``prefix_kl`` (nats): mean over the sampler's prefixes; ``full_kl``: the same over the trainer's own, by
    self-normalised W_t, NaN where ``identifiable`` is False: ``mean_weight``'s interval must hold 1, no wider
    than 0.2, and the weights be ``tame``: 20 effective sequences, and a Pareto k below its limit or an ESS of 0.9.
    ``alive_mass``: mean of W_t over all sequences, ended ones counting 0; ``weighted_kl``: mean of W_t KL, likewise.
    """

    alive: Ints
    mean_weight: Floats
    mean_weight_low: Floats
    mean_weight_high: Floats
    missing_mass: Floats
    effective: Floats
    pareto_k: Floats
    prefix_kl: Floats
    full_kl: Floats
    identifiable: Bools
    tame: Bools
    alive_mass: Floats
    weighted_kl: Floats


def audit_places(log_ratio: Floats, kl: Floats, levels: Levels, intervals: ClusterIntervals) -> Places:
    """Follow the running weight through the responses.

    Sequences with a null log-ratio are left out: their weight is not known from there on.

    Args:
        log_ratio: d = log pi - log mu of each counted token, in order within its sequence, nats, (n,).
        kl: a divergence at the prefix of each token, nats, (n,).
        levels: which sequence and group each token belongs to.
        intervals: over prompt groups.
    """
    log_weight, divergence, group = _padded(log_ratio, kl, levels)
    here = ~np.isnan(divergence)
    weight = np.exp(log_weight)
    low, high = _mean_intervals(weight, group, intervals)
    n = len(weight)
    effective = np.array([ess(column) * n for column in log_weight.T])
    shape = np.array([pareto_k(column) for column in log_weight.T])
    # Pareto k knows no scale: weights of 1 +- 0.001 can have a large one, and re-weight next to nothing.
    tame = ((shape < pareto_k_limit(n)) | (effective >= NEARLY_EQUAL * n)) & (effective >= MIN_EFFECTIVE_SEQUENCES)
    known_mass = (low <= 1) & (high >= 1) & (high - low <= WIDEST_MASS)
    alive_mass = (weight * here).sum(axis=0) / max(1, n)
    weighted_kl = np.nansum(weight * divergence, axis=0) / max(1, n)
    with np.errstate(invalid="ignore", divide="ignore"):
        prefix = np.nansum(divergence, axis=0) / here.sum(axis=0)
        full = weighted_kl / alive_mass
    mean = weight.sum(axis=0) / max(1, n)
    identifiable = tame & known_mass
    return Places(
        alive=here.sum(axis=0).astype(np.int64),
        mean_weight=mean,
        mean_weight_low=low,
        mean_weight_high=high,
        missing_mass=np.where(high < 1, 1 - mean, 0.0),
        effective=effective,
        pareto_k=shape,
        prefix_kl=prefix,
        full_kl=np.where(identifiable, full, np.nan),
        identifiable=identifiable,
        tame=tame,
        alive_mass=alive_mass,
        weighted_kl=weighted_kl,
    )


def full_kl(places: Places) -> tuple[float, str]:
    """KL on the trainer's own prefixes, mean over tokens, with the reason where it is not identifiable.

    Each place counts with the trainer's mass that is alive there. It is given only if at every place the weights are
    tame, the interval of their mean is narrow, and it holds 1 or the mean is within 0.02 of it: read at hundreds of
    places, some interval misses 1 by chance.
    """
    if not len(places.alive):
        return math.nan, "full KL: no sequence with all its log-ratios known"
    if np.isnan(places.prefix_kl).any():
        return math.nan, "full KL: the divergence is null at some places"
    place = _first(~places.tame)
    if place is not None:
        return math.nan, (
            f"full KL not identifiable: at place {place} of the responses the running weight has "
            f"{places.effective[place]:.3g} effective sequences and Pareto k {places.pareto_k[place]:.2f}"
        )
    covers = (places.mean_weight_low <= 1) & (places.mean_weight_high >= 1)
    place = _first(~(covers | (np.abs(places.mean_weight - 1) <= 0.02)))
    if place is None:
        place = _first(~(places.mean_weight_high - places.mean_weight_low <= WIDEST_MASS))
    if place is not None:
        return math.nan, (
            f"full KL not identifiable: at place {place} of the responses the mean weight is "
            f"{places.mean_weight[place]:.3f} [{places.mean_weight_low[place]:.3f}, "
            f"{places.mean_weight_high[place]:.3f}], not surely 1"
        )
    return float(places.weighted_kl.sum() / places.alive_mass.sum()), ""


def _first(mask: Bools) -> int | None:
    return int(np.argmax(mask)) if mask.any() else None


def _padded(log_ratio: Floats, kl: Floats, levels: Levels) -> tuple[Floats, Floats, Ints]:
    """Of sequences without nulls: log W_t (S, T), carried on past the end; KL (S, T), NaN there; group (S,)."""
    whole = np.ones(levels.n_sequences, dtype=np.bool_)
    whole[levels.sequence[np.isnan(log_ratio)]] = False
    counts = np.bincount(levels.sequence, minlength=levels.n_sequences)
    whole &= counts > 0
    row = np.cumsum(whole) - 1
    keep = whole[levels.sequence]
    width = int(counts[whole].max(initial=0))
    starts = np.cumsum(counts) - counts
    place = np.arange(len(levels.sequence)) - starts[levels.sequence]
    ratio = np.zeros((int(whole.sum()), width))
    divergence = np.full(ratio.shape, np.nan)
    at = (row[levels.sequence[keep]], place[keep])
    ratio[at] = log_ratio[keep]
    divergence[at] = kl[keep]
    # Exclusive: the token at t is not yet in the weight of its own prefix.
    return np.cumsum(ratio, axis=1) - ratio, divergence, levels.group_of_sequence[whole]


def _mean_intervals(weight: Floats, group: Ints, intervals: ClusterIntervals) -> tuple[Floats, Floats]:
    """Interval of the mean weight at each place, (T,) twice; NaN with fewer than two groups."""
    low, high = np.full(weight.shape[1], np.nan), np.full(weight.shape[1], np.nan)
    if len(np.unique(group)) < 2:
        return low, high
    counts = np.zeros(intervals.n_groups)
    np.add.at(counts, group, 1.0)
    for start in range(0, weight.shape[1], _CHUNK):
        span = slice(start, start + _CHUNK)
        sums = np.zeros((intervals.n_groups, weight[:, span].shape[1]))
        np.add.at(sums, group, weight[:, span])
        low[span], high[span] = intervals.mean_intervals(counts, sums)
    return low, high
