"""``inspect``: what a run holds, what can be computed, what is missing, what it will cost."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mismatch_probe.inspection import LOG_PROBS, QUANTITIES, Inspection, StepInspection
from mismatch_probe.reporters.format import NULL, duration, ranges, size, to_json
from mismatch_probe.reporters.terminal import plain_table

_NAMES = {"discrepancy": "D", "lag": "L", "log_ratio": "d", "full_vocabulary": "KL"}


def print_text(found: Inspection, console: Console) -> None:
    """Facts, a table with like steps joined, what is missing, and the cost."""
    table = plain_table("", "", left=(0, 1))
    table.show_header = False
    for name, value in _facts(found):
        table.add_row(Text(name, style="bold"), Text(value, overflow="fold"))
    table.columns[1].no_wrap = False
    console.print(table)
    console.print()
    console.print(_steps_table(found))
    console.print()
    console.print(Text(_LEGEND, style="dim"))
    for text in _missing(found):
        console.print(Text(text, style="yellow"))
    for notice in found.notices:
        console.print(Text(f"note: {notice}"))
    for row in found.rejected[:5]:
        console.print(Text(f"set aside: {row.file}, row {row.row}: {row.reason}", style="yellow"))
    if len(found.rejected) > 5:
        console.print(Text(f"... {len(found.rejected)} rows set aside in all", style="yellow"))
    console.print(Text(_cost(found)))


def as_json(found: Inspection) -> str:
    """The same as JSON, one entry a step."""
    return to_json({"schema_version": 1, **asdict(found), "path": str(found.path)})


_LEGEND = (
    "mu sampler, pi_s trainer network at the sampler's weights, pi at its own: logged, or rescored from a checkpoint; "
    "nearest: only another version's checkpoint is there, used with --nearest and marked approximate. computes, "
    "exactly: D engine numerics, L stale weights, d their sum, KL over the vocabulary."
)


def _facts(found: Inspection) -> list[tuple[str, str]]:
    steps = found.steps
    versions = sorted({version for step in steps for version in step.versions})
    model = found.architecture + (f", {found.parameters:,} parameters" if found.parameters else "")
    return [
        ("run", found.name or found.path.resolve().name),
        ("format", found.format),
        *([("model", model)] if model else []),
        ("steps", f"{len(steps)} ({ranges([step.step for step in steps])})"),
        ("sequences", f"{sum(step.sequences for step in steps):,}"),
        ("loss tokens", f"{sum(step.tokens for step in steps):,}"),
        ("sampler versions", ranges(versions) or "unknown"),
        ("versions kept", ranges(list(found.checkpoint_versions)) or "none"),
        *found.settings.items(),
    ]


def _steps_table(found: Inspection) -> Table:
    heads = ("steps", "seqs", "tokens", "versions", "mu", "pi_s", "pi", "computes")
    table = plain_table(*heads, left=(0, 3, 4, 5, 6, 7))
    for column in (0, 3, 4, 5, 6, 7):
        table.columns[column].no_wrap = False
    for _, members in groupby(found.steps, key=_signature):
        alike = list(members)
        versions = sorted({version for step in alike for version in step.versions})
        table.add_row(
            ranges([step.step for step in alike]),
            f"{sum(step.sequences for step in alike):,}",
            f"{sum(step.tokens for step in alike):,}",
            ranges(versions) or "unknown",
            *(_source(alike[0], name) for name in LOG_PROBS),
            _computes(alike[0]),
        )
    return table


def _signature(step: StepInspection) -> tuple[object, ...]:
    return (*(_source(step, name) for name in LOG_PROBS), _computes(step))


def _source(step: StepInspection, name: str) -> str:
    shares = step.sources[name]
    return ", ".join(kind if part == 1 else f"{kind} {part:.0%}" for kind, part in shares.items()) or NULL


def _computes(step: StepInspection) -> str:
    parts = [(_NAMES[name], step.can[name]) for name in QUANTITIES]
    return ", ".join(name if part == 1 else f"{name} {part:.0%}" for name, part in parts if part > 0) or "nothing"


def _missing(found: Inspection) -> list[str]:
    """One line a kind, however many steps lack it."""
    steps: dict[str, list[int]] = {}
    places: dict[str, list[str]] = {}
    for step in found.steps:
        for missing in step.missing:
            if step.step not in steps.setdefault(missing.what, []):
                steps[missing.what].append(step.step)
            if missing.where and missing.where not in places.setdefault(missing.what, []):
                places[missing.what].append(missing.where)
    lines = []
    for what, numbers in steps.items():
        where = places.get(what, [])
        more = f" and {len(where) - 1} more" if len(where) > 1 else ""
        lines.append(f"missing at step {ranges(numbers)}: {what}{f' {where[0]}{more}' if where else ''}")
    return lines


def _cost(found: Inspection) -> str:
    cost = found.cost
    if not cost.forward_tokens:
        return "Scoring: nothing to score; what is logged is used as it is."
    if cost.seconds is None:
        time = "time unknown (weights are not in safetensors)"
    else:
        time = f"about {duration(cost.seconds)} on this CPU, within a factor of three"
    return (
        f"Scoring: {cost.forward_tokens:,} tokens in {cost.forward_passes} forward passes over {cost.checkpoints} "
        f"checkpoints ({size(cost.checkpoint_bytes)}), {time}."
    )
