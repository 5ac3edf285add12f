"""A column of log-probs that is a copy of another one."""

from __future__ import annotations

import numpy as np

from mismatch_probe.diagnosis.catalogue import Page
from mismatch_probe.diagnosis.evidence import Evidence
from mismatch_probe.diagnosis.finding import Finding, NotTestable, Number, Result, Severity
from mismatch_probe.diagnosis.words import count, steps_of
from mismatch_probe.run import UNKNOWN_VERSION

PAGES = (
    Page(
        "MP706",
        "a logged column is a copy, not evidence",
        "The trainer's log-probs in the dump are the sampler's, or the other way round, so their ratio is 1 and every "
        "metric of the gap between them reads 0 whatever the gap is.",
        "Both columns are equal bit for bit at every token. Two computations never agree like that, unless both run "
        "the same batch-invariant kernels.",
        "An engine and a trainer that are known to be bitwise equal, with the sampler at the trainer's own version.",
        "Log what the trainer computes under the weights of its step before the update, beside what the engine logged.",
        ("radixark/miles#1829", "verl-project/verl#7196"),
    ),
)
_TOKENS = 20
"""Fewest tokens of a step with a log-prob other than 0 on both sides."""


def check_copies(evidence: Evidence) -> Result:
    """MP706, from the log alone: the steps at which both columns are the same numbers."""
    tokens = evidence.tokens
    # A certain token has 0 on both sides.
    told = tokens.counted & ~np.isnan(tokens.sampler) & ~np.isnan(tokens.trainer_logged) & (tokens.sampler != 0)
    if not told.any():
        return Result(
            not_testable=(NotTestable(("MP706",), "the dump holds no trainer's log-probs beside the sampler's"),)
        )
    equal = tokens.sampler == tokens.trainer_logged
    step = evidence.step_of_token
    steps = [int(s) for s in np.unique(step[told]) if (told & (step == s)).sum() >= _TOKENS]
    copied = [s for s in steps if equal[told & (step == s)].all()]
    if not copied:
        return Result()
    mine = told & np.isin(step, copied)
    known = mine & (tokens.claimed != UNKNOWN_VERSION) & (tokens.trainer_version != UNKNOWN_VERSION)
    lagging = int((known & (tokens.claimed != tokens.trainer_version)).sum())
    gap = np.abs(tokens.trainer - tokens.sampler)[mine]
    rescored = float(np.nanmean(gap)) if (~np.isnan(gap)).any() else float("nan")
    why = f", {lagging:,} of them from another version than the trainer's" if lagging else ""
    return Result(
        (
            Finding(
                "MP706",
                Severity.ERROR if lagging else Severity.WARNING,
                f"100 % of the logged trainer log-probs are bit-identical to the sampler's at "
                f"{steps_of(copied, steps)} ({count(int(mine.sum()), 'token')}{why}): this column is a copy, "
                "not evidence",
                explains=float(mine.sum() / told.sum()),
                numbers=(Number("mean |d| as rescored at those tokens", rescored, "nats"),),
                steps=tuple(copied),
            ),
        )
    )


CHECKS = (check_copies,)
