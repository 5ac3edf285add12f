"""Field reports in which positions that the engine did not draw are counted with a log-prob of 0.0."""

from __future__ import annotations

from collections.abc import Callable

from tests.field.base import EOS, PAD
from tests.field.case import Case, Variant
from tests.field.cases_values import Row, changed


def appended(every: int) -> Callable[[Row, int], None]:
    """An end token after responses that were cut at the length limit, in every so many of them."""

    def change(row: Row, at: int) -> None:
        if row["finish_reason"] == "length" and at % every == 0:
            row["response_ids"].append(EOS)
            row["sampler_logprobs"].append(0.0)
            row["loss_mask"].append(True)
            row["finish_reason"] = "stop"

    return change


def tool(first: int, length: int, every: int = 1) -> Callable[[Row, int], None]:
    """A block of tokens whose log-prob was never given, in every so many rows that are long enough."""

    def change(row: Row, at: int) -> None:
        if at % every == 0 and len(row["response_ids"]) > first + length:
            row["sampler_logprobs"][first : first + length] = [0.0] * length

    return change


def padded(width: int, every: int = 1) -> Callable[[Row, int], None]:
    """Padding after responses that ended by themselves."""

    def change(row: Row, at: int) -> None:
        missing = width - len(row["response_ids"])
        if row["response_ids"][-1] == EOS and missing > 0 and at % every == 0:
            row["response_ids"] += [PAD] * missing
            row["sampler_logprobs"] += [0.0] * missing
            row["loss_mask"] += [True] * missing

    return change


CASES = (
    Case(
        10,
        "an end token is appended by hand",
        "NovaSky-AI/SkyRL#758",
        "MP107",
        Variant("at every response that was cut", changed(appended(1))),
        Variant("at every response that was cut, one step", changed(appended(1), (2,))),
        Variant("at a fifth of the responses that were cut", changed(appended(5))),
    ),
    Case(
        13,
        "tokens of a tool are counted",
        "PeterGriffinJin/Search-R1#21",
        "MP108",
        Variant("three tokens in every response", changed(tool(3, 3))),
        Variant("six tokens in every response", changed(tool(3, 6))),
        Variant("two tokens in every eighth response", changed(tool(3, 2, every=8))),
    ),
    Case(
        13,
        "padding after the end is counted",
        "the project's own",
        "MP109",
        Variant("up to the length limit", changed(padded(24))),
        Variant("up to 40 tokens", changed(padded(40))),
        Variant("up to 12 tokens, every fourth response", changed(padded(12, every=4))),
    ),
)
