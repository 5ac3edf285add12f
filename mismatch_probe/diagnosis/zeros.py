"""Exact 0.0 where no engine gave a log-prob: appended end tokens, padding, and text that the engine did not write."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch_probe.diagnosis.catalogue import Page
from mismatch_probe.diagnosis.evidence import Evidence
from mismatch_probe.diagnosis.finding import Finding, NotTestable, Number, Result, Severity
from mismatch_probe.diagnosis.words import count, nats, percent
from mismatch_probe.run import Bools

PAGES = (
    Page(
        "MP107",
        "an appended end token is counted",
        "The end token was added by hand where a response was cut, with a log-prob of 0.0 and a loss mask of 1.",
        "D is large at the last token of such rows and normal elsewhere: the mean hides it, the bucket shows it.",
        "An engine log-prob for that token that is not 0.0.",
        "Mask end tokens that the engine did not draw.",
        ("NovaSky-AI/SkyRL#758",),
    ),
    Page(
        "MP108",
        "tokens that the engine did not write are counted",
        "Tool results, observations or retrieved text stand in the response with a log-prob of 0.0, and the loss mask "
        "counts them.",
        "Blocks of exact 0.0 inside responses, at tokens that the trainer finds uncertain; KL by k1 is then negative.",
        "The same blocks with a loss mask of 0.",
        "Mask everything that the engine did not draw, from the positions of the turns, not from a text round trip.",
        ("PeterGriffinJin/Search-R1#21", "THUDM/slime#1370", "rllm-org/rllm#503"),
    ),
    Page(
        "MP109",
        "padding after the end is counted",
        "Pad tokens after the end token have a log-prob of 0.0 and a loss mask of 1.",
        "Counted tokens after the first end token, with exact 0.0.",
        "A loss mask that ends with the end token.",
        "Cut the mask at the first end token.",
        (),
    ),
)

_CERTAIN = -1e-2
"""A trainer log-prob above it makes an exact 0.0 plausible."""
_ALIGNED = 0.3
"""Mean |D| of the other tokens, nats, above which the log is misaligned anyway and a 0.0 is a symptom of that."""


@dataclass(frozen=True)
class _Kind:
    code: str
    what: str


_KINDS = {
    "end": _Kind("MP107", "an end token with log-prob 0.0 closes"),
    "block": _Kind("MP108", "blocks of exact 0.0 stand inside"),
    "padding": _Kind("MP109", "tokens with log-prob 0.0 follow the end token of"),
}


def check_zeros(evidence: Evidence) -> Result:
    """MP107, MP108 and MP109, one finding each; those tokens are no longer compared."""
    tokens = evidence.tokens
    zero = tokens.counted & (tokens.sampler == 0.0) & ~(tokens.stale > _CERTAIN)
    if not zero.any():
        return Result()
    others = evidence.gap(~zero)
    if others > _ALIGNED:
        because = f"mean |D| is {nats(others)} nats at the other tokens too"
        return Result(not_testable=(NotTestable(tuple(kind.code for kind in _KINDS.values()), because),))
    findings = []
    for name, chosen in _sorted(evidence, zero).items():
        if chosen.any():
            findings.append(_finding(evidence, _KINDS[name], chosen, others))
            evidence = evidence.without(chosen, _KINDS[name].what)
    return Result(tuple(findings), evidence=evidence)


def _sorted(evidence: Evidence, zero: Bools) -> dict[str, Bools]:
    """The zeros by kind, (m,) each: a lone end token, a block of two or more inside, what follows an end token."""
    tokens, first = evidence.tokens, evidence.sequences.first
    ends = np.isin(tokens.token_id, evidence.settings.eos_token_id)
    found = {name: np.zeros(len(zero), dtype=np.bool_) for name in _KINDS}
    for row in np.unique(tokens.sequence[zero]):
        span = slice(int(first[row]), int(first[row + 1]))
        mine, end = zero[span], ends[span]
        after = np.cumsum(end) - end > 0
        found["padding"][span] = mine & after
        last = int(np.flatnonzero(tokens.counted[span])[-1])
        rest = mine & ~after
        if rest[last] and end[last]:
            found["end"][span.start + last] = True
            rest[last] = False
        # A run at the very start is what a shift leaves behind; a single zero inside says nothing.
        starts = np.flatnonzero(rest & ~np.concatenate([[False], rest[:-1]]))
        for start in starts:
            length = int(np.argmin(np.append(rest[start:], False)))
            if start > 0 and length > 1:
                found["block"][span.start + start : span.start + start + length] = True
    return found


def _finding(evidence: Evidence, kind: _Kind, chosen: Bools, others: float) -> Finding:
    tokens = evidence.tokens
    rows = len(np.unique(tokens.sequence[chosen]))
    inside = evidence.gap(chosen)
    share = float(chosen.sum() / tokens.counted.sum())
    with np.errstate(invalid="ignore"):
        k1, low, high = evidence.mean(-evidence.discrepancy)
    text = (
        f"{kind.what} {count(rows, 'response')}: {count(int(chosen.sum()), 'counted token')} ({percent(share)}), mean "
        f"|D| {nats(inside)} there and {nats(others)} elsewhere; KL(mu || pi_s) by k1 {k1:+.3f} "
        f"[{low:+.3f}, {high:+.3f}]"
    )
    return Finding(
        kind.code,
        Severity.ERROR,
        text,
        explains=evidence.share(chosen) if evidence.gap() > 0 else share,
        numbers=(Number("mean |D| there", inside, "nats"), Number("mean |D| elsewhere", others, "nats")),
        examples=tuple(evidence.example(int(place)) for place in np.flatnonzero(chosen)[:3]),
    )


CHECKS = (check_zeros,)
