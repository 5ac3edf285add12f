"""Metrics that mislead though the run is sound: what was averaged, over which rows, in which unit."""

from __future__ import annotations

import math

import numpy as np

from mismatch_probe.diagnosis.catalogue import Page
from mismatch_probe.diagnosis.evidence import Evidence
from mismatch_probe.diagnosis.finding import Finding, NotTestable, Number, Result, Severity
from mismatch_probe.diagnosis.words import count, nats, percent, steps_of
from mismatch_probe.run import Floats, Ints
from mismatch_probe.stats.ess import ess

PAGES = (
    Page(
        "MP701",
        "rows without a counted token shrink row-averaged metrics",
        "Some rows have a loss mask of zeros. A metric that is averaged over rows, with 0 for them, is too small by "
        "their share; one that is averaged over tokens is not.",
        "Rows whose loss mask counts no token. All numbers of the probe are over counted tokens and do not change with "
        "such rows.",
        "A metric of the framework that stays the same when the masked rows are left out.",
        "Average over counted tokens (sum over tokens / number of counted tokens), or leave such rows out before.",
        ("verl-project/verl#7772", "verl-project/verl#7785"),
    ),
    Page(
        "MP702",
        "ESS depends on what it is pooled over",
        "ESS of micro-batches or of single prompts, averaged, hides the differences between them; ESS that counts "
        "tokens outside the loss, or divides by another n, can even exceed 1.",
        "Kish's ESS of whole steps, pooled, against the mean of the ESS of their prompt groups, which stand in for "
        "micro-batches.",
        "A framework's ESS that equals the pooled one.",
        "Take (sum w)^2 / (n sum w^2) over all counted tokens, or sequences, of a step at once; say which. The probe's "
        "ESS is that, and lies in (0, 1] by construction.",
        ("rllm-org/rllm#503", "radixark/miles#3230", "NVIDIA/Megatron-LM#5420", "PrimeIntellect-ai/prime-rl#2478"),
    ),
    Page(
        "MP703",
        "a sequence ratio is far from 1 by length alone",
        "The ratio of a response is the product over its tokens: a small mean log-ratio a token, times the length, "
        "makes it large or small though every token is fine.",
        "Sequence ratios outside [1/3, 3] where token ratios are near 1 and the sequence ratio is what e^(length x "
        "mean) gives.",
        "Responses of the same length whose ratio is near 1.",
        "Compare a sequence ratio with e^(length x mean log-ratio) before you call it abnormal. The product is the "
        "unbiased weight; its geometric mean is not, but can be compared between lengths. Look for the reason of the "
        "mean itself.",
        ("huggingface/trl#5814", "huggingface/trl#4772", "NVIDIA-NeMo/RL#2269"),
    ),
    Page(
        "MP704",
        "no counted token in a step",
        "A step's loss mask counts no token at all: there is nothing to train on, and nothing that a metric could be "
        "of.",
        "Steps whose rows all have a mask of zeros. They are never called passed.",
        "A counted token in the step's dump.",
        "See why the mask is empty: a filter that took all rows, or a mask that was written before it was filled.",
        ("NovaSky-AI/SkyRL#911", "NovaSky-AI/SkyRL#1703"),
    ),
)
CAP = 3.0
"""A sequence ratio beyond this, or below its inverse, is what truncated importance sampling cuts by default."""
NEAR = 0.05
"""Mean |log-ratio| of tokens whose ratios count as near 1, nats."""
POOLED = 0.05
"""Difference between two ways to pool ESS that is worth a word."""


def check_masks(evidence: Evidence) -> Result:
    """MP701 and MP704."""
    sequences, tokens = evidence.sequences, evidence.tokens
    counted = np.bincount(tokens.sequence[tokens.counted], minlength=len(sequences))
    if not len(sequences):
        return Result(not_testable=(NotTestable(("MP701", "MP704"), "no row could be read"),))
    steps = np.unique(sequences.step)
    empty = np.array([step for step in steps if not counted[sequences.step == step].any()], dtype=np.int64)
    findings = []
    if len(empty):
        findings.append(_nothing(empty, steps, counted, sequences.step))
    masked = (counted == 0) & ~np.isin(sequences.step, empty)
    if masked.any():
        findings.append(_rows(evidence, masked, empty))
    return Result(tuple(findings))


def check_pooling(evidence: Evidence) -> Result:
    """MP702: ESS of sequences pooled over a step, against the mean over its prompt groups."""
    codes = ("MP702",)
    d = evidence.tokens.trainer - evidence.tokens.sampler
    known = evidence.tokens.counted & ~np.isnan(d)
    if not known.any():
        return Result(not_testable=(NotTestable(codes, "no token has both log-probs, so there are no weights"),))
    found = [one for step in np.unique(evidence.step_of_token[known]) if (one := _pooled(evidence, d, known, step))]
    if not found:
        return Result(not_testable=(NotTestable(codes, "no step holds two prompt groups with two sequences each"),))
    worst = max(found, key=lambda one: one[1] - one[0])
    step, (whole, parts) = worst[2], worst[:2]
    if parts - whole < POOLED:
        return Result()
    summary = (
        f"sequence ESS of step {step} is {whole:.2f} pooled and {parts:.2f} as a mean over prompt groups: averaged "
        f"over micro-batches it would hide what differs between them; the probe's is pooled over counted tokens"
    )
    numbers = (Number("sequence ESS, pooled", whole), Number("mean sequence ESS of prompt groups", parts))
    return Result((Finding("MP702", Severity.INFO, summary, parts - whole, numbers, (step,)),))


def check_products(evidence: Evidence) -> Result:
    """MP703: sequence ratios that length alone explains."""
    d = np.where(evidence.tokens.counted, evidence.tokens.trainer - evidence.tokens.sampler, 0.0)
    rows = len(evidence.sequences)
    total = np.bincount(evidence.tokens.sequence, weights=d, minlength=rows)
    length = np.bincount(evidence.tokens.sequence, weights=evidence.tokens.counted, minlength=rows)
    known = (length > 0) & ~np.isnan(total)
    if not known.any():
        return Result(not_testable=(NotTestable(("MP703",), "no response has all its log-ratios"),))
    total, length = total[known], length[known]
    mean = float(total.sum() / length.sum())
    size = float(np.abs(d[evidence.tokens.counted & ~np.isnan(d)]).mean())
    far = np.abs(total) > math.log(CAP)
    expected = length * mean
    # What length gives must be most of what is there: else single tokens, or chance, made the ratio.
    by_length = far & (np.abs(expected) > math.log(CAP) / 2) & (np.abs(total - expected) < np.abs(total) / 2)
    if size > NEAR or by_length.mean() < 0.05:
        return Result()
    typical = float(np.median(length[by_length]))
    ratio = float(np.median(total[by_length]))
    summary = (
        f"{percent(float(by_length.mean()))} of the sequence ratios lie outside [1/{CAP:g}, {CAP:g}] by length alone: "
        f"mean d is {mean:+.2g} nats a token (token ratio {math.exp(mean):.3f}), and e^({typical:.0f} tokens x "
        f"{mean:.2g}) = {math.exp(typical * mean):.2g} where the median ratio is {math.exp(ratio):.2g}"
    )
    numbers = (
        Number("mean d a token", mean, "nats"),
        Number("mean |d| a token", size, "nats"),
        Number("token ratio at the mean", math.exp(mean)),
        Number("median length of these responses", typical, "tokens"),
        Number("e^(length x mean)", math.exp(min(700.0, typical * mean))),
        Number("median sequence ratio of these responses", math.exp(min(700.0, ratio))),
        Number("share of responses beyond the cap", float(far.mean())),
    )
    return Result((Finding("MP703", Severity.INFO, summary, float(by_length.mean()), numbers),))


def _nothing(empty: Ints, steps: Ints, counted: Ints, step_of_row: Ints) -> Finding:
    rows = int(np.isin(step_of_row, empty).sum())
    where = steps_of(map(int, empty), map(int, steps))
    if len(empty) == len(steps):
        text = f"no token is counted at {where} ({count(rows, 'row')}): there is nothing to compare, and nothing passes"
        return Finding("MP704", Severity.ERROR, text, 1.0, steps=tuple(map(int, empty)))
    text = (
        f"no token is counted at {where} ({count(rows, 'row')}, all masked): nothing was compared there, and what is "
        f"said of the run is said of the other {count(len(steps) - len(empty), 'step')}"
    )
    return Finding("MP704", Severity.WARNING, text, rows / len(counted), steps=tuple(map(int, empty)))


def _rows(evidence: Evidence, masked: np.ndarray, empty: Ints) -> Finding:
    sequences = evidence.sequences
    of_step = [(int(step), sequences.step == step) for step in np.unique(sequences.step[masked])]
    worst, mine = max(of_step, key=lambda one: float(masked[one[1]].mean()))
    share = float(masked[mine].mean())
    used = int((~masked & ~np.isin(sequences.step, empty)).sum())
    gap = evidence.gap()
    shrunk = (
        "" if math.isnan(gap) else f", for mean |D| {nats(gap * (1 - share))} instead of {nats(gap)} at step {worst}"
    )
    text = (
        f"{masked.sum()} of {len(masked)} rows count no token ({percent(share)} at step {worst}): a metric averaged "
        f"over rows is that share too small{shrunk}; the numbers here are over the counted tokens of {used} rows"
    )
    numbers = (
        Number("rows without a counted token", float(masked.sum())),
        Number("rows used", float(used)),
        Number("largest share of such rows in a step", share),
    )
    places = np.flatnonzero(masked)[:3]
    examples = tuple(evidence.example_row(int(row)) for row in places)
    steps = tuple(step for step, _ in of_step)
    return Finding("MP701", Severity.INFO, text, float(masked.mean()), numbers, steps, examples)


def _pooled(evidence: Evidence, d: Floats, known: np.ndarray, step: int) -> tuple[float, float, int] | None:
    """ESS of the step's sequences, pooled and as a mean over prompt groups with at least two."""
    rows = np.unique(evidence.tokens.sequence[known & (evidence.step_of_token == step)])
    # Where a fault was found the weights are wrong, however they are pooled.
    rows = rows[~np.isin(rows, evidence.tokens.sequence[known & ~evidence.usable])]
    if not len(rows):
        return None
    sums = np.bincount(evidence.tokens.sequence[known], weights=d[known], minlength=len(evidence.sequences))[rows]
    group = evidence.sequences.group[rows]
    parts = [ess(sums[group == one]) for one in np.unique(group) if (group == one).sum() > 1]
    return (ess(sums), float(np.mean(parts)), int(step)) if len(parts) > 1 else None


CHECKS = (check_masks, check_pooling, check_products)
