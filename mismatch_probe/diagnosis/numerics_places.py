"""A gap that depends on where a token stands: beyond a position, or under prompts that many responses share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch_probe.diagnosis.catalogue import Page
from mismatch_probe.diagnosis.evidence import Evidence
from mismatch_probe.diagnosis.finding import Finding, NotTestable, Number, Result
from mismatch_probe.diagnosis.residual import Residual, severity_of
from mismatch_probe.diagnosis.scan import LEAST
from mismatch_probe.diagnosis.spread import difference
from mismatch_probe.diagnosis.words import nats
from mismatch_probe.run import Bools, Ints

PAGES = (
    Page(
        "MP306",
        "the gap grows with position",
        "Engine and trainer treat distant positions differently: another RoPE base, scaling or attention factor, or an "
        "attention window that one side does not have.",
        "Within responses |D| is at least twice as large beyond one absolute position (prompt included) as before it, "
        "in nats and in log-odds, so that less confident tokens are not the reason. A position that is the config's "
        "window or original_max_position_embeddings is named.",
        "Tokens beyond the position that are as close as those before it.",
        "Compare rope_scaling, rope_theta, sliding_window and max_position_embeddings of the two programs, and the "
        "attention factor that each derives from them. An 8-bit key-value cache also loses with context: switch it off "
        "once.",
        ("PrimeIntellect-ai/prime-rl#2802", "vllm-project/vllm#27722"),
    ),
    Page(
        "MP307",
        "the gap is in large groups only",
        "The engine takes another path where many requests share a prompt, such as cascade attention, and that path "
        "computes something else.",
        "Mean |D| of prompts with many responses is at least twice that of prompts with few, in nats and in log-odds.",
        "A prompt with as many responses whose tokens are as close as those of the others.",
        "Switch the shared-prefix path off once (vLLM: disable_cascade_attn=True) and compare.",
        ("vllm-project/vllm#22103", "verl-project/verl#3595"),
    ),
    Page(
        "MP313",
        "the gap follows the padding",
        "A program that pads its batches gives padded rows other log-probs: position ids or masks do not account for "
        "the padding.",
        "Logged log-probs that deviate with the number of pad tokens. Dumps do not record it. The probe's own scores "
        "are made without padding.",
        "Rows of equal length, which need no padding, that are as far off.",
        "Score one short row alone and beside a long one; pass position ids that start after the padding.",
        ("unslothai/unsloth#6738", "OpenRLHF/OpenRLHF#217"),
    ),
)
TIMES = 2.0
"""Mean |D| must differ by this factor between places: published runs in order change by 1.3 over 2048 positions."""
_FALSE = 0.001
"""Chance of a finding without a cause, over all the cuts that are tried."""
_FEWEST_TOKENS, _FEWEST_GROUPS = 30, 4
_SIZES = 5
"""Of more sizes of group, so many are tried as the dividing one."""


def check_groups(evidence: Evidence) -> Result:
    """MP307: responses to prompts that many share, from some position on."""
    left = Residual.of(evidence)
    if not len(left):
        return Result(not_testable=(NotTestable(("MP307",), "no token is left to compare"),))
    size = np.bincount(evidence.sequences.group)[evidence.sequences.group]
    sizes = np.unique(np.quantile(np.unique(size[left.sequence]), np.linspace(0, 1, _SIZES), method="nearest"))
    if len(sizes) < 2:
        why = "every prompt has the same number of responses, so nothing tells large groups from small ones"
        return Result(not_testable=(NotTestable(("MP307",), why),))
    position = evidence.tokens.position[left.at]
    starts = np.unique(np.quantile(position, np.arange(8) / 8, method="lower"))
    best: _Contrast | None = None
    found: tuple[int, int] = (0, 0)
    for members in sizes[1:]:
        large = size[left.sequence] >= members
        cut, tried = _best_cut(position[large], left.only(large))
        for start in starts if cut is None else (*starts, cut):
            rival = _contrast(left, large, position >= start, max(tried, len(starts)) * (len(sizes) - 1))
            if rival is not None and (best is None or rival.weight > best.weight):
                best, found = rival, (int(members), int(start))
    if best is None:
        return Result()
    members, start = found
    since = f" from position {start} on" if start else ""
    summary = (
        f"responses to prompts with {members} or more responses are off{since}: mean |D| {nats(best.inside)} nats, "
        f"{nats(best.outside)} in smaller groups{' there' if start else ''}; a path for shared prompts (cascade "
        "attention) would do that"
    )
    return _result("MP307", summary, best, left, evidence, "large groups")


def check_positions(evidence: Evidence) -> Result:
    """MP306: beyond an absolute position. MP313 is never testable."""
    unseen = NotTestable(("MP313",), "dumps do not record how many pad tokens stood beside a row in the framework")
    left = Residual.of(evidence)
    if len(left) < 2 * _FEWEST_TOKENS:
        why = f"{len(left)} tokens are left to compare, too few for a profile by position"
        return Result(not_testable=(unseen, NotTestable(("MP306",), why)))
    absolute = evidence.sequences.prompt_length[left.sequence] + evidence.tokens.position[left.at]
    cut, tried = _best_cut(absolute, left)
    if cut is None:
        return Result(not_testable=(unseen,))
    beyond = absolute >= cut
    best = _contrast(left, beyond, _spanning(left, beyond), tried)
    if best is None:
        return Result(not_testable=(unseen,))
    named = _named(evidence, cut)
    summary = (
        f"|D| grows with position: from absolute position {cut} on it is {nats(best.inside)} nats on average, "
        f"{nats(best.outside)} before it in the same responses{named}"
    )
    found = _result("MP306", summary, best, left, evidence, "far positions")
    return Result(found.findings, (unseen,), found.evidence)


@dataclass(frozen=True, eq=False)
class _Contrast:
    """Mean |D| inside and outside, nats, the interval of the difference, the tokens inside (n,), and how well the
    contrast separates large from small: their number times the square of the difference."""

    inside: float
    outside: float
    low: float
    high: float
    tokens: Bools
    weight: float


def _contrast(left: Residual, there: Bools, among: Bools, looks: int) -> _Contrast | None:
    """Tokens ``there`` against the others, both ``among`` some; None where they do not clearly differ."""
    inside, outside = there & among, ~there & among
    for side in (inside, outside):
        if side.sum() < _FEWEST_TOKENS or np.count_nonzero(np.bincount(left.group[side])) < _FEWEST_GROUPS:
            return None
    gap, low, high = difference(left.size[among], there[among], left.group[among], 1 - _FALSE / max(1, looks))
    level = float(left.size[inside].mean())
    if not (low > 0 and gap >= LEAST and level >= TIMES * (level - gap)):
        return None
    if not left.only(among).odds_ratio(there[among]) >= TIMES:
        return None
    return _Contrast(level, level - gap, low, high, inside, gap**2 * float(inside.sum()))


def _best_cut(absolute: Ints, left: Residual) -> tuple[int | None, int]:
    """The position at which two means fit |D| best, the later one larger, and how many were tried."""
    places, number, counts = np.unique(absolute, return_inverse=True, return_counts=True)
    n, total = len(absolute), float(left.size.sum())
    before = np.cumsum(counts)[:-1].astype(np.float64)
    sums = np.cumsum(np.bincount(number, weights=left.size))[:-1]
    enough = np.minimum(before, n - before) >= _FEWEST_TOKENS
    if not enough.any():
        return None, 0
    step = (total - sums) / (n - before) - sums / before
    gain = np.where(enough & (step > 0), before * (n - before) * np.square(step), -1.0)
    at = int(gain.argmax())
    return (int(places[at + 1]) if gain[at] > 0 else None), int(enough.sum())


def _spanning(left: Residual, beyond: Bools) -> Bools:
    """Tokens of responses that have some on either side: long and short responses differ in more than position."""
    rows = int(left.sequence.max()) + 1
    sides = [np.bincount(left.sequence[part], minlength=rows) > 0 for part in (beyond, ~beyond)]
    return np.asarray((sides[0] & sides[1])[left.sequence])


def _named(evidence: Evidence, cut: int) -> str:
    """The config's field that is this position, in words."""
    fields = ("sliding_window", "original_max_position_embeddings", "max_position_embeddings", "attention_chunk_size")
    for part in (evidence.config, *(value for value in evidence.config.values() if isinstance(value, dict))):
        for field in fields:
            value = part.get(field)
            if isinstance(value, int) and abs(value - cut) <= max(1, 0.02 * value):
                return f"; the config has {field} = {value}"
    return ""


def _result(code: str, summary: str, best: _Contrast, left: Residual, evidence: Evidence, why: str) -> Result:
    worst = left.at[best.tokens][np.argsort(-left.size[best.tokens], kind="stable")[:3]]
    finding = Finding(
        code,
        severity_of(best.inside),
        summary,
        explains=left.share(best.tokens, best.outside),
        numbers=(
            Number("mean |D| there", best.inside, "nats"),
            Number("mean |D| elsewhere", best.outside, "nats"),
            Number("difference", best.inside - best.outside, "nats", best.low, best.high),
        ),
        examples=tuple(
            evidence.example(int(token), f"D {nats(float(evidence.discrepancy[token]))}") for token in worst
        ),
    )
    return Result((finding,), (), evidence.without(left.mask(best.tokens, len(evidence.tokens)), why))


CHECKS = (check_groups, check_positions)
