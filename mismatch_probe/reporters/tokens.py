"""``tokens``: the worst sequences of a step, their text coloured by mismatch, and their log-probs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from textwrap import wrap
from typing import Any

from rich.console import Console
from rich.text import Text

from mismatch_probe.reporters.format import nats, to_json
from mismatch_probe.reporters.terminal import plain_table
from mismatch_probe.tokens_view import PARTS, SequenceView, TokenView

_SHADES = ((1.0, "black on red"), (0.3, "black on yellow"), (0.1, "underline"))
"""|x| from which a token is so marked, nats."""
_LONGEST = 14

Namer = Callable[[int], str]


def print_text(
    views: list[SequenceView], by: str, step: int, most_tokens: int, namer: Namer | None, console: Console
) -> None:
    """Each sequence: what makes it so, its text, and its worst tokens."""
    symbol = PARTS[by]
    console.print(Text(f"Step {step}, by the sum of |{symbol}| over a response", style="bold"))
    for view in views:
        console.print()
        facts = "".join(f", {name} {value}" for name, value in view.facts.items() if value is not None)
        head = f"{view.sequence_id}: |{symbol}| {view.total:.2f} nats, {view.share:.0%} of the step{facts}"
        console.print(Text(head, style="bold"))
        named = f" [{', '.join(view.findings)}]" if view.findings else ""
        for line in wrap(f"{view.reason}{named}", console.width - 2):
            console.print(Text(f"  {line}"))
        console.print(_line(view, by, namer))
        console.print(_table(view, by, most_tokens, namer))
    console.print()
    legend = Text("marked where |x| is at least: ")
    for limit, style in reversed(_SHADES):
        legend.append(f"{limit:g}", style)
        legend.append(" ")
    legend.append("nats (in colour). mu sampler, pi_s stale trainer, pi trainer: log-probs.")
    console.print(legend)


def as_json(views: list[SequenceView], by: str, step: int, namer: Namer | None) -> str:
    """The same as JSON, every token of each sequence."""
    sequences = []
    for view in views:
        content = asdict(view)
        for token in content["tokens"]:
            token["text"] = None if namer is None or token["token_id"] is None else namer(token["token_id"])
        sequences.append(content)
    return to_json({"schema_version": 1, "step": step, "by": by, "sequences": sequences})


def _line(view: SequenceView, by: str, namer: Namer | None) -> Text:
    """The response in one paragraph, tokens marked by their size."""
    line = Text("  ", overflow="fold")
    names = [_name(token, namer, longest=None) for token in view.tokens]
    # Ids, and the words of a tokenizer that splits at spaces, bring none of their own.
    between = "" if any(" " in name for name in names) else " "
    for token, name in zip(view.tokens, names, strict=True):
        line.append(name, _style(getattr(token, by)))
        line.append(between)
    return line


def _table(view: SequenceView, by: str, most: int, namer: Namer | None) -> Any:
    table = plain_table("token", "id", "text", "mu", "pi_s", "pi", "D", "L", left=(0, 2))
    ranked = sorted(view.tokens, key=lambda token: -abs(getattr(token, by) or 0.0))[:most]
    for token in sorted(ranked, key=lambda token: token.position):
        numbers = (token.sampler_logprob, token.stale_trainer_logprob, token.trainer_logprob)
        table.add_row(
            str(token.position),
            "-" if token.token_id is None else str(token.token_id),
            Text(_name(token, namer, _LONGEST) if namer else "-", style=_style(getattr(token, by))),
            *(nats(float("nan") if number is None else number) for number in numbers),
            *(nats(float("nan") if number is None else number) for number in (token.discrepancy, token.lag)),
        )
    return table


def _name(token: TokenView, namer: Namer | None, longest: int | None) -> str:
    if token.token_id is None:
        return "?"
    name = str(token.token_id) if namer is None else namer(token.token_id)
    shown = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in name)
    return shown if longest is None or len(shown) <= longest else f"{shown[: longest - 1]}…"


def _style(value: float | None) -> str:
    size = 0.0 if value is None else abs(value)
    return next((style for limit, style in _SHADES if size >= limit), "")
