"""``diagnose`` and ``explain`` behind their options, and the findings that end other commands' output."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mismatch_probe.diagnosis.catalogue import page, pages
from mismatch_probe.diagnosis.finding import Diagnosis, Severity
from mismatch_probe.diagnosis.stored import FILE, as_text
from mismatch_probe.errors import ExitCode, MismatchProbeError, NothingToJudgeError, UsageError
from mismatch_probe.folder import SCORES, Analysis, analysis_path, has_analysis, open_analysis, write_bytes
from mismatch_probe.readers import ReadOptions, open_run
from mismatch_probe.reporters import diagnosis as reporter
from mismatch_probe.reporters.terminal import TerminalProgress, stdout
from mismatch_probe.run import Run

if TYPE_CHECKING:
    from mismatch_probe.decompose import DecomposeOptions
    from mismatch_probe.diagnosis.job import Scanning


def run_diagnose(
    run_dir: Path,
    output: Path | None,
    run_format: str | None,
    reading: ReadOptions,
    device: str,
    dtype: str | None,
    max_tokens: int | None,
    trust_remote_code: bool,
    select: Sequence[str],
    ignore: Sequence[str],
    fail_on: Severity | None,
    baseline: Path | None,
    format: str,
    quiet: bool,
) -> int:
    """Diagnose a run; one that was never decomposed is decomposed first."""
    from mismatch_probe.decompose import DecomposeOptions, decompose
    from mismatch_probe.diagnosis.job import diagnose_run

    check_codes([*select, *ignore])
    other = None if baseline is None else open_analysis(baseline, None)
    run = open_run(run_dir, reading, run_format)
    folder = analysis_path(run_dir, output)
    options = DecomposeOptions(
        device=device,
        dtype=dtype,
        max_tokens=max_tokens,
        trust_remote_code=trust_remote_code,
        skip_bad_rows=reading.skip_bad_rows,
        strict=reading.strict,
    )
    with TerminalProgress(quiet) as progress:
        analysis: Analysis | None = None
        try:
            if not has_analysis(folder):
                progress.notice(f"{folder}: no analysis here yet, so the run is decomposed first")
                decompose(run, folder, options, progress)
            analysis = open_analysis(run_dir, output)
            # The scans must see what decompose saw: another dtype would be another discrepancy.
            options = replace(options, dtype=dtype or analysis.record["scoring"]["dtype"])
        except NothingToJudgeError as error:
            progress.notice(f"{error}. What follows rests on the files alone")
        # A folder without an analysis is not ours to keep scores in.
        options = replace(options, keep_scores=analysis is not None)
        found = diagnose_run(run, analysis, _scanning(run, folder, options, progress), options.seed, other)
    if analysis is not None:
        write_bytes(folder / FILE, as_text(found).encode())
    shown = chosen(found, select, ignore)
    if format == "text":
        reporter.print_text(shown, stdout())
    else:
        sys.stdout.write((reporter.as_json(shown) if format == "json" else reporter.to_markdown(shown)) + "\n")
    if fail_on is not None and shown.worst is not None and shown.worst >= fail_on:
        return ExitCode.GATE_FAILED
    return ExitCode.OK if analysis is not None else ExitCode.NOTHING_TO_JUDGE


def write_findings(run: Run, folder: Path, options: DecomposeOptions, progress: TerminalProgress) -> None:
    """Diagnose what was just decomposed into ``folder``, and keep the findings there."""
    from mismatch_probe.diagnosis.job import diagnose_run

    # Scans run in this process: where scoring needed more than that, it could not hold the models.
    alone = options.cluster is None and options.tensor_parallel == 1
    if not alone:
        progress.notice("causes are looked for without scans, which run in one process: see mismatch-probe diagnose")
    scanning = _scanning(run, folder, options, progress) if alone else None
    try:
        found = diagnose_run(run, open_analysis(run.path, folder), scanning, options.seed)
    except MismatchProbeError as error:
        # The analysis is whole without it.
        progress.notice(f"causes could not be looked for: {error}")
        return
    write_bytes(folder / FILE, as_text(found).encode())


def _scanning(run: Run, folder: Path, options: DecomposeOptions, progress: TerminalProgress) -> Scanning:
    """How the scans of a run score."""
    from mismatch_probe.diagnosis.job import Scanning
    from mismatch_probe.scoring_choice import scoring_choice

    kept = (options.cache or folder / SCORES) if options.keep_scores else None
    return Scanning(scoring_choice(run, options), kept, progress.tokens, progress.notice)


def run_explain(code: str | None) -> int:
    """Print the page of a code, or the list of all."""
    if code is None:
        reporter.print_index(stdout())
    else:
        reporter.print_page(page(code), stdout())
    return ExitCode.OK


def check_codes(codes: Sequence[str]) -> None:
    """Refuse codes, and patterns such as MP2*, that name nothing.

    Raises:
        UsageError: one of them names no finding.
    """
    known = pages()
    for code in codes:
        if not fnmatch.filter(known, _pattern(code)):
            raise UsageError(f"{code}: names no finding. mismatch-probe explain lists them; MP2 means all of MP2xx")


def chosen(diagnosis: Diagnosis, select: Sequence[str], ignore: Sequence[str]) -> Diagnosis:
    """The findings that are selected (all where none is) and not ignored."""

    def kept(code: str) -> bool:
        wanted = not select or any(fnmatch.fnmatchcase(code, _pattern(one)) for one in select)
        return wanted and not any(fnmatch.fnmatchcase(code, _pattern(one)) for one in ignore)

    untested = (replace(entry, codes=tuple(filter(kept, entry.codes))) for entry in diagnosis.not_testable)
    return replace(
        diagnosis,
        findings=tuple(finding for finding in diagnosis.findings if kept(finding.code)),
        not_testable=tuple(entry for entry in untested if entry.codes),
    )


def _pattern(code: str) -> str:
    """MP2 is all of MP2xx, as linters have it."""
    return code.upper() if len(code) >= 5 or "*" in code else f"{code.upper()}*"
