"""What ``decompose`` does on request beside the split: whose error it is, and the full KL on fresh responses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mismatch_probe.assemble import Judgement, StepData
from mismatch_probe.errors import UsageError
from mismatch_probe.executors.local import LocalExecutor
from mismatch_probe.executors.plan import Callbacks
from mismatch_probe.fresh import FreshPlan, FreshPlanner, fresh_row
from mismatch_probe.planning import StepPlan
from mismatch_probe.reference import DEFAULT_SEQUENCES, Reference, reference_options
from mismatch_probe.run import Run, Step
from mismatch_probe.scoring.cache import ScoreCache
from mismatch_probe.scoring.network import ScoringOptions
from mismatch_probe.scoring.sample import Sampling, sample_fresh
from mismatch_probe.scoring.sample_cache import KeptSamples
from mismatch_probe.scoring.scores import StepScores
from mismatch_probe.selection import StepSelection


@dataclass(frozen=True)
class ExtraOptions:
    """``reference``: dtype of the reference, None for none, at ``reference_sequences`` responses a step.

    ``fresh_rollouts``: responses a step, None for none, at ``fresh_steps``, None for every step that is analysed.
    """

    reference: str | None = None
    reference_sequences: int = DEFAULT_SEQUENCES
    fresh_rollouts: int | None = None
    fresh_steps: StepSelection | None = None


class Extras:
    """Both, for the steps of one analysis.

    Args:
        run: what is analysed.
        steps: those of its steps that are.
        scoring: how its tokens are scored.
        cache: folder of finished scores and samples, None for none.
        options: what was asked for.
        judgement: how intervals are made, and the seed.
        callbacks: whom to tell what.

    Raises:
        UsageError: the options contradict one another, or the run.
    """

    def __init__(
        self,
        run: Run,
        steps: Sequence[Step],
        scoring: ScoringOptions,
        cache: Path | None,
        options: ExtraOptions,
        judgement: Judgement,
        callbacks: Callbacks,
    ) -> None:
        self._run, self._scoring, self._options, self._judgement = run, scoring, options, judgement
        self._reference: Reference | None = None
        if scoring.tensor_parallel > 1 and (options.reference is not None or options.fresh_rollouts is not None):
            raise UsageError("--tensor-parallel: --reference and --fresh-rollouts run in one process. Drop one of them")
        if options.reference is not None:
            wide = reference_options(scoring, options.reference)
            quiet = Callbacks(on_notice=callbacks.on_notice, on_unusable=callbacks.on_unusable)
            kept = None if cache is None else ScoreCache(cache, wide)
            executor = LocalExecutor(wide, run.adapter_base, kept, quiet)
            self._reference = Reference(scoring, wide.dtype, options.reference_sequences, executor, judgement)
        self._fresh: FreshPlanner | None = None
        if options.fresh_steps is not None and options.fresh_rollouts is None:
            raise UsageError("--fresh-steps: says where, pass --fresh-rollouts N to say how many")
        self.fresh_steps: tuple[Step, ...] = ()
        if options.fresh_rollouts is not None:
            chosen = options.fresh_steps
            self.fresh_steps = tuple(steps) if chosen is None else chosen.choose(tuple(steps))
            tolerant = callbacks.on_unusable is not None
            draw: Callable[..., Any] = sample_fresh if cache is None else KeptSamples(cache, run.adapter_base)
            self._fresh = FreshPlanner(
                run, scoring, options.fresh_rollouts, self.fresh_steps, judgement.seed, draw, tolerant
            )

    @property
    def cost(self) -> str:
        """What the fresh responses cost, in words; "" where none are drawn."""
        if self._fresh is None:
            return ""
        longest = self._run.settings.max_response_length
        return (
            f"fresh rollouts: {self._options.fresh_rollouts} responses at each of {len(self.fresh_steps)} steps are "
            f"drawn token by token{'' if longest is None else f', up to {longest} tokens each'}, then scored under "
            "both versions (--fresh-steps chooses fewer)"
        )

    def plans(self, plans: Iterable[StepPlan]) -> Iterator[StepPlan | FreshPlan]:
        """The plans, with those of the fresh responses after their steps."""
        return iter(plans) if self._fresh is None else self._fresh.between(plans)

    def row(self, plan: StepPlan, data: StepData) -> tuple[dict[str, Any], list[str]]:
        """Columns of the steps table on whose error it is, and reasons."""
        return ({}, []) if self._reference is None else self._reference.row(plan, data)

    def fresh_row(self, plan: FreshPlan, scores: StepScores, data: StepData) -> tuple[dict[str, Any], list[str]]:
        """Columns of the steps table on the full KL, and reasons; ``data`` is the recorded step's."""
        return fresh_row(plan, scores, data, self._judgement)

    def record(self) -> dict[str, Any]:
        """What ``run.json`` says of them beyond the options."""
        settings = self._run.settings
        sampling = {
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
            "longest": settings.max_response_length,
            "eos": list(settings.eos_token_id),
            "dtype": Sampling(scoring=self._scoring).dtype,
            "steps": [step.index for step in self.fresh_steps],
        }
        reference = {"dtype": self._options.reference, "sequences": self._options.reference_sequences}
        return {
            "fresh_rollouts": None if self._fresh is None else sampling,
            "reference": None if self._reference is None else reference,
        }
