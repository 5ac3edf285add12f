"""Slopes of the logarithm of a mean, from sums over clusters, with errors that no one source of scatter can shrink.

The model is log E[y] = intercept of the row's kind + covariates . slopes, for a y >= 0 such as a squared log-ratio. It
is fitted by the estimating equations of a gamma model with logarithmic link (McCullagh and Nelder 1989, chapter 8):
they need sums only, weigh every kind by its own scale and are consistent whatever the distribution of y is.

Errors are leave-one-cluster-out jackknives (the one-step form, Cain and Lange 1984; CR3 of Bell and McCaffrey 2002),
one for each way of clustering. Prompt groups are the units that were drawn; but a whole step, or a whole version lag,
may lie off the line for a reason that all its groups share. The widest interval counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mismatch_probe.stats.student import t_quantile
from mismatch_probe.stats.types import Floats, Ints

MANY_CLUSTERS = 2000
"""From here on, leaving one out moves the information matrix by too little to be worth a solution each."""
_ITERATIONS = 200


@dataclass(frozen=True)
class Slope:
    """A slope with its candidate (standard error, degrees of freedom); those without freedom are left out."""

    value: float
    errors: tuple[tuple[float, int], ...]

    def reach(self, confidence: float) -> float:
        """Half the width of the interval: the widest that any way of clustering gives; infinite if none has freedom."""
        widths = [t_quantile((1 + confidence) / 2, df) * error for error, df in self.errors]
        return max(widths, default=math.inf)

    def times(self, factor: float) -> Slope:
        """The slope of a covariate that is ``factor`` times smaller."""
        return Slope(self.value * factor, tuple((error * abs(factor), df) for error, df in self.errors))


def log_slopes(
    counts: Floats, sums: Floats, kind: Ints, covariates: Floats, clusterings: Sequence[tuple[Ints, int]]
) -> list[Slope]:
    """Fit log E[y] = intercept[kind] + covariates . slopes.

    Args:
        counts: tokens of each row, above 0, (R,).
        sums: sum of y over them, (R,); each kind must have one above 0.
        kind: 0..B-1, which intercept, (R,).
        covariates: (R, K).
        clusterings: for each, the cluster of each row, (R,), and the parameters that the clusters determine: its
            degrees of freedom are clusters minus these.

    Returns:
        K slopes, or fewer than K if the covariates do not tell them apart: then none.
    """
    # Rows of one kind with the same covariates are fitted alike: as many cells as that are enough.
    cell, first = _labels([kind, *covariates.T])
    design = np.concatenate([np.eye(int(kind.max()) + 1)[kind[first]], covariates[first]], axis=1)
    slopes = covariates.shape[1]
    if np.linalg.matrix_rank(design) < design.shape[1]:
        return []
    found = _fit(_totals(cell, counts), _totals(cell, sums), design)
    scale = np.exp(-np.clip(design @ found, -700, 700))
    hessian = (design * (_totals(cell, sums) * scale)[:, None]).T @ design
    errors: list[list[tuple[float, int]]] = [[] for _ in range(slopes)]
    for cluster, spent in clusterings:
        at, starts = _labels([cluster, cell])
        own, _ = _labels([cluster[starts]])
        n = int(own.max()) + 1
        if n - spent < 1:
            continue
        here = cell[starts]
        fitted = _totals(at, sums) * scale[here]
        moves = _left_out(design, here, fitted, _totals(at, counts), hessian, own, n)[:, -slopes:]
        spread = np.sqrt((n - 1) / n * np.square(moves).sum(axis=0))
        for slope in range(slopes):
            errors[slope].append((float(spread[slope]), n - spent))
    return [Slope(float(found[k - slopes]), tuple(errors[k])) for k in range(slopes)]


def _labels(columns: Sequence[Floats | Ints]) -> tuple[Ints, Ints]:
    """Number the different rows of some columns: the number of each row, (R,), and a row of each number, (C,)."""
    label = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        _, code = np.unique(column, return_inverse=True)
        _, label = np.unique(label * (int(code.max()) + 1) + code, return_inverse=True)
    _, first = np.unique(label, return_index=True)
    return label.astype(np.int64), first.astype(np.int64)


def _totals(label: Ints, values: Floats) -> Floats:
    """Sum of the values with each label, (C,)."""
    return np.asarray(np.bincount(label, weights=values), dtype=np.float64)


def _fit(counts: Floats, sums: Floats, design: Floats) -> Floats:
    """Minimise sum of counts * eta + sums * exp(-eta), which is convex, by Newton steps halved until it falls."""

    def loss(at: Floats) -> float:
        eta = np.clip(design @ at, -700, 700)
        return float(counts @ eta + sums @ np.exp(-eta))

    some = sums > 0
    start = np.log(np.maximum(sums[some] / counts[some], 1e-300))
    root = np.sqrt(counts[some])
    at: Floats = np.linalg.lstsq(design[some] * root[:, None], start * root, rcond=None)[0]
    current = loss(at)
    for _ in range(_ITERATIONS):
        fitted = sums * np.exp(-np.clip(design @ at, -700, 700))
        gradient = design.T @ (counts - fitted)
        step = np.linalg.lstsq((design * fitted[:, None]).T @ design, gradient, rcond=None)[0]
        share = 1.0
        while share > 1e-10 and not loss(at - share * step) <= current:
            share /= 2
        at, before, current = at - share * step, current, loss(at - share * step)
        if abs(before - current) <= 1e-14 * abs(before) and float(np.abs(share * step).max()) < 1e-9:
            break
    return at


def _left_out(design: Floats, cell: Ints, fitted: Floats, counts: Floats, hessian: Floats, at: Ints, n: int) -> Floats:
    """How far the parameters move when each cluster is left out, (n, P), to first order.

    ``design`` (C, P) by cell; ``cell``, ``fitted``, ``counts`` and the cluster ``at`` by row, (R,).
    """
    width = design.shape[1]
    rest = fitted - counts
    scores = np.stack([np.bincount(at, weights=rest * design[cell, i], minlength=n) for i in range(width)], axis=1)
    if n > MANY_CLUSTERS:
        return np.asarray(scores @ np.linalg.pinv(hessian, hermitian=True))
    others = np.empty((n, width, width))
    for i in range(width):
        for j in range(i + 1):
            own = np.bincount(at, weights=fitted * design[cell, i] * design[cell, j], minlength=n)
            others[:, i, j] = others[:, j, i] = hessian[i, j] - own
    # A cluster that alone holds a kind leaves nothing to fit it by, and no score for it either.
    return np.asarray(np.einsum("nij,nj->ni", np.linalg.pinv(others, rcond=1e-10, hermitian=True), scores))
