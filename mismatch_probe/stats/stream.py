"""Sums over tokens that arrive in chunks, in memory that grows with sequences and groups and not with tokens."""

from __future__ import annotations

import math

import numpy as np

from mismatch_probe.stats.health import unit_health
from mismatch_probe.stats.tails import LARGEST_LOG, tail_length, tail_shape
from mismatch_probe.stats.types import Floats, Ints

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
    """Covariance of two values, or the variance of one with itself, joined from chunks about their own means.

    Source: Chan, Golub and LeVeque (1983), "Algorithms for computing the sample variance".
    """

    def __init__(self) -> None:
        self.count, self._x, self._y, self._product = 0, 0.0, 0.0, 0.0

    def add(self, x: Floats, y: Floats) -> None:
        """Take in pairs, (n,), none of them null, at least one."""
        n, total = len(x), self.count + len(x)
        mean_x, mean_y = float(x.mean()), float(y.mean())
        from_x, from_y = mean_x - self._x, mean_y - self._y
        self._product += float((x - mean_x) @ (y - mean_y)) + from_x * from_y * self.count * n / total
        self._x += from_x * n / total
        self._y += from_y * n / total
        self.count = total

    def value(self) -> float:
        """Mean product of the deviations; NaN before any pair."""
        return self._product / self.count if self.count else math.nan


class RunningWeights:
    """Token weights of one ratio: sums by prompt group for the ESS, and what their health needs.

    Args:
        n_groups: G.
        most: tokens that may come at most.
    """

    def __init__(self, n_groups: int, most: int) -> None:
        self._sums = np.zeros((3, n_groups))
        self._shift, self._peak, self._tilt = 0.0, -math.inf, 0.0
        self._largest, self._spread = RunningLargest(tail_length(most) + 1), RunningComoment()
        self._beyond = np.zeros(2)

    def add(self, log_weights: Floats, runs: Runs, group_of_run: Ints) -> None:
        """Take in log-weights, nats, (n,), none of them null, at least one, and where their groups begin."""
        self._rise(float(log_weights.max()))
        shifted = log_weights - self._shift
        weights = np.exp(shifted)
        for sums, more in zip(
            self._sums, (runs.lengths, runs.sums(weights), runs.sums(np.square(weights))), strict=True
        ):
            np.add.at(sums, group_of_run, more)
        self._tilt += float(weights @ shifted)
        self._largest.add(log_weights)
        self._spread.add(log_weights, log_weights)
        size = np.abs(log_weights)
        self._beyond += np.count_nonzero(size > math.log(2)), np.count_nonzero(size > math.log(1.25))

    def _rise(self, peak: float) -> None:
        """Keep the sums within float64: another factor where the largest weight is far above the present one."""
        first, self._peak = self._peak == -math.inf, max(self._peak, peak)
        by = self._peak - self._shift
        if first:
            self._shift = self._peak
        elif by > _FAR:
            fall = math.exp(-by)
            self._tilt = fall * (self._tilt - by * float(self._sums[1].sum()))
            self._sums[1:] *= fall
            self._sums[2] *= fall  # once more, since fall^2 may be 0 where the sum times it is not
            self._shift = self._peak

    @property
    def sums(self) -> Floats:
        """Count, sum of w and sum of w^2 of each group, (G, 3), scaled by the largest weight."""
        fall = math.exp(self._shift - self._peak) if self._sums.any() else 1.0
        return np.asarray(self._sums.T * (1.0, fall, fall * fall))

    @property
    def variance(self) -> float:
        """Of the log-weights, nats^2; NaN before any."""
        return self._spread.value()

    def health(self) -> dict[str, float]:
        """As ``health.unit_health`` of all of them at once."""
        n, total, squares = map(float, self._sums.sum(axis=1))
        if not n:
            return unit_health(np.zeros(0))
        log_mean_square = 2 * self._shift + math.log(squares / n)
        return {
            "pareto_k": tail_shape(self._largest.values(), int(n)),
            "perplexity_ess": min(math.exp(math.log(total / n) - self._tilt / total), 1.0),
            "max_weight_share": math.exp(self._peak - self._shift) / total,
            "chi_square": max(n * squares / total**2 - 1, 0.0),
            "second_moment": math.exp(log_mean_square) if log_mean_square < LARGEST_LOG else math.nan,
        }

    def extremes(self) -> dict[str, float]:
        """Shares of the tokens beyond ln 2, and outside [0.8, 1.25]."""
        n = float(self._sums[0].sum())
        return {"share_beyond_ln2": self._beyond[0] / n, "share_outside_band": self._beyond[1] / n} if n else {}


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
