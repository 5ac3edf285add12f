"""The split of the log-ratio, and its sums over sequences and prompt groups."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch_probe.stats.types import Floats, Ints


@dataclass(frozen=True, eq=False)
class Split:
    """Per-token parts of the log-ratio, nats, (n,) float64, NaN = null. ``log_ratio`` is D + L to the last bit."""

    discrepancy: Floats
    lag: Floats
    log_ratio: Floats


def split(sampler: Floats, stale_trainer: Floats, trainer: Floats) -> Split:
    """Split log pi - log mu at log pi_s.

    The log-ratio is formed as D + L, so that the parts add up exactly in float64; it differs from log pi - log mu by
    rounding, a few units in the last place. Where pi_s is unknown it is log pi - log mu itself and the parts are null.

    Args:
        sampler: log mu, (n,). NaN = null, here and below.
        stale_trainer: log pi_s, (n,).
        trainer: log pi, (n,).
    """
    discrepancy = stale_trainer - sampler
    lag = trainer - stale_trainer
    return Split(discrepancy, lag, np.where(np.isnan(stale_trainer), trainer - sampler, discrepancy + lag))


@dataclass(frozen=True, eq=False)
class Levels:
    """Which sequence and prompt group each counted token belongs to.

    ``sequence`` (n,) holds 0..S-1, ``group_of_sequence`` (S,) holds 0..G-1.
    """

    sequence: Ints
    group_of_sequence: Ints

    @property
    def n_sequences(self) -> int:
        """S."""
        return len(self.group_of_sequence)

    @property
    def n_groups(self) -> int:
        """G."""
        return int(self.group_of_sequence.max()) + 1 if len(self.group_of_sequence) else 0

    @property
    def group(self) -> Ints:
        """Prompt group of each token, (n,)."""
        return self.group_of_sequence[self.sequence]


def sequence_sums(values: Floats, levels: Levels) -> Floats:
    """Sum over each response, (S,): the log of the product of the token ratios. NaN where any token is null, or where
    the sequence has no counted token.
    """
    sums = np.bincount(levels.sequence, weights=values, minlength=levels.n_sequences)
    present = np.bincount(levels.sequence, minlength=levels.n_sequences) > 0
    return np.where(present, sums, np.nan)


def group_log_means(log_weights: Floats, levels: Levels) -> Floats:
    """Log of the mean sequence weight of each prompt group, (G,): the weight that a prompt carries in the batch.

    Null sequences are left out; a group without any other is NaN.
    """
    known = ~np.isnan(log_weights)
    group = levels.group_of_sequence[known]
    peak = np.full(levels.n_groups, -np.inf)
    np.maximum.at(peak, group, log_weights[known])
    total = np.bincount(group, weights=np.exp(log_weights[known] - peak[group]), minlength=levels.n_groups)
    count = np.bincount(group, minlength=levels.n_groups)
    out = np.full(levels.n_groups, np.nan)
    there = count > 0
    out[there] = peak[there] + np.log(total[there] / count[there])
    return out


def drop_nulls(values: Floats, group: Ints) -> tuple[Floats, Ints]:
    """Values that are not null, and the group of each."""
    known = ~np.isnan(values)
    return values[known], group[known]
