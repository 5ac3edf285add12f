"""The body of one version with the output head of another: hidden states are kept, heads tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mismatch_probe.diagnosis.catalogue import Page
from mismatch_probe.diagnosis.evidence import Evidence, Weights, capped
from mismatch_probe.diagnosis.finding import Example, Finding, NotTestable, Number, Result, Severity, or_none
from mismatch_probe.diagnosis.rereading import read_as, share_of_gap, suspects, with_candidate
from mismatch_probe.diagnosis.scan import BETTER, LEAST, Candidate, Fit, Scan, mean_difference
from mismatch_probe.diagnosis.words import nats, steps_of
from mismatch_probe.errors import CheckpointError
from mismatch_probe.run import Bools, Floats, Ints

PAGES = (
    Page(
        "MP203",
        "body of one version with the output head of another",
        "The engine's output head was not updated with the rest of the weights, or the rest not with the head. A tied "
        "head that the engine keeps as a copy of the embedding is the usual place.",
        "No whole version fits, and one version's body with another version's head does.",
        "A whole version that fits as well, or a checksum of the engine's head that equals the claimed version's.",
        "Have the engine update the head: where head and embedding are tied, load both under the names that the engine "
        "uses, or restart it. Compare a checksum of the head after every synchronisation.",
        ("NVIDIA-NeMo/Megatron-Bridge#4883", "vllm-project/vllm#51665"),
    ),
)
PILOT, FEW = 256, 64
"""Tokens of a step that the heads are tried on; FEW where there are more than eight candidates."""


@dataclass(frozen=True)
class _Pair:
    """One step read with a body and a head, places among the candidates."""

    fit: Fit
    body: int
    head: int
    gap: float
    temperature: int
    tokens: Ints
    logprob: dict[int, Floats]
    low: float
    high: float


def check_heads(evidence: Evidence) -> Result:
    """Try heads where the best whole version leaves a gap: all of them at the worst step, that relation at the rest."""
    scan, weights = evidence.scan, evidence.weights
    if scan is None or weights is None:
        return Result(not_testable=(NotTestable(("MP203",), "no sampler log-prob and checkpoint are there together"),))
    if sum(candidate.version is not None for candidate in scan.candidates) < 2:
        return Result(not_testable=(NotTestable(("MP203",), "the run holds one set of weights only"),))
    fits = evidence.readings
    open_ = suspects(fits)
    if not open_:
        return Result()
    try:
        pairs = _Search(evidence, scan, weights).pairs(max(open_, key=lambda fit: fit.gap), fits)
    except CheckpointError as error:
        return Result(not_testable=(NotTestable(("MP203",), f"the heads cannot be exchanged: {error}"),))
    if not pairs:
        return Result()
    steps = [fit.step for fit in fits]
    return Result((_finding(evidence, scan, pairs, steps),), evidence=_reread(evidence, scan, pairs))


class _Search:
    """Bodies and heads, on few tokens."""

    def __init__(self, evidence: Evidence, scan: Scan, weights: Weights) -> None:
        self._evidence, self._scan, self._weights = evidence, scan, weights
        self._known = [at for at, one in enumerate(scan.candidates) if one in set(weights.candidates)]

    def pairs(self, pilot: Fit, fits: Sequence[Fit]) -> list[_Pair]:
        """The pair of every step that a pair explains as one explains the pilot; empty where none does."""
        found = self._pilot(pilot)
        if found is None:
            return []
        out = [found]
        for fit in fits:
            if fit is not pilot and (pair := self._best(fit, self._alike(found, fit), 1.0, 0.0)) is not None:
                out.append(pair)
        return sorted(out, key=lambda pair: pair.fit.step)

    def _pilot(self, fit: Fit) -> _Pair | None:
        anchors = {self._anchor(fit), fit.choice.candidate} - {None}
        tried = [(body, head) for body in anchors if body is not None for head in self._known if head != body]
        tried += [(body, head) for head in anchors if head is not None for body in self._known if head != body]
        return self._best(fit, tried, BETTER, LEAST)

    def _alike(self, pilot: _Pair, fit: Fit) -> list[tuple[int, int]]:
        """What the pilot's pair means at another step: the same version, or one as far from the step's own."""
        own = self._anchor(fit)
        if own is None:
            return []
        then = self._anchor(pilot.fit)
        moved = [self._moved(one, then, own) for one in (pilot.body, pilot.head)]
        bodies, heads = {pilot.body, moved[0]}, {pilot.head, moved[1]}
        return [(body, head) for body in bodies for head in heads if None not in (body, head) and body != head]  # type: ignore[misc]

    def _moved(self, one: int, then: int | None, now: int) -> int | None:
        """The candidate as far from ``now`` as ``one`` is from ``then``, in versions."""
        versions = [candidate.version for candidate in self._scan.candidates]
        if one == then:
            return now
        if then is None or None in (versions[one], versions[then], versions[now]):
            return None
        wanted = versions[now] + versions[one] - versions[then]  # type: ignore[operator]
        return next((at for at in self._known if versions[at] == wanted), None)

    def _anchor(self, fit: Fit) -> int | None:
        """The candidate that most tokens of the step name; the best whole one where none is named."""
        named = self._scan.claimed[self._evidence.step_of_token[self._scan.tokens] == fit.step]
        known, counts = np.unique(named[named >= 0], return_counts=True)
        return int(known[counts.argmax()]) if len(known) else fit.choice.candidate

    def _best(self, fit: Fit, tried: list[tuple[int, int]], share: float, least: float) -> _Pair | None:
        """The best of some pairs, beyond sampling error: it leaves ``share`` of what the best whole one leaves.

        Once a pair was found among all, the same one at another step need only be better.
        """
        chosen = self._tokens(fit)
        at = np.flatnonzero(chosen)
        sampler, group = self._evidence.tokens.sampler[at], self._evidence.group_of_token[at]
        whole = self._whole(fit, at)
        best: _Pair | None = None
        for body in dict.fromkeys(body for body, _ in tried):
            heads = list(dict.fromkeys(head for b, head in tried if b == body))
            scored = self._score(fit, body, heads, chosen)
            for row, head in enumerate(heads):
                for temperature, values in scored.items():
                    absolute = capped(values[row] - sampler)
                    gap, before = float(absolute.mean()), float(np.nanmean(whole))
                    if (best is not None and gap >= best.gap) or gap > share * before or before - gap < least:
                        continue
                    low, high = mean_difference(whole, absolute, group)
                    if not low <= 0:
                        rows = {place: found[row] for place, found in scored.items()}
                        best = _Pair(fit, body, head, gap, temperature, at, rows, low, high)
        return best

    def _score(self, fit: Fit, body: int, heads: list[int], chosen: Bools) -> dict[int, Floats]:
        """Log-probs by place of the temperature, (heads, k) each: as declared, and as the step reads best."""
        candidates = self._scan.candidates
        found = {}
        for place in dict.fromkeys((self._scan.declared, fit.choice.temperature)):
            read = replace(self._evidence, temperature=self._scan.temperatures[place])
            found[place] = self._weights.heads(candidates[body], [candidates[head] for head in heads], read, chosen)
        return found

    def _tokens(self, fit: Fit) -> Bools:
        """Whole sequences of the step, few tokens in all, (m,)."""
        scan, evidence = self._scan, self._evidence
        most = PILOT if len(self._known) <= 8 else FEW
        mine = scan.tokens[(evidence.step_of_token[scan.tokens] == fit.step) & evidence.usable[scan.tokens]]
        sequence = evidence.tokens.sequence[mine]
        order = np.random.default_rng(0).permutation(np.unique(sequence))
        size = np.cumsum([int((sequence == one).sum()) for one in order])
        kept = order[: 1 + int(np.searchsorted(size, most))]
        out = np.zeros(len(evidence.tokens), dtype=np.bool_)
        out[mine[np.isin(sequence, kept)]] = True
        return out

    def _whole(self, fit: Fit, at: Ints) -> Floats:
        """Capped |D| of the step's best whole reading, its shift aside, (k,)."""
        slot = np.searchsorted(self._scan.tokens, at)
        named = self._scan.claimed[slot]
        candidate = named if fit.choice.candidate is None else np.full(len(at), fit.choice.candidate)
        found = self._scan.logprob[candidate, fit.choice.temperature, slot]
        return np.where(candidate >= 0, capped(found - self._evidence.tokens.sampler[at]), np.nan)


def _finding(evidence: Evidence, scan: Scan, pairs: list[_Pair], steps: list[int]) -> Finding:
    worst = max(pairs, key=lambda pair: pair.fit.gap_claimed - pair.gap)
    before = float(np.mean([pair.fit.gap_claimed for pair in pairs]))
    after, whole = float(np.mean([pair.gap for pair in pairs])), min(pair.fit.gap for pair in pairs)
    mine = [pair.fit.step for pair in pairs]
    middle = pairs[(len(pairs) - 1) // 2]
    each = f"the {_text(scan, middle)}" + ("" if len(pairs) == 1 else f" at step {middle.fit.step}")
    rule = _rule(scan, pairs)
    return Finding(
        "MP203",
        Severity.ERROR,
        f"{steps_of(mine, steps)}: {rule}{each}; mean |D| {nats(before)} falls to {nats(after)} "
        f"({nats(whole)} or more with any whole version)",
        explains=share_of_gap(evidence, {pair.fit.step: pair.fit.gap_claimed - pair.gap for pair in pairs}),
        numbers=(
            Number("mean |D| of the best whole version", worst.fit.gap, "nats"),
            Number("mean |D| as found", worst.gap, "nats"),
            Number("difference", worst.fit.gap - worst.gap, "nats", or_none(worst.low), or_none(worst.high)),
        ),
        steps=tuple(mine),
        examples=tuple(
            Example(pair.fit.step, note=f"{_text(scan, pair)}: {nats(pair.fit.gap)} falls to {nats(pair.gap)}")
            for pair in pairs[:6]
        ),
    )


def _rule(scan: Scan, pairs: list[_Pair]) -> str:
    if len(pairs) == 1:
        return "the engine holds "
    bodies, heads = {pair.body for pair in pairs}, {pair.head for pair in pairs}
    if len(heads) == 1:
        return f"the output head stays at {scan.candidates[pairs[0].head].name} while the body moves: "
    if len(bodies) == 1:
        return f"the body stays at {scan.candidates[pairs[0].body].name} while the output head moves: "
    return "body and output head are of two versions: "


def _text(scan: Scan, pair: _Pair) -> str:
    body, head = scan.candidates[pair.body].name, scan.candidates[pair.head].name
    return f"body of {body} with the output head of {head}"


def _reread(evidence: Evidence, scan: Scan, pairs: list[_Pair]) -> Evidence:
    """Those steps read as found, so that what comes after judges what is left."""
    stale = np.full(len(evidence.tokens), np.nan)
    for pair in pairs:
        candidate = Candidate(_text(scan, pair), None, scan.candidates[pair.body].path)
        scan = with_candidate(scan, candidate, pair.tokens, pair.logprob)
        stale[pair.tokens] = pair.logprob[scan.declared]
    steps = np.isin(evidence.step_of_token, [pair.fit.step for pair in pairs])
    return replace(read_as(evidence, steps, stale, "MP203"), scan=scan)


CHECKS = (check_heads,)
