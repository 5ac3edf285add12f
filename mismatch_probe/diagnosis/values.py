"""Log-probs that no distribution gives, or that were never logged; looked for before anything is explained."""

from __future__ import annotations

import numpy as np

from mismatch_probe.diagnosis.catalogue import Page
from mismatch_probe.diagnosis.evidence import Evidence
from mismatch_probe.diagnosis.finding import Example, Finding, Number, Result, Severity
from mismatch_probe.diagnosis.words import count, percent, steps_of
from mismatch_probe.run import Bools, Floats

PAGES = (
    Page(
        "MP501",
        "log-probs are null at some counted tokens",
        "The sampler's log-prob of single tokens is null or NaN where the tokens around it have one.",
        "Counted tokens without a sampler log-prob, in steps that have them elsewhere. They are left out, not filled.",
        "The same tokens masked, or logged with a number.",
        "Find out why they were not logged; never fill 0.0 in, which claims certainty. Mask tokens that the engine did "
        "not draw.",
        ("huggingface/trl#6166", "strands-rl/strands-sglang#34"),
    ),
    Page(
        "MP504",
        "log-probs above 0",
        "A log-prob above 0 is no log-prob: it was computed as a difference of rounded numbers, or stored coarsely.",
        "Counted tokens whose logged log-prob is above .0001; a grid of the values tells the precision.",
        "Log-probs logged in float32 that are all at or below 0.",
        "Compute log-softmax in float32 on the engine's side and log it in float32.",
        ("AI-Hypercomputer/maxtext#5231",),
    ),
    Page(
        "MP505",
        "a filler value is counted as a log-prob",
        "Positions that the engine did not draw were filled with one value, and the loss mask counts some of them.",
        "One value above 0 at several counted tokens.",
        "The same value at masked tokens only.",
        "Mask those tokens. Where the mask is right a filler does no harm.",
        ("yaof20/Flash-RL#19", "radixark/miles#418"),
    ),
    Page(
        "MP605",
        "a column is missing from some steps",
        "Some steps of the dump hold no sampler log-probs at all, so they have no discrepancy and no total ratio.",
        "Steps all of whose counted tokens lack the sampler's log-prob, beside steps that have them.",
        "A dump of those steps that holds them.",
        "Log the sampler's log-probs at every step. The lag needs none where both checkpoints are kept.",
        ("PrimeIntellect-ai/prime-rl#2281", "THUDM/slime#1976"),
    ),
)

_ABOVE = 1e-4
_GRIDS = tuple(2.0**-k for k in range(2, 11))


def check_missing(evidence: Evidence) -> Result:
    """MP605 and MP501: counted tokens without a sampler log-prob, by step and one by one."""
    tokens, steps = evidence.tokens, evidence.step_of_token
    missing = tokens.counted & np.isnan(tokens.sampler)
    every = [int(step) for step in np.unique(steps[tokens.counted])]
    empty = [step for step in every if missing[(steps == step) & tokens.counted].all()]
    findings = []
    if empty and len(empty) < len(every):
        text = (
            f"{steps_of(empty, every)}: no sampler log-prob is logged, so there is no discrepancy and no total ratio; "
            f"{count(len(every) - len(empty), 'other step')} of {len(every)} have them"
        )
        findings.append(Finding("MP605", Severity.WARNING, text, explains=len(empty) / len(every), steps=tuple(empty)))
    single = missing & ~np.isin(steps, empty)
    if single.any():
        findings.append(_nulls(evidence, single))
    return Result(tuple(findings))


def _nulls(evidence: Evidence, single: Bools) -> Finding:
    tokens = evidence.tokens
    rows = len(np.unique(tokens.sequence[single]))
    share = float(single.sum() / tokens.counted.sum())
    certain = int((tokens.stale[single] > -1e-3).sum())
    known = int((~np.isnan(tokens.stale[single])).sum())
    told = f", {certain} of the {known} that were rescored with pi_s above .999" if known else ""
    text = (
        f"null at {count(int(single.sum()), 'counted token')} on {count(rows, 'row')} ({percent(share)}){told}; they "
        "are excluded, not filled with 0.0"
    )
    places = np.flatnonzero(single)[:3]
    examples = tuple(evidence.example(int(place)) for place in places)
    return Finding("MP501", Severity.WARNING, text, explains=share, examples=examples)


def check_positive(evidence: Evidence) -> Result:
    """MP505 where all values above 0 are one filler, else MP504; those tokens are no longer compared."""
    tokens = evidence.tokens
    above = tokens.counted & (tokens.sampler > _ABOVE)
    if not above.any():
        return Result()
    values = tokens.sampler[above]
    fillers = np.unique(values)
    share = float(above.sum() / tokens.counted.sum())
    number = count(int(above.sum()), "counted token")
    examples: tuple[Example, ...] = tuple(
        evidence.example(int(place), f"{tokens.sampler[place]:+.3g}") for place in np.flatnonzero(above)[:3]
    )
    if len(fillers) == 1 and (len(values) > 1 or float(fillers[0]) == round(float(fillers[0]))):
        masked = int((~tokens.counted & (tokens.sampler == fillers[0])).sum())
        text = (
            f"the value {fillers[0]:+g} stands at {number} ({percent(share)}) and {masked:,} masked ones: a filler "
            "that the mask should hide"
        )
        finding = Finding("MP505", Severity.ERROR, text, explains=share, examples=examples)
    else:
        grid = _grid(tokens.sampler[tokens.counted & ~np.isnan(tokens.sampler)])
        coarse = f"; all values lie on a grid of 1/{1 / grid:.0f}: computed or stored in low precision" if grid else ""
        text = f"mu is above 0 at {number} ({percent(share)}), at most {values.max():+.3g}{coarse}"
        numbers = (
            Number("largest log-prob", float(values.max()), "nats"),
            Number("tokens above 0", float(above.sum())),
        )
        finding = Finding("MP504", Severity.ERROR, text, explains=share, numbers=numbers, examples=examples)
    return Result((finding,), evidence=evidence.without(above, "log-probs above 0"))


def _grid(values: Floats) -> float | None:
    """The coarsest grid on which all values lie, None where there is none."""
    return next((step for step in _GRIDS if bool(np.all(np.abs(values / step - np.round(values / step)) < 1e-6))), None)


CHECKS = (check_missing, check_positive)
