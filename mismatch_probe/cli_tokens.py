"""The options of ``tokens``."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mismatch_probe.cli_options import AnalysisOption, DataFormat, RunArgument
from mismatch_probe.errors import ExitCode


class Part(StrEnum):
    """What sequences are ranked by."""

    log_ratio = "log-ratio"
    discrepancy = "discrepancy"
    lag = "lag"


def tokens(
    step: Annotated[int, typer.Option(help="Training step to look at.")],
    run_dir: RunArgument = Path("."),
    output: AnalysisOption = None,
    worst: Annotated[int, typer.Option(min=1, help="Sequences to show, the worst first.")] = 5,
    by: Annotated[Part, typer.Option(help="Rank by the sum of |d|, |D| or |L| over a response.")] = Part.log_ratio,
    sequence: Annotated[str | None, typer.Option(metavar="ID", help="Show this sequence instead.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Tokens of each sequence in its table.")] = 5,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json or its folder; default: the one beside the run, else ids.")
    ] = None,
    format: Annotated[DataFormat, typer.Option("--format", help="How to print.")] = DataFormat.text,
) -> int:
    """Show the worst sequences of a step: text coloured by mismatch, all three log-probs, and the reason."""
    from mismatch_probe.diagnosis.stored import read_findings
    from mismatch_probe.folder import open_analysis
    from mismatch_probe.reporters import tokens as reporter
    from mismatch_probe.reporters.terminal import stdout
    from mismatch_probe.token_text import find_tokenizer, text_of_ids
    from mismatch_probe.tokens_view import worst_sequences

    analysis = open_analysis(run_dir, output)
    column = by.value.replace("-", "_")
    views = worst_sequences(analysis, step, column, worst, read_findings(analysis.folder), sequence)
    file = tokenizer or find_tokenizer(run_dir, analysis.record.get("checkpoints", {}))
    namer = None if file is None else text_of_ids(file)
    if format is DataFormat.json:
        sys.stdout.write(reporter.as_json(views, column, step, namer) + "\n")
    else:
        reporter.print_text(views, column, step, top, namer, stdout())
    known = any(getattr(token, column) is not None for view in views for token in view.tokens)
    return ExitCode.OK if known else ExitCode.NOTHING_TO_JUDGE
