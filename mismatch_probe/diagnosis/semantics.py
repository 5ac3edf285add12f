"""Log-probs of another distribution than the one that is trained: calibration, penalties."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mismatch_probe.diagnosis.catalogue import Page
from mismatch_probe.diagnosis.evidence import Evidence
from mismatch_probe.diagnosis.finding import Finding, NotTestable, Number, Result, Severity
from mismatch_probe.run import Bools

PAGES = (
    Page(
        "MP404",
        "the sampled tokens do not fit the logged distribution",
        "Sampling went through a temperature, top-p or another transform, and both sides log raw log-probs: every "
        "ratio is 1, and none of them is that of the distribution that drew the tokens.",
        "Sampled tokens are more (or less) probable than their distribution's entropy allows: the mean of "
        "-log mu - H differs from 0.",
        "The mean of -log mu - H over all sampled responses, none of them dropped, within its error of 0.",
        "Log processed log-probs, and divide the trainer's logits by the sampling temperature.",
        ("thinking-machines-lab/tinker-feedback#148",),
    ),
    Page(
        "MP405",
        "a penalty or bias on tokens already seen",
        "A repetition, presence or frequency penalty lowers the engine's logits of ids that occurred before; the "
        "trainer knows nothing of it.",
        "D differs between tokens whose id occurred before in the sequence and those whose id did not.",
        "The same difference with penalties switched off.",
        "Sample without penalties, or apply the same ones in the trainer.",
        (),
    ),
)

_LEAST_TOKENS = 50
_CALIBRATION_Z, _CALIBRATION = 5.0, 0.05
_PENALTY_Z, _PENALTY = 5.0, 0.02
_EXPLAINED = 0.2
"""Mean |D|, nats, above which something larger is wrong: these signatures then mean nothing."""
_UNEXPLAINED = "a larger gap is left unexplained"


def check_calibration(evidence: Evidence) -> Result:
    """Whether the sampled tokens were drawn from the distribution whose log-probs are logged."""
    tokens = evidence.tokens
    if evidence.gap() > _EXPLAINED:
        return Result(not_testable=(NotTestable(("MP404",), _UNEXPLAINED),))
    if evidence.settings.filtered:
        return Result(not_testable=(NotTestable(("MP404",), f"rows were dropped ({evidence.settings.filtered})"),))
    surprise = -tokens.stale - tokens.entropy
    known = evidence.usable & ~np.isnan(surprise)
    if known.sum() < _LEAST_TOKENS:
        return Result(not_testable=(NotTestable(("MP404",), "entropies are known at fewer than 50 tokens"),))
    mean, low, high = evidence.mean(surprise)
    error = (high - low) / (2 * 1.96)
    if np.isnan(error) or error <= 0 or abs(mean) < max(_CALIBRATION, _CALIBRATION_Z * error):
        return Result()
    settings = evidence.settings
    declared_raw = settings.logprobs_mode == "raw" and (settings.temperature != 1 or settings.truncated_sampling)
    sharper = "more" if mean < 0 else "less"
    summary = (
        f"sampled tokens are {sharper} probable than the logged distribution allows: mean of -log pi_s - H is "
        f"{mean:+.2f} [{low:+.2f}, {high:+.2f}] nats (0 when they were drawn from it), while the ratios look healthy"
    )
    severity = Severity.WARNING if declared_raw else Severity.ERROR
    numbers = (Number("mean of -log pi_s - H", mean, "nats", low, high), Number("z", mean / error))
    return Result((Finding("MP404", severity, summary, explains=0.0, numbers=numbers),))


def check_penalties(evidence: Evidence) -> Result:
    """D at ids that occurred before against D at new ones."""
    if evidence.gap() > _EXPLAINED:
        return Result(not_testable=(NotTestable(("MP405",), _UNEXPLAINED),))
    seen = _seen_before(evidence)
    discrepancy, usable = evidence.discrepancy, evidence.usable
    if min((usable & seen).sum(), (usable & ~seen).sum()) < _LEAST_TOKENS:
        return Result(not_testable=(NotTestable(("MP405",), "too few ids occur twice in a sequence"),))
    again, first = evidence.mean(discrepancy, seen), evidence.mean(discrepancy, ~seen)
    gap, error = again[0] - first[0], float(np.hypot(again[2] - again[1], first[2] - first[1])) / (2 * 1.96)
    if np.isnan(error) or abs(gap) < max(_PENALTY, _PENALTY_Z * error) or abs(again[0]) < 2 * abs(first[0]):
        return Result()
    summary = (
        f"D is {again[0]:+.3f} [{again[1]:+.3f}, {again[2]:+.3f}] nats at ids that occurred before in their sequence "
        f"and {first[0]:+.3f} [{first[1]:+.3f}, {first[2]:+.3f}] at new ones: a penalty on repeated tokens"
    )
    finding = Finding(
        "MP405",
        Severity.ERROR,
        summary,
        explains=evidence.share(seen),
        numbers=(Number("D, seen before", again[0], "nats", again[1], again[2]), Number("difference", gap, "nats")),
        examples=tuple(evidence.example(int(at), f"D {discrepancy[at]:.3f}") for at in evidence.worst(seen)),
    )
    centred = evidence.tokens.sampler + np.where(seen, again[0], first[0])
    mended = replace(evidence, tokens=replace(evidence.tokens, sampler=centred))
    return Result((finding,), evidence=mended)


def _seen_before(evidence: Evidence) -> Bools:
    """True where a token's id occurred earlier in its response, or in its prompt, (m,)."""
    ids, first = evidence.tokens.token_id, evidence.sequences.first
    out = np.zeros(len(ids), dtype=np.bool_)
    for row, prompt in enumerate(evidence.sequences.prompt_ids):
        whole = np.concatenate([prompt, ids[first[row] : first[row + 1]]])
        _, earliest = np.unique(whole, return_index=True)
        repeated = np.ones(len(whole), dtype=np.bool_)
        repeated[earliest] = False
        out[first[row] : first[row + 1]] = repeated[len(prompt) :]
    return out


CHECKS = (check_penalties, check_calibration)
