"""One step's rollouts under the weights that sampled them and under the trainer's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mismatch_probe.errors import CheckpointError
from mismatch_probe.run import UNKNOWN_VERSION, Bools, Floats, Ints, Rollouts
from mismatch_probe.scoring.head import PairScores, TokenScores, compare, score
from mismatch_probe.scoring.network import NetworkCache, ScoringOptions
from mismatch_probe.scoring.plan import STATE_BYTES, batches, shards
from mismatch_probe.scoring.sketch import HeadSketch, StepFactors
from mismatch_probe.scoring.states import hidden_states

GIVES_NO_NUMBER = "gives no number (NaN weights or overflow)"
"""End of the reason of tokens at which a network gave NaN."""
NOISE_SEQUENCES = 8
"""Sequences a step that are scored a second time, alone, for the noise floor."""


@dataclass(eq=False)
class StepScores:
    """Rescored values of each response token, nats, (tokens,) float64; NaN where not counted or not scored.

    ``bias_lag_sum`` sums pi_s - pi over the tokens of each half of the prompt groups, (2, V), and
    ``bias_lag_tokens`` counts them, (2,); None where no token had both. ``noise`` holds the difference between the
    log-probs of the same tokens scored in a batch and alone. ``reasons`` says, with token counts, what was not scored.
    ``factors`` are those of the head's gradient, where they were wanted.
    """

    tokens: int
    stale_logprob: Floats = field(init=False)
    trainer_logprob: Floats = field(init=False)
    entropy_stale: Floats = field(init=False)
    entropy_trainer: Floats = field(init=False)
    kl_stale_trainer: Floats = field(init=False)
    kl_trainer_stale: Floats = field(init=False)
    total_variation: Floats = field(init=False)
    bias_lag_sum: Floats | None = None
    bias_lag_tokens: Ints = field(default_factory=lambda: np.zeros(2, dtype=np.int64))
    noise: Floats = field(default_factory=lambda: np.zeros(0))
    reasons: dict[str, int] = field(default_factory=dict)
    factors: StepFactors | None = None

    def __post_init__(self) -> None:
        for name in COLUMNS:
            setattr(self, name, np.full(self.tokens, np.nan))

    def add_bias(self, bias_sum: Floats, half: Ints) -> None:
        """Add sums of pi_s - pi, (2, V), over tokens that belong to the given halves, (n,)."""
        self.bias_lag_sum = bias_sum if self.bias_lag_sum is None else self.bias_lag_sum + bias_sum
        self.bias_lag_tokens += np.bincount(half, minlength=2)


COLUMNS = (
    *("stale_logprob", "trainer_logprob", "entropy_stale", "entropy_trainer"),
    *("kl_stale_trainer", "kl_trainer_stale", "total_variation"),
)


class StepScorer:
    """Scores steps one after another; networks that the next step needs again stay loaded.

    Args:
        options: device, dtype, temperature, bounds.
        on_tokens: called with the number of tokens after each forward pass.
        on_unusable: called with the error of a checkpoint that cannot be loaded, which then counts as absent; None
            raises it.
        base: the model below checkpoints that are adapters.
    """

    def __init__(
        self,
        options: ScoringOptions,
        on_tokens: Callable[[int], None] = lambda _: None,
        on_unusable: Callable[[CheckpointError], None] | None = None,
        base: Path | None = None,
    ) -> None:
        self._options, self._on_tokens, self._on_unusable = options, on_tokens, on_unusable
        self._networks = NetworkCache(options, base=base)
        self._unusable: set[Path] = set()
        self._sketch: HeadSketch | None = None

    def score(
        self,
        rollouts: Rollouts,
        half: Ints,
        trainer: Path | None,
        sampler: Callable[[int], Path | None],
        gradient: Bools | None = None,
    ) -> StepScores:
        """Score every counted token: the trainer's weights once, then each sampler version on its own tokens.

        Args:
            rollouts: the step's sequences; ids must lie inside the vocabularies.
            half: 0 or 1 for each sequence, by prompt group, (n,).
            trainer: checkpoint of the trainer's current weights, None when there is none.
            sampler: checkpoint of a sampler version, or None.
            gradient: tokens whose factors of the head's gradient are wanted, (tokens,); None for none.

        Raises:
            CheckpointError: a checkpoint cannot be loaded, or two of them differ in vocabulary.
        """
        scores = StepScores(len(rollouts.response.values))
        counted = rollouts.loss_mask
        versions = [int(version) for version in np.unique(rollouts.sampler_version[counted])]
        # What this step needs again must outlive what it loads first.
        self._networks.touch([path for version in versions if (path := sampler(version)) is not None])
        trainer = self._usable(trainer)
        if trainer is None and counted.any():
            _count(scores.reasons, "no checkpoint of the trainer's weights at this step", int(counted.sum()))
        if gradient is not None and trainer is not None:
            scores.factors = self._prepare(trainer, gradient)
        held = None
        if trainer is not None and counted.sum() <= self._tokens_held(trainer):
            held = self._states(trainer, rollouts, counted)
        for version in versions:
            mine = counted & (rollouts.sampler_version == version)
            self._networks.touch([trainer] if trainer is not None else [])
            stale = self._usable(sampler(version), beside=trainer)
            if stale is None:
                what = "unknown sampler version" if version == UNKNOWN_VERSION else f"sampler version {version}"
                _count(scores.reasons, f"no checkpoint for {what}", int(mine.sum()))
            if stale is None and trainer is None:
                continue
            for part in self._parts(_either((stale, trainer)), rollouts, mine):
                states = None if held is None else held[torch.from_numpy(part[counted])]
                self._score_part(scores, rollouts, half, part, (stale, trainer), states)
            self._measure_noise(scores, rollouts, mine, (stale, trainer), max(1, NOISE_SEQUENCES // len(versions)))
        return scores

    def _score_part(
        self,
        scores: StepScores,
        rollouts: Rollouts,
        half: Ints,
        part: Bools,
        paths: tuple[Path | None, Path | None],
        trainer_states: Tensor | None,
    ) -> None:
        """Tokens of one version under its weights and the trainer's, or under the one set of weights there is."""
        stale, trainer = paths
        place = np.flatnonzero(part)
        ids = torch.from_numpy(rollouts.response.values[place])
        half_of_token = half[rollouts.sequence_of_token[place]]
        if trainer is not None and trainer_states is None:
            trainer_states = self._states(trainer, rollouts, part)
        if stale is not None and trainer is not None and stale != trainer:
            assert trainer_states is not None
            stale_states = self._states(stale, rollouts, part)
            pair = (self._networks.get(stale), stale_states), (self._networks.get(trainer), trainer_states)
            sketch = self._sketch_for(scores, place)
            found = compare(*pair, ids, torch.from_numpy(half_of_token), *self._bounds, sketch)
            factors = found.factors
            for name, values in _columns(found).items():
                getattr(scores, name)[place] = values.cpu().numpy()
            known = np.isfinite(scores.kl_stale_trainer[place])
            scores.add_bias(found.bias_sum.cpu().numpy(), half_of_token[known])
        else:
            states = self._states(_either(paths), rollouts, part) if trainer_states is None else trainer_states
            sketch = self._sketch_for(scores, place) if stale is not None and trainer is not None else None
            one, factors = score(self._networks.get(_either(paths)), states, ids, *self._bounds, sketch)
            _put_one(scores, one, place, stale is not None, trainer is not None)
            if stale is not None and trainer is not None:
                # The same weights: the lag is zero by identity, not by measurement.
                for name in ("kl_stale_trainer", "kl_trainer_stale", "total_variation"):
                    getattr(scores, name)[place] = 0.0
                scores.add_bias(np.zeros((2, self._networks.get(stale).vocab_size)), half_of_token)
        if factors is not None and scores.factors is not None:
            scores.factors.put(factors, place)
        for role, own in (("stale", stale), ("trainer", trainer)):
            if own is not None:
                lost = int(np.isnan(getattr(scores, f"{role}_logprob")[place]).sum())
                _count(scores.reasons, f"{own.name} {GIVES_NO_NUMBER}", lost)

    def _measure_noise(
        self, scores: StepScores, rollouts: Rollouts, mine: Bools, paths: tuple[Path | None, Path | None], count: int
    ) -> None:
        """Score a few sequences again, each alone: what the batch shape does to a score is the probe's own noise.

        Only sequences that shared a batch tell anything.
        """
        before = scores.trainer_logprob if paths[0] is None else scores.stale_logprob
        path = _either(paths)
        sequence = rollouts.sequence_of_token
        rows = np.unique(sequence[mine])
        lengths = rollouts.prompt.lengths[rows] + rollouts.response.lengths[rows]
        shared = [rows[batch] for batch in batches(lengths, self._options.max_tokens) if len(batch) > 1]
        rows = np.sort(np.concatenate(shared)) if shared else rows[:0]
        for row in rows[np.unique(np.linspace(0, len(rows) - 1, count).astype(int))] if len(rows) else ():
            alone = mine & (sequence == row)
            ids = torch.from_numpy(rollouts.response.values[alone])
            states = self._states(path, rollouts, alone, count_tokens=False)
            again, _ = score(self._networks.get(path), states, ids, *self._bounds)
            gap = again.logprob.cpu().numpy() - before[alone]
            scores.noise = np.concatenate([scores.noise, gap[~np.isnan(gap)]])

    def _prepare(self, trainer: Path, gradient: Bools) -> StepFactors | None:
        network = self._networks.get(trainer)
        if network.caps_logits:
            return None
        if self._sketch is None or self._sketch.shape != tuple(network.weight.shape):
            self._sketch = HeadSketch(network.weight)
        return StepFactors(gradient, self._sketch)

    def _sketch_for(self, scores: StepScores, place: Ints) -> HeadSketch | None:
        """The sketch, where one of these tokens' factors is wanted."""
        return self._sketch if scores.factors is not None and bool(scores.factors.wanted[place].any()) else None

    @property
    def _bounds(self) -> tuple[float, int]:
        return self._options.temperature, self._options.chunk_elements

    def _states(self, path: Path, rollouts: Rollouts, wanted: Bools, count_tokens: bool = True) -> Tensor:
        report = self._on_tokens if count_tokens else lambda _: None
        return hidden_states(self._networks.get(path), rollouts, wanted, self._options.max_tokens, report)

    def _parts(self, path: Path, rollouts: Rollouts, mine: Bools) -> Iterator[Bools]:
        """Cut tokens into runs of whole sequences whose hidden states can be held."""
        sequence = rollouts.sequence_of_token
        per_row = np.bincount(sequence[mine], minlength=len(rollouts))
        for rows in shards(per_row, self._tokens_held(path)):
            part = mine & np.isin(sequence, rows)
            if part.any():
                yield part

    def _tokens_held(self, path: Path) -> int:
        weight = self._networks.get(path).weight
        return max(1, STATE_BYTES // (weight.shape[1] * weight.element_size()))

    def _usable(self, path: Path | None, beside: Path | None = None) -> Path | None:
        """The path, where its network can be loaded and has the vocabulary of the one beside it."""
        if path is None or path in self._unusable:
            return None
        try:
            rows = self._networks.get(path).vocab_size
            if beside is not None and rows != (others := self._networks.get(beside).vocab_size):
                raise CheckpointError(
                    f"{path} has {rows} output rows and {beside} has {others}. "
                    "Both must be exported with the same vocabulary padding"
                )
        except CheckpointError as error:
            if self._on_unusable is None:
                raise
            self._unusable.add(path)
            self._on_unusable(error)
            return None
        return path


def _columns(pair: PairScores) -> dict[str, Tensor]:
    return {
        "stale_logprob": pair.stale.logprob,
        "trainer_logprob": pair.trainer.logprob,
        "entropy_stale": pair.stale.entropy,
        "entropy_trainer": pair.trainer.entropy,
        "kl_stale_trainer": pair.kl_stale_trainer,
        "kl_trainer_stale": pair.kl_trainer_stale,
        "total_variation": pair.total_variation,
    }


def _count(reasons: dict[str, int], reason: str, tokens: int) -> None:
    if tokens:
        reasons[reason] = reasons.get(reason, 0) + tokens


def _either(paths: tuple[Path | None, Path | None]) -> Path:
    path = paths[1] if paths[0] is None else paths[0]
    assert path is not None
    return path


def _put_one(scores: StepScores, one: TokenScores, place: Ints, stale: bool, trainer: bool) -> None:
    for role, there in (("stale", stale), ("trainer", trainer)):
        if there:
            getattr(scores, f"{role}_logprob")[place] = one.logprob.cpu().numpy()
            getattr(scores, f"entropy_{role}")[place] = one.entropy.cpu().numpy()
