"""Is what is left of the gap of a usual size: against published runs, against a run of one's own, against the probe."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mismatch_probe.checkpoints.config import config_differences
from mismatch_probe.diagnosis.catalogue import Page
from mismatch_probe.diagnosis.evidence import Evidence
from mismatch_probe.diagnosis.finding import Finding, NotTestable, Number, Result, Severity, or_none
from mismatch_probe.diagnosis.levels import Expected, differences, expected
from mismatch_probe.diagnosis.spread import mean_of
from mismatch_probe.diagnosis.words import listed, nats
from mismatch_probe.folder import Analysis
from mismatch_probe.readers.settings import checked
from mismatch_probe.run import Floats, Ints, Settings
from mismatch_probe.stats.kl import k_terms

PAGES = (
    Page(
        "MP301",
        "usual for this precision and architecture",
        "No fault: two programs of finite precision never agree to the last bit.",
        "Mean |D| and k3, of what no other check explains, lie where published runs in working order lie, or below.",
        "A run of your own with the same settings and a clearly smaller gap: pass it with --baseline.",
        "Nothing has to be done. To lower it, compute the output head and log-softmax in float32 on both sides. At k3 "
        "of 1e-3 a token, products over whole responses are useless from some hundred tokens on whatever the lag is.",
        ("vllm-project/vime#64", "PrimeIntellect-ai/prime-rl#2802", "NovaSky-AI/SkyRL#1408", "radixark/miles#2722"),
    ),
    Page(
        "MP309",
        "numerics are larger than usual, or than in the baseline run",
        "The engine computes less precisely than its precision explains, or than it did in another run: another "
        "kernel, topology, quantisation or version.",
        "Mean |D| or k3, with its interval, lies above the range from which published runs were found faulty; or above "
        "the baseline run's by half, beyond sampling error.",
        "The same engine and settings that give the smaller gap on the same tokens.",
        "See what differs in settings first. Then halve the difference: one node against two, tensor parallelism, an "
        "8-bit cache, compiled kernels, engine version.",
        ("vllm-project/vime#64", "verl-project/verl#7519"),
    ),
    Page(
        "MP310",
        "at the probe's own noise floor",
        "No fault that could be seen: log-probs differ by no more than the probe's own do when the batch has another "
        "shape.",
        "Root mean square of D is at most a quarter above that of two scores of one token, in a batch and alone.",
        "Scores in float32 or float64 that lower the floor and leave D where it is.",
        "To see below the floor, score with --dtype float32.",
        ("verl-project/verl#6280",),
    ),
)
LARGER = 1.5
"""A run is worse than its baseline from this factor in mean |D| on, beyond sampling error."""
NEAR_FLOOR = 1.25
"""Up to so many times the floor D is at the floor: what the engine adds is then smaller than the floor itself."""
_CONFIDENCE = 0.999


def check_level(evidence: Evidence) -> Result:
    """MP310, MP301 or MP309: one of the three, wherever something is left to compare."""
    d = evidence.discrepancy[evidence.usable]
    group = evidence.group_of_token[evidence.usable]
    if not len(d):
        return Result(not_testable=(NotTestable(("MP301", "MP309", "MP310"), "no token is left to compare"),))
    level = Level.of(d, group, _CONFIDENCE)
    rms = float(np.sqrt(np.square(d).mean()))
    floor = evidence.noise_floor
    beside = () if math.isnan(floor) else (Number("the probe's noise floor, rms", floor, "nats"),)
    if rms <= NEAR_FLOOR * floor:
        text = f"rms D is {nats(rms)} nats, at the probe's own noise floor of {nats(floor)}: nothing can be concluded"
        return Result((Finding("MP310", Severity.INFO, text, numbers=(Number("rms D", rms, "nats"), *beside)),))
    return Result((_against_table(level, expected(evidence.settings, evidence.config), beside),))


@dataclass(frozen=True)
class Level:
    """Mean |D| and k3 with their intervals (value, low, high), nats, and what the tail holds."""

    mean_abs: tuple[float, float, float]
    k3: tuple[float, float, float]
    beyond: tuple[float, float, float]
    median: float
    p99: float

    @classmethod
    def of(cls, d: Floats, group: Ints, confidence: float = 0.95) -> Level:
        """Of D (n,) by prompt group (n,)."""
        size = np.abs(d)
        return cls(
            mean_abs=mean_of(size, group, confidence),
            k3=mean_of(k_terms(np.clip(d, -50.0, 50.0))["k3"], group, confidence),
            beyond=mean_of((size > math.log(2)).astype(np.float64), group, confidence),
            median=float(np.median(size)),
            p99=float(np.quantile(size, 0.99)),
        )

    def numbers(self, whose: str = "") -> tuple[Number, ...]:
        """All of them."""
        return (
            _number(f"mean |D|{whose}", self.mean_abs, "nats"),
            _number(f"KL(mu || pi_s) by k3{whose}", self.k3, "nats"),
            _number(f"share of tokens with |D| above ln 2{whose}", self.beyond),
            Number(f"median |D|{whose}", self.median, "nats"),
            Number(f"99th percentile of |D|{whose}", self.p99, "nats"),
        )


def _against_table(level: Level, usual: Expected, beside: tuple[Number, ...]) -> Finding:
    row = usual.usual
    assumed = f" ({usual.assumed})" if usual.assumed else ""
    found = f"mean |D| {nats(level.mean_abs[0])} and k3 {level.k3[0]:.2g} nats a token"
    usually = f"{nats(row.mean_abs[0])} to {nats(row.mean_abs[1])} and {row.k3[0]:.2g} to {row.k3[1]:.2g}"
    numbers = (*level.numbers(), *beside)
    if level.mean_abs[1] > row.suspect_mean_abs or level.k3[1] > row.suspect_k3:
        text = f"{found} are above what is usual for {row.name}, {usually}{assumed}; no other check explains it"
        return Finding("MP309", Severity.WARNING, text, numbers=numbers)
    if level.mean_abs[0] <= row.mean_abs[1] and level.k3[0] <= row.k3[1]:
        below = level.mean_abs[0] < row.mean_abs[0]
        where = "below what is usual" if below else "usual"
        return Finding("MP301", Severity.INFO, f"{found}: {where} for {row.name}, {usually}{assumed}", numbers=numbers)
    text = f"{found}: at the upper end of what is usual for {row.name}, {usually}{assumed}"
    return Finding("MP301", Severity.INFO, text, numbers=numbers)


def with_baseline(evidence: Evidence, other: Evidence | Analysis) -> Finding:
    """The run against one of your own: MP309 where it is clearly worse, else MP301.

    Args:
        evidence: the run, as its checks left it.
        other: the baseline, gathered like this run, or its analysis.

    Raises:
        InputError: the tokens of the analysis cannot be read.
    """
    mine = evidence.discrepancy[evidence.usable], evidence.group_of_token[evidence.usable]
    theirs, settings, config = _of_baseline(other)
    differing = differences(evidence.settings, settings) + _of_configs(evidence.config, config)
    differs = f"they differ in {listed(differing, 6)}" if differing else "their settings are the same"
    name = settings.name or "the baseline"
    if not len(mine[0]) or not len(theirs[0]):
        text = f"nothing to compare with {name}: no token has a discrepancy in one of the two runs; {differs}"
        return Finding("MP301", Severity.INFO, text)
    a, b = Level.of(*mine), Level.of(*theirs)
    gap, ratio = _apart(a.mean_abs, b.mean_abs), _factor(a.mean_abs, b.mean_abs)
    numbers = (
        _number("mean |D| minus the baseline's", gap, "nats"),
        _number("k3 minus the baseline's", _apart(a.k3, b.k3), "nats"),
        _number("share above ln 2 minus the baseline's", _apart(a.beyond, b.beyond)),
        *a.numbers(),
        *b.numbers(", baseline"),
    )
    words = (
        f"{differs}; mean |D| is {nats(a.mean_abs[0])} nats, {nats(b.mean_abs[0])} in {name}: by "
        f"{nats(gap[0])} [{nats(gap[1])}, {nats(gap[2])}]"
    )
    if gap[1] > 0 and ratio >= LARGER:
        return Finding("MP309", Severity.WARNING, f"larger than in the baseline: {words} more", numbers=numbers)
    verdict = "smaller than" if gap[2] < 0 else "larger than" if gap[1] > 0 else "not different from"
    return Finding("MP301", Severity.INFO, f"{verdict} in the baseline: {words}", numbers=numbers)


def _of_baseline(other: Evidence | Analysis) -> tuple[tuple[Floats, Ints], Settings, Mapping[str, Any]]:
    if isinstance(other, Evidence):
        chosen = other.usable
        return (other.discrepancy[chosen], other.group_of_token[chosen]), other.settings, other.config
    table = other.tokens(["group_id", "discrepancy", "stale_trainer_logprob_source", "sampler_logprob_source"])
    exact = (table["stale_trainer_logprob_source"] == "rescored") & (table["sampler_logprob_source"] == "logged")
    table = table[exact & table["discrepancy"].notna()]
    group = np.asarray(table.groupby(["step", "group_id"], observed=True).ngroup(), dtype=np.int64)
    d: Floats = table["discrepancy"].to_numpy(dtype=np.float64)
    kept = other.record["run"]["settings"]
    known = {key: value for key, value in kept.items() if key in Settings.__dataclass_fields__ and value is not None}
    settings = Settings(**{key: checked(key, value) if value else value for key, value in known.items()})
    return (d, group), settings, {}


def _of_configs(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    return [f"{one.field}: {one.value_a}, {one.value_b}" for one in config_differences(dict(a), dict(b)) if a and b]


def _apart(a: tuple[float, float, float], b: tuple[float, float, float]) -> tuple[float, float, float]:
    """Difference of two independent means with its interval: half widths add in squares."""
    reach = math.hypot((a[2] - a[1]) / 2, (b[2] - b[1]) / 2)
    return a[0] - b[0], a[0] - b[0] - reach, a[0] - b[0] + reach


def _factor(a: tuple[float, float, float], b: tuple[float, float, float]) -> float:
    return a[0] / b[0] if b[0] > 0 else math.inf


def _number(name: str, found: tuple[float, float, float], unit: str = "1") -> Number:
    return Number(name, found[0], unit, *map(or_none, found[1:]))


CHECKS: tuple[Callable[[Evidence], Result], ...] = (check_level,)
