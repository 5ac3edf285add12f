"""The main job: each step's rollouts through scoring and statistics into the tables."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import torch

from mismatch_probe import __version__
from mismatch_probe.assemble import Judgement, halves, join, step_row
from mismatch_probe.checkpoints.describe import digest
from mismatch_probe.errors import BadFileError, CheckpointError, NothingToJudgeError, UsageError
from mismatch_probe.folder import Staging
from mismatch_probe.resolve import StepCheckpoints, semantic_reasons, set_aside
from mismatch_probe.rows import place_table, sequence_rows, token_table
from mismatch_probe.run import Rejected, Rollouts, Run, Step
from mismatch_probe.scoring.network import ScoringOptions
from mismatch_probe.scoring.score import GIVES_NO_NUMBER, StepScorer, StepScores
from mismatch_probe.selection import StepSelection, limit_sequences
from mismatch_probe.stats.breakdown import DEFAULT_LEVEL, DEFAULT_RATIO, DEFAULT_THRESHOLD, Rule
from mismatch_probe.stats.constancy import DEFAULT_MARGIN
from mismatch_probe.stats.corrections import DEFAULT_TARGET
from mismatch_probe.stats.intervals import DEFAULT_METHOD
from mismatch_probe.stats.summary import BiasVectors
from mismatch_probe.table_io import table_of, write_table
from mismatch_probe.tables import REJECTED, SEQUENCES, STEPS
from mismatch_probe.tables_trends import TRENDS
from mismatch_probe.trends import RunTrends
from mismatch_probe.updates import UpdateOptions, chosen_tokens, update_row


class Progress(Protocol):
    """Where progress and notices go."""

    def start(self, steps: int) -> None:
        """The number of steps is known."""

    def step(self, index: int, tokens: int) -> None:
        """A step begins; it will forward about ``tokens`` tokens."""

    def tokens(self, count: int) -> None:
        """Tokens went through a network."""

    def notice(self, text: str) -> None:
        """Something the user must know."""


@dataclass(frozen=True)
class DecomposeOptions:
    """Options of ``decompose``; ``dtype`` None means the trainer's own, ``max_tokens`` None what suits the device."""

    steps: StepSelection | None = None
    limit: int | None = None
    seed: int = 0
    device: str = "auto"
    dtype: str | None = None
    max_tokens: int | None = None
    trust_remote_code: bool = False
    level: str = DEFAULT_LEVEL
    threshold: float = DEFAULT_THRESHOLD
    ratio: str = DEFAULT_RATIO
    confidence: float = 0.95
    resamples: int = 2000
    intervals: str = DEFAULT_METHOD
    constancy_margin: float = DEFAULT_MARGIN
    skip_bad_rows: bool = False
    strict: bool = False
    nearest: bool = False
    gradient: bool = True
    gradient_target: str = DEFAULT_TARGET
    clip_eps: float = 0.2


def decompose(run: Run, folder: Path, options: DecomposeOptions, progress: Progress, overwrite: bool = False) -> None:
    """Decompose the chosen steps of a run and write the tables.

    Raises:
        NothingToJudgeError: no step held a token that could be compared; an earlier analysis stays in place.
        BadFileError, CheckpointError, OutputError, UsageError: as their names say.
    """
    steps = run.steps if options.steps is None else options.steps.choose(run.steps)
    for notice in (*run.notices, *semantic_reasons(run), *_precision(run, options)):
        progress.notice(notice)
    progress.start(len(steps))
    with Staging(folder, overwrite) as staging:
        job = _Job(run, options, progress)
        for step in steps:
            try:
                job.decompose_step(step, staging.path)
            except CheckpointError as error:
                raise CheckpointError(f"{error}. Or pass --skip-bad-rows to leave its tokens out") from None
        if not job.compared:
            raise NothingToJudgeError(_nothing(run, job))
        write_table(table_of(job.step_rows, STEPS, job.provenance), staging.path / "steps.parquet")
        write_table(pa.concat_tables(job.sequences).combine_chunks(), staging.path / "sequences.parquet")
        write_table(pa.concat_tables(job.places), staging.path / "places.parquet")
        write_table(table_of(job.trends.rows(), TRENDS, job.provenance), staging.path / "trends.parquet")
        rejected = [asdict(row) for row in job.rejected]
        write_table(table_of(rejected, REJECTED, job.provenance), staging.path / "rejected.parquet")
        staging.write_json("run.json", job.record(steps))
        staging.commit()


class _Job:
    """The state that passes from step to step: loaded networks, the last bias vectors, the rows so far."""

    def __init__(self, run: Run, options: DecomposeOptions, progress: Progress) -> None:
        self._run, self._options, self._progress = run, options, progress
        scoring = ScoringOptions(
            device=options.device,
            dtype=options.dtype or run.settings.trainer_dtype,
            temperature=run.settings.scoring_temperature,
            trust_remote_code=options.trust_remote_code,
        ).for_device()  # a device that is not there fails before anything is read
        self._scoring = scoring if options.max_tokens is None else replace(scoring, max_tokens=options.max_tokens)
        on_unusable = self._say_unusable if options.skip_bad_rows else None
        self._scorer = StepScorer(self._scoring, progress.tokens, on_unusable, run.adapter_base)
        self._judgement = Judgement(
            Rule(options.level, options.threshold, options.ratio),
            options.confidence,
            options.resamples,
            options.seed,
            options.intervals,
        )
        self._updates = UpdateOptions(options.gradient, options.gradient_target, options.clip_eps)
        self._bias = BiasVectors()
        self.trends = RunTrends(options.constancy_margin, options.confidence, options.seed)
        self._digests: dict[str, str] = {}
        self._notices: list[str] = []
        self.step_rows: list[dict[str, Any]] = []
        self.sequences: list[pa.Table] = []
        self.places: list[pa.Table] = []
        self.rejected: list[Rejected] = []
        self.compared = False
        self.provenance = {
            "run": run.settings.name or run.path.resolve().name,
            "format": run.format,
            "dtype": self._scoring.dtype,
            "temperature": f"{self._scoring.temperature:g}",
            "torch": version("torch"),
            "transformers": version("transformers"),
        }

    def decompose_step(self, step: Step, out: Path) -> None:
        """Score one step and keep its rows."""
        rollouts = step.load()
        if self._options.limit is not None:
            rollouts = limit_sequences(rollouts, self._options.limit, self._options.seed, step.index)
        version = self._run.trainer_version(step.index)
        checkpoints = StepCheckpoints(self._run, rollouts, version, self._options.skip_bad_rows, self._options.nearest)
        rollouts = self._set_aside(rollouts, checkpoints, step)
        for notice in (*rollouts.notices, *checkpoints.problems, *checkpoints.approximations, *checkpoints.notes):
            self._say(notice)
        self._progress.step(step.index, sum(tokens for _, tokens in checkpoints.forward_passes(rollouts)))
        scores = self._score(rollouts, checkpoints, step.index)
        one_lineage = self._run.sampler_checkpoints is None
        data = join(step.index, rollouts, scores, version, one_lineage, checkpoints.gaps)
        write_table(token_table(data, self.provenance), out / "tokens" / f"step={step.index}" / "part-0.parquet")
        reasons = (*semantic_reasons(self._run), *checkpoints.problems, *checkpoints.approximations)
        row, summary = step_row(data, self._judgement, self._bias, reasons)
        more, why = update_row(data, self._judgement, self._updates)
        row |= more
        row["reasons"] += why
        self._bias = summary.bias
        self.trends.add(data, summary)
        self.places.append(place_table(step.index, summary.places, self.provenance))
        self.step_rows.append(row)
        self.sequences.append(table_of(sequence_rows(data), SEQUENCES, self.provenance))
        self.rejected.extend(rollouts.rejected)
        self._say_rejected(step.index, rollouts.rejected)
        parts = (data.split.discrepancy, data.split.lag, data.split.log_ratio)
        self.compared |= any(bool((~np.isnan(part)).any()) for part in parts)
        for path in checkpoints.paths:
            self._digests.setdefault(_relative(path, self._run.path), digest(path, self._run.adapter_base))

    def record(self, steps: tuple[Step, ...]) -> dict[str, Any]:
        """What ``run.json`` says: everything needed to know what was compared with what."""
        run = self._run
        settings = {key: value for key, value in asdict(run.settings).items() if key != "sources"}
        options = asdict(self._options)
        options["steps"] = None if self._options.steps is None else self._options.steps.text
        return {
            "schema_version": 1,
            "run": {"name": self.provenance["run"], "format": run.format, "settings": settings},
            "sources": dict(sorted(run.settings.sources.items())),
            "assumed": sorted(run.settings.assumed),
            "versions": {
                "mismatch-probe": __version__,
                "python": platform.python_version(),
                **{name: version(name) for name in ("torch", "transformers", "numpy", "pyarrow")},
            },
            "options": options,
            "scoring": asdict(self._scoring) | {"device": str(self._scoring.torch_device())},
            "steps": [step.index for step in steps],
            "steps_left_out": [s.index for s in run.steps if s.index not in {step.index for step in steps}],
            "files": {
                _relative(file, run.path): _file_digest(file)
                for file in dict.fromkeys(file for step in steps for file in step.files)
            },
            "checkpoints": self._digests,
            "rejected_rows": len(self.rejected),
            "notices": [*run.notices, *self._notices],
        }

    def _score(self, rollouts: Rollouts, checkpoints: StepCheckpoints, step: int) -> StepScores:
        if self._run.trainer_checkpoints is None:
            return StepScores(len(rollouts.response.values))
        wanted = chosen_tokens(rollouts, self._options.seed, step) if self._updates.gradient else None
        try:
            scores = self._scorer.score(rollouts, halves(rollouts), checkpoints.trainer, checkpoints.sampler, wanted)
        except torch.OutOfMemoryError:
            raise UsageError(
                f"{self._scoring.torch_device()}: out of memory. Lower --max-tokens (now {self._scoring.max_tokens})"
            ) from None
        for reason, tokens in scores.reasons.items():
            if reason.endswith(GIVES_NO_NUMBER):
                self._say(f"{reason} at {tokens} tokens; they are left out")
        return scores

    def _set_aside(self, rollouts: Rollouts, checkpoints: StepCheckpoints, step: Step) -> Rollouts:
        kept = set_aside(rollouts, checkpoints, step.index)
        if self._options.strict and len(kept.rejected) > len(rollouts.rejected):
            first = kept.rejected[len(rollouts.rejected)]
            raise BadFileError(first.file, first.row, first.reason, "Drop --strict to set it aside")
        return kept

    def _say_unusable(self, error: CheckpointError) -> None:
        self._say(f"{error}. Left out")

    def _say(self, notice: str) -> None:
        if notice not in self._notices:
            self._notices.append(notice)
            self._progress.notice(notice)

    def _say_rejected(self, step: int, rejected: tuple[Rejected, ...]) -> None:
        for row in rejected[:3]:
            self._say(f"{row.file}, row {row.row}: set aside: {row.reason}")
        if len(rejected) > 3:
            self._say(f"step {step}: {len(rejected)} rows set aside in all; rejected.parquet lists them")


def _precision(run: Run, options: DecomposeOptions) -> list[str]:
    dtype = options.dtype or run.settings.trainer_dtype
    if run.trainer_checkpoints is None or dtype in ("float32", "float64"):
        return []
    return [
        f"scored in {dtype}: its rounding is part of D and L (in bfloat16 some .04 nats rms a log-prob). "
        "Pass --dtype float32 to see a lag below that"
    ]


_ASSUMED = "assumed, since nothing states it"


def _nothing(run: Run, job: _Job) -> str:
    """Why a whole run could not be judged, in one line."""
    if job.rejected and not any(map(len, job.sequences)):
        first = job.rejected[0]
        return (
            f"{run.path}: all {len(job.rejected)} rows were set aside; the first: {first.file}, row {first.row}: "
            f"{first.reason}"
        )
    # The same reason with another count at each step is one reason.
    reasons = sorted({reason.split(":")[0] for row in job.step_rows for reason in row["reasons"]} - {_ASSUMED})
    return f"{run.path}: nothing could be compared at any step. {'; '.join(reasons[:3]) or 'No step was chosen'}"


def _relative(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name


def _file_digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
