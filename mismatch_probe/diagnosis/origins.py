"""What the weights that fit a step are: a version of the run, a reference model, or the base without its adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mismatch_probe.checkpoints.compare import State
from mismatch_probe.diagnosis.evidence import Weights
from mismatch_probe.diagnosis.scan import LEAST, Candidate, Fit, Scan
from mismatch_probe.diagnosis.scanning import BASE_NAME
from mismatch_probe.run import Ints


def twins(scan: Scan, weights: Weights | None, one: int) -> list[int]:
    """Other candidates of the same weights: those whose log-probs agree wherever both were tried, and whose tensors do.

    Raises:
        CheckpointError: a checkpoint cannot be read.
    """
    found = []
    for other in range(len(scan.candidates)):
        apart = np.abs(scan.logprob[one, scan.declared] - scan.logprob[other, scan.declared])
        apart = apart[~np.isnan(apart)]
        # Batches of another make differ in the last digits, so that equal numbers are no condition.
        if other == one or not len(apart) or apart.mean() > LEAST:
            continue
        if not apart.any() or (weights is not None and _equal(weights, scan.candidates[one], scan.candidates[other])):
            found.append(other)
    return found


def _equal(weights: Weights, one: Candidate, other: Candidate) -> bool:
    compared = weights.compare(one, other)
    return len(compared.of(State.IDENTICAL, State.SAME_VALUES)) == len(compared.tensors)


def stranger_of(
    scan: Scan, weights: Weights | None, fits: Sequence[Fit], candidate: int, claimed: Mapping[int, int]
) -> int | None:
    """The model without a number that ``candidate`` stands for, None where it is a version of the run.

    A version can equal a reference model, and an adapter that was not trained yet its base. The base below adapters is
    then the better name. A reference is, where steps before were sampled by the versions that they claim: the sampler
    had left that version, so it got those weights from elsewhere. ``claimed`` are the versions claimed, by step.
    """
    if scan.candidates[candidate].version is None:
        return candidate
    same = [other for other in twins(scan, weights, candidate) if scan.candidates[other].version is None]
    base = next((other for other in same if is_base(scan.candidates[other])), None)
    if base is not None:
        return base
    first = min(fit.step for fit in fits if fit.choice.candidate == candidate)
    version = scan.candidates[candidate].version
    left_it = any(f.step < first and f.choice.candidate is None and claimed[f.step] != version for f in fits)
    return same[0] if same and left_it else None


def is_base(candidate: Candidate) -> bool:
    """Whether it is the model below checkpoints that are adapters."""
    return candidate.name == BASE_NAME


def label_stands_still(claimed: Ints, found: Ints) -> bool:
    """Whether one version is claimed at three steps or more while those found grow and are never older, (steps,)."""
    still = len(claimed) >= 3 and len(np.unique(claimed)) == 1
    return bool(still and (found > claimed).all() and (np.diff(found) >= 0).all() and found[-1] > found[0])
