"""The trainer's own log-probs against the probe's: a fault of the trainer is one that the sampler has no part in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch_probe.diagnosis.catalogue import Page
from mismatch_probe.diagnosis.evidence import CAP, Evidence, capped
from mismatch_probe.diagnosis.finding import Finding, NotTestable, Number, Result, Severity
from mismatch_probe.diagnosis.numerics_tails import Tail, examples_of, tail_named, tail_of
from mismatch_probe.diagnosis.residual import Residual
from mismatch_probe.diagnosis.spread import intraclass, mean_of
from mismatch_probe.diagnosis.words import nats, percent, steps_of
from mismatch_probe.run import Bools, Floats

PAGES = (
    Page(
        "MP304",
        "mismatch before the first update, on the trainer's side",
        "The trainer's own log-probs are off at the first step, when its weights are still the sampler's, while the "
        "probe's scores of the same weights agree with the sampler: a fault of the training forward pass, or of how it "
        "loads and packs.",
        "At the first step logged trainer log-probs are far from the probe's, in some sequences or at some places more "
        "than in others; a part of the rows is exact. Rows packed without boundaries look like this: the first of each "
        "pack is right. The probe scores every row by itself, or proves that its packing changes nothing.",
        "The trainer's log-probs of one row scored alone, equal to those in the batch.",
        "Score one batch with packing off. If the gap goes, give attention the boundaries of the packed rows "
        "(cu_seqlens, position ids that restart).",
        ("NVIDIA-NeMo/RL#2105", "NVIDIA-NeMo/RL#4079"),
    ),
    Page(
        "MP305",
        "training-mode noise in the trainer's log-probs",
        "The trainer's log-probs were computed with dropout (or another noise of training mode) switched on.",
        "Logged trainer log-probs scatter around the probe's without bias by position or sequence, at every response, "
        "no version explains them, and the sampler agrees with the probe. The probe's own scores are the same twice.",
        "Two passes of the trainer over one batch that agree to rounding.",
        "Call eval() before log-probs are computed, and set attention_dropout, hidden_dropout and the adapter's "
        "dropout to 0: some training stacks default to 0.1 whatever the checkpoint says.",
        ("Human-Agent-Society/reef#536", "huggingface/trl#454", "huggingface/trl#2042"),
    ),
)
LARGE = 0.03
"""Mean distance of logged trainer log-probs from the probe's, nats, below which it is the usual one of two programs."""
TIMES = 3.0
"""And it must be so many times the sampler's own."""
_CONFIDENCE = 0.999
_MIN_TOKENS = 6


def check_trainer(evidence: Evidence) -> Result:
    """MP304 and MP305, and single tokens that the trainer alone has far off (MP302)."""
    tokens = evidence.tokens
    logged = tokens.trainer_logged
    if np.isnan(logged[tokens.counted]).all():
        return _untested("the run holds no log-probs of the trainer's own")
    wanted = tokens.counted & ~np.isnan(logged)
    reference = _closest(evidence, wanted)
    if reference is None:
        return _untested("the trainer's weights are not there, so its own log-probs have nothing to be compared with")
    if not np.isnan(tokens.sampler[wanted]).all() and (logged == tokens.sampler)[wanted].mean() > 0.5:
        return _untested("the logged trainer log-probs are a copy of the sampler's")
    away = Residual.between(evidence, reference, logged, wanted)
    if len(away) < 50:
        return _untested("fewer than 50 tokens have a log-prob of the trainer's own")
    tail = tail_of(away)
    if tail is not None and not tail.mixture:
        return Result((_single(evidence, away, tail),))
    usual = evidence.gap()
    level, low, high = mean_of(away.size, away.group, _CONFIDENCE)
    if not (low > LARGE and (np.isnan(usual) or low > TIMES * usual)):
        return Result()
    shape = _Shape.of(away)
    numbers = (
        Number("mean |logged - rescored| of the trainer", level, "nats", low, high),
        Number("mean |D|, sampler against rescored", usual, "nats"),
        *shape.numbers(),
        *(() if np.isnan(evidence.noise_floor) else (Number("the probe's noise floor", evidence.noise_floor, "nats"),)),
    )
    if shape.is_noise:
        return Result((_noise(evidence, away, level, usual, numbers),))
    return _first_step(evidence, away, usual, numbers)


def _noise(evidence: Evidence, away: Residual, level: float, usual: float, numbers: tuple[Number, ...]) -> Finding:
    floor = "" if np.isnan(evidence.noise_floor) else f" (re-scored twice, ours agree to {nats(evidence.noise_floor)})"
    spread = float(np.std(away.d))
    summary = (
        f"the trainer's logged log-probs scatter around ours with a standard deviation of {nats(spread)} nats, in "
        f"every response alike, and no version explains them{floor}; the sampler is within {nats(usual)}: "
        f"training-mode noise"
    )
    return Finding("MP305", Severity.ERROR, summary, _share(level, usual), numbers, steps=_steps(away))


def _first_step(evidence: Evidence, away: Residual, usual: float, numbers: tuple[Number, ...]) -> Result:
    """MP304 where the gap is there before any update."""
    first = int(evidence.sequences.step.min())
    at = away.at[away.step == first]
    claimed, version = evidence.tokens.claimed[at], evidence.tokens.trainer_version[at]
    if not len(at) or not ((claimed == version) & (claimed >= 0)).mean() > 0.5:
        return _untested(f"step {first}, the first that is there, was sampled by older weights than it updates")
    mine = away.step == first
    level, low, _ = mean_of(away.size[mine], away.group[mine], _CONFIDENCE)
    if not low > LARGE:
        return Result()
    rows = _medians(away.only(mine))
    exact = float((rows < 0.1 * level).mean()) if len(rows) else 0.0
    some = f", and {percent(exact)} of its responses are right" if exact > 0 else ""
    others = "" if len(_steps(away)) == 1 else f"; it stays at {steps_of(_steps(away), evidence.sequences.step)}"
    summary = (
        f"the trainer's log-probs are off by {nats(level)} nats on average at step {first}, before the first update, "
        f"where sampler and probe agree to {nats(usual)}{some}: a fault of the trainer's forward pass (packing, "
        f"loader), not lag{others}"
    )
    return Result((Finding("MP304", Severity.ERROR, summary, _share(level, usual), numbers, (first,)),))


def _single(evidence: Evidence, away: Residual, tail: Tail) -> Finding:
    """MP302 of the trainer's own log-probs."""
    where = tail_named(evidence, away, tail)
    rest = float(away.size[~tail.tokens].mean())
    return Finding(
        "MP302",
        Severity.WARNING,
        f"in the trainer's own log-probs {tail.words(where)}; the sampler's are within {nats(evidence.gap())} there",
        explains=_share(float(away.size.mean()), rest),
        numbers=tail.numbers(),
        steps=tuple(int(step) for step in np.unique(away.step[tail.tokens])),
        examples=examples_of(evidence, away, tail),
    )


@dataclass(frozen=True)
class _Shape:
    """Whether errors of the trainer look like noise: ``even`` is the share of responses with their part of it."""

    mean: float
    even: float
    between: float
    along: float

    @classmethod
    def of(cls, away: Residual) -> _Shape:
        rows = _medians(away)
        usual = float(np.median(away.size))
        same = away.sequence[1:] == away.sequence[:-1]
        pairs = away.d[1:][same], away.d[:-1][same]
        known = len(pairs[0]) > 2 and min(float(side.std()) for side in pairs) > 0
        return cls(
            mean=float(away.d.mean()),
            even=float((rows > 0.25 * usual).mean()) if len(rows) else 1.0,
            between=intraclass(np.clip(away.d, -CAP, CAP), away.sequence),
            along=float(np.corrcoef(*pairs)[0, 1]) if known else 0.0,
        )

    @property
    def is_noise(self) -> bool:
        """In every response, and neither shared by a response nor carried from token to token."""
        return self.even >= 0.95 and not self.between > 0.2 and not self.along > 0.2

    def numbers(self) -> tuple[Number, ...]:
        return (
            Number("mean of logged - rescored", self.mean, "nats"),
            Number("share of responses with a part in it", self.even),
            Number("share of its variance between responses (ICC)", self.between),
            Number("correlation of neighbouring tokens", self.along),
        )


def _closest(evidence: Evidence, wanted: Bools) -> Floats | None:
    """The rescored log-probs (m,) that the trainer's own are closest to: current weights, the sampler's, any version's.

    None where none are rescored, or the current ones are the logged ones themselves.
    """
    tokens = evidence.tokens
    columns = [tokens.trainer, tokens.stale]
    if evidence.scan is not None:
        scan = evidence.scan
        columns += [scan.spread(len(tokens), at, scan.declared) for at in range(len(scan.candidates))]
    known = [column for column in columns if not np.isnan(column[wanted]).all()]
    known = [column for column in known if not (column == tokens.trainer_logged)[wanted & ~np.isnan(column)].all()]
    if not known:
        return None

    def gap(column: Floats) -> float:
        return float(np.nanmean(capped((column - tokens.trainer_logged)[wanted])))

    return min(known, key=gap)


def _medians(away: Residual) -> Floats:
    """Median distance in each response with enough tokens."""
    rows: list[float] = []
    order = np.argsort(away.sequence, kind="stable")
    _, first = np.unique(away.sequence[order], return_index=True)
    for part in np.split(away.size[order], first[1:]):
        if len(part) >= _MIN_TOKENS:
            rows.append(float(np.median(part)))
    return np.array(rows)


def _steps(away: Residual) -> tuple[int, ...]:
    return tuple(int(step) for step in np.unique(away.step))


def _share(level: float, usual: float) -> float:
    """Share of the gap between the trainer's own log-probs and the sampler's that goes when the trainer is mended."""
    return 0.0 if np.isnan(usual) else float(np.clip(1 - usual / level, 0.0, 1.0))


def _untested(why: str) -> Result:
    return Result(not_testable=(NotTestable(("MP304", "MP305"), why),))


CHECKS = (check_trainer,)
