"""``--target-precision``: a growing sample of each step's prompt groups is scored until its ESS is decided."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from mismatch_probe.assemble import Judgement, join, split_is_partial
from mismatch_probe.executors.plan import Executor
from mismatch_probe.planning import Planner, StepPlan
from mismatch_probe.run import Ints, Run
from mismatch_probe.scoring.scores import StepScores, joined
from mismatch_probe.stats.intervals import Interval
from mismatch_probe.stats.stopping import look_confidence, look_sizes, why_stop
from mismatch_probe.stats.summary import judged_ess
from mismatch_probe.updates import MAX_TOKENS


@dataclass(frozen=True)
class Sampled:
    """How much of one step was scored: ``groups`` of ``of_groups``, in ``looks``, and ``why`` no more.

    ``tokens`` of ``of_tokens`` counted tokens were scored.
    """

    step: int
    groups: int
    of_groups: int
    looks: int
    why: str
    tokens: int
    of_tokens: int

    def reason(self) -> str:
        """For the step's reasons."""
        if self.groups == self.of_groups:
            return f"all {self.of_groups} prompt groups were scored, in {self.looks} looks (--target-precision)"
        return (
            f"sampled: {self.groups} of {self.of_groups} prompt groups were scored, {self.why} after {self.looks} "
            "looks (--target-precision); intervals are widened so that they hold wherever sampling stops"
        )


@dataclass(frozen=True, eq=False)
class Answer:
    """One step as far as it was scored, and the judgement whose intervals hold under stopping."""

    plan: StepPlan
    scores: StepScores
    judgement: Judgement
    sampled: Sampled


class Sampler:
    """Scores steps look by look.

    Args:
        run: whose steps they are.
        target: half-width of the judged ESS's interval that is narrow enough.
        judgement: which ESS is judged, and how.
        planner: cuts the parts of a step into units.
        executor: scores them; what an earlier look scored is not scored again.
    """

    def __init__(self, run: Run, target: float, judgement: Judgement, planner: Planner, executor: Executor) -> None:
        self._one_lineage = run.sampler_checkpoints is None
        self._target, self._judgement = target, judgement
        self._planner, self._executor = planner, executor
        self.sampled: list[Sampled] = []

    def answers(self, plans: Iterable[StepPlan]) -> Iterator[Answer]:
        """One for each step.

        Raises:
            CheckpointError, OutputError, UsageError: as ``Executor.run``.
        """
        for plan in plans:
            answer = self._answer(plan)
            self.sampled.append(answer.sampled)
            yield answer

    def _answer(self, plan: StepPlan) -> Answer:
        group = plan.rollouts.group_of_sequence
        groups = int(group.max()) + 1 if len(group) else 0
        order = np.random.default_rng([self._judgement.seed, plan.step.index, 5]).permutation(groups)
        place_in_order = np.empty(groups, dtype=np.int64)
        place_in_order[order] = np.arange(groups)
        # Halves by the order of drawing: equal at whatever look is the last, and never changed by a later one.
        place = place_in_order[group]
        sizes = look_sizes(groups) or (0,)
        confidence = look_confidence(self._judgement.confidence, len(sizes))
        judgement = replace(self._judgement, confidence=confidence)
        parts: list[tuple[Ints, StepScores]] = []
        done, gradient_tokens, why = 0, 0, ""
        for look, size in enumerate(sizes):
            rows = np.flatnonzero((place >= done) & (place < size)).astype(np.int64)
            part = self._planner.part(plan, rows, place[rows] % 2, look, gradient_tokens < MAX_TOKENS)
            ((_, scores),) = self._executor.run([part])
            gradient_tokens += part.tokens
            parts.append((rows, scores))
            done = size
            whole, merged = self._merged(plan, parts, place)
            why = why_stop(self._ess(whole, merged, judgement), judgement.rule.threshold, self._target)
            if why:
                break
        if done == groups:
            judgement, why = self._judgement, "all groups"
        sampled = Sampled(
            step=plan.step.index,
            groups=done,
            of_groups=groups,
            looks=len(parts),
            why=why,
            tokens=int(whole.rollouts.loss_mask.sum()),
            of_tokens=int(plan.rollouts.loss_mask.sum()),
        )
        return Answer(whole, merged, judgement, sampled)

    @staticmethod
    def _merged(plan: StepPlan, parts: list[tuple[Ints, StepScores]], place: Ints) -> tuple[StepPlan, StepScores]:
        """The step as far as it was scored, its sequences in the order of the log."""
        rows = np.sort(np.concatenate([rows for rows, _ in parts]))
        rollouts = plan.rollouts.take(rows)
        places = [(rollouts.response.places(np.searchsorted(rows, mine)), scores) for mine, scores in parts]
        whole = replace(plan, rollouts=rollouts, half=place[rows] % 2, units=[])
        return whole, joined(len(rollouts.response.values), places)

    def _ess(self, plan: StepPlan, scores: StepScores, judgement: Judgement) -> Interval:
        """The judged ESS so far."""
        data = join(
            plan.step.index,
            plan.rollouts,
            scores,
            plan.trainer_version,
            self._one_lineage,
            plan.checkpoints.gaps,
            half=plan.half,
        )
        if split_is_partial(data):
            return Interval(float("nan"))
        rule = judgement.rule
        ratios = {"lag": data.split.lag, "discrepancy": data.split.discrepancy, "total": data.split.log_ratio}
        return judged_ess(ratios[rule.ratio], data.levels, rule.level, judgement.over(data.levels.n_groups))

    def saved(self) -> str:
        """One sentence: what was left unscored."""
        tokens, of_tokens = (sum(getattr(one, name) for one in self.sampled) for name in ("tokens", "of_tokens"))
        short = sum(one.groups < one.of_groups for one in self.sampled)
        share = 1 - tokens / of_tokens if of_tokens else 0.0
        return (
            f"--target-precision {self._target:g}: {tokens:,} of {of_tokens:,} tokens were scored, {share:.0%} saved; "
            f"{short} of {len(self.sampled)} steps stopped early"
        )

    def record(self) -> dict[str, Any]:
        """What ``run.json`` says."""
        return {"target_precision": {"target": self._target, "steps": [asdict(one) for one in self.sampled]}}


def callback(progress_step: Callable[[int, int], None]) -> Callable[[Any], None]:
    """What tells the progress of a plan: a later look of a step is not another step."""

    def on_plan(plan: Any) -> None:
        if not getattr(plan, "look", 0):
            progress_step(plan.step.index, plan.forward_tokens)

    return on_plan
