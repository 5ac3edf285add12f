"""``diagnose`` and ``explain``: findings with their evidence, and the page of a code."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mismatch_probe.diagnosis.catalogue import FAMILIES, Page, pages
from mismatch_probe.diagnosis.finding import Bucket, Diagnosis, Example, Finding, Number, Severity
from mismatch_probe.diagnosis.stored import as_content
from mismatch_probe.diagnosis.words import nats, percent
from mismatch_probe.reporters.format import to_json
from mismatch_probe.reporters.terminal import plain_table

_STYLE = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.INFO: "dim"}
_EXAMPLES = 5
_SOURCE = "https://github.com/{}/issues/{}"


def print_text(diagnosis: Diagnosis, console: Console) -> None:
    """Every finding with its evidence, what cannot be tested, and how much of the gap is explained."""
    console.print(Text(headline(diagnosis), style="bold"))
    known = pages()
    for finding in diagnosis.findings:
        page = known[finding.code]
        console.print()
        console.print(
            Text.assemble(
                (f"{finding.code} {finding.severity.name.lower()}", _STYLE[finding.severity]), f"  {page.name}"
            )
        )
        _say(console, finding.summary)
        for label, text in _details(finding, page):
            _say(console, text, f"{label}: ")
    if diagnosis.not_testable:
        console.print()
        console.print(Text("Not testable here", style="bold"))
        for entry in diagnosis.not_testable:
            _say(console, f"{', '.join(entry.codes)}: {entry.because}")
    if diagnosis.buckets:
        console.print()
        console.print(Text("Where the gap lives", style="bold"))
        console.print(_bucket_table(diagnosis))
        _say(console, concentration(diagnosis))
    console.print()
    for sentence in closing(diagnosis):
        console.print(Text(sentence, style="dim"))


def _bucket_table(diagnosis: Diagnosis) -> Table:
    """The buckets that stand out, or all of a few: mean |D| with its interval, signed mean, tokens."""
    table = plain_table("", "", "mean |D|", "interval", "mean D", "tokens", left=(0, 1))
    for bucket in standing_out(diagnosis):
        ends = "-" if bucket.low is None or bucket.high is None else f"[{nats(bucket.low)}, {nats(bucket.high)}]"
        signed = "-" if bucket.mean is None else f"{bucket.mean:+.4f}"
        size = "-" if bucket.mean_abs is None else nats(bucket.mean_abs)
        table.add_row(bucket.bucket, bucket.level, size, ends, signed, f"{bucket.tokens:,}")
    return table


def standing_out(diagnosis: Diagnosis, most: int = 8) -> list[Bucket]:
    """The buckets whose interval lies above the run's mean |D|, those farthest above it first; none is no news."""
    gap = diagnosis.gap or 0.0
    above = [one for one in diagnosis.buckets if one.low is not None and one.low > gap and one.mean_abs is not None]
    return sorted(above, key=lambda one: -(one.mean_abs or 0.0))[:most]


def concentration(diagnosis: Diagnosis) -> str:
    """How few tokens and sequences carry the gap, in one sentence."""
    return "; ".join(f"{number.name}: {percent(number.value)}" for number in diagnosis.concentration)


def print_short(diagnosis: Diagnosis | None, console: Console) -> None:
    """A line a finding above INFO, for the end of other commands' output."""
    if diagnosis is None:
        return
    console.print()
    console.print(Text(headline(diagnosis), style="bold"))
    for finding in diagnosis.findings:
        if finding.severity > Severity.INFO:
            head = (f"{finding.code} {finding.severity.name.lower()}", _STYLE[finding.severity])
            console.print(Text.assemble(head, f": {finding.summary}"))
    if any(finding.severity > Severity.INFO for finding in diagnosis.findings):
        console.print(Text("mismatch-probe diagnose has the evidence; explain CODE the remedy.", style="dim"))


def short_list(diagnosis: Diagnosis | None) -> list[dict[str, str]] | None:
    """The same for programs; None where no diagnosis was made."""
    if diagnosis is None:
        return None
    return [
        {"code": finding.code, "severity": finding.severity.name.lower(), "summary": finding.summary}
        for finding in diagnosis.findings
        if finding.severity > Severity.INFO
    ]


def headline(diagnosis: Diagnosis) -> str:
    """How many findings of each severity."""
    counts = [
        (sum(finding.severity is severity for finding in diagnosis.findings), severity.name.lower())
        for severity in sorted(Severity, reverse=True)
    ]
    told = [f"{number} {name}{'s' if number != 1 and name != 'info' else ''}" for number, name in counts if number]
    return f"Findings: {', '.join(told)}" if told else "Findings: none"


def closing(diagnosis: Diagnosis) -> list[str]:
    """What the findings leave of the gap, and where to read on."""
    sentences = list(diagnosis.notes)
    if diagnosis.gap is not None:
        left = "nothing that can be compared" if diagnosis.left is None else f"{nats(diagnosis.left)}"
        sentences.append(
            f"Mean |D|, each at most 2 nats: {nats(diagnosis.gap)}; with every found cause taken out: {left}."
        )
    if diagnosis.findings:
        sentences.append("mismatch-probe explain CODE prints a finding's page.")
    return sentences


def to_markdown(diagnosis: Diagnosis) -> str:
    """The same as Markdown."""
    known = pages()
    lines = [f"### {headline(diagnosis)}", ""]
    for finding in diagnosis.findings:
        page = known[finding.code]
        lines += [f"#### {finding.code} {finding.severity.name.lower()}: {page.name}", "", finding.summary, ""]
        lines += [*(f"- **{label}:** {text}" for label, text in _details(finding, page)), ""]
    if diagnosis.not_testable:
        lines += ["#### Not testable here", ""]
        lines += [*(f"- {', '.join(entry.codes)}: {entry.because}" for entry in diagnosis.not_testable), ""]
    if diagnosis.buckets:
        lines += ["#### Where the gap lives", "", "| bucket | level | mean abs D | low | high | mean D | tokens |"]
        lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
        for one in diagnosis.buckets:
            numbers = (one.mean_abs, one.low, one.high, one.mean)
            cells = ["-" if value is None else f"{value:.4g}" for value in numbers]
            lines.append(f"| {' | '.join([one.bucket, one.level, *cells, str(one.tokens)])} |")
        lines += ["", concentration(diagnosis), ""]
    return "\n".join([*lines, *closing(diagnosis)])


def as_json(diagnosis: Diagnosis) -> str:
    """The same as JSON, as findings.json has it."""
    return to_json(as_content(diagnosis))


def _details(finding: Finding, page: Page) -> list[tuple[str, str]]:
    details = [("evidence", "; ".join(map(_number, finding.numbers)))] if finding.numbers else []
    if finding.examples:
        details.append(("see", _examples(finding.examples)))
    details.append(("refuted by", finding.refuted_by or page.refuted_by))
    details.append(("remedy", finding.remedy or page.remedy))
    return details


def _number(number: Number) -> str:
    unit = "" if number.unit == "1" else f" {number.unit}"
    low, high = number.low, number.high
    ends = "" if low is None or high is None else f" [{nats(low)}, {nats(high)}]"
    return f"{number.name} {nats(number.value)}{ends}{unit}"


def _examples(examples: Sequence[Example]) -> str:
    told = []
    for example in examples[:_EXAMPLES]:
        where = f"step {example.step}"
        where += "" if example.sequence_id is None else f" sequence {example.sequence_id}"
        where += "" if example.position is None else f" token {example.position}"
        told.append(where + (f" ({example.note})" if example.note else ""))
    more = len(examples) - _EXAMPLES
    return "; ".join(told) + (f"; {more} more in findings.json" if more > 0 else "")


def _say(console: Console, text: str, label: str = "") -> None:
    """An indented paragraph whose label is dim."""
    indent = "  "
    for at, line in enumerate(wrap(label + text, console.width - len(indent)) or [""]):
        shown = Text(indent + line)
        if at == 0:
            shown.stylize("dim", len(indent), len(indent) + len(label))
        console.print(shown)


def print_page(page: Page, console: Console) -> None:
    """One code's page."""
    console.print(Text(f"{page.code}  {page.name}", style="bold"))
    for label, text in _page_parts(page):
        console.print()
        console.print(Text(label, style="dim"))
        _say(console, text)


def print_index(console: Console) -> None:
    """Every code with its name."""
    family = ""
    for code, page in pages().items():
        if code[2] != family:
            family = code[2]
            console.print(Text(f"MP{family}xx  {FAMILIES[family][0]}: {FAMILIES[family][1]}", style="bold"))
        console.print(Text(f"  {code}  {page.name}"))


def _page_parts(page: Page) -> list[tuple[str, str]]:
    parts = [("What it is", page.what), ("How it is seen", page.seen_by)]
    parts += [("What would refute it", page.refuted_by), ("What to do", page.remedy)]
    return parts + ([("Reported in", ", ".join(page.sources))] if page.sources else [])


def pages_markdown() -> str:
    """``docs/findings.md`` up to its table of field reports."""
    lines = [
        "# Findings",
        "",
        "What `diagnose` can name. Each code is stable. A finding is an *error* when log-probs or weights are not what",
        "they are said to be, a *warning* when they can be used with a bias or loss that should be known, *info* when",
        "it explains a number and asks for nothing. `mismatch-probe explain MP202` prints one page of these.",
    ]
    family = ""
    for code, page in pages().items():
        if code[2] != family:
            family = code[2]
            lines += ["", f"## MP{family}xx: {FAMILIES[family][0]}", "", FAMILIES[family][1].capitalize() + "."]
        lines += ["", f"### {code} {page.name}", "", page.what, ""]
        lines += [
            f"- **Seen by:** {page.seen_by}",
            f"- **Refuted by:** {page.refuted_by}",
            f"- **Remedy:** {page.remedy}",
        ]
        if page.sources:
            lines.append(f"- **Reported in:** {', '.join(_link(source) for source in page.sources)}")
    return "\n".join(lines) + "\n"


def _link(source: str) -> str:
    name, mark, number = source.partition("#")
    return f"[{source}]({_SOURCE.format(name, number)})" if mark and number.isdigit() else source
