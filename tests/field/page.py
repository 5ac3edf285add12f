"""docs/findings.md: the catalogue, and what became of every field report. ``python -m tests.field.page`` writes it."""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path

import tests.field
from mismatch_probe.reporters.diagnosis import pages_markdown
from tests.field.case import RESULTS, Case

PAGE = Path(__file__).parent.parent.parent / "docs" / "findings.md"


def cases() -> list[Case]:
    """Every case of every family, by number."""
    names = [module.name for module in pkgutil.iter_modules(tests.field.__path__) if module.name.startswith("cases_")]
    found = [case for name in names for case in importlib.import_module(f"tests.field.{name}").CASES]
    return sorted(found, key=lambda case: (case.number, case.title))


def markdown() -> str:
    """The page."""
    kept = json.loads(RESULTS.read_text())
    lines = [
        "## Field reports",
        "",
        "Faults that practitioners reported in public, each planted into a small run (five steps of 8 prompts by 4",
        "responses) and diagnosed by the command line. A cell says what is planted and what was found, the first",
        "cause first, with mean |D| in nats as it stands and with every found cause taken out. *Weakest* is the",
        "weakest input at which the cause must still be found. The tests in `tests/field` write the results.",
        "",
        "| # | report | smallest input | stronger | weakest |",
        "|---|---|---|---|---|",
    ]
    for case in cases():
        shown = ((variant.words, kept[f"{case.number} {case.title}: {name}"]) for name, variant in case.variants())
        cells = [f"{words}: {found}" for words, found in shown]
        owner, _, number = case.source.partition("#")
        source = f"[{case.source}](https://github.com/{owner}/issues/{number})" if number else case.source
        lines.append(f"| {case.number} | {case.title} ({source}) | {' | '.join(cells)} |")
    return pages_markdown() + "\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(markdown(), encoding="utf-8")
