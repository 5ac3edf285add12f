"""The full KL: the trainer's own responses to the run's prompts, scored under both versions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mismatch_probe.assemble import Judgement, StepData, halves
from mismatch_probe.columns import with_ends
from mismatch_probe.errors import CheckpointError
from mismatch_probe.planning import StepPlan
from mismatch_probe.run import Floats, Ints, Rollouts, Run, Step
from mismatch_probe.scoring.network import ScoringOptions
from mismatch_probe.scoring.plan import forward_tokens, units
from mismatch_probe.scoring.sample import Sampling
from mismatch_probe.scoring.scores import StepScores
from mismatch_probe.scoring.units import Unit
from mismatch_probe.selection import limited_rows
from mismatch_probe.stats.fresh import fresh_kl
from mismatch_probe.stats.intervals import interval_reasons
from mismatch_probe.stats.ratios import Levels

WIDEST_GAP = 0.2
"""Nats rms between log pi as sampled and as scored; bfloat16 on both sides costs some .004 to .04."""
Draw = Callable[..., Rollouts]
"""``scoring.sample.sample_fresh``, or what stands in its place."""


@dataclass(frozen=True, eq=False)
class FreshPlan:
    """Fresh responses of one step and how to score them.

    Fresh response j answers the prompt of the recorded sequence ``row[j]``. ``same`` says that sampler and trainer
    hold the same weights, so that nothing need be drawn. ``reasons`` says why there is nothing to score, or what its
    score is of.
    """

    step: Step
    rollouts: Rollouts | None = None
    row: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    units: list[Unit] = field(default_factory=list)
    same: bool = False
    reasons: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Response tokens."""
        return 0 if self.rollouts is None else len(self.rollouts.response.values)

    @property
    def forward_tokens(self) -> int:
        """Tokens that go through a network to be scored."""
        return forward_tokens(self.units)


class FreshPlanner:
    """Draws fresh responses at chosen steps.

    ``count`` responses a step: whole prompt groups are drawn by seed, and every recorded sequence of theirs gets a
    counterpart that the trainer draws to the same prompt. More than the step has sequences means several counterparts
    each. Temperature, top-k, top-p, end tokens and longest response are the run's.

    Args:
        run: its settings and steps.
        scoring: how its tokens are scored.
        count: fresh responses a step.
        steps: those that get them.
        seed: of prompts and tokens.
        draw: ``sample_fresh``, or what stands in its place.
        tolerant: a checkpoint that cannot be loaded is a reason instead of an error.
    """

    def __init__(
        self,
        run: Run,
        scoring: ScoringOptions,
        count: int,
        steps: Sequence[Step],
        seed: int,
        draw: Draw,
        tolerant: bool = False,
    ) -> None:
        self._tolerant = tolerant
        self._run, self._scoring, self._count, self._seed, self._draw = run, scoring, count, seed, draw
        self._steps = {step.index for step in steps}

    def between(self, plans: Iterable[StepPlan]) -> Iterator[StepPlan | FreshPlan]:
        """Each plan, followed by that of its fresh responses where they are wanted."""
        for plan in plans:
            yield plan
            if plan.step.index in self._steps:
                yield self.plan(plan)

    def plan(self, plan: StepPlan) -> FreshPlan:
        """Draw the fresh responses of one step.

        Raises:
            CheckpointError: the trainer's checkpoint cannot be loaded, and nobody asked to go on without it.
        """
        recorded, trainer, step = plan.rollouts, plan.checkpoints.trainer, plan.step
        if trainer is None:
            return FreshPlan(step, reasons=("fresh rollouts: no checkpoint of the trainer's weights at this step",))
        rows = limited_rows(recorded, self._count, self._seed, step.index)
        rows = rows[np.bincount(recorded.sequence_of_token[recorded.loss_mask], minlength=len(recorded))[rows] > 0]
        versions = {int(row): _version(recorded, int(row)) for row in rows}
        missing = sorted({v for v, _ in versions.values() if plan.checkpoints.sampler(v) is None})
        if missing or not len(rows):
            which = f"no checkpoint for sampler version {missing[0]}" if missing else "no counted token"
            return FreshPlan(step, reasons=(f"fresh rollouts: {which}",))
        if all(plan.checkpoints.sampler(version) == trainer for version, _ in versions.values()):
            return FreshPlan(
                step, same=True, reasons=("fresh rollouts: none drawn, both versions are the same weights",)
            )
        copies = max(1, self._count // len(recorded))
        prompts = recorded.take(rows).prompt
        try:
            drawn = self._draw(trainer, prompts, self.sampling(recorded), copies, [self._seed, step.index, 4])
        except CheckpointError as error:
            if not self._tolerant:
                raise
            return FreshPlan(step, reasons=(f"fresh rollouts: {error}",))
        row = np.repeat(rows, copies)
        comparable = self._run.settings.temperature == self._scoring.temperature
        version = np.array([versions[int(r)][0] for r in row], dtype=np.int64)
        fresh = replace(
            drawn,
            group_id=recorded.group_id[row],
            sampler_logprob=drawn.sampler_logprob if comparable else np.full(len(drawn.sampler_logprob), np.nan),
            sampler_version=np.repeat(version, drawn.response.lengths),
        )
        cut = units(step.index, fresh, halves(fresh), trainer, plan.checkpoints.sampler, self._scoring.unit_tokens)
        return FreshPlan(
            step, fresh, row, [replace(unit, noise=0) for unit in cut], reasons=self._reasons(versions, recorded)
        )

    def sampling(self, recorded: Rollouts) -> Sampling:
        """How the run sampled; what it does not say of its longest response is that of the step."""
        settings = self._run.settings
        return Sampling(
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            longest=settings.max_response_length or int(recorded.response.lengths.max()),
            eos=settings.eos_token_id,
            scoring=self._scoring,
            base=self._run.adapter_base,
        )

    def _reasons(self, versions: dict[int, tuple[int, bool]], recorded: Rollouts) -> tuple[str, ...]:
        reasons = []
        used = sorted({version for version, _ in versions.values()})
        if len(used) > 1:
            named = ", ".join(map(str, used))
            reasons.append(
                f"fresh rollouts: each is compared with the version that drew its recorded counterpart ({named})"
            )
        mixed = sum(several for _, several in versions.values())
        if mixed:
            reasons.append(
                f"fresh rollouts: {mixed} of {len(versions)} recorded counterparts changed version on the way; theirs "
                "are compared with the version of most of their tokens"
            )
        if not recorded.loss_mask.all():
            reasons.append(
                "fresh rollouts: recorded responses hold masked tokens (of tools, say), fresh ones hold none"
            )
        settings = self._run.settings
        if settings.max_response_length is None:
            longest = int(recorded.response.lengths.max())
            reasons.append(f"fresh rollouts: cut at {longest} tokens, the step's longest, since no limit is stated")
        if not settings.eos_token_id:
            reasons.append("fresh rollouts: no end token is stated, the checkpoint's own ends a response")
        return tuple(reasons)


def fresh_row(
    plan: FreshPlan, scores: StepScores, data: StepData, judgement: Judgement
) -> tuple[dict[str, Any], list[str]]:
    """Columns of the steps table on the full KL, and reasons.

    Args:
        plan: what was drawn.
        scores: of its responses.
        data: the recorded step.
        judgement: how intervals are made.
    """
    reasons = list(plan.reasons)
    if plan.same:
        names = ("trainer_stale", "stale_trainer", "sequence_trainer_stale", "prefix_trainer_stale")
        ends = ("", "_ci_low", "_ci_high")
        return {f"full_kl_fresh_{name}{end}": 0.0 for name in names for end in ends}, reasons
    if plan.rollouts is None:
        return {}, reasons
    fresh, group = plan.rollouts, data.levels.group_of_sequence
    if np.isnan(scores.kl_trainer_stale).any():
        return {}, [*reasons, "fresh rollouts: the networks give no number at some of their tokens"]
    intervals = judgement.over(data.levels.n_groups)
    paired = np.isin(data.levels.sequence, plan.row)
    found = fresh_kl(
        scores.kl_trainer_stale,
        scores.kl_stale_trainer,
        Levels(fresh.sequence_of_token, group[plan.row]),
        data.scores.kl_trainer_stale[data.counted][paired],
        data.levels.group[paired],
        intervals,
    )
    values: dict[str, Any] = {"full_kl_fresh_sequences": len(fresh), "full_kl_fresh_tokens": plan.tokens}
    finite = {name: interval for name, interval in found.items() if not math.isinf(interval.value)}
    reasons += (len(found) - len(finite)) * [
        "fresh rollouts: prefix KL is 0 over the recorded responses, so there is no ratio to it"
    ]
    values |= with_ends(finite)
    reasons += interval_reasons(finite)
    gap = _gap(fresh, scores.trainer_logprob)
    if gap > WIDEST_GAP:
        reasons.append(
            f"fresh rollouts: log pi as sampled and as scored differ by {gap:.2g} nats rms, more than rounding "
            "explains: the responses may not be the trainer's"
        )
    return values | {"full_kl_fresh_gap_rms": gap}, reasons


def _gap(fresh: Rollouts, scored: Floats) -> float:
    return float(np.sqrt(np.square(fresh.sampler_logprob - scored).mean()))


def _version(recorded: Rollouts, row: int) -> tuple[int, bool]:
    """Version of most counted tokens of a sequence, the older of two; and whether there are several."""
    span = slice(recorded.response.offsets[row], recorded.response.offsets[row + 1])
    versions, counts = np.unique(recorded.sampler_version[span][recorded.loss_mask[span]], return_counts=True)
    return int(versions[np.argmax(counts)]), len(versions) > 1
