"""``gate``: each check in a line, and which failed."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from mismatch_probe.diagnosis.finding import Diagnosis
from mismatch_probe.gate import Check, Outcome
from mismatch_probe.reporters.diagnosis import print_short, short_list
from mismatch_probe.reporters.format import to_json

_STYLE = {Outcome.PASSED: "green", Outcome.FAILED: "bold red", Outcome.UNJUDGED: "dim"}


def summary(checks: list[Check]) -> str:
    """One line: passed, or the names of what failed."""
    failed = [check.name for check in checks if check.outcome is Outcome.FAILED]
    unjudged = [check.name for check in checks if check.outcome is Outcome.UNJUDGED]
    left = f"; not judged: {', '.join(unjudged)}" if unjudged else ""
    if failed:
        return f"Gate failed: {', '.join(failed)}{left}"
    return f"Gate cannot judge: {', '.join(unjudged)}" if unjudged else "Gate passed"


def print_text(checks: list[Check], source: str, diagnosis: Diagnosis | None, console: Console) -> None:
    """One line a check, the summary, and the findings of the run."""
    for check in checks:
        console.print(Text.assemble((f"{check.outcome:9}", _STYLE[check.outcome]), check.sentence()))
    console.print(Text(f"Thresholds: {source}", style="dim"))
    passed = all(check.outcome is Outcome.PASSED for check in checks)
    console.print(Text(summary(checks), style="bold green" if passed else "bold red"))
    print_short(diagnosis, console)


def as_json(checks: list[Check], source: str, diagnosis: Diagnosis | None) -> str:
    """The same as JSON."""
    rows = [{**vars(check), "outcome": str(check.outcome), "sentence": check.sentence()} for check in checks]
    return to_json(
        {
            "schema_version": 1,
            "summary": summary(checks),
            "thresholds": source,
            "checks": rows,
            "findings": short_list(diagnosis),
        }
    )
