"""``inspect --weights``: two checkpoints, by family for people, by tensor for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mismatch_probe.checkpoints.compare import FamilyComparison, State, WeightComparison
from mismatch_probe.reporters.format import NULL, nats, to_json
from mismatch_probe.reporters.terminal import plain_table

_WORDS = {state: state.value.replace("_", " ").replace(" a", " A").replace(" b", " B") for state in State}
_LEGEND = (
    "Names without model. and .weight, * for layer numbers; n tensors. unchanged: share of elements of equal value; "
    "largest: max |B - A|; relative: rms(B - A) / rms(A)."
)
_LISTED = 4
_LONGEST = 60


def print_text(found: WeightComparison, console: Console) -> None:
    """The two paths, a table by family, and what deserves a sentence."""
    for side, path in (("A", found.path_a), ("B", found.path_b)):
        console.print(_text(f"{side}  {path}", overflow="fold"))
    console.print()
    console.print(_table(found))
    console.print()
    console.print(_text(_LEGEND, style="dim"))
    console.print(_text(_counts(found), style="bold"))
    for text in (*_largest(found), *_rounded(found), *_dtypes(found)):
        console.print(_text(text))
    for text in (*_unmoved(found), *_shapes(found), *_only(found), *_not_finite(found)):
        console.print(_text(text, style="yellow"))
    for text in (*_config(found), *(f"note: {notice}" for notice in found.notices)):
        console.print(_text(text))


def _text(line: str, **style: Any) -> Text:
    """Names come from files: nothing in them reaches the terminal as a command."""
    return Text("".join(letter if letter.isprintable() else "?" for letter in line), **style)


def as_json(found: WeightComparison) -> str:
    """Every tensor and family; numbers that are not known are null."""
    counts = {state.value: len(found.of(state)) for state in State}
    content = {**asdict(found), "path_a": str(found.path_a), "path_b": str(found.path_b)}
    return to_json({"schema_version": 1, "counts": counts, **content})


def _table(found: WeightComparison) -> Table:
    table = plain_table("family", "n", "state", "unchanged", "largest", "relative", left=(0, 2), tight=True)
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    for family in found.families:
        table.add_row(
            _text(family.family.removeprefix("model.").removesuffix(".weight")),
            str(sum(family.states.values())),
            _state(family),
            _percent(family.unchanged_share),
            NULL if family.largest is None else nats(family.largest),
            NULL if family.relative is None else nats(family.relative),
        )
    return table


def _state(family: FamilyComparison) -> str:
    if len(family.states) == 1:
        return _WORDS[next(iter(family.states))]
    if family.unmoved:
        return "unmoved"
    changed = family.states.get(State.CHANGED, 0)
    return f"{changed}/{sum(family.states.values())} changed" if changed else "mixed"


def _percent(value: float | None) -> str:
    """A share, never a false 0 or 100."""
    if value is None:
        return NULL
    if 0 < value < 0.0005:
        return "<0.1 %"
    return ">99.9 %" if 0.9995 < value < 1 else f"{100 * value:.{0 if value in (0, 1) else 1}f} %"


def _counts(found: WeightComparison) -> str:
    parts = [f"{len(found.of(state))} {_WORDS[state]}" for state in State if found.of(state)]
    return f"{len(found.tensors)} tensors: {', '.join(parts)}."


def _largest(found: WeightComparison) -> list[str]:
    moved = [(t.difference.largest, t) for t in found.tensors if t.difference and t.difference.largest]
    if not moved:
        return []
    size, tensor = max(moved, key=lambda pair: pair[0])
    place = list(tensor.difference.largest_at or ()) if tensor.difference else []
    return [f"Largest change: {nats(size)} in {tensor.name} at {place}."]


def _rounded(found: WeightComparison) -> list[str]:
    said: dict[str, int] = {}
    for tensor in found.of(State.ROUNDED):
        if tensor.difference and tensor.difference.rounding:
            said[tensor.difference.rounding] = said.get(tensor.difference.rounding, 0) + 1
    return [f"{statement} exactly, in {_tensors(count)}." for statement, count in said.items()]


def _dtypes(found: WeightComparison) -> list[str]:
    pairs: dict[tuple[str, str], int] = {}
    for tensor in found.tensors:
        if tensor.a and tensor.b and tensor.a.dtype != tensor.b.dtype:
            pair = (tensor.a.dtype, tensor.b.dtype)
            pairs[pair] = pairs.get(pair, 0) + 1
    return [f"Stored as {a} in A, {b} in B: {_tensors(count)}." for (a, b), count in pairs.items()]


def _unmoved(found: WeightComparison) -> list[str]:
    """Whichever side is the exception: the families that stayed, or those that moved."""
    moved = [family.family for family in found.families if State.CHANGED in family.states]
    if not found.unmoved_families:
        return []
    if len(moved) < len(found.unmoved_families):
        return [
            f"Only these moved: {', '.join(moved)}. If A and B are a trainer's and its sampler's weights of one "
            "version, a weight sync left them out."
        ]
    return [
        f"Did not move while others did: {', '.join(found.unmoved_families)}. Frozen, left out by a weight sync, or "
        "its steps are below the precision of its dtype."
    ]


def _shapes(found: WeightComparison) -> list[str]:
    differing = found.of(State.SHAPE_DIFFERS)
    lines = [
        f"Shape differs: {t.name} {list(t.a.shape)} in A, {list(t.b.shape)} in B." for t in differing if t.a and t.b
    ]
    return lines[:_LISTED] + _more(len(lines), "of another shape")


def _only(found: WeightComparison) -> list[str]:
    lines = []
    for state in (State.ONLY_IN_A, State.ONLY_IN_B):
        names = [tensor.name for tensor in found.of(state)]
        lines += [f"O{_WORDS[state][1:]}: {name}" for name in names[:_LISTED]]
        lines += _more(len(names), _WORDS[state])
    return lines


def _not_finite(found: WeightComparison) -> list[str]:
    lines = []
    for tensor in found.tensors:
        for side, content in (("A", tensor.a), ("B", tensor.b)):
            if content and (content.nan or content.inf):
                lines.append(f"Not finite in {side}: {tensor.name}, {content.nan} NaN and {content.inf} infinite.")
    return lines[:_LISTED] + _more(len(lines), "with values that are not finite")


def _config(found: WeightComparison) -> list[str]:
    return [
        f"config.json, {field.field}: {_short(field.value_a)} in A, {_short(field.value_b)} in B"
        for field in found.config
    ]


def _short(value: str | None) -> str:
    """A value's JSON text, a long list's beginning, or a dash where the field is absent."""
    if value is None:
        return NULL
    return value if len(value) <= _LONGEST else f"{value[: _LONGEST - 3]}..."


def _more(count: int, what: str) -> list[str]:
    return [f"... {_tensors(count)} {what} in all"] if count > _LISTED else []


def _tensors(count: int) -> str:
    return f"{count} tensor{'' if count == 1 else 's'}"
