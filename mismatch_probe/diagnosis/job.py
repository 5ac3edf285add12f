"""From a run and its analysis to the diagnosis: gather, scan, check."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_probe.checkpoints.config import read_config
from mismatch_probe.checkpoints.describe import describe
from mismatch_probe.diagnosis.access import RunWeights
from mismatch_probe.diagnosis.diagnose import diagnose
from mismatch_probe.diagnosis.evidence import Evidence
from mismatch_probe.diagnosis.finding import Diagnosis
from mismatch_probe.diagnosis.gather import gather
from mismatch_probe.diagnosis.numerics_levels import with_baseline
from mismatch_probe.diagnosis.scan import Candidate
from mismatch_probe.diagnosis.scanning import find_candidates, scan
from mismatch_probe.errors import CheckpointError
from mismatch_probe.folder import Analysis
from mismatch_probe.run import UNKNOWN_VERSION, Bools, Ints, Run
from mismatch_probe.scoring.candidate_cache import KeptCandidates
from mismatch_probe.scoring.candidates import CandidateScorer
from mismatch_probe.scoring.network import ScoringOptions


@dataclass(frozen=True)
class Scanning:
    """How the scans score: with ``options``, keeping scores in ``kept`` (None: nowhere), and whom they tell what."""

    options: ScoringOptions
    kept: Path | None = None
    on_tokens: Callable[[int], None] = lambda _: None
    on_notice: Callable[[str], None] = lambda _: None


def diagnose_run(
    run: Run,
    analysis: Analysis | None,
    scanning: Scanning | None,
    seed: int = 0,
    baseline: Analysis | None = None,
) -> Diagnosis:
    """Diagnose a run.

    Args:
        run: the run.
        analysis: its analysis; None where nothing in it could be compared, which leaves the dump itself.
        scanning: how the scans score; None makes none.
        seed: of their samples.
        baseline: analysis of a run of one's own to compare the level with, None for none.

    Raises:
        InputError: a file cannot be read.
        OutputError: what the scans scored cannot be kept.
        UsageError: the device's memory does not hold the smallest pass.
    """
    scorer = None if scanning is None else scorer_of(run, scanning)
    try:
        last = None if baseline is None else (lambda evidence: with_baseline(evidence, baseline))
        return diagnose(collect(run, analysis, scorer, seed), last=last)
    finally:
        if isinstance(scorer, KeptCandidates):
            scorer.close()


def scorer_of(run: Run, scanning: Scanning) -> CandidateScorer | KeptCandidates:
    """What scores the run's candidates."""
    options = replace(scanning.options, temperature=1.0)
    scorer = CandidateScorer(options, run.adapter_base, scanning.on_tokens, scanning.on_notice)
    return scorer if scanning.kept is None else KeptCandidates(scorer, scanning.kept, run.adapter_base)


def collect(
    run: Run, analysis: Analysis | None, scorer: CandidateScorer | KeptCandidates | None, seed: int = 0
) -> Evidence:
    """The evidence of a run, scans included where there is a scorer; arguments as in ``diagnose_run``."""
    wanted = None if analysis is None else set(map(int, analysis.steps["step"]))
    steps = [step for step in run.steps if wanted is None or step.index in wanted]
    evidence = gather(run, steps, analysis, seed)
    candidates = find_candidates(run)
    evidence = replace(evidence, config=_config(candidates, run.adapter_base))
    if not candidates or scorer is None:
        return evidence
    candidates, fits, notes = fitting(evidence, candidates, run.adapter_base)
    named = _named(run, evidence, candidates)
    found = scan(evidence, candidates, named, fits, scorer, seed)
    weights = RunWeights(candidates, scorer, run.adapter_base)
    unread = (*notes, *(() if found is None else found.unread))
    return replace(evidence, scan=found, weights=weights, unread=unread)


def _config(candidates: list[Candidate], base: Path | None) -> dict[str, Any]:
    """config.json of the first candidate that has one; a file that cannot be read is told of by the scans."""
    for candidate in candidates:
        with contextlib.suppress(CheckpointError):
            if found := read_config(candidate.path, base):
                return found
    return {}


def fitting(
    evidence: Evidence, candidates: list[Candidate], base: Path | None
) -> tuple[list[Candidate], Bools, list[str]]:
    """The candidates that can be read, the sequences that all of them can take (n,), and what could not be read."""
    readable: list[Candidate] = []
    notes: list[str] = []
    sequences = evidence.sequences
    rows = len(sequences)
    highest, lowest = np.full(rows, -1), np.zeros(rows, dtype=np.int64)
    for row in range(rows):
        ids = np.concatenate(
            [sequences.prompt_ids[row], evidence.tokens.token_id[sequences.first[row] : sequences.first[row + 1]]]
        )
        highest[row], lowest[row] = (ids.max(), ids.min()) if len(ids) else (-1, -1)
    fits = lowest >= 0
    for candidate in candidates:
        try:
            found = describe(candidate.path, base)
        except CheckpointError as error:
            notes.append(f"not tried in the scans: {error}")
            continue
        readable.append(candidate)
        fits &= highest < (found.vocab_size or highest.max(initial=0) + 1)
        fits &= sequences.prompt_length + sequences.length <= (found.max_positions or np.iinfo(np.int64).max)
    return readable, fits, notes


def _named(run: Run, evidence: Evidence, candidates: list[Candidate]) -> Ints:
    """For each token the candidate that the run names for it, -1 for none."""
    number = {candidate.path.resolve(): at for at, candidate in enumerate(candidates)}
    claimed = evidence.tokens.claimed
    out = np.full(len(claimed), -1, dtype=np.int64)
    for version in np.unique(claimed):
        path: Path | None = None if version == UNKNOWN_VERSION else run.sampler_checkpoint(int(version))
        if path is not None:
            out[claimed == version] = number.get(path.resolve(), -1)
    return out
