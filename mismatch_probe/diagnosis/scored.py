"""Chosen tokens of the evidence, scored under one checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from mismatch_probe.diagnosis.evidence import Evidence
from mismatch_probe.diagnosis.scan import Candidate
from mismatch_probe.run import Bools, Floats, Ragged


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


def scores_of(
    evidence: Evidence, chosen: Bools, worth: Bools, candidate: Candidate, grid: Sequence[float], scorer: Scorer
) -> Scored:
    """Log-probs of the tokens that are ``chosen & worth`` (m,) under one candidate, by temperature."""
    prompt, response, wanted = as_sequences(evidence, chosen, worth)
    return scorer.score(candidate.path, prompt, response, wanted, grid)


def as_sequences(evidence: Evidence, chosen: Bools, worth: Bools) -> tuple[Ragged, Ragged, Bools]:
    """Prompts and responses of the sequences that hold chosen tokens, and which of their tokens are wanted.

    Wanted tokens come in the order of the evidence, so log-probs of them fit ``chosen & worth``. Sequences end at their
    last wanted token.
    """
    tokens, first = evidence.tokens, evidence.sequences.first
    asked = chosen & worth
    at = np.flatnonzero(asked)
    # What comes after the last token that is asked for does not change it.
    rows, last = np.unique(tokens.sequence[at][::-1], return_index=True)
    stops = at[::-1][last] + 1
    prompt = Ragged.of([evidence.sequences.prompt_ids[row] for row in rows])
    response = Ragged.of([tokens.token_id[first[row] : stop] for row, stop in zip(rows, stops, strict=True)])
    spans = [asked[first[row] : stop] for row, stop in zip(rows, stops, strict=True)]
    return prompt, response, np.concatenate([np.zeros(0, dtype=np.bool_), *spans])
