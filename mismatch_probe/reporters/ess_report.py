"""``ess-report``: ESS of three ratios at three levels, the first breakdown, a verdict."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console
from rich.text import Text

from mismatch_probe.approximate import approximate
from mismatch_probe.diagnosis.finding import Diagnosis
from mismatch_probe.diagnosis.stored import read_findings
from mismatch_probe.folder import Analysis
from mismatch_probe.noise import WITHIN, floor_sentence, floor_tops, noise_steps
from mismatch_probe.reporters.beside import beside_sentences
from mismatch_probe.reporters.change_points import SeriesChange, series_changes
from mismatch_probe.reporters.diagnosis import headline, print_short, short_list
from mismatch_probe.reporters.format import to_json, with_interval
from mismatch_probe.reporters.terminal import STATUS_STYLE, approximation_note, plain_table, step_label
from mismatch_probe.stats.breakdown import LEVELS, RATIOS, Breakdown, Rule, StepEss, find_breakdown, verdict
from mismatch_probe.stats.change import DEFAULT_RATE
from mismatch_probe.stats.constancy import NAME as CONSTANCY
from mismatch_probe.stats.levels import StepDiscrepancy, discrepancy_sentence
from mismatch_probe.stats.mass import StepMass, mass_sentence

_MEANING = {
    "lag": "Lag, pi / pi_s: stale weights alone.",
    "discrepancy": "Discrepancy, pi_s / mu: engine numerics alone.",
    "total": "Total, pi / mu: what the logs blend.",
}


@dataclass(frozen=True)
class EssReport:
    """ESS of every step; ``ess[ratio][level]`` has one StepEss a step."""

    run: str
    rule: Rule
    confidence: float
    intervals: str
    ess: dict[str, dict[str, list[StepEss]]]
    discrepancy: list[StepDiscrepancy]
    changes: list[SeriesChange]
    trends: list[dict[str, Any]]
    mass: str = ""
    note: str = ""
    floor: str = ""
    beside: tuple[str, ...] = ()
    diagnosis: Diagnosis | None = None

    @property
    def numerics(self) -> str:
        """What the discrepancy says beside the probe's noise floor, and the mass audit where it fails."""
        return " ".join(filter(None, (discrepancy_sentence(self.discrepancy), self.floor, self.mass)))

    @property
    def answers(self) -> list[str]:
        """Where a quantity jumps, and what is asked of the run as a whole, a sentence each."""
        trends = (str(trend["sentence"]) for trend in self.trends)
        return [*self.beside, *(change.sentence for change in self.changes), *trends]

    @property
    def judged(self) -> list[StepEss]:
        """The ESS that the rule judges."""
        return self.ess[self.rule.ratio][self.rule.level]

    @property
    def breakdown(self) -> Breakdown:
        """The first breakdown step, and the first lasting one."""
        return find_breakdown(self.judged, self.rule)

    @property
    def verdict(self) -> str:
        """In words."""
        return verdict(self.judged, self.rule)


def ess_report(analysis: Analysis, rule: Rule, false_alarm_rate: float = DEFAULT_RATE) -> EssReport:
    """Take the report from the steps table; jumps are looked for at the given false-alarm rate a series."""
    steps, options = analysis.steps, analysis.record["options"]

    def column(ratio: str, level: str) -> list[StepEss]:
        name = f"ess_{ratio}_{level}"
        tokens = {"lag": "tokens_with_lag", "discrepancy": "tokens_with_discrepancy", "total": "tokens"}[ratio]
        count = {"token": tokens, "sequence": "sequences", "prompt": "groups"}[level]
        parts = steps[["step", name, f"{name}_ci_low", f"{name}_ci_high", count]].assign(gap=approximate(steps, name))
        # Of the total ratio D is the smaller part wherever it matters; of its own weights it is all.
        noise = noise_steps(steps) if ratio == "discrepancy" else np.zeros(len(steps), dtype=np.bool_)
        return [
            StepEss(int(step), float(value), float(low), float(high), float(n), bool(gap), bool(within))
            for (step, value, low, high, n, gap), within in zip(parts.itertuples(index=False), noise, strict=True)
        ]

    ess = {ratio: {lvl: column(ratio, lvl) for lvl in LEVELS} for ratio in RATIOS}
    exact = steps[~approximate(steps)]  # elsewhere D holds a part of the lag
    parts = zip(*(exact[f"discrepancy_{part}"] for part in ("rms", "k3")), floor_tops(exact), strict=True)
    discrepancy = [
        StepDiscrepancy(int(step), *map(float, part)) for step, part in zip(exact["step"], parts, strict=True)
    ]
    name = "discrepancy_mean_weight"
    weights = exact[["step", name, f"{name}_ci_low", f"{name}_ci_high"]].itertuples(index=False)
    masses = [
        StepMass(int(step), float(value), float(low), float(high), bool(within))
        for (step, value, low, high), within in zip(weights, noise_steps(exact), strict=True)
    ]
    known = any(not math.isnan(mass.value) for mass in masses)
    mass = mass_sentence(masses, options["confidence"]) if known else ""
    note = approximation_note(steps)
    changes = series_changes(steps, rule, false_alarm_rate)
    how = (options["confidence"], options["intervals"])
    trends = _trends(analysis, exact)
    floor = floor_sentence(steps)
    beside = tuple(beside_sentences(analysis, exact))
    found = read_findings(analysis.folder)
    return EssReport(analysis.name, rule, *how, ess, discrepancy, changes, trends, mass, note, floor, beside, found)


def _trends(analysis: Analysis, exact: pd.DataFrame) -> list[dict[str, Any]]:
    """Answers about the run; one that rests on a discrepancy within the noise floor is not left standing alone."""
    known = exact["discrepancy_rms"].notna().to_numpy()
    if not known.any() or not noise_steps(exact)[known].all():
        return analysis.trends
    return [
        trend | {"sentence": f"{trend['sentence']} D is {WITHIN} at every step: a change may be the probe's own."}
        if trend["name"] == CONSTANCY and trend["answer"] == "changing"
        else trend
        for trend in analysis.trends
    ]


def print_text(report: EssReport, console: Console) -> None:
    """Three tables and the verdict, at 80 columns."""
    for ratio in RATIOS:
        console.print(Text(_MEANING[ratio], style="bold"))
        headings = [f"{level} ESS" for level in LEVELS]
        table = plain_table("step", *headings, *(["status"] if ratio == report.rule.ratio else []), left=(0, 4))
        for at, judged in enumerate(report.judged):
            cells = [with_interval(s.value, s.low, s.high, s.n) for s in (report.ess[ratio][lvl][at] for lvl in LEVELS)]
            status = judged.status(report.rule.threshold)
            mark = [Text(status, style=STATUS_STYLE[status])] if ratio == report.rule.ratio else []
            table.add_row(step_label(judged.step, judged.approximate), *cells, *mark)
        console.print(table)
        console.print()
    console.print(Text(_footnote(report), style="dim"))
    console.print()
    console.print(Text(report.verdict, style="bold"))
    for sentence in (report.numerics, *report.answers):
        console.print(Text(sentence))
    print_short(report.diagnosis, console)


def to_markdown(report: EssReport) -> str:
    """The same as Markdown."""
    lines = [f"### ESS of {report.run}", "", report.verdict, "", report.numerics, ""]
    lines += [*(f"- {answer}" for answer in report.answers), ""]
    if report.diagnosis is not None:
        told = short_list(report.diagnosis) or []
        lines += [headline(report.diagnosis), ""]
        lines += [*(f"- **{one['code']} {one['severity']}:** {one['summary']}" for one in told), ""]
    for ratio in RATIOS:
        status = ["status"] if ratio == report.rule.ratio else []
        heads = ["step", *(f"{level} ESS" for level in LEVELS), *status]
        lines += [f"**{_MEANING[ratio]}**", "", f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
        for at, judged in enumerate(report.judged):
            cells = [with_interval(s.value, s.low, s.high, s.n) for s in (report.ess[ratio][lvl][at] for lvl in LEVELS)]
            mark = [str(judged.status(report.rule.threshold))] if ratio == report.rule.ratio else []
            lines.append(f"| {' | '.join([step_label(judged.step, judged.approximate), *cells, *mark])} |")
        lines.append("")
    return "\n".join([*lines, _footnote(report)])


def as_json(report: EssReport) -> str:
    """The same as JSON; null where unknown."""
    found = report.breakdown
    steps: list[dict[str, Any]] = []
    for at, judged in enumerate(report.judged):
        ess = {ratio: {lvl: _numbers(report.ess[ratio][lvl][at]) for lvl in LEVELS} for ratio in RATIOS}
        steps.append({"step": judged.step, "status": str(judged.status(report.rule.threshold)), "ess": ess})
    return to_json(
        {
            "schema_version": 1,
            "run": report.run,
            "level": report.rule.level,
            "ratio": report.rule.ratio,
            "threshold": report.rule.threshold,
            "lasting": report.rule.lasting,
            "confidence": report.confidence,
            "intervals": report.intervals,
            "first_breakdown_step": None if found.first is None else found.first.step,
            "lasting_breakdown_step": None if found.lasting is None else found.lasting.step,
            "breakdown_steps": found.steps,
            "verdict": report.verdict,
            "numerics": report.numerics,
            "noise_floor": report.floor,
            "beside": list(report.beside),
            "findings": short_list(report.diagnosis),
            "changes": [asdict(change) for change in report.changes],
            "trends": report.trends,
            "steps": steps,
        }
    )


def _numbers(step: StepEss) -> dict[str, float]:
    return {"value": step.value, "ci_low": step.low, "ci_high": step.high}


def _footnote(report: EssReport) -> str:
    return (
        f"Kish ESS of raw weights as a share of n, with {report.confidence:.0%} intervals over prompt groups "
        f"({report.intervals}). "
        "sequence: product over the response; prompt: mean of a group's sequence weights. "
        "<: below 5/n, where the estimate is biased upwards; ~: ten units or fewer. "
        f"Breakdown: the whole interval of {report.rule.quantity} lies below {report.rule.threshold:g}; warning: it "
        f"straddles it; lasting: {report.rule.lasting} judged steps in a row."
        f"{' ' + report.note if report.note else ''}"
    )
