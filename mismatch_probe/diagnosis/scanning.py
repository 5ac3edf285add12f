"""Which checkpoints, temperatures and tokens a scan tries: coarse over all versions, then fine where it matters."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from mismatch_probe.diagnosis.evidence import CAP, Evidence
from mismatch_probe.diagnosis.scan import Candidate, Scan
from mismatch_probe.errors import CheckpointError
from mismatch_probe.run import Bools, CheckpointPattern, Floats, Ints, Ragged, Run

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


class Scorer(Protocol):
    """What turns sequences into log-probs under one candidate: ``scoring.candidates.CandidateScorer``."""

    def score(
        self, body: Path, prompt: Ragged, response: Ragged, wanted: Bools, temperatures: Sequence[float]
    ) -> Scored:
        """Log-probs and entropies at the wanted tokens, (T, n)."""


class Scored(Protocol):
    """What a scorer gives."""

    @property
    def logprob(self) -> Floats:
        """(T, n), nats."""

    @property
    def entropy(self) -> Floats:
        """(T, n), nats."""


@dataclass(frozen=True)
class Budget:
    """Tokens of a step that the coarse pass and the fine pass take."""

    coarse: int = 64
    fine: int = 1024

    @classmethod
    def for_run(cls, tokens: int, steps: int, candidates: int) -> Budget:
        """So that the scan adds at most SHARE to a decompose of ``tokens`` response tokens under two networks."""
        share = SHARE * 2 * tokens / max(1, steps)
        coarse = max(cls.coarse, int(0.5 * share / max(1, candidates)))
        return cls(coarse, max(4 * coarse, int(0.5 * share / (_BEST + 1)), 256))


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
        coarse = _sample(evidence, worth, budget.coarse, seed)
        found = [_coarsely(evidence, coarse, worth, candidate, declared, scorer) for candidate in candidates]
        chosen = {int(step): _promising(evidence, found, named, int(step)) for step in steps}
    fine = _sample(evidence, worth, budget.fine, seed)
    tokens = np.flatnonzero(fine & worth)
    shape = (len(candidates), len(grid), len(tokens))
    logprob, entropy = np.full(shape, np.nan), np.full(shape, np.nan)
    unread: list[str] = []
    for number, candidate in enumerate(candidates):
        mine = np.isin(evidence.step_of_token, [step for step, tried in chosen.items() if number in tried])
        if (fine & worth & mine).any():
            at = mine[tokens]
            try:
                scores = _scores(evidence, fine & mine, worth, candidate, grid, scorer)
            except CheckpointError as error:
                unread.append(f"not tried in the scans: {error}")
                continue
            logprob[number][:, at], entropy[number][:, at] = scores.logprob, scores.entropy
    declared_at = grid.index(declared)
    return Scan(tuple(candidates), grid, declared_at, tokens, logprob, entropy, named[tokens], tuple(unread))


def _promising(evidence: Evidence, found: list[Floats], named: Ints, step: int) -> set[int]:
    """Candidates worth a closer look at one step: the best of all its tokens, of single sequences, and the named."""
    mine = evidence.step_of_token == step
    gaps = np.array([np.minimum(np.abs(one - evidence.tokens.sampler), CAP)[mine] for one in found])  # (K, n)
    known = ~np.isnan(gaps).all(axis=0)
    gaps[np.isnan(gaps).all(axis=1)] = CAP  # it could not be loaded
    order = np.argsort(gaps[:, known].mean(axis=1), kind="stable")
    sequence = evidence.tokens.sequence[mine][known]
    _, number = np.unique(sequence, return_inverse=True)
    sums = np.array([np.bincount(number, weights=row) for row in gaps[:, known]])
    winners, votes = np.unique(sums.argmin(axis=0), return_counts=True)
    often = winners[votes >= max(2, 0.15 * votes.sum())]
    return {*map(int, order[:_BEST]), *map(int, often), *(int(c) for c in np.unique(named[mine]) if c >= 0)}


def _sample(evidence: Evidence, worth: Bools, most: int, seed: int) -> Bools:
    """Tokens of whole sequences, about ``most`` of those ``worth`` it in each step, (m,); every group in turn."""
    rng = np.random.default_rng(seed)
    sequences = evidence.sequences
    size = np.bincount(evidence.tokens.sequence, weights=worth, minlength=len(sequences))
    kept = np.zeros(len(sequences), dtype=np.bool_)
    for step in np.unique(sequences.step):
        rows = np.flatnonzero((sequences.step == step) & (size > 0))
        rows = rows[rng.permutation(len(rows))]
        # The first of every group, then the second of every group: few groups would make wide intervals.
        turn = np.zeros(len(rows), dtype=np.int64)
        seen: dict[int, int] = {}
        for at, row in enumerate(rows):
            group = int(sequences.group[row])
            turn[at] = seen[group] = seen.get(group, -1) + 1
        rows = rows[np.argsort(turn, kind="stable")]
        kept[rows[: 1 + int(np.searchsorted(np.cumsum(size[rows]), most))]] = True
    return kept[evidence.tokens.sequence]


def _coarsely(
    evidence: Evidence, chosen: Bools, worth: Bools, candidate: Candidate, temperature: float, scorer: Scorer
) -> Floats:
    """Log-probs at their places, NaN elsewhere and everywhere where the candidate cannot be loaded, (m,)."""
    out = np.full(len(evidence.tokens), np.nan)
    with suppress(CheckpointError):  # tried again in the fine pass only where the run names it, and told there
        out[chosen & worth] = _scores(evidence, chosen, worth, candidate, (temperature,), scorer).logprob[0]
    return out


def _scores(
    evidence: Evidence, chosen: Bools, worth: Bools, candidate: Candidate, grid: Sequence[float], scorer: Scorer
) -> Scored:
    prompt, response, wanted = as_sequences(evidence, chosen, worth)
    return scorer.score(candidate.path, prompt, response, wanted, grid)


def as_sequences(evidence: Evidence, chosen: Bools, worth: Bools) -> tuple[Ragged, Ragged, Bools]:
    """Prompts and responses of the sequences that hold chosen tokens, and which of their tokens are wanted.

    Wanted tokens come in the order of the evidence, so log-probs of them fit ``chosen & worth``.
    """
    rows = np.unique(evidence.tokens.sequence[chosen])
    mine = np.isin(evidence.tokens.sequence, rows)
    first, ids = evidence.sequences.first, evidence.tokens.token_id
    prompt = Ragged.of([evidence.sequences.prompt_ids[row] for row in rows])
    response = Ragged.of([ids[first[row] : first[row + 1]] for row in rows])
    return prompt, response, (chosen & worth)[mine]
