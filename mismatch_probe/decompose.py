"""The main job: each step's rollouts through scoring and statistics into the tables."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_probe.assemble import Judgement, join, step_row
from mismatch_probe.checkpoints.describe import digest
from mismatch_probe.decompose_options import DecomposeOptions as DecomposeOptions
from mismatch_probe.decompose_options import Progress as Progress
from mismatch_probe.engine_asked import engine_session
from mismatch_probe.engine_split import engine_reasons
from mismatch_probe.errors import CheckpointError, NothingToJudgeError
from mismatch_probe.executors.local import LocalExecutor
from mismatch_probe.executors.plan import Callbacks, Executor
from mismatch_probe.executors.ray import RayExecutor
from mismatch_probe.extras import ExtraOptions, Extras
from mismatch_probe.folder import SCORES, Staging
from mismatch_probe.fresh import FreshPlan
from mismatch_probe.nulls import PREFIX, null_reasons
from mismatch_probe.planning import Planner, Planning, StepPlan
from mismatch_probe.precision import precision_notices
from mismatch_probe.record import record, relative, run_name
from mismatch_probe.resolve import semantic_reasons
from mismatch_probe.run import Rejected, Run, Step
from mismatch_probe.scoring.cache import ScoreCache
from mismatch_probe.scoring.scores import GIVES_NO_NUMBER, StepScores
from mismatch_probe.scoring_choice import scoring_choice
from mismatch_probe.stats.breakdown import Rule
from mismatch_probe.stats.summary import BiasVectors
from mismatch_probe.step_tables import StepTables
from mismatch_probe.table_io import table_of, write_table
from mismatch_probe.tables import STEPS
from mismatch_probe.tables_trends import TRENDS
from mismatch_probe.target import Sampler, callback
from mismatch_probe.trends import RunTrends
from mismatch_probe.updates import UpdateOptions, chosen_tokens, update_row


def decompose(run: Run, folder: Path, options: DecomposeOptions, progress: Progress, overwrite: bool = False) -> None:
    """Decompose the chosen steps of a run and write the tables.

    Scores that are finished outlive whatever ends the process: the same command goes on from them.

    Raises:
        NothingToJudgeError: no step held a token that could be compared; an earlier analysis stays in place.
        BadFileError, CheckpointError, OutputError, UsageError: as their names say.
    """
    options.check()
    steps = run.steps if options.steps is None else options.steps.choose(run.steps)
    for notice in (*run.notices, *semantic_reasons(run), *precision_notices(run, options.device, options.dtype)):
        progress.notice(notice)
    with Staging(folder, overwrite) as staging:
        job = _Job(run, options, progress, folder, steps)
        with job.engine or nullcontext(), StepTables(staging.path, job.provenance) as tables:
            job.decompose(steps, tables)
        if not job.compared:
            raise NothingToJudgeError(_nothing(run, job, tables))
        write_table(table_of(job.step_rows, STEPS, job.provenance), staging.path / "steps.parquet")
        write_table(table_of(job.trends.rows(), TRENDS, job.provenance), staging.path / "trends.parquet")
        staging.write_json("run.json", job.record(steps, tables.rejected))
        staging.commit()


class _Job:
    """The state that passes from step to step: the last bias vectors, the rows so far."""

    def __init__(
        self, run: Run, options: DecomposeOptions, progress: Progress, folder: Path, steps: tuple[Step, ...]
    ) -> None:
        self._run, self._options, self._progress = run, options, progress
        self._scoring = scoring_choice(run, options)
        kept = (options.cache or folder / SCORES) if options.keep_scores else None
        self._cache = None if kept is None else ScoreCache(kept, self._scoring)
        self._judgement = Judgement(
            Rule(options.level, options.threshold, options.ratio),
            options.confidence,
            options.resamples,
            options.seed,
            options.intervals,
        )
        asked = ExtraOptions(
            options.reference, options.reference_sequences, options.fresh_rollouts, options.fresh_steps
        )
        self._extras = Extras(run, steps, self._scoring, kept, asked, self._judgement, self._callbacks())
        self._updates = UpdateOptions(options.gradient, options.gradient_target, options.clip_eps)
        self._bias = BiasVectors()
        self.trends = RunTrends(options.constancy_margin, options.confidence, options.seed)
        self._digests: dict[str, str] = {}
        self._sampler: Sampler | None = None
        self._notices: list[str] = []
        self.engine = engine_session(run, options, self._scoring, self._say)
        self.step_rows: list[dict[str, Any]] = []
        self.compared = False
        self.provenance = {
            "run": run_name(run),
            "format": run.format,
            "dtype": self._scoring.dtype,
            "temperature": f"{self._scoring.temperature:g}",
            "torch": version("torch"),
            "transformers": version("transformers"),
        }

    def decompose(self, steps: tuple[Step, ...], tables: StepTables) -> None:
        """Plan, score and keep the rows of every step."""
        self._progress.start(len(steps) + len(self._extras.fresh_steps))
        if self._extras.cost:
            self._progress.notice(self._extras.cost)
        try:
            if self._options.target_precision is not None:
                self._sample(steps, tables, self._options.target_precision)
                return
            for plan, scores in self._executor().run(self._extras.plans(self._planner().plans(steps))):
                if isinstance(plan, FreshPlan):
                    self._add(self._extras.fresh_row(plan, scores, self._data))
                else:
                    self._keep(plan, scores, tables)
        except CheckpointError as error:
            raise CheckpointError(f"{error}. Or pass --skip-bad-rows to leave its tokens out") from None

    def _sample(self, steps: tuple[Step, ...], tables: StepTables, target: float) -> None:
        """Score as much of each step as its verdict needs."""
        planner = self._planner()
        self._sampler = Sampler(self._run, target, self._judgement, planner, self._executor())
        for answer in self._sampler.answers(planner.plans(steps)):
            self._keep(answer.plan, answer.scores, tables, answer.judgement, (answer.sampled.reason(),))
        self._progress.notice(self._sampler.saved())

    def _planner(self) -> Planner:
        options = self._options
        planning = Planning(
            limit=options.limit,
            seed=options.seed,
            tolerant=options.skip_bad_rows,
            strict=options.strict,
            nearest=options.nearest,
            unit_tokens=self._scoring.unit_tokens,
            whole=options.target_precision is None,
            gradient=(lambda of, step: chosen_tokens(of, options.seed, step)) if self._updates.gradient else None,
        )
        return Planner(self._run, planning, self._say)

    def _executor(self) -> Executor:
        rest = (self._scoring, self._run.adapter_base, self._cache, self._callbacks())
        return LocalExecutor(*rest) if self._options.cluster is None else RayExecutor(*rest, self._options.cluster)

    def _callbacks(self) -> Callbacks:
        return Callbacks(
            on_plan=callback(self._progress.step),
            on_tokens=self._progress.tokens,
            on_notice=self._progress.notice,
            on_unusable=self._say_unusable if self._options.skip_bad_rows else None,
        )

    def _keep(
        self,
        plan: StepPlan,
        scores: StepScores,
        tables: StepTables,
        judgement: Judgement | None = None,
        said: tuple[str, ...] = (),
    ) -> None:
        """The rows of one step; ``said`` are more reasons."""
        judgement = judgement or self._judgement
        step, rollouts, checkpoints = plan.step.index, plan.rollouts, plan.checkpoints
        for reason, tokens in scores.reasons.items():
            if reason.endswith(GIVES_NO_NUMBER):
                self._say(f"{reason} at {tokens} tokens; they are left out")
        one_lineage = self._run.sampler_checkpoints is None
        engine = None if self.engine is None else self.engine.score(rollouts, checkpoints.sampler)
        data = join(step, rollouts, scores, plan.trainer_version, one_lineage, checkpoints.gaps, engine, plan.half)
        reasons = (
            *semantic_reasons(self._run),
            *checkpoints.problems,
            *checkpoints.approximations,
            *engine_reasons(data.engine, self._run.settings),
            *said,
        )
        row, summary = step_row(data, judgement, self._bias, reasons)
        self.step_rows.append(row)
        self._add(update_row(data, judgement, self._updates))
        self._add(self._extras.row(plan, data))
        self._add(({}, null_reasons(self.step_rows[-1])))
        self._bias, self._data = summary.bias, data
        self.trends.add(data, summary)
        tables.add(data, summary.places)
        self._say_rejected(step, rollouts.rejected)
        parts = (data.split.discrepancy, data.split.lag, data.split.log_ratio)
        self.compared |= any(bool((~np.isnan(part)).any()) for part in parts)
        for path in checkpoints.paths:
            self._digests.setdefault(relative(path, self._run.path), digest(path, self._run.adapter_base))

    def _add(self, found: tuple[dict[str, Any], list[str]]) -> None:
        """More columns, and reasons, of the step that was kept last."""
        self.step_rows[-1] |= found[0]
        self.step_rows[-1]["reasons"] += found[1]

    def record(self, steps: tuple[Step, ...], rejected: int) -> dict[str, Any]:
        """What ``run.json`` says."""
        options = {key: value for key, value in asdict(self._options).items() if key not in _NOT_RECORDED}
        for name in ("steps", "fresh_steps"):
            options[name] = None if options[name] is None else options[name]["text"]
        rest = (self._scoring, self._digests, rejected, self._notices)
        beside = {} if self.engine is None else {"engine": self.engine.facts}
        beside |= {} if self._sampler is None else self._sampler.record()
        return record(self._run, steps, options, *rest) | self._extras.record() | beside

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


_NOT_RECORDED = ("cache", "keep_scores", "engine_python", "cluster")
"""Options that change no result."""
_ASSUMED = "assumed, since nothing states it"


def _nothing(run: Run, job: _Job, tables: StepTables) -> str:
    """Why a whole run could not be judged, in one line."""
    first = tables.first_rejected
    if first is not None and not tables.sequences:
        return (
            f"{run.path}: all {tables.rejected} rows were set aside; the first: {first.file}, row {first.row}: "
            f"{first.reason}"
        )
    # The same reason with another count at each step is one reason.
    reasons = sorted({reason.split(":")[0] for row in job.step_rows for reason in row["reasons"]} - {_ASSUMED, PREFIX})
    return f"{run.path}: nothing could be compared at any step. {'; '.join(reasons[:3]) or 'No step was chosen'}"
