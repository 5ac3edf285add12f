"""Log-probs of another distribution than the one that is trained: truncation, calibration, penalties."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mismatch_probe.diagnosis.catalogue import Page
from mismatch_probe.diagnosis.evidence import Evidence
from mismatch_probe.diagnosis.finding import Finding, NotTestable, Number, Result, Severity
from mismatch_probe.diagnosis.words import nats, percent
from mismatch_probe.run import Bools

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
_CERTAIN = 0.05
"""Entropy of a prefix, nats, below which truncation cuts nothing."""
_MASS = 0.002
"""Mean weights this close to 1 are rounding's."""
_CALIBRATION_Z, _CALIBRATION = 5.0, 0.05
_PENALTY_Z, _PENALTY = 5.0, 0.02
_EXPLAINED = 0.2
"""Mean |D|, nats, above which something larger is wrong: these signatures then mean nothing."""
_UNEXPLAINED = "a larger gap is left unexplained"


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
    finding = Finding(
        "MP402",
        Severity.ERROR,
        summary,
        explains=_share(evidence, chosen),
        numbers=(
            Number("mean weight", weight, "1", low, high),
            Number("mean D", *_reordered(evidence.mean(discrepancy))),
            Number("tokens below", below),
            Number("tokens above", above),
        ),
        examples=tuple(evidence.example(int(at), f"D {discrepancy[at]:.3f}") for at in _worst(discrepancy, chosen)),
    )
    # Which mass survived at each prefix is not logged: its mean is put back wherever the prefix leaves a choice. It is
    # the same for every token, since one chosen by its D would favour the version that D was taken with.
    open_prefix = usable & ~(evidence.tokens.entropy < _CERTAIN)
    restored = evidence.tokens.sampler + np.where(open_prefix, float(discrepancy[open_prefix].mean()), 0.0)
    return Result((finding,), evidence=replace(evidence, tokens=replace(evidence.tokens, sampler=restored)))


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
        explains=_share(evidence, usable & seen),
        numbers=(Number("D, seen before", again[0], "nats", again[1], again[2]), Number("difference", gap, "nats")),
        examples=tuple(
            evidence.example(int(at), f"D {discrepancy[at]:.3f}") for at in _worst(discrepancy, usable & seen)
        ),
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


def _share(evidence: Evidence, chosen: Bools) -> float:
    """Share of the remaining gap that the chosen tokens carry."""
    size = np.minimum(np.abs(evidence.discrepancy), 2.0)
    whole = float(size[evidence.usable].sum())
    return float(size[chosen & evidence.usable].sum()) / whole if whole > 0 else 0.0


def _worst(discrepancy: np.ndarray, chosen: Bools, most: int = 3) -> np.ndarray:
    places = np.flatnonzero(chosen)
    return places[np.argsort(-np.abs(discrepancy[places]), kind="stable")[:most]]


def _reordered(mean: tuple[float, float, float]) -> tuple[float, str, float, float]:
    return mean[0], "nats", mean[1], mean[2]


CHECKS = (check_truncation, check_penalties, check_calibration)
