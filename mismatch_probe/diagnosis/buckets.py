"""Where the gap lives: mean |D| by position, kind and place of tokens, and how few of them hold how much of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from mismatch_probe.diagnosis.evidence import CAP, Evidence
from mismatch_probe.diagnosis.finding import Bucket, Number, or_none
from mismatch_probe.diagnosis.spread import bucket_means, intraclass
from mismatch_probe.run import UNKNOWN_VERSION, Bools, Floats, Ints
from mismatch_probe.stats.constancy import BIN_EDGES

Levels = tuple[Ints, list[str]]
"""The level of each token, -1 for none, (m,), and their names."""
_FEWEST = 8
"""Token ids with fewer tokens have no row of their own."""
_WORST_IDS = 5


def buckets(evidence: Evidence) -> tuple[Bucket, ...]:
    """Mean |D| (each capped at 2 nats) and mean D of usable tokens, dimension by dimension."""
    usable = evidence.usable & ~np.isnan(evidence.discrepancy)
    if not usable.any():
        return ()
    d = np.clip(evidence.discrepancy[usable], -CAP, CAP)
    group = evidence.group_of_token[usable]
    rows: list[Bucket] = []
    for name, (level, names) in _dimensions(evidence, usable):
        mine = level[usable]
        size, signed = (bucket_means(v, mine, group, len(names)) for v in (np.abs(d), d))
        rows.extend(
            Bucket(
                name,
                names[at],
                int(size.tokens[at]),
                *(or_none(of[at]) for of in (size.mean, size.low, size.high, signed.mean, signed.low, signed.high)),
            )
            for at in range(len(names))
            if size.tokens[at]
        )
    return tuple(rows)


def concentration(evidence: Evidence) -> tuple[Number, ...]:
    """Shares of the gap in the worst tokens and sequences, and of the variance of D between ids and sequences."""
    usable = evidence.usable & ~np.isnan(evidence.discrepancy)
    if not usable.any():
        return ()
    d = np.clip(evidence.discrepancy[usable], -CAP, CAP)
    _, sequence = np.unique(evidence.tokens.sequence[usable], return_inverse=True)
    size = np.abs(d)
    found = {
        "share of |D| in the worst 1 % of tokens": worst_share(size, 0.01),
        "share of |D| in the worst 5 % of sequences": worst_share(
            np.bincount(sequence, weights=size).astype(np.float64), 0.05
        ),
        "share of the variance of D between token ids (ICC)": intraclass(d, evidence.tokens.token_id[usable]),
        "share of the variance of D between sequences (ICC)": intraclass(d, sequence.astype(np.int64)),
    }
    return tuple(Number(name, value) for name, value in found.items() if not np.isnan(value))


def worst_share(size: Floats, share: float) -> float:
    """Share of the sum of ``size`` (n,), none below 0, in its largest ``share`` of entries (one at least)."""
    total = float(size.sum())
    most = max(1, round(share * len(size)))
    return float(np.sort(size)[-most:].sum() / total) if total > 0 else float("nan")


def probability_bin(log_p: Floats) -> Ints:
    """Bin of each probability, that of the reference ladder, (n,); NaN goes to the last."""
    return np.searchsorted(BIN_EDGES[1:-1], np.exp(log_p), side="right").astype(np.int64)


def segments(evidence: Evidence) -> Ints:
    """How many times the claimed version has changed before each token of its response, (m,)."""
    return _runs(evidence, evidence.tokens.claimed)


def _dimensions(evidence: Evidence, usable: Bools) -> Iterator[tuple[str, Levels]]:
    """Every dimension that holds at least two levels here."""
    makers: tuple[tuple[str, Callable[[Evidence, Bools], Levels | None]], ...] = (
        ("place", _place),
        ("position", _position),
        ("tokens to the length limit", _to_limit),
        ("turn", _turn),
        ("version segment", _segment),
        ("finish reason", _finish),
        ("probability", _probability),
        ("logged value", _exact_zero),
        ("responses to the prompt", _members),
        ("prompt length", _prompt_length),
        ("token id", _token_id),
    )
    for name, make in makers:
        found = make(evidence, usable)
        if found is not None and len(np.unique(found[0][usable])) > 1:
            yield name, found


def _place(evidence: Evidence, usable: Bools) -> Levels:
    last = np.zeros(len(evidence.tokens), dtype=np.bool_)
    last[evidence.sequences.first[1:][evidence.sequences.length > 0] - 1] = True
    finish, reasons = _reasons(evidence)
    names = ["first token", "between", *(f"last token, {reason}" for reason in reasons)]
    level = np.where(evidence.tokens.position == 0, 0, 1)
    return np.where(last, 2 + finish[evidence.tokens.sequence], level).astype(np.int64), names


def _position(evidence: Evidence, usable: Bools) -> Levels:
    return _quantiles(evidence.tokens.position, usable, 10)


def _to_limit(evidence: Evidence, usable: Bools) -> Levels | None:
    limit = evidence.settings.max_response_length
    if limit is None:
        return None
    edges = (1, 4, 16, 64, 256)
    level = np.searchsorted(edges, limit - 1 - evidence.tokens.position, side="right")
    names = [f"{low} to {high - 1}" for low, high in pairwise(edges)]
    return level.astype(np.int64), ["0", *names, f"{edges[-1]} or more"]


def _turn(evidence: Evidence, usable: Bools) -> Levels:
    # A turn ends where tokens that do not count begin.
    return _upto(np.where(evidence.tokens.counted, (_runs(evidence, evidence.tokens.counted) + 1) // 2, 0), "turn")


def _segment(evidence: Evidence, usable: Bools) -> Levels | None:
    known = evidence.tokens.claimed != UNKNOWN_VERSION
    return _upto(segments(evidence), "segment") if known.any() else None


def _finish(evidence: Evidence, usable: Bools) -> Levels:
    finish, reasons = _reasons(evidence)
    return finish[evidence.tokens.sequence], reasons


def _probability(evidence: Evidence, usable: Bools) -> Levels:
    names = [f"{low:g} to {high:g}" for low, high in pairwise(BIN_EDGES)]
    return probability_bin(evidence.tokens.stale), names


def _exact_zero(evidence: Evidence, usable: Bools) -> Levels:
    return np.where(evidence.tokens.sampler == 0.0, 1, 0).astype(np.int64), ["other", "exactly 0.0"]


def _members(evidence: Evidence, usable: Bools) -> Levels:
    size = np.bincount(evidence.sequences.group)[evidence.sequences.group]
    level = np.searchsorted((2, 4, 8, 16), size, side="right")
    return level[evidence.tokens.sequence].astype(np.int64), ["1", "2 to 3", "4 to 7", "8 to 15", "16 or more"]


def _prompt_length(evidence: Evidence, usable: Bools) -> Levels:
    return _quantiles(evidence.sequences.prompt_length[evidence.tokens.sequence], usable, 4)


def _token_id(evidence: Evidence, usable: Bools) -> Levels | None:
    """The ids whose mean D stands out most for their number of tokens; the others together."""
    ids, number, counts = np.unique(evidence.tokens.token_id[usable], return_inverse=True, return_counts=True)
    d = np.clip(evidence.discrepancy[usable], -CAP, CAP)
    mean = np.bincount(number, weights=d) / counts
    score = np.where(counts >= _FEWEST, np.abs(mean) * np.sqrt(counts), -1.0)
    worst = [at for at in np.argsort(-score, kind="stable")[:_WORST_IDS] if score[at] > 0]
    level = np.zeros(len(evidence.tokens), dtype=np.int64)
    for at, one in enumerate(worst):
        level[evidence.tokens.token_id == ids[one]] = at + 1
    return level, ["other", *(str(ids[one]) for one in worst)]


def _reasons(evidence: Evidence) -> tuple[Ints, list[str]]:
    """Finish reason of each sequence as a number, and their names."""
    names = ["unknown" if reason is None else str(reason) for reason in evidence.sequences.finish_reason]
    if not names:
        return np.zeros(0, dtype=np.int64), []
    reasons, number = np.unique(names, return_inverse=True)
    return number.astype(np.int64), [str(reason) for reason in reasons]


def _runs(evidence: Evidence, values: Ints | Bools) -> Ints:
    """How many times the value has changed before each token of its response, (m,)."""
    changes = np.zeros(len(values), dtype=np.int64)
    same = evidence.tokens.sequence[1:] == evidence.tokens.sequence[:-1]
    changes[1:] = same & (values[1:] != values[:-1])
    total = np.cumsum(changes)
    first = evidence.sequences.first[:-1]
    return np.asarray(total - total[first[evidence.tokens.sequence]], dtype=np.int64) if len(total) else total


def _upto(level: Ints, name: str, most: int = 3) -> Levels:
    return np.minimum(level, most), [*(f"{name} {at + 1}" for at in range(most)), f"{name} {most + 1} and later"]


def _quantiles(values: Ints, usable: Bools, parts: int) -> Levels:
    """Parts of about equally many usable tokens, named by their range."""
    cuts = np.unique(np.quantile(values[usable], np.arange(1, parts) / parts, method="higher"))
    level = np.searchsorted(cuts, values, side="right").astype(np.int64)
    return level, _ranges(values[usable], level[usable], len(cuts) + 1)


def _ranges(values: Ints, level: Ints, levels: int) -> list[str]:
    names: Sequence[str] = []
    for at in range(levels):
        mine = values[level == at]
        low, high = (int(mine.min()), int(mine.max())) if len(mine) else (0, 0)
        names = [*names, f"{low}" if low == high else f"{low} to {high}"]
    return list(names)
