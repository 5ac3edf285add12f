"""``decompose`` behind its options: the one command that needs torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd

from mismatch_probe.errors import ExitCode, UsageError
from mismatch_probe.folder import analysis_path, open_analysis
from mismatch_probe.launched import follows, launched_processes
from mismatch_probe.noise import WITHIN, noise_steps
from mismatch_probe.readers import ReadOptions, open_run
from mismatch_probe.reporters.diagnosis import print_short
from mismatch_probe.reporters.ess_report import ess_report
from mismatch_probe.reporters.format import nats
from mismatch_probe.reporters.terminal import (
    TerminalProgress,
    approximation_note,
    decomposition_table,
    engine_sentence,
    stdout,
)
from mismatch_probe.selection import StepSelection
from mismatch_probe.stats.breakdown import Rule


def run_decompose(
    run_dir: Path,
    output: Path | None,
    overwrite: bool,
    run_format: str | None,
    overrides: tuple[str, ...],
    quiet: bool,
    diagnose: bool,
    **options: Any,
) -> int:
    """Read, decompose, print the table. ``options`` are the fields of DecomposeOptions, ``steps`` as text."""
    if follows():
        from mismatch_probe.scoring.parallel import follow

        follow()
        return ExitCode.OK
    options["tensor_parallel"] = options["tensor_parallel"] or launched_processes() or 1
    run = open_run(run_dir, ReadOptions(options["skip_bad_rows"], options["strict"], overrides), run_format)
    for name in ("steps", "fresh_steps"):
        text = options[name]
        options[name] = None if text is None else StepSelection(text, f"--{name.replace('_', '-')}")
    from mismatch_probe.decompose import DecomposeOptions, decompose
    from mismatch_probe.diagnose_command import write_findings
    from mismatch_probe.scoring.network import DTYPES

    if options["dtype"] not in (None, *DTYPES):
        raise UsageError(f"--dtype {options['dtype']}: unknown. Use {', '.join(DTYPES)}")
    options["cluster"] = _cluster(options)
    folder = analysis_path(run_dir, output)
    asked = DecomposeOptions(**options)
    with TerminalProgress(quiet) as progress:
        decompose(run, folder, asked, progress, overwrite)
        if diagnose:
            write_findings(run, folder, asked, progress)
    _print_result(run_dir, output)
    if not quiet:
        sys.stderr.write(f"wrote {folder}\n")
    return ExitCode.OK


def _cluster(options: dict[str, Any]) -> Any:
    """Take the options of the executor out; the cluster they mean, None for this process."""
    from mismatch_probe.executors.ray import RayOptions

    executor = options.pop("executor")
    asked = {name: options.pop(name) for name in ("address", "gpus_per_worker", "workers")}
    if executor == "ray":
        return RayOptions(**asked)
    for name, value in asked.items():
        if value is not None:
            raise UsageError(f"--{name.replace('_', '-')}: only with --executor ray")
    return None


def _print_result(run_dir: Path, output: Path | None) -> None:
    analysis = open_analysis(run_dir, output)
    steps, options = analysis.steps, analysis.record["options"]
    console = stdout()
    console.print(decomposition_table(steps))
    console.print()
    console.print(
        "D numerics, L stale weights: nats a token. token, seq, prompt: ESS of the lag. KL: prefix KL(pi_s || pi).",
        style="dim",
    )
    console.print(_bias_sentence(steps), style="dim")
    if inside := engine_sentence(steps):
        console.print(inside, style="dim")
    note = approximation_note(steps)
    if note:
        console.print(note, style="yellow")
    report = ess_report(analysis, Rule(options["level"], options["threshold"], options["ratio"]))
    console.print()
    console.print(report.verdict, style="bold")
    console.print(report.numerics)
    for sentence in report.answers:
        console.print(sentence)
    print_short(report.diagnosis, console)


def _bias_sentence(steps: pd.DataFrame) -> str:
    """Size, noise and persistence of the score bias at the last step that has one."""
    parts = []
    for part, symbol in (("discrepancy", "D"), ("lag", "L")):
        known = steps[steps[f"bias_{part}_norm"].notna()]
        if known.empty:
            continue
        step = known.iloc[-1]
        if step[f"bias_{part}_norm"] == 0:
            parts.append(f"{symbol} 0 (step {step['step']})")
            continue
        cosine = step[f"bias_{part}_cosine_previous"]
        kept = f", cosine {cosine:.2f} with the step before" if cosine == cosine else ""
        mean = f"mean vector {step[f'bias_{part}_norm']:.1e} +- {step[f'bias_{part}_noise']:.1e}{kept}"
        if part == "discrepancy" and noise_steps(known)[-1]:
            mean += f"; {WITHIN}"
        parts.append(f"{symbol} {nats(step[f'bias_{part}_tv'])} (step {step['step']}; {mean})")
    return f"Score bias, total variation: {'; '.join(parts)}." if parts else "Score bias: null."
