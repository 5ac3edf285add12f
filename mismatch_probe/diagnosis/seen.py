"""Prompts that earlier steps held already."""

from __future__ import annotations

import numpy as np

from mismatch_probe.diagnosis.evidence import Evidence
from mismatch_probe.run import Bools, Ints


def first_step_of_prompt(evidence: Evidence) -> Ints:
    """The first step that held each sequence's prompt, (n,)."""
    prompt, step = evidence.sequences.prompt, evidence.sequences.step
    first = np.full(int(prompt.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, prompt, step)
    return first[prompt]


def seen_before(evidence: Evidence) -> Bools:
    """Sequences whose prompt was there at an earlier step, (n,)."""
    return first_step_of_prompt(evidence) < evidence.sequences.step
