"""The options of ``diagnose`` and ``explain``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mismatch_probe.cli_options import (
    AnalysisOption,
    DeviceOption,
    MaxTokensOption,
    QuietOption,
    ReadableFormat,
    RunArgument,
    RunFormatOption,
    SetOption,
    SkipBadRowsOption,
    StrictOption,
    TrustOption,
)


class FailOn(StrEnum):
    """The severity from which a finding makes the exit code 1."""

    error = "error"
    warning = "warning"


def diagnose(
    run_dir: RunArgument = Path("."),
    output: AnalysisOption = None,
    select: Annotated[
        list[str] | None, typer.Option(metavar="CODE", help="Show these only: MP203, or MP2 for all MP2xx. Repeatable.")
    ] = None,
    ignore: Annotated[list[str] | None, typer.Option(metavar="CODE", help="Leave these out. Repeatable.")] = None,
    fail_on: Annotated[
        FailOn | None, typer.Option(help="Exit 1 where a finding is as severe; default: exit 0 whatever is found.")
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(metavar="RUN", help="A decomposed run of yours whose level is normal.")
    ] = None,
    format: Annotated[ReadableFormat, typer.Option("--format", help="How to print.")] = ReadableFormat.text,
    device: DeviceOption = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="float64, float32, bfloat16 or float16; default: the analysis's own.")
    ] = None,
    max_tokens: MaxTokensOption = None,
    trust_remote_code: TrustOption = False,
    run_format: RunFormatOption = None,
    overrides: SetOption = None,
    skip_bad_rows: SkipBadRowsOption = False,
    strict: StrictOption = False,
    quiet: QuietOption = False,
) -> int:
    """Name the causes of a run's mismatch, with evidence, what would refute each, and the remedy."""
    from mismatch_probe.diagnose_command import run_diagnose
    from mismatch_probe.diagnosis.finding import Severity
    from mismatch_probe.readers import ReadOptions

    return run_diagnose(
        run_dir,
        output,
        run_format,
        ReadOptions(skip_bad_rows, strict, tuple(overrides or ())),
        device,
        dtype,
        max_tokens,
        trust_remote_code,
        tuple(select or ()),
        tuple(ignore or ()),
        None if fail_on is None else Severity[fail_on.value.upper()],
        baseline,
        format.value,
        quiet,
    )


def explain(
    code: Annotated[str | None, typer.Argument(metavar="CODE", help="Such as MP203; left out: the list.")] = None,
) -> int:
    """Print the page of a finding: what it is, how it is seen, what would refute it, what to do."""
    from mismatch_probe.diagnose_command import run_explain

    return run_explain(code)
