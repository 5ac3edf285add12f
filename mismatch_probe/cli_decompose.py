"""``decompose`` behind its options: the one command that needs torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd

from mismatch_probe.errors import ExitCode, UsageError
from mismatch_probe.folder import analysis_path, open_analysis
from mismatch_probe.readers import ReadOptions, open_run
from mismatch_probe.reporters.ess_report import ess_report
from mismatch_probe.reporters.format import nats
from mismatch_probe.reporters.terminal import TerminalProgress, decomposition_table, stdout
from mismatch_probe.selection import StepSelection


def run_decompose(
    run_dir: Path, output: Path | None, overwrite: bool, run_format: str | None, quiet: bool, **options: Any
) -> int:
    """Read, decompose, print the table. ``options`` are the fields of DecomposeOptions, ``steps`` as text."""
    run = open_run(run_dir, ReadOptions(options["skip_bad_rows"], options["strict"]), run_format)
    text = options.pop("steps")
    steps = None if text is None else StepSelection(text)
    from mismatch_probe.decompose import DecomposeOptions, decompose
    from mismatch_probe.scoring.network import DTYPES

    if options["dtype"] not in (None, *DTYPES):
        raise UsageError(f"--dtype {options['dtype']}: unknown. Use {', '.join(DTYPES)}")
    folder = analysis_path(run_dir, output)
    with TerminalProgress(quiet) as progress:
        decompose(run, folder, DecomposeOptions(steps=steps, **options), progress, overwrite)
    _print_result(run_dir, output)
    if not quiet:
        sys.stderr.write(f"wrote {folder}\n")
    return ExitCode.OK


def _print_result(run_dir: Path, output: Path | None) -> None:
    analysis = open_analysis(run_dir, output)
    steps, options = analysis.steps, analysis.record["options"]
    console = stdout()
    console.print(decomposition_table(steps))
    console.print()
    floor = float(steps["noise_floor_rms"].max())
    console.print(
        "D numerics, L stale weights: nats a token. token, seq, prompt: ESS of the lag. KL: prefix KL(pi_s || pi). "
        + (f"The probe's own noise in a log-prob: rms {nats(floor)} nats." if floor == floor else ""),
        style="dim",
    )
    console.print(_bias_sentence(steps.iloc[-1]), style="dim")
    report = ess_report(steps, analysis.name, options["level"], options["threshold"], options["confidence"])
    console.print()
    console.print(report.verdict, style="bold")


def _bias_sentence(step: pd.Series) -> str:
    """Size and persistence of the score bias at the last step, in words."""
    parts = []
    for part, symbol in (("discrepancy", "D"), ("lag", "L")):
        cosine = step[f"bias_{part}_cosine_previous"]
        kept = f" (cosine with the step before {cosine:.2f})" if cosine == cosine else ""
        parts.append(f"{symbol} {nats(step[f'bias_{part}_tv'])}{kept}")
    return f"Score bias at step {step['step']}, total variation: {', '.join(parts)}."
