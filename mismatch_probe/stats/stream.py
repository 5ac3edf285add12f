"""ESS of three levels over tokens that arrive in chunks, in memory that grows with sequences and not with tokens."""

from __future__ import annotations

import numpy as np

from mismatch_probe.stats.ess import ess, ess_from_sums
from mismatch_probe.stats.ratios import Levels, group_log_means
from mismatch_probe.stats.types import Floats, Ints


class RunningEss:
    """Kish's ESS from running sums of w and w^2, both scaled by the largest weight so far. NaN entries are left out."""

    def __init__(self) -> None:
        self._peak = -np.inf
        self._sums = np.zeros(3)

    def add(self, log_weights: Floats) -> None:
        """Take in log-weights, nats, (n,)."""
        known = log_weights[~np.isnan(log_weights)]
        if not len(known):
            return
        peak = max(self._peak, float(known.max()))
        if self._sums[0]:
            fall = np.exp(self._peak - peak)
            self._sums *= (1.0, fall, fall * fall)
        weights = np.exp(known - peak)
        self._sums += (len(weights), weights.sum(), np.square(weights).sum())
        self._peak = peak

    def value(self) -> float:
        """The share of n, in (0, 1]; NaN before any weight."""
        return float(ess_from_sums(self._sums)) if self._sums[0] else float("nan")


class RunningLevels:
    """ESS of one ratio at token, sequence and prompt level; a sequence may be spread over chunks."""

    def __init__(self) -> None:
        self._tokens, self._sums, self._count = RunningEss(), np.zeros(0), np.zeros(0, np.int64)

    def add(self, log_weights: Floats, sequence: Ints) -> None:
        """Take in log-weights, nats, (n,), NaN = null, and the number from 0 of each token's sequence, (n,)."""
        self._tokens.add(log_weights)
        size = max(len(self._sums), int(sequence.max(initial=-1)) + 1)
        more = size - len(self._sums)
        sums, count = np.pad(self._sums, (0, more)), np.pad(self._count, (0, more))
        self._sums = sums + np.bincount(sequence, weights=log_weights, minlength=size)
        self._count = count + np.bincount(sequence, minlength=size)

    def values(self, group_of_sequence: Ints) -> dict[str, float]:
        """ESS by level, NaN = null; ``group_of_sequence`` (S,) holds 0..G-1."""
        sequence = np.where(self._count > 0, self._sums, np.nan)
        prompt = group_log_means(sequence, Levels(np.zeros(0, np.int64), group_of_sequence))
        return {"token": self._tokens.value(), "sequence": ess(sequence), "prompt": ess(prompt)}
