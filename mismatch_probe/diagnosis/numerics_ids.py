"""A bias that goes with the token id, as an output head of other weights gives it."""

from __future__ import annotations

import numpy as np

from mismatch_probe.diagnosis.evidence import Evidence
from mismatch_probe.diagnosis.finding import Finding, NotTestable, Number, Result
from mismatch_probe.diagnosis.residual import Residual, severity_of
from mismatch_probe.diagnosis.scan import LEAST
from mismatch_probe.diagnosis.words import count, listed, nats, percent
from mismatch_probe.run import Floats, Ints

SHARE = 0.15
"""Share of the variance of D between token ids from which it is a bias of its own. Drawing tokens from a noisy engine
makes improbable ones look biased, which at a noise of 0.2 nats comes to 0.04."""
_FEWEST, _FEWEST_IDS = 3, 8
_SHUFFLES = 2000


def check_ids(evidence: Evidence) -> Result:
    """MP312: mean D of an id in one half of the prompt groups, against its mean in the other half."""
    left = Residual.of(evidence)
    ids = evidence.tokens.token_id[left.at]
    d = np.clip(left.d, -2.0, 2.0)
    halves = _halves(d, ids, left.group)
    if halves is None:
        why = f"fewer than {_FEWEST_IDS} token ids occur {_FEWEST} times in both halves of the prompt groups"
        return Result(not_testable=(NotTestable(("MP312",), why),))
    names, a, b, weight, mean = halves
    shared = _covariance(a, b, weight)
    total = float(np.var(d))
    spread = float(np.sqrt(max(shared, 0.0)))
    if not (shared > 0 and shared >= SHARE * total and spread >= LEAST):
        return Result()
    rng = np.random.default_rng(0)
    by_chance = max(_covariance(a, b[rng.permutation(len(b))], weight) for _ in range(_SHUFFLES))
    if shared <= by_chance:
        return Result()
    order = np.argsort(-np.abs(mean), kind="stable")
    worst = listed([f"{names[at]} ({mean[at]:+.2g})" for at in order[:4]])
    reliability = float(shared / np.sqrt(_covariance(a, a, weight) * _covariance(b, b, weight)))
    summary = (
        f"each token id has a bias of its own: {percent(shared / total)} of the variance of D lies between ids, "
        f"{nats(spread)} nats from id to id, and the two halves of the prompts agree on it (r {reliability:.2f} over "
        f"{count(len(names), 'id')}; largest {worst}): look at the output head"
    )
    finding = Finding(
        "MP312",
        severity_of(float(left.size.mean())),
        summary,
        explains=max(0.0, float((np.abs(d) - np.abs(d - _bias(ids, names, mean))).sum() / left.total)),
        numbers=(
            Number("share of the variance of D between token ids", shared / total),
            Number("standard deviation of an id's bias", spread, "nats"),
            Number("correlation of the two halves", reliability),
            Number("largest covariance of shuffled ids over that found", by_chance / shared),
        ),
    )
    return Result((finding,))


def _halves(d: Floats, ids: Ints, group: Ints) -> tuple[Ints, Floats, Floats, Floats, Floats] | None:
    """Ids that occur often enough, their mean D in either half of the groups, their weight, and their mean in all."""
    if not len(d):
        return None
    names, number = np.unique(ids, return_inverse=True)
    groups, of_token = np.unique(group, return_inverse=True)
    half = np.random.default_rng(0).permutation(len(groups))[of_token] % 2
    counts = np.stack([np.bincount(number[half == h], minlength=len(names)) for h in (0, 1)]).astype(np.float64)
    sums = np.stack([np.bincount(number[half == h], weights=d[half == h], minlength=len(names)) for h in (0, 1)])
    often = counts.min(axis=0) >= _FEWEST
    if often.sum() < _FEWEST_IDS:
        return None
    a, b = sums[:, often] / counts[:, often]
    weight = 2 / (1 / counts[:, often]).sum(axis=0)
    return names[often], a, b, weight, sums[:, often].sum(axis=0) / counts[:, often].sum(axis=0)


def _bias(ids: Ints, names: Ints, mean: Floats) -> Floats:
    """Bias of each token's id, 0 where it is not known, (n,)."""
    at = np.minimum(np.searchsorted(names, ids), len(names) - 1)
    return np.where(names[at] == ids, mean[at], 0.0)


def _covariance(a: Floats, b: Floats, weight: Floats) -> float:
    share = weight / weight.sum()
    return float((share * (a - (share * a).sum()) * (b - (share * b).sum())).sum())


CHECKS = (check_ids,)
