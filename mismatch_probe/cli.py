"""The command line: one thin function a command. torch is imported only where ``decompose`` runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mismatch_probe import __version__
from mismatch_probe.cli_decompose import decompose
from mismatch_probe.cli_diagnose import diagnose, explain
from mismatch_probe.cli_options import (
    AnalysisOption,
    DataFormat,
    FigureFormat,
    Level,
    LevelOption,
    QuietOption,
    Ratio,
    RatioOption,
    ReadableFormat,
    RunArgument,
    RunFormatOption,
    SetOption,
    SkipBadRowsOption,
    StrictOption,
    ThresholdOption,
)
from mismatch_probe.cli_prescribe import prescribe
from mismatch_probe.cli_tokens import tokens
from mismatch_probe.errors import ExitCode

app = typer.Typer(
    name="mismatch-probe",
    help="Split the training-inference mismatch of an LLM RL run into engine numerics and stale weights.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Plain help: rich markup reads FIRST:END:STRIDE as an emoji, and boxes waste half of 80 columns.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 fine, 1 gate failed, 2 usage or unreadable input, 3 internal error, "
    "5 nothing could be judged, 130 interrupted.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"mismatch-probe {__version__}\n")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Take the options that stand before the command."""


@app.command(short_help="What a run holds, allows, lacks and will cost.")
def inspect(
    run_dir: RunArgument = Path("."),
    run_format: RunFormatOption = None,
    overrides: SetOption = None,
    format: Annotated[DataFormat, typer.Option("--format", help="How to print.")] = DataFormat.text,
    skip_bad_rows: SkipBadRowsOption = False,
    strict: StrictOption = False,
    weights: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="A B", help="Compare two checkpoints instead: versions (7, sampler:7) or paths."),
    ] = None,
) -> int:
    """Say what a run holds, what can be computed, what is missing, and what it will cost."""
    if weights is not None:
        from mismatch_probe.cli_inspect import run_inspect_weights

        return run_inspect_weights(run_dir, run_format, tuple(overrides or ()), weights, format)
    from mismatch_probe.inspection import inspect_run
    from mismatch_probe.readers import ReadOptions, open_run
    from mismatch_probe.reporters import inspection as reporter
    from mismatch_probe.reporters.terminal import stdout

    found = inspect_run(open_run(run_dir, ReadOptions(skip_bad_rows, strict, tuple(overrides or ())), run_format))
    if format is DataFormat.json:
        sys.stdout.write(reporter.as_json(found) + "\n")
    else:
        reporter.print_text(found, stdout())
    computable = any(share > 0 for step in found.steps for share in step.can.values())
    return ExitCode.OK if computable else ExitCode.NOTHING_TO_JUDGE


app.command(short_help="Split every token's error into numerics and lag.")(decompose)


app.command(short_help="Name the causes, with evidence and remedy.")(diagnose)
app.command(short_help="The page of a finding's code.")(explain)
app.command(short_help="Which correction, when to resync, and why.")(prescribe)
app.command(short_help="The worst sequences of a step, token by token.")(tokens)


@app.command(name="ess-report", short_help="ESS with intervals, first breakdown, verdict.")
def ess_report(
    run_dir: RunArgument = Path("."),
    output: AnalysisOption = None,
    ess_level: LevelOption = Level.sequence,
    ess_threshold: ThresholdOption = 0.5,
    ess_ratio: RatioOption = Ratio.lag,
    lasting: Annotated[int, typer.Option(min=1, help="Judged steps in a row that make a lasting breakdown.")] = 3,
    false_alarm_rate: Annotated[
        float, typer.Option(min=0.001, max=0.5, help="Chance that a series without a jump is said to have one.")
    ] = 0.01,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Check the steps table against the tokens table first.")
    ] = False,
    format: Annotated[ReadableFormat, typer.Option("--format", help="How to print.")] = ReadableFormat.text,
) -> int:
    """ESS of the lag, discrepancy and total ratio a step, the first breakdown, and a verdict."""
    from mismatch_probe.folder import open_analysis
    from mismatch_probe.reporters import ess_report as reporter
    from mismatch_probe.reporters.terminal import stdout
    from mismatch_probe.stats.breakdown import Rule

    analysis = open_analysis(run_dir, output)
    if recompute:
        from mismatch_probe.recompute import check_steps

        sys.stderr.write(check_steps(analysis) + "\n")
    report = reporter.ess_report(
        analysis, Rule(ess_level.value, ess_threshold, ess_ratio.value, lasting), false_alarm_rate
    )
    if format is ReadableFormat.text:
        reporter.print_text(report, stdout())
    else:
        text = reporter.as_json(report) if format is ReadableFormat.json else reporter.to_markdown(report)
        sys.stdout.write(text + "\n")
    known = any(s.value == s.value for levels in report.ess.values() for column in levels.values() for s in column)
    return ExitCode.OK if known else ExitCode.NOTHING_TO_JUDGE


@app.command(short_help="Draw the pictures.")
def plot(
    run_dir: RunArgument = Path("."),
    output: AnalysisOption = None,
    only: Annotated[
        list[str] | None, typer.Option(help="decomposition, ess, prefix-kl, bias or distributions; may be repeated.")
    ] = None,
    ess_level: LevelOption = Level.sequence,
    ess_threshold: ThresholdOption = 0.5,
    format: Annotated[FigureFormat, typer.Option("--format", help="Picture format.")] = FigureFormat.png,
    quiet: QuietOption = False,
) -> int:
    """Draw the decomposition, ESS, prefix KL, score bias and distributions into the analysis folder's plots/."""
    from mismatch_probe.folder import open_analysis
    from mismatch_probe.reporters.plots import draw

    analysis = open_analysis(run_dir, output)
    for path in draw(analysis, only, ess_level.value, ess_threshold, format.value):
        if not quiet:
            sys.stderr.write(f"wrote {path}\n")
    return ExitCode.OK


@app.command(short_help="Exit 1 when a step is beyond a threshold.")
def gate(
    run_dir: RunArgument = Path("."),
    output: AnalysisOption = None,
    ess_level: Annotated[
        Level | None, typer.Option(envvar="MISMATCH_PROBE_ESS_LEVEL", help="Level of min-ess; default sequence.")
    ] = None,
    min_ess: Annotated[
        float | None, typer.Option(envvar="MISMATCH_PROBE_MIN_ESS", help="Lowest ESS of the lag; default 0.5.")
    ] = None,
    max_discrepancy_k3: Annotated[
        float | None,
        typer.Option(
            envvar="MISMATCH_PROBE_MAX_DISCREPANCY_K3", help="Highest KL(mu || pi_s), k3, nats; default 0.02."
        ),
    ] = None,
    max_prefix_kl: Annotated[
        float | None,
        typer.Option(envvar="MISMATCH_PROBE_MAX_PREFIX_KL", help="Highest prefix KL(pi_s || pi), nats; default off."),
    ] = None,
    max_mass_error: Annotated[
        float | None,
        typer.Option(
            envvar="MISMATCH_PROBE_MAX_MASS_ERROR",
            help="Largest |mean e^D - 1| whose interval excludes 0; default off.",
        ),
    ] = None,
    max_bias_tv: Annotated[
        float | None,
        typer.Option(envvar="MISMATCH_PROBE_MAX_BIAS_TV", help="Highest score bias of either part; default off."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Thresholds file; default: nearest mismatch-probe.toml or pyproject.toml.")
    ] = None,
    format: Annotated[DataFormat, typer.Option("--format", help="How to print.")] = DataFormat.text,
    exit_zero: Annotated[bool, typer.Option("--exit-zero", help="Return 0 even when a check fails.")] = False,
) -> int:
    """Fail (exit 1) when a step is beyond a threshold; 5 when a check could judge no step."""
    from mismatch_probe.config import load_thresholds
    from mismatch_probe.diagnosis.stored import read_findings
    from mismatch_probe.folder import open_analysis
    from mismatch_probe.gate import Outcome, run_checks
    from mismatch_probe.reporters import gate as reporter
    from mismatch_probe.reporters.terminal import stdout

    given = {
        "ess_level": None if ess_level is None else ess_level.value,
        "min_ess": min_ess,
        "max_discrepancy_k3": max_discrepancy_k3,
        "max_prefix_kl": max_prefix_kl,
        "max_mass_error": max_mass_error,
        "max_bias_tv": max_bias_tv,
    }
    thresholds, source = load_thresholds(Path.cwd(), config, given)
    analysis = open_analysis(run_dir, output)
    checks = run_checks(analysis.steps, thresholds)
    diagnosis = read_findings(analysis.folder)
    if format is DataFormat.json:
        sys.stdout.write(reporter.as_json(checks, source, diagnosis) + "\n")
    else:
        reporter.print_text(checks, source, diagnosis, stdout())
    outcomes = {check.outcome for check in checks}
    if Outcome.FAILED in outcomes and not exit_zero:
        return ExitCode.GATE_FAILED
    return ExitCode.NOTHING_TO_JUDGE if Outcome.UNJUDGED in outcomes else ExitCode.OK
