"""Sums over tokens that arrive in chunks, in memory that grows with sequences and groups and not with tokens."""

from __future__ import annotations

import math

import numpy as np

from mismatch_probe.stats.health import weight_health
from mismatch_probe.stats.tails import tail_length, tail_shape
from mismatch_probe.stats.types import Floats, Ints
from mismatch_probe.stats.weights import EXTREMES

_FAR = 300.0
"""Nats between the scale of the sums and the largest weight: e^600 and its square's sum are within float64."""


class Runs:
    """Stretches of a chunk in one sequence; sums over them cost a fraction of sums by sequence.

    Args:
        sequence: of each token, in any order, (n,), at least one.
    """

    def __init__(self, sequence: Ints) -> None:
        self._starts = np.concatenate([[0], np.flatnonzero(np.diff(sequence)) + 1])
        self.sequence: Ints = sequence[self._starts]
        self.lengths: Ints = np.diff(np.append(self._starts, len(sequence)))

    def sums(self, values: Floats) -> Floats:
        """Sum over each stretch, (R,)."""
        return np.asarray(np.add.reduceat(values, self._starts))


class RunningLargest:
    """The largest of all values so far.

    Args:
        count: how many are wanted.
    """

    def __init__(self, count: int) -> None:
        self._count, self._least, self._held = count, -math.inf, 0
        self._parts: list[Floats] = []

    def add(self, values: Floats) -> None:
        """Take in values, (n,), none of them null."""
        more = values[values > self._least] if self._least > -math.inf else values
        if not len(more):
            return
        self._parts.append(np.array(more))
        self._held += len(more)
        if self._held > 2 * self._count:
            self._parts = [np.partition(np.concatenate(self._parts), self._held - self._count)[-self._count :]]
            self._held, self._least = self._count, float(self._parts[0].min())

    def values(self) -> Floats:
        """``count`` of them or more, in any order; all where there are fewer."""
        return np.concatenate(self._parts) if self._parts else np.zeros(0)


class RunningComoment:
    """Count, sums and sum of products of pairs by prompt group, about the means of all: for covariance and variance.

    Held about the first chunk's means, which are near those of all, and moved there at the end.

    Args:
        n_groups: G.
    """

    def __init__(self, n_groups: int) -> None:
        self._sums = np.zeros((4, n_groups))
        self._origin: tuple[float, float] | None = None

    def add(self, x: Floats, y: Floats, runs: Runs, group_of_run: Ints) -> None:
        """Take in pairs, (n,), none of them null, at least one, and where their groups begin."""
        if self._origin is None:
            self._origin = float(x.mean()), float(y.mean())
        a, b = x - self._origin[0], y - self._origin[1]
        for sums, more in zip(self._sums, (runs.lengths, runs.sums(a), runs.sums(b), runs.sums(a * b)), strict=True):
            np.add.at(sums, group_of_run, more)

    @property
    def sums(self) -> Floats:
        """Count, sum of x, of y and of x y about their means, (G, 4)."""
        count, a, b, product = self._sums
        if not count.any():
            return np.asarray(self._sums.T.copy())
        x, y = a.sum() / count.sum(), b.sum() / count.sum()
        about = [count, a - count * x, b - count * y, product - x * b - y * a + count * x * y]
        return np.stack(about, axis=1)


class RunningWeights:
    """Token weights of one ratio: sums by prompt group for the ESS, and what their health needs.

    Args:
        n_groups: G.
        most: tokens that may come at most.
    """

    def __init__(self, n_groups: int, most: int) -> None:
        self._sums = np.zeros((4, n_groups))
        self._shift, self._peak = 0.0, -math.inf
        self._largest, self._spread = RunningLargest(tail_length(most) + 1), RunningComoment(n_groups)
        self._beyond = np.zeros((len(EXTREMES), n_groups))

    def add(self, log_weights: Floats, runs: Runs, group_of_run: Ints) -> None:
        """Take in log-weights, nats, (n,), none of them null, at least one, and where their groups begin."""
        self._rise(float(log_weights.max()))
        shifted = log_weights - self._shift
        weights = np.exp(shifted)
        tilted = np.where(weights > 0, weights * shifted, 0.0)
        each = (runs.lengths, runs.sums(weights), runs.sums(np.square(weights)), runs.sums(tilted))
        for sums, more in zip(self._sums, each, strict=True):
            np.add.at(sums, group_of_run, more)
        self._largest.add(log_weights)
        self._spread.add(log_weights, log_weights, runs, group_of_run)
        size = np.abs(log_weights)
        for beyond, limit in zip(self._beyond, EXTREMES.values(), strict=True):
            np.add.at(beyond, group_of_run, runs.sums((size > limit).astype(np.float64)))

    def _rise(self, peak: float) -> None:
        """Keep the sums within float64: another factor where the largest weight is far above the present one."""
        first, self._peak = self._peak == -math.inf, max(self._peak, peak)
        by = self._peak - self._shift
        if first:
            self._shift = self._peak
        elif by > _FAR:
            fall = math.exp(-by)
            self._sums[3] -= by * self._sums[1]
            self._sums[1:] *= fall
            self._sums[2] *= fall  # once more, since fall^2 may be 0 where the sum times it is not
            self._shift = self._peak

    @property
    def sums(self) -> tuple[Floats, float]:
        """As ``weights.weight_sums`` of all of them at once."""
        if not self._sums.any():
            return self._sums.T.copy(), 0.0
        by = self._shift - self._peak
        fall = math.exp(by)
        count, weights, squares, tilted = self._sums
        scaled = [count, weights * fall, squares * fall * fall, (tilted + by * weights) * fall]
        return np.stack(scaled, axis=1), self._peak

    def law_sums(self, sequences: Floats) -> Floats:
        """Count, sum and sum of squares about the mean, and ``sequences`` (G,) beside them, (G, 4)."""
        about = self._spread.sums
        return np.column_stack([about[:, 0], about[:, 1], about[:, 3], sequences])

    @property
    def extremes(self) -> Floats:
        """Count of tokens, and of those beyond each of ``weights.EXTREMES``, by prompt group, (G, 3)."""
        return np.column_stack([self._sums[0], *self._beyond])

    def health(self) -> dict[str, float]:
        """As ``health.weight_health`` of all of them at once."""
        n, total = float(self._sums[0].sum()), float(self._sums[1].sum())
        if not n:
            return weight_health(np.zeros(0))
        return {
            "pareto_k": tail_shape(self._largest.values(), int(n)),
            "max_weight_share": math.exp(self._peak - self._shift) / total,
        }


class RunningBias:
    """Sums of the discrepancy's bias vectors, as ``bias.discrepancy_bias_sums``, (2, V), by half of the groups."""

    def __init__(self) -> None:
        self._sums, self.tokens = np.zeros((2, 0)), np.zeros(2, dtype=np.int64)

    def add(self, sums: Floats, tokens: Ints) -> None:
        """Take in those of a chunk, whose V may be another."""
        more = max(0, sums.shape[1] - self._sums.shape[1])
        self._sums = np.pad(self._sums, ((0, 0), (0, more))) if more else self._sums
        self._sums[:, : sums.shape[1]] += sums
        self.tokens = self.tokens + tokens

    @property
    def sums(self) -> Floats:
        """So far, (2, V)."""
        return self._sums
