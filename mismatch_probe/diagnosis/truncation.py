"""Sampling that was cut: looked for before the scans, which would take it for something else, and after them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mismatch_probe.diagnosis.catalogue import Page
from mismatch_probe.diagnosis.evidence import Evidence
from mismatch_probe.diagnosis.finding import Finding, NotTestable, Number, Result, Severity
from mismatch_probe.diagnosis.words import nats, percent

PAGES = (
    Page(
        "MP402",
        "sampling was cut (top-p, top-k, min-p)",
        "The logged log-probs are renormalised over the tokens that survived top-p, top-k or min-p; the trainer's are "
        "not. The difference is the log of the mass that survived.",
        "D is negative at nearly every token that has one, its mean weight lies below 1, and nothing else is wrong: "
        "ESS and correlation look perfect.",
        "Tokens whose D is clearly positive; a mean weight of 1.",
        "Sample with top_p=1 and top_k=-1, or replay the engine's sampling mask in the trainer. Reweighting by the "
        "logged ratio multiplies every gradient by the surviving mass.",
        ("huggingface/trl#6789", "verl-project/verl#6240", "vllm-project/vllm#49577"),
    ),
)
_LEAST_TOKENS = 50
_CERTAIN = 0.05
"""Entropy of a prefix, nats, below which truncation cuts nothing."""
_MASS = 0.002
"""Mean weights this close to 1 are rounding's."""


def check_truncation(evidence: Evidence) -> Result:
    """D of one sign and a mean weight below 1."""
    discrepancy, usable = evidence.discrepancy, evidence.usable
    known = discrepancy[usable]
    if len(known) < _LEAST_TOKENS:
        return Result(not_testable=(NotTestable(("MP402",), "fewer than 50 tokens have a discrepancy"),))
    positive = known[known > 0]
    # What noise there is shows above 0, where truncation puts nothing.
    noise = float(np.sqrt(np.square(positive).mean())) if len(positive) else 0.0
    limit = max(0.005, 3 * noise)
    below, above = int((known < -limit).sum()), int((known > limit).sum())
    with np.errstate(over="ignore"):
        weight, low, high = evidence.mean(np.exp(discrepancy))
    if not (high < 1 - _MASS and below >= 20 and below >= 20 * max(1, above)):
        return Result()
    settings = evidence.settings
    declared = [f"top_p {settings.top_p:g}"] if settings.top_p < 1 else []
    declared += [f"top_k {settings.top_k}"] if settings.top_k > 0 else []
    said = (
        f"{' and '.join(declared)} declared" if declared else "none declared, so the settings that are logged are wrong"
    )
    summary = (
        f"sampling was cut ({said}): {percent(float((known < limit).mean()))} of tokens have D < {nats(limit)}, and "
        f"the mean weight is {weight:.3f} [{low:.3f}, {high:.3f}]: the bias is one-sided, and ESS cannot see it"
    )
    chosen = usable & (discrepancy < -limit)
    mean, mean_low, mean_high = evidence.mean(discrepancy)
    finding = Finding(
        "MP402",
        Severity.ERROR,
        summary,
        explains=evidence.share(chosen),
        numbers=(
            Number("mean weight", weight, "1", low, high),
            Number("mean D", mean, "nats", mean_low, mean_high),
            Number("tokens below", below),
            Number("tokens above", above),
        ),
        examples=tuple(evidence.example(int(at), f"D {discrepancy[at]:.3f}") for at in evidence.worst(chosen)),
    )
    # Which mass survived at each prefix is not logged: its mean is put back wherever the prefix leaves a choice. It is
    # the same for every token, since one chosen by its D would favour the version that D was taken with.
    open_prefix = usable & ~(evidence.tokens.entropy < _CERTAIN)
    restored = evidence.tokens.sampler + np.where(open_prefix, float(discrepancy[open_prefix].mean()), 0.0)
    return Result((finding,), evidence=replace(evidence, tokens=replace(evidence.tokens, sampler=restored)))


CHECKS = (check_truncation,)
