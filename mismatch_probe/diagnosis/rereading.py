"""Tokens read under other weights than claimed: the evidence with their rescored log-probs replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from mismatch_probe.diagnosis.evidence import Evidence
from mismatch_probe.diagnosis.fine import WIDE
from mismatch_probe.diagnosis.scan import Candidate, Fit, Scan
from mismatch_probe.run import Bools, Floats, Ints

_APART, _LEAST = 1.5, 0.0067
"""Or above which it is, where so many times that of the best step; below, no reading could take enough away."""


def suspects(fits: Sequence[Fit]) -> list[Fit]:
    """Steps whose best reading leaves more than numerics usually do, or much more than at the run's best step."""
    least = min((fit.gap for fit in fits), default=0.0)
    return [fit for fit in fits if fit.gap > WIDE or (fit.gap > _APART * least and fit.gap > _LEAST)]


def read_as(evidence: Evidence, steps: Bools, stale: Floats, why: str) -> Evidence:
    """The evidence with other rescored log-probs.

    Args:
        evidence: the run.
        steps: tokens that are read anew, (m,).
        stale: their log-probs, (m,); NaN where another reading was not scored, so that the token is no longer usable.
        why: what was taken out.
    """
    found = np.where(steps, stale, evidence.tokens.stale)
    usable = evidence.usable & ~(steps & np.isnan(found))
    tokens = replace(evidence.tokens, stale=found)
    return replace(evidence, tokens=tokens, usable=usable, applied=(*evidence.applied, why))


def with_candidate(scan: Scan, candidate: Candidate, tokens: Ints, logprob: Mapping[int, Floats]) -> Scan:
    """The scan with one candidate more, named for some tokens.

    Args:
        scan: the scan.
        candidate: the new one.
        tokens: its tokens, among the scan's, ascending, (k,).
        logprob: of those tokens, by place in ``temperatures``.
    """
    at = np.searchsorted(scan.tokens, tokens)
    row = np.full((1, *scan.logprob.shape[1:]), np.nan)
    for temperature, values in logprob.items():
        row[0, temperature, at] = values
    claimed = scan.claimed.copy()
    claimed[at] = len(scan.candidates)
    return replace(
        scan,
        candidates=(*scan.candidates, candidate),
        logprob=np.concatenate([scan.logprob, row]),
        entropy=np.concatenate([scan.entropy, np.full_like(row, np.nan)]),
        claimed=claimed,
    )


def share_of_gap(evidence: Evidence, gained: Mapping[int, float]) -> float:
    """Share of the gap that goes when each step's mean |D| falls by so many nats."""
    step = evidence.step_of_token[evidence.usable]
    whole = evidence.gap() * len(step)
    gone = sum(gain * int((step == at).sum()) for at, gain in gained.items())
    return float(min(1.0, gone / whole)) if whole > 0 else 0.0
