"""What is left to explain, token by token, in nats and in log-odds: the arrays that the numerics checks share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mismatch_probe.diagnosis.evidence import Evidence, capped
from mismatch_probe.diagnosis.finding import Severity
from mismatch_probe.run import Bools, Floats, Ints
from mismatch_probe.stats.constancy import displacement

BROKEN = 0.1
"""Mean |D| in nats from which tokens count as wrong, not as imprecise: no published engine in working order, down to
an 8-bit cache, reaches it over all of its tokens (see levels)."""
_MAD = 1.4826


@dataclass(frozen=True, eq=False)
class Residual:
    """One entry a token that is still to be explained, (n,).

    ``at`` is its place in ``Evidence.tokens``, ``d`` its discrepancy and ``size`` |D|, capped at 2 nats. ``odds`` is
    the change in log-odds, whose scale hardly depends on the probability, NaN where p is 1 to float32. ``group``,
    ``sequence`` and ``step`` are as in the evidence. ``total`` is the sum of |D| over all counted tokens, those that
    earlier checks explained too.
    """

    at: Ints
    d: Floats
    size: Floats
    odds: Floats
    group: Ints
    sequence: Ints
    step: Ints
    total: float

    @classmethod
    def of(cls, evidence: Evidence, among: Bools | None = None) -> Residual:
        """Of usable tokens, and of those ``among`` (m,) only where given."""
        return cls.between(evidence, evidence.tokens.sampler, evidence.tokens.stale, evidence.usable, among)

    @classmethod
    def between(
        cls, evidence: Evidence, first: Floats, second: Floats, wanted: Bools, among: Bools | None = None
    ) -> Residual:
        """Of two columns of log-probs (m,): D is the second minus the first."""
        chosen = wanted & ~np.isnan(second - first)
        at = np.flatnonzero(chosen if among is None else chosen & among)
        d = (second - first)[at]
        counted = evidence.tokens.counted & ~np.isnan(second - first)
        return cls(
            at=at,
            d=d,
            size=capped(d),
            odds=displacement(first[at], second[at]),
            group=evidence.group_of_token[at],
            sequence=evidence.tokens.sequence[at],
            step=evidence.step_of_token[at],
            total=float(capped((second - first)[counted]).sum()),
        )

    def __len__(self) -> int:
        return len(self.at)

    def only(self, part: Bools) -> Residual:
        """Some of the tokens (n,)."""
        names = ("at", "d", "size", "odds", "group", "sequence", "step")
        return replace(self, **{name: getattr(self, name)[part] for name in names})

    def odds_ratio(self, there: Bools) -> float:
        """Median |change in log-odds| of the tokens ``there`` (n,) over that of the others; infinite, NaN as it comes.

        Tokens of another confidence have another |D| without any fault; in log-odds they do not.
        """
        known = ~np.isnan(self.odds)
        inside, outside = (np.abs(self.odds[known & part]) for part in (there, ~there))
        if not len(inside) or not len(outside):
            return float("nan")
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(np.median(inside) / np.median(outside))

    def share(self, tokens: Bools, expected: float = 0.0) -> float:
        """Share of the run's gap that goes when the mean |D| of the tokens (n,) falls to what is ``expected``."""
        return float(np.clip((self.size[tokens] - expected).sum() / self.total, 0.0, 1.0)) if self.total > 0 else 0.0

    def mask(self, tokens: Bools, total: int) -> Bools:
        """Tokens (n,) as a mask over all ``total`` tokens of the evidence."""
        out = np.zeros(total, dtype=np.bool_)
        out[self.at[tokens]] = True
        return out


def robust_deviation(values: Floats) -> float:
    """Standard deviation that a normal distribution of this median |value| has; NaN is left out."""
    known = values[~np.isnan(values)]
    return float(_MAD * np.median(np.abs(known))) if len(known) else float("nan")


def severity_of(level: float) -> Severity:
    """ERROR where tokens are off by more than BROKEN nats on average, else WARNING."""
    return Severity.ERROR if level >= BROKEN else Severity.WARNING
