"""``prescribe``: one recommendation, the corrections side by side, and the resyncs."""

from __future__ import annotations

from dataclasses import asdict
from textwrap import wrap

from rich.console import Console
from rich.text import Text

from mismatch_probe.prescription import Prescription
from mismatch_probe.reporters.format import NULL, ranges, to_json
from mismatch_probe.reporters.terminal import plain_table
from mismatch_probe.stats.sync import Interval

_HEADS = ("correction", "bias", "worst", "of D", "of L", "size", "variance", "cut")


def print_text(found: Prescription, console: Console) -> None:
    """The recommendation first."""
    console.print(Text(found.advice, style="bold"))
    for sentence in sentences(found):
        for line in wrap(sentence, console.width - 2):
            console.print(Text(f"  {line}"))
    console.print()
    table = plain_table(*_HEADS)
    for row in rows(found):
        table.add_row(*row)
    console.print(table)
    console.print(Text(footnote(found), style="dim"))


def to_markdown(found: Prescription) -> str:
    """The same as Markdown."""
    lines = [f"### {found.advice}", "", *(f"- {sentence}" for sentence in sentences(found)), ""]
    lines += [f"| {' | '.join(_HEADS)} |", "|" + " --- |" * len(_HEADS)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows(found)), "", footnote(found)])


def as_json(found: Prescription) -> str:
    """The same as JSON; null where unknown."""
    return to_json({"schema_version": 1, **asdict(found), "resyncs": found.resyncs})


def sentences(found: Prescription) -> list[str]:
    """Reasons, resyncs, and the longest sync interval."""
    said = [f"Because {reason}." for reason in found.reasons]
    if found.replayed:
        recorded = max(step.recorded_lag for step in found.replayed)
        if found.resyncs:
            left = max(step.lag for step in found.replayed)
            said.append(
                f"DLC would have resynchronised after {len(found.resyncs)} of {len(found.replayed)} steps "
                f"({ranges(found.resyncs)}): the version lag would have reached {left} instead of {recorded}."
            )
        else:
            said.append("DLC would have resynchronised at no step.")
    if found.interval is not None:
        said.append(interval_sentence(found.interval, found.level, found.threshold))
    return said


def interval_sentence(interval: Interval, level: str, threshold: float) -> str:
    """The longest sync interval in words."""
    what = f"the {level} ESS of the lag at {threshold:g} or more"
    seen = interval.longest_seen
    if interval.updates is None:
        if seen == 1:
            return f"Every step was sampled by its own version, which keeps {what}; longer intervals were not seen."
        return f"A sync every {seen} updates, the longest seen, keeps {what}."
    low = str(interval.low if interval.low is not None else seen)
    high = str(interval.high) if interval.high is not None else f"{seen} or more"
    return f"A sync every {interval.updates} updates [{low}, {high}] keeps {what}."


def rows(found: Prescription) -> list[tuple[str, ...]]:
    """One a correction."""
    return [
        (
            effect.name,
            *(_share(value) for value in (effect.bias, effect.worst, effect.bias_discrepancy, effect.bias_lag)),
            _number(effect.size),
            _number(effect.variance),
            _share(effect.cut),
        )
        for effect in found.effects
    ]


def footnote(found: Prescription) -> str:
    """What the columns are."""
    steps = max((effect.steps for effect in found.effects), default=0)
    return (
        f"Medians over {steps} steps with an on-policy target. bias: |update - target| over |target| in the output "
        "head; worst: its largest step; of D, of L: its parts. size: |update| over |target|. variance: of the token "
        "weights, over their squared mean. cut: tokens clipped or masked. Resyncs are replayed from the ESS seen at "
        "each version lag, as if it did not depend on the step."
    )


def _share(value: float) -> str:
    return NULL if value != value else f"{value:.1%}"


def _number(value: float) -> str:
    return NULL if value != value else f"{value:.3f}"
