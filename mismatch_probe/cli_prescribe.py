"""The options of ``prescribe``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mismatch_probe.cli_options import AnalysisOption, Level, LevelOption, ReadableFormat, RunArgument, ThresholdOption
from mismatch_probe.errors import ExitCode


def prescribe(
    run_dir: RunArgument = Path("."),
    output: AnalysisOption = None,
    ess_level: LevelOption = Level.sequence,
    ess_threshold: ThresholdOption = 0.5,
    tolerance: Annotated[
        float, typer.Option(min=0, max=10, help="Bias of an update, as a share of its target, that is left alone.")
    ] = 0.1,
    format: Annotated[ReadableFormat, typer.Option("--format", help="How to print.")] = ReadableFormat.text,
) -> int:
    """Replay the corrections and DLC's resyncs on a recorded run, and recommend one thing."""
    from mismatch_probe.diagnosis.stored import read_findings
    from mismatch_probe.folder import open_analysis
    from mismatch_probe.prescription import prescribe as find
    from mismatch_probe.reporters import prescription as reporter
    from mismatch_probe.reporters.terminal import stdout

    analysis = open_analysis(run_dir, output)
    found = find(analysis, read_findings(analysis.folder), ess_level.value, ess_threshold, tolerance)
    if format is ReadableFormat.text:
        reporter.print_text(found, stdout())
    else:
        text = reporter.as_json(found) if format is ReadableFormat.json else reporter.to_markdown(found)
        sys.stdout.write(text + "\n")
    known = bool(found.replayed) or any(effect.steps for effect in found.effects)
    return ExitCode.OK if known else ExitCode.NOTHING_TO_JUDGE
