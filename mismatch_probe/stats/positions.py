"""The running importance weight by position: is the mass all there, and is a re-weighted KL identifiable?

At place t of the response the prefix was drawn by the sampler; the weight W_t = prod_{s<t} pi/mu of what came before
turns an average over the sampler's prefixes into one over the trainer's own. Its mean is 1 at every place where the
logged log-probs are those that sampled and the sampler's sequences cover the trainer's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from mismatch_probe.stats.ess import ess
from mismatch_probe.stats.intervals import LOG, ClusterIntervals, Interval, group_sums
from mismatch_probe.stats.ratios import Levels
from mismatch_probe.stats.tails import pareto_k, pareto_k_limit
from mismatch_probe.stats.types import Bools, Floats, Ints

MIN_EFFECTIVE_SEQUENCES = 20.0
NEARLY_EQUAL = 0.9
"""ESS as a share of n from which weights count as nearly equal, whatever their tail."""
WIDEST_MASS = 0.2
"""Widest interval of a mean weight that still counts as knowing it."""
_ENTRIES = 1 << 20
"""Sums over groups, of all places together, that are held at once."""


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
    ``sums`` of each prompt group over all places, (G, 3): sequences, W_t KL, and W_t where alive.
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
    sums: Floats


@dataclass(frozen=True, eq=False)
class Place:
    """One place of the responses: ``row`` (k,) of the sequences with a token there, and those tokens' ``log_ratio`` and
    ``kl`` (k,), nats.
    """

    row: Ints
    log_ratio: Floats
    kl: Floats


def audit_places(log_ratio: Floats, kl: Floats, levels: Levels, intervals: ClusterIntervals) -> Places:
    """Follow the running weight through the responses.

    Sequences with a null log-ratio are left out: their weight is not known from there on.

    Args:
        log_ratio: d = log pi - log mu of each counted token, in order within its sequence, nats, (n,).
        kl: a divergence at the prefix of each token, nats, (n,).
        levels: which sequence and group each token belongs to; the tokens of a sequence stand together.
        intervals: over prompt groups.
    """
    whole = np.ones(levels.n_sequences, dtype=np.bool_)
    whole[levels.sequence[np.isnan(log_ratio)]] = False
    counts = np.bincount(levels.sequence, minlength=levels.n_sequences)
    whole &= counts > 0
    starts, lengths = (np.cumsum(counts) - counts)[whole], counts[whole]

    def places() -> Iterator[Place]:
        for place in range(int(lengths.max(initial=0))):
            row = np.flatnonzero(lengths > place)
            at = starts[row] + place
            yield Place(row, log_ratio[at], kl[at])

    return audit(places(), levels.group_of_sequence[whole], intervals)


def audit(places: Iterable[Place], group: Ints, intervals: ClusterIntervals) -> Places:
    """The same, place by place: memory grows with sequences and places, not with tokens.

    Args:
        places: in order; a row that ends does not come back.
        group: prompt group of each sequence, none of them with a null log-ratio, (S,).
        intervals: over prompt groups.
    """
    n = len(group)
    log_weight, weighted_kl, alive_mass = np.zeros(n), np.zeros(n), np.zeros(n)
    found: list[tuple[float, ...]] = []
    ends = _MeanIntervals(group, intervals)
    for place in places:
        weight = np.exp(log_weight)
        ends.add(weight)
        alive, known = weight[place.row], ~np.isnan(place.kl)
        with np.errstate(invalid="ignore", divide="ignore"):
            prefix = float(np.divide(place.kl[known].sum(), known.sum()))
        found.append(
            (
                float(len(place.row)),
                float(weight.sum()) / n,
                ess(log_weight) * n,
                pareto_k(log_weight),
                prefix,
                float(alive[known].sum()) / n,
                float(np.nansum(alive * place.kl)) / n,
            )
        )
        weighted_kl[place.row[known]] += (alive * place.kl)[known]
        alive_mass[place.row[known]] += alive[known]
        # Exclusive: the token at t is not yet in the weight of its own prefix.
        log_weight[place.row] += place.log_ratio
    sums = group_sums([weighted_kl, alive_mass], group, intervals.n_groups)
    return _places(np.array(found).reshape(-1, 7), *ends.found(), n, sums)


def _places(found: Floats, low: Floats, high: Floats, n: int, sums: Floats) -> Places:
    alive, mean, effective, shape, prefix, alive_mass, weighted_kl = found.T
    # Pareto k knows no scale: weights of 1 +- 0.001 can have a large one, and re-weight next to nothing.
    tame = ((shape < pareto_k_limit(n)) | (effective >= NEARLY_EQUAL * n)) & (effective >= MIN_EFFECTIVE_SEQUENCES)
    identifiable = tame & (low <= 1) & (high >= 1) & (high - low <= WIDEST_MASS)
    with np.errstate(invalid="ignore", divide="ignore"):
        full = weighted_kl / alive_mass
    return Places(
        alive=alive.astype(np.int64),
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
        sums=sums,
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


def full_kl_interval(places: Places, intervals: ClusterIntervals) -> Interval:
    """``full_kl`` with its interval over prompt groups; null with the reason where it is not identifiable."""
    value, reason = full_kl(places)
    if reason:
        return Interval(value, reason=reason)
    return intervals.interval(places.sums, lambda s: s[..., 1] / s[..., 2], LOG)


def _first(mask: Bools) -> int | None:
    return int(np.argmax(mask)) if mask.any() else None


class _MeanIntervals:
    """Interval of the mean weight at each place, from sums over groups of some places at a time."""

    def __init__(self, group: Ints, intervals: ClusterIntervals) -> None:
        self._group, self._intervals = group, intervals
        self._counts = np.bincount(group, minlength=intervals.n_groups).astype(np.float64)
        self._at_once = max(1, _ENTRIES // max(1, intervals.n_groups))
        self._sums: list[Floats] = []
        self._ends: list[tuple[Floats, Floats]] = [(np.zeros(0), np.zeros(0))]

    def add(self, weight: Floats) -> None:
        """Weights at the next place, (S,)."""
        sums = np.bincount(self._group, weights=weight, minlength=self._intervals.n_groups)
        self._sums.append(sums.astype(np.float64, copy=False))
        if len(self._sums) == self._at_once:
            self._close()

    def found(self) -> tuple[Floats, Floats]:
        """Lower and upper ends, (T,) each; NaN with fewer than two groups."""
        if self._sums:
            self._close()
        low, high = zip(*self._ends, strict=True)
        return np.concatenate(low), np.concatenate(high)

    def _close(self) -> None:
        self._ends.append(self._intervals.mean_intervals(self._counts, np.stack(self._sums, axis=1)))
        self._sums = []
