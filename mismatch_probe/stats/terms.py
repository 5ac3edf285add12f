"""Per-token terms whose means are columns of the steps table, whether the tokens come at once or in chunks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch_probe.stats.bias import sampled_total_variation
from mismatch_probe.stats.intervals import IDENTITY, LOG, Scale, Statistic, mean, root_mean
from mismatch_probe.stats.kl import k_terms
from mismatch_probe.stats.ratios import Levels, Split
from mismatch_probe.stats.types import Floats, Ints

PARTS = ("discrepancy", "lag", "log_ratio")
RATIOS = {"lag": "lag", "discrepancy": "discrepancy", "total": "log_ratio"}
"""The part that is the log-weight of each ratio."""
VOCABULARY = {
    "total_variation": "bias_lag_tv",
    "kl_stale_trainer": "prefix_kl_stale_trainer",
    "kl_trainer_stale": "prefix_kl_trainer_stale",
    "same_top": "top1_agreement",
    "entropy_stale": "entropy_stale",
    "entropy_trainer": "entropy_trainer",
}
"""Columns that are the mean of a sum over the vocabulary, by what is averaged."""


@dataclass(frozen=True, eq=False)
class StepTokens:
    """Counted tokens of one step, all or a chunk of them; arrays (n,), nats, NaN = null.

    ``half`` is 0 or 1, by prompt group. ``bias_lag_sums`` (2, V) and ``bias_lag_tokens`` (2,) are the exact lag bias
    summed over each half, None when it was not computed.
    """

    split: Split
    levels: Levels
    half: Ints
    token_id: Ints
    kl_stale_trainer: Floats
    kl_trainer_stale: Floats
    total_variation: Floats
    same_top: Floats
    entropy_stale: Floats
    entropy_trainer: Floats
    bias_lag_sums: Floats | None
    bias_lag_tokens: Ints

    def of(self, source: str) -> Floats:
        """The array of that name: one of PARTS or VOCABULARY."""
        values: Floats = getattr(self.split if source in PARTS else self, source)
        return values


def terms(source: str, values: Floats) -> dict[str, Floats]:
    """What is averaged, by column name.

    Args:
        source: one of PARTS or VOCABULARY.
        values: of tokens, none of them null, (n,).
    """
    if source in VOCABULARY:
        return {VOCABULARY[source]: values}
    found = {
        f"{source}_mean": values,
        f"{source}_mean_abs": np.abs(values),
        f"{source}_rms": np.square(values),
        f"{source}_mean_weight": np.exp(values),
    }
    if source != "lag":
        found |= {f"{source}_{estimator}": estimate for estimator, estimate in k_terms(values).items()}
    if source == "discrepancy":
        found["bias_discrepancy_tv"] = sampled_total_variation(values)
    return found


def statistic_of(column: str) -> tuple[Statistic, Scale]:
    """How a column follows from the count and the sum of its terms, and the scale of its interval."""
    if column.endswith("_rms"):
        return root_mean, LOG
    signed = ("_mean", "_k1", "_mean_weight", "top1_agreement")
    return mean, IDENTITY if column.endswith(signed) else LOG
