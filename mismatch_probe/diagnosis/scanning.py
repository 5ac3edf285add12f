"""Which checkpoints, temperatures and tokens a scan tries: coarse over all versions, then fine where it matters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mismatch_probe.diagnosis.evidence import CAP, Evidence, capped
from mismatch_probe.diagnosis.fine import FineTable
from mismatch_probe.diagnosis.scan import Candidate, Scan
from mismatch_probe.diagnosis.scored import Scorer, scores_of
from mismatch_probe.errors import CheckpointError
from mismatch_probe.run import Bools, CheckpointPattern, Floats, Ints, Run

TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5)
EXTRA_NAMES = ("reference", "ref", "base", "initial", "teacher", "init")
"""Folders beside the versions that may hold weights which a sampler got by mistake."""
BASE_NAME = "the base model"
"""The model below checkpoints that are adapters."""
SHARE = 0.2
"""A scan sends at most this share of the tokens through networks that decompose sends, where that is enough."""
_FEW = 8
"""So many candidates are all tried finely; of more, those that the coarse pass leaves."""
_BEST = 3
_PROBES = 6
"""So many steps, evenly spaced, and as many that stand out, try all of many candidates; the others what did well."""
_OUTSTANDING, _BETTER = 1.5, 0.8
_PREFIX = 64
"""Response tokens of a sequence that the coarse pass takes."""


@dataclass(frozen=True)
class Budget:
    """Response tokens of a step that the coarse pass and the fine pass take."""

    coarse: int = 64
    fine: int = 256

    @classmethod
    def for_run(cls, tokens: int, steps: int, candidates: int) -> Budget:
        """So that the scans add at most SHARE to a decompose of ``tokens`` response tokens under two networks.

        Few candidates are tried on no fewer tokens than the defaults, many on half as many. Prompts, which every
        sequence brings along, and temperatures take half of the share.
        """
        share = SHARE * 2 * tokens
        if candidates <= _FEW:
            return cls(cls.coarse, max(cls.fine, min(1024, int(share / max(1, steps) / (2 * (_BEST + 1))))))
        coarse = int(share / 5 / max(1, min(steps, _PROBES)) / candidates)
        fine = int(share / 3 / max(1, steps) / (_BEST + 1))
        return cls(min(256, max(cls.coarse, coarse)), min(1024, max(cls.fine // 2, fine)))


def find_candidates(run: Run) -> list[Candidate]:
    """Every checkpoint that is there: the sampler's and the trainer's versions, the base, named ones beside them."""
    found: dict[Path, Candidate] = {}

    def add(name: str, version: int | None, path: Path | None, whose: str = "") -> None:
        if path is not None and path.exists():
            found.setdefault(path.resolve(), Candidate(name, version, path, whose))

    both = run.sampler_checkpoints is not None
    for pattern, whose in ((run.sampler_checkpoints, "sampler"), (run.trainer_checkpoints, "trainer")):
        if pattern is None:
            continue
        for version in pattern.versions():
            name = f"the {whose}'s version {version}" if both else f"version {version}"
            add(name, version, pattern.path(version), whose if both else "")
        for name, path in _beside(pattern):
            add(name, None, path)
    add("version 0", 0, run.initial)
    # An adapter's base is scored as a model of its own: without the adapter.
    add(BASE_NAME, None, run.adapter_base)
    return list(found.values())


def _beside(pattern: CheckpointPattern) -> list[tuple[str, Path]]:
    folder = pattern.path(0).parent
    return [(name, folder / name) for name in EXTRA_NAMES if (folder / name / "config.json").is_file()]


def scan(
    evidence: Evidence, candidates: list[Candidate], named: Ints, fits: Bools, scorer: Scorer, seed: int = 0
) -> Scan | None:
    """Score a sample of every step under the candidates; None where there is nothing to scan.

    Args:
        evidence: the run.
        candidates: what the sampler may have held.
        named: for each token the candidate that the run names, -1 for none, (m,).
        fits: sequences that every candidate can take: known ids, inside its vocabulary and positions, (n,).
        scorer: gives the log-probs.
        seed: of the sample.
    """
    worth = evidence.tokens.counted & ~np.isnan(evidence.tokens.sampler) & fits[evidence.tokens.sequence]
    steps = np.unique(evidence.step_of_token[worth])
    if not candidates or not len(steps):
        return None
    budget = Budget.for_run(int(worth.sum()), len(steps), len(candidates))
    declared = evidence.temperature
    grid = tuple(sorted({*TEMPERATURES, declared, evidence.settings.temperature}))
    chosen = {int(step): set(range(len(candidates))) for step in steps}
    if len(candidates) > _FEW:
        probes = choose_probes(evidence, worth)
        there = worth & np.isin(evidence.step_of_token, probes)
        coarse = _sample(evidence, there, budget.coarse, seed, _PREFIX)
        found = [_coarsely(evidence, coarse, worth, candidate, declared, scorer) for candidate in candidates]
        looked = {step: _promising(evidence, found, named, step) for step in probes}
        tried, better = ({step: both[which] for step, both in looked.items()} for which in (0, 1))
        chosen = carry(candidates, {int(step): _named_at(evidence, named, int(step)) for step in steps}, tried, better)
    fine = _sample(evidence, worth, budget.fine, seed)
    table = FineTable(evidence, candidates, grid, fine & worth, scorer)
    table.fill_all(chosen, {int(step): _named_at(evidence, named, int(step)) for step in steps}, declared)
    return Scan(
        candidates=tuple(candidates),
        temperatures=grid,
        declared=grid.index(declared),
        tokens=table.tokens,
        logprob=table.logprob,
        entropy=table.entropy,
        claimed=named[table.tokens],
        unread=tuple(table.unread),
    )


def choose_probes(evidence: Evidence, worth: Bools) -> list[int]:
    """Steps at which every candidate is tried: some evenly spaced, and those whose gap as claimed stands out."""
    steps = np.unique(evidence.step_of_token[worth])
    even = steps[np.unique(np.linspace(0, len(steps) - 1, min(len(steps), _PROBES)).astype(np.int64))]
    gaps = np.array([evidence.gap(evidence.step_of_token == step) for step in steps])
    if np.isnan(gaps).any():
        return [int(step) for step in steps]
    order = np.argsort(-gaps, kind="stable")
    outstanding = [at for at in order[:_PROBES] if gaps[at] > _OUTSTANDING * np.median(gaps)]
    return sorted({*map(int, even), *(int(steps[at]) for at in outstanding)})


def carry(
    candidates: Sequence[Candidate],
    named: Mapping[int, set[int]],
    tried: Mapping[int, set[int]],
    better: Mapping[int, set[int]],
) -> dict[int, set[int]]:
    """Candidates to try finely at every step: what did well at the steps that tried all, and what it means elsewhere.

    Args:
        candidates: all of them.
        named: those that tokens of a step name, by step.
        tried: those worth a closer look, by step that tried all.
        better: those of them that beat what is named there: the same ones are tried at other steps, and those as many
            versions away.
    """
    place = {(one.whose, one.version): at for at, one in enumerate(candidates) if one.version is not None}
    absolute: Counter[int] = Counter()
    offset: Counter[int] = Counter()
    for step, best in better.items():
        absolute.update(best)
        own_versions = [v for own in named[step] if (v := candidates[own].version) is not None]
        there = [v for at in best if (v := candidates[at].version) is not None]
        offset.update({v - own for v in there for own in own_versions})
    often = {at for at, _ in absolute.most_common(_BEST)}
    offsets = {-1, 1, *(by for by, _ in offset.most_common(_BEST))}
    out = {}
    for step, own in named.items():
        if step in tried or not own:
            out[step] = tried.get(step) or set().union(*tried.values())
            continue
        near = {
            at
            for one in own
            for by in offsets
            if (version := candidates[one].version) is not None
            and (at := place.get((candidates[one].whose, version + by))) is not None
        }
        out[step] = own | near | often
    return out


def _named_at(evidence: Evidence, named: Ints, step: int) -> set[int]:
    return {int(one) for one in np.unique(named[evidence.step_of_token == step]) if one >= 0}


def _promising(evidence: Evidence, found: list[Floats], named: Ints, step: int) -> tuple[set[int], set[int]]:
    """Candidates worth a closer look at one step, and those of them that beat what the run names.

    The first are the best of all tokens, those of single sequences, and the named. Where the named one is best, the
    others are its neighbours, which is no news for other steps.
    """
    mine = evidence.step_of_token == step
    sampler = evidence.tokens.sampler[mine]
    gaps = np.array([capped(one[mine] - sampler) for one in found])  # (K, n)
    known = ~np.isnan(gaps).all(axis=0)
    gaps[np.isnan(gaps).all(axis=1)] = CAP  # it could not be loaded
    gaps, own = gaps[:, known], named[mine][known]
    claimed = np.where(own >= 0, gaps[own, np.arange(len(own))], CAP)
    order = np.argsort(gaps.mean(axis=1), kind="stable")
    _, number = np.unique(evidence.tokens.sequence[mine][known], return_inverse=True)
    sums = np.array([np.bincount(number, weights=row) for row in gaps])
    winner = sums.argmin(axis=0)
    winners, votes = np.unique(winner, return_counts=True)
    often = winners[votes >= max(2, 0.15 * votes.sum())]
    better = {int(order[0])} if gaps[order[0]].mean() < _BETTER * claimed.mean() else set()
    for one in often:
        won = (winner == one)[number]
        if gaps[one][won].mean() < _BETTER * claimed[won].mean():
            better.add(int(one))
    names = _named_at(evidence, named, step)
    return {*map(int, order[:_BEST]), *map(int, often), *names}, better - names


def _sample(evidence: Evidence, worth: Bools, most: int, seed: int, prefix: int | None = None) -> Bools:
    """Tokens of whole sequences, or of their ``prefix``, about ``most`` of those ``worth`` it in each step, (m,).

    Every prompt group in turn: few groups would make wide intervals.
    """
    rng = np.random.default_rng(seed)
    if prefix is not None:
        worth = worth & (evidence.tokens.position < prefix)
    sequences = evidence.sequences
    size = np.bincount(evidence.tokens.sequence, weights=worth, minlength=len(sequences))
    kept = np.zeros(len(sequences), dtype=np.bool_)
    for step in np.unique(sequences.step):
        rows = np.flatnonzero((sequences.step == step) & (size > 0))
        rows = rows[rng.permutation(len(rows))]
        # The first of every group, then the second of every group.
        turn = np.zeros(len(rows), dtype=np.int64)
        seen: dict[int, int] = {}
        for at, row in enumerate(rows):
            group = int(sequences.group[row])
            turn[at] = seen[group] = seen.get(group, -1) + 1
        rows = rows[np.argsort(turn, kind="stable")]
        kept[rows[: 1 + int(np.searchsorted(np.cumsum(size[rows]), most))]] = True
    return kept[evidence.tokens.sequence] & (worth if prefix is not None else True)


def _coarsely(
    evidence: Evidence, chosen: Bools, worth: Bools, candidate: Candidate, temperature: float, scorer: Scorer
) -> Floats:
    """Log-probs at their places, NaN elsewhere and everywhere where the candidate cannot be loaded, (m,)."""
    out = np.full(len(evidence.tokens), np.nan)
    with suppress(CheckpointError):  # tried again in the fine pass only where the run names it, and told there
        out[chosen & worth] = scores_of(evidence, chosen, worth, candidate, (temperature,), scorer).logprob[0]
    return out
