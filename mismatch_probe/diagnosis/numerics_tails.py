"""A gap that few carry: whole sequences, token ids, or single tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch_probe.diagnosis.evidence import Evidence
from mismatch_probe.diagnosis.finding import Example, Finding, NotTestable, Number, Result, Severity, or_none
from mismatch_probe.diagnosis.levels import experts_of
from mismatch_probe.diagnosis.residual import Residual, robust_deviation, severity_of
from mismatch_probe.diagnosis.spread import mean_of
from mismatch_probe.diagnosis.words import count, listed, nats, percent
from mismatch_probe.run import Bools, Floats, Ints
from mismatch_probe.stats.intervals import ClusterIntervals, group_sums, mean

TIMES = 5.0
"""A sequence is bad where its median change in log-odds, and its mean |D|, are this many times those of the others."""
FAR = 20.0
"""A token is far off beyond so many standard deviations, found robustly, of the change in log-odds ..."""
LARGE = 1.0
"""... and so many nats."""
BEYOND = 10.0
"""A token is in the tail beyond so many such deviations and SMALLEST nats. In runs of vLLM in bfloat16 0.4 % of
the tokens are beyond 10 of them and 0.1 nats, and under 0.1 % beyond 0.2 nats."""
SMALLEST = 0.2
TAIL = 0.004
"""Share of the tokens in the tail from which it is one of its own, not stray tokens."""
_MIN_TOKENS = 6
_SHOWN = 5


def check_sequences(evidence: Evidence) -> Result:
    """MP303: a few sequences, often all responses to a few prompts."""
    left = Residual.of(evidence)
    rows, number, sizes = np.unique(left.sequence, return_inverse=True, return_counts=True)
    judged = sizes >= _MIN_TOKENS
    if judged.sum() < 2 * _MIN_TOKENS:
        why = f"{count(int(judged.sum()), 'sequence')} with {_MIN_TOKENS} tokens or more, too few to compare"
        return Result(not_testable=(NotTestable(("MP303",), why),))
    size = np.bincount(number, weights=left.size) / sizes
    odds = _medians(np.abs(np.nan_to_num(left.odds)), number, len(rows))
    usual = float(np.median(odds[judged]))
    bad = judged & (odds > TIMES * usual) & (size >= 0.1)
    # All tokens of the others, so that few bad ones among many cannot move the level that they are measured by.
    bad &= size > TIMES * float(np.average(size[~bad], weights=sizes[~bad])) if not bad.all() else False
    bad |= _rest_of_group(evidence, rows, bad, judged, size, usual=float(np.median(size[judged])))
    if not bad.any() or bad.sum() > len(rows) / 3:
        return Result()
    tokens = bad[number]
    level, low, high = mean_of(left.size[tokens], left.group[tokens])
    rest = float(left.size[~tokens].mean())
    carried = float(left.size[tokens].sum() / left.size.sum())
    if carried < 0.2:
        return Result()
    limit = float(np.sqrt(size[bad].min() * max(size[~bad].max(), 1e-6)))
    dropped = float((size > limit).mean())
    summary = (
        f"{bad.sum()} of {len(rows)} sequences carry {percent(carried)} of the error: mean |D| {nats(level)} nats in "
        f"them, {nats(rest)} in the others{_groups_hit(evidence, rows, bad)}; a mask of sequences above "
        f"{nats(limit)} would drop {percent(dropped)}"
    )
    worst = rows[bad][np.argsort(-size[bad], kind="stable")[:_SHOWN]]
    places = dict(zip(rows, size, strict=True))
    finding = Finding(
        "MP303",
        severity_of(level),
        summary,
        explains=left.share(tokens, rest),
        numbers=(
            Number("mean |D| in the bad sequences", level, "nats", or_none(low), or_none(high)),
            Number("mean |D| in the others", rest, "nats"),
            Number("share of the error that they carry", carried),
            Number("share of the sequences that a mask would drop", dropped),
        ),
        steps=tuple(int(step) for step in np.unique(evidence.sequences.step[rows[bad]])),
        examples=tuple(evidence.example_row(int(row), f"mean |D| {nats(places[row])}") for row in worst),
    )
    return Result((finding,), (), evidence.without(left.mask(tokens, len(evidence.tokens)), "bad sequences"))


def check_tokens(evidence: Evidence) -> Result:
    """MP302 and MP311: single tokens far off, and a tail of their own beside tokens that are close."""
    left = Residual.of(evidence)
    tail = tail_of(left)
    moe = experts_of(evidence.config)
    untested = (NotTestable(("MP311",), _no_routing(moe)),)
    if tail is None:
        return Result(not_testable=untested)
    code = "MP311" if moe and tail.mixture else "MP302"
    rest = float(left.size[~tail.tokens].mean())
    finding = Finding(
        code,
        Severity.WARNING,
        f"{tail.words(tail_named(evidence, left, tail))}{_why(code, moe)}",
        explains=left.share(tail.tokens, rest),
        numbers=(*tail.numbers(), *_reward(evidence, left, tail.tokens)),
        steps=tuple(int(step) for step in np.unique(left.step[tail.tokens])),
        examples=examples_of(evidence, left, tail),
    )
    return Result((finding,), untested, evidence.without(left.mask(tail.tokens, len(evidence.tokens)), "single tokens"))


@dataclass(frozen=True, eq=False)
class Tail:
    """Tokens far from the bulk, (n,) as a mask; ``mixture`` where they are many and moderate: a second population."""

    tokens: Bools
    mixture: bool
    left: Residual
    share: tuple[float, float, float]

    def words(self, where: str) -> str:
        """Median and tail beside each other; ``where`` names the worst tokens."""
        d, left = np.abs(self.left.d), self.left
        number = int(self.tokens.sum())
        spread = float(np.std(left.d[~self.tokens]))
        if self.mixture:
            tail_spread = float(np.sqrt(np.square(left.d[self.tokens]).mean()))
            return (
                f"{percent(self.share[0])} [{percent(self.share[1])}, {percent(self.share[2])}] of the tokens are off "
                f"by {nats(tail_spread)} nats rms while the rest is off by {nats(spread)}: a heavier tail than one "
                "normal distribution has"
            )
        carried = float(left.size[self.tokens].sum() / left.size.sum())
        return (
            f"{count(number, 'token')} of {len(left):,} {'is' if number == 1 else 'are'} off by up to "
            f"{nats(float(d.max()))} nats and carr{'ies' if number == 1 else 'y'} {percent(carried)} of the error, "
            f"while the median |D| is {nats(float(np.median(d)))}: {where}"
        )

    def numbers(self) -> tuple[Number, ...]:
        """Robust and plain levels side by side."""
        d = np.abs(self.left.d)
        with np.errstate(over="ignore"):
            plain = float(np.exp(np.minimum(d, 700.0)).mean())
        return (
            Number("tokens in the tail", float(self.tokens.sum())),
            Number("share of tokens in the tail", *self.share[:1], "1", *map(or_none, self.share[1:])),
            Number("median |D|", float(np.median(d)), "nats"),
            Number("99th percentile of |D|", float(np.quantile(d, 0.99)), "nats"),
            Number("largest |D|", float(d.max()), "nats"),
            Number("share of tokens with |D| above ln 2", float((d > np.log(2)).mean())),
            Number("mean of exp |D|, which the largest decide", plain),
            Number("mean of exp |D| without the tail", float(np.exp(d[~self.tokens]).mean())),
        )


def tail_of(left: Residual) -> Tail | None:
    """The tail of D, None where there is none or too few tokens to tell."""
    if len(left) < 50:
        return None
    spread, odds_spread = robust_deviation(left.d), robust_deviation(left.odds)
    odds = np.abs(np.nan_to_num(left.odds))
    size = np.abs(left.d)
    out = (odds > BEYOND * odds_spread) & (size > np.maximum(BEYOND * spread, SMALLEST))
    far = out & (odds > FAR * odds_spread) & (size > LARGE)
    share = _share(out, left.group)
    moderate = bool(out.any()) and float(np.median(size[out])) < LARGE
    if out.sum() >= 5 and moderate and share[0] >= TAIL and not share[1] < TAIL / 3:
        return Tail(out, True, left, share)
    return Tail(far, False, left, _share(far, left.group)) if far.any() else None


def examples_of(evidence: Evidence, left: Residual, tail: Tail) -> tuple[Example, ...]:
    """The worst tokens, with their ids."""
    worst = left.at[tail.tokens][np.argsort(-np.abs(left.d[tail.tokens]), kind="stable")[:_SHOWN]]
    d = dict(zip(left.at, left.d, strict=True))
    return tuple(
        evidence.example(int(at), f"token {evidence.tokens.token_id[at]}, D {nats(float(d[at]))}") for at in worst
    )


def tail_named(evidence: Evidence, left: Residual, tail: Tail) -> str:
    """The worst tokens in words, the others counted."""
    worst = left.at[tail.tokens][np.argsort(-np.abs(left.d[tail.tokens]), kind="stable")]
    row, position = evidence.tokens.sequence[worst], evidence.tokens.position[worst]
    names = evidence.sequences.sequence_id[row]
    return listed([f"{name} at position {place}" for name, place in zip(names, position, strict=True)])


def _share(tokens: Bools, group: Ints) -> tuple[float, float, float]:
    names, number = np.unique(group, return_inverse=True)
    sums = group_sums([tokens.astype(np.float64)], number.astype(np.int64), len(names))
    found = ClusterIntervals(len(names)).interval(sums, mean)
    return found.value, max(0.0, found.low), found.high


def _medians(values: Floats, number: Ints, rows: int) -> Floats:
    """Median of the values of each row, (rows,)."""
    order = np.lexsort((values, number))
    counts = np.bincount(number, minlength=rows)
    first = np.cumsum(counts) - counts
    ordered = values[order]
    low, high = ordered[first + (counts - 1) // 2], ordered[first + counts // 2]
    return np.asarray((low + high) / 2)


def _rest_of_group(evidence: Evidence, rows: Ints, bad: Bools, judged: Bools, size: Floats, usual: float) -> Bools:
    """Responses too short to judge alone whose group is bad in all that can be judged, and that are off themselves."""
    group = evidence.sequences.group[rows]
    groups = int(group.max()) + 1
    hit, all_of_it = (np.bincount(group[part], minlength=groups) for part in (bad, judged))
    whole = (hit >= 1) & (hit == all_of_it)
    return np.asarray(whole[group] & ~judged & (size > TIMES * usual))


def _groups_hit(evidence: Evidence, rows: Ints, bad: Bools) -> str:
    """Whether whole prompt groups are bad."""
    group = evidence.sequences.group[rows]
    names, number = np.unique(group, return_inverse=True)
    members, hit = (np.bincount(number[part], minlength=len(names)) for part in (np.ones_like(bad), bad))
    whole = int(((hit == members) & (members > 1)).sum())
    if not whole:
        return ""
    if whole == int((hit > 0).sum()):
        return f", all responses to the same {count(whole, 'prompt')}"
    return f"; of {count(int((hit > 0).sum()), 'prompt')} with such a response, {whole} have no other"


def _why(code: str, moe: bool) -> str:
    if code == "MP311":
        return "; isolated tokens that were routed to other experts look like this"
    return "" if not moe else "; the model has experts, so routing is one suspect"


def _no_routing(moe: bool) -> str:
    if moe:
        return "the experts that each token was routed to are not recorded, so routing is judged by the tail alone"
    return "the model has no experts, or no checkpoint says whether it has"


def _reward(evidence: Evidence, left: Residual, tokens: Bools) -> tuple[Number, ...]:
    """Whether responses that hold such tokens are rewarded differently."""
    reward = evidence.sequences.reward
    rows = np.unique(left.sequence)
    known = rows[~np.isnan(reward[rows])]
    hit = np.isin(known, left.sequence[tokens])
    if hit.sum() < 2 or (~hit).sum() < 2:
        return ()
    gap = float(reward[known[hit]].mean() - reward[known[~hit]].mean())
    return (Number("mean reward of the responses with such tokens minus that of the others", gap),)


CHECKS = (check_sequences, check_tokens)
