"""The steps row of one step from its tokens in chunks: what ``summary.summarise`` gives of all of them at once."""

from __future__ import annotations

import numpy as np

from mismatch_probe.stats.bias import discrepancy_bias_sums, mean_bias
from mismatch_probe.stats.health import weight_health
from mismatch_probe.stats.intervals import ClusterIntervals, Interval
from mismatch_probe.stats.ratios import Levels, group_log_means
from mismatch_probe.stats.stream import RunningBias, RunningComoment, RunningWeights, Runs
from mismatch_probe.stats.summary import SEQUENCE_KL, bias_values, put_law, put_weights, sequence_kl
from mismatch_probe.stats.terms import PARTS, RATIOS, VOCABULARY, StepTokens, statistic_of, terms
from mismatch_probe.stats.types import Floats, Ints
from mismatch_probe.stats.weights import (
    covariance_of,
    intervals_of_tokens,
    intervals_of_weights,
    weight_intervals,
)


class RunningSummary:
    """Takes in the tokens of a step chunk by chunk, in memory that grows with its sequences and groups.

    A sequence may be spread over chunks. What needs more than tokens has no place here: the exact bias vector of the
    lag. The running weight by place is ``positions.audit``'s.

    Args:
        group_of_sequence: prompt group of each sequence, 0..G-1, (S,).
        most: tokens that may come at most.
    """

    def __init__(self, group_of_sequence: Ints, most: int) -> None:
        self._group, self._most = group_of_sequence, most
        self._n_groups = int(group_of_sequence.max(initial=-1)) + 1
        self.tokens: Ints = np.zeros(len(group_of_sequence), dtype=np.int64)
        self._sources = {source: self._new(source) for source in (*PARTS, *VOCABULARY)}
        self._both, self._bias = RunningComoment(self._n_groups), RunningBias()

    def _new(self, source: str) -> _Source:
        return _Source(source, self._group, self._n_groups, self._most)

    def add(self, tokens: StepTokens) -> None:
        """Take in a chunk of tokens, at least one; their sequences are numbered as ``group_of_sequence`` is."""
        with np.errstate(over="ignore", invalid="ignore"):  # as in summarise, infinite sums are refused with a reason
            self._add(tokens)

    def _add(self, tokens: StepTokens) -> None:
        sequence = tokens.levels.sequence
        runs = Runs(sequence)
        np.add.at(self.tokens, runs.sequence, runs.lengths)
        for source, sums in self._sources.items():
            values = tokens.of(source)
            known = ~np.isnan(values)
            if known.all():
                sums.add(values, runs)
            elif known.any():
                sums.add(values[known], Runs(sequence[known]))
        discrepancy, lag = tokens.split.discrepancy, tokens.split.lag
        both = ~(np.isnan(discrepancy) | np.isnan(lag))
        if both.any():
            mine = runs if both.all() else Runs(sequence[both])
            self._both.add(discrepancy[both], lag[both], mine, self._group[mine.sequence])
        size = int(tokens.token_id.max(initial=-1)) + 1
        self._bias.add(*discrepancy_bias_sums(discrepancy, tokens.token_id, tokens.half, size))

    def forget(self, *sources: str) -> None:
        """Leave out what is known for a part of the step only, as if it were null: names in PARTS or VOCABULARY."""
        for source in sources:
            self._sources[source] = self._new(source)
        if "discrepancy" in sources:
            self._both, self._bias = RunningComoment(self._n_groups), RunningBias()

    def known(self, source: str) -> int:
        """Tokens at which it is not null."""
        return int(self._sources[source].tokens.sum())

    def sequence_sums(self, source: str) -> Floats:
        """Sum over each response, (S,), as ``ratios.sequence_sums``."""
        sums = self._sources[source]
        return np.where((self.tokens > 0) & (sums.tokens == self.tokens), sums.sequence, np.nan)

    def is_zero(self) -> bool:
        """The same weights on both sides: L and the total variation are 0 at every token."""
        n = int(self.tokens.sum())
        lag, variation = (self._sources[source] for source in ("lag", "total_variation"))
        sums = (lag.sums["lag_mean_abs"], variation.sums["bias_lag_tv"])
        everywhere = 0 < n == lag.tokens.sum() == variation.tokens.sum()
        return bool(everywhere) and not any(each.any() for each in sums)

    def found(
        self, intervals: ClusterIntervals, previous: Floats | None
    ) -> tuple[dict[str, float], dict[str, Interval], Floats | None]:
        """Values and intervals by column name, and the mean bias vector of the discrepancy, None where it is null.

        Args:
            intervals: over the step's prompt groups.
            previous: that vector of the step before.
        """
        found: dict[str, Interval] = {}
        for sums in self._sources.values():
            for name, each in sums.sums.items():
                found[name] = intervals.interval(np.stack([sums.counts, each], axis=1), *statistic_of(name))
        whole = {source: self.sequence_sums(source) for source in SEQUENCE_KL}
        found |= sequence_kl(whole, self._group, intervals)
        values: dict[str, float] = {}
        for ratio, part in RATIOS.items():
            self._weigh(ratio, part, intervals, found, values)
        found["discrepancy_lag_covariance"] = covariance_of(self._both.sums, intervals)
        bias = mean_bias(self._bias.sums, self._bias.tokens) if self._bias.tokens.any() else None
        values |= bias_values("discrepancy", bias, previous)
        return values, found, None if bias is None else bias.vector

    def _weigh(
        self, ratio: str, part: str, intervals: ClusterIntervals, found: dict[str, Interval], values: dict[str, float]
    ) -> None:
        """What one ratio's weights are worth at each level."""
        sums = self._sources[part]
        sequence = self.sequence_sums(part)
        prompt = group_log_means(sequence, Levels(np.zeros(0, dtype=np.int64), self._group))
        here = intervals_of_weights(*sums.weights.sums, intervals)
        put_weights(ratio, "token", here, sums.weights.health(), found, values)
        for level, units, group in (
            ("sequence", sequence, self._group),
            ("prompt", prompt, np.arange(len(prompt), dtype=np.int64)),
        ):
            put_weights(ratio, level, weight_intervals(units, group, intervals), weight_health(units), found, values)
        present = np.bincount(self._group[sums.tokens > 0], minlength=self._n_groups).astype(np.float64)
        law = intervals_of_tokens(sums.weights.extremes, sums.weights.law_sums(present), intervals)
        put_law(ratio, law, found)


class _Source:
    """Sums of one per-token quantity: of its terms by group, (G,) each, and of itself by sequence, (S,)."""

    def __init__(self, source: str, group: Ints, n_groups: int, most: int) -> None:
        self._source, self._group = source, group
        self.counts = np.zeros(n_groups)
        self.sums = {name: np.zeros(n_groups) for name in terms(source, np.zeros(0))}
        self.tokens: Ints = np.zeros(len(group), dtype=np.int64)
        self.sequence = np.zeros(len(group))
        self.weights = RunningWeights(n_groups, most if source in PARTS else 0)

    def add(self, values: Floats, runs: Runs) -> None:
        """Take in values, (n,), none of them null, at least one."""
        group = self._group[runs.sequence]
        np.add.at(self.counts, group, runs.lengths)
        for name, each in terms(self._source, values).items():
            np.add.at(self.sums[name], group, runs.sums(each))
        np.add.at(self.tokens, runs.sequence, runs.lengths)
        np.add.at(self.sequence, runs.sequence, runs.sums(values))
        if self._source in PARTS:
            self.weights.add(values, runs, group)
