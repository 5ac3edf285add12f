"""One step's rollouts under the weights that sampled them and under the trainer's weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mismatch_probe.run import UNKNOWN_VERSION, Bools, Floats, Ints, Rollouts
from mismatch_probe.scoring.head import PairScores, compare, score
from mismatch_probe.scoring.network import Network, NetworkCache, ScoringOptions
from mismatch_probe.scoring.plan import batches, shards

SHARD_TOKENS = 32768
"""Scored tokens whose hidden states are held at once."""
NOISE_SEQUENCES = 4
"""Sequences a step that are scored a second time, alone, for the noise floor."""


@dataclass(eq=False)
class StepScores:
    """Rescored values of each response token, nats, (tokens,) float64; NaN where not counted or not scored.

    ``bias_lag_sum`` sums pi_s - pi over the tokens of each half of the prompt groups, (2, V), and
    ``bias_lag_tokens`` counts them, (2,); None where no token had both. ``noise`` holds the difference between the
    log-probs of the same tokens scored in a batch and alone. ``reasons`` says, with token counts, what was not scored.
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

    def __post_init__(self) -> None:
        for name in COLUMNS:
            setattr(self, name, np.full(self.tokens, np.nan))


COLUMNS = (
    *("stale_logprob", "trainer_logprob", "entropy_stale", "entropy_trainer"),
    *("kl_stale_trainer", "kl_trainer_stale", "total_variation"),
)


class StepScorer:
    """Scores steps one after another; networks that the next step needs again stay loaded.

    Args:
        options: device, dtype, temperature, bounds.
        on_tokens: called with the number of tokens after each forward pass.
    """

    def __init__(self, options: ScoringOptions, on_tokens: Callable[[int], None] = lambda _: None) -> None:
        self._options, self._on_tokens = options, on_tokens
        self._networks = NetworkCache(options)

    def score(
        self, rollouts: Rollouts, half: Ints, trainer: Path | None, sampler: Callable[[int], Path | None]
    ) -> StepScores:
        """Score every counted token.

        Args:
            rollouts: the step's sequences; ids must lie inside the vocabularies.
            half: 0 or 1 for each sequence, by prompt group, (n,).
            trainer: checkpoint of the trainer's current weights, None when there is none.
            sampler: checkpoint of a sampler version, or None.

        Raises:
            CheckpointError: a checkpoint cannot be loaded, or two of them differ in vocabulary.
        """
        scores = StepScores(len(rollouts.response.values))
        sequence = rollouts.sequence_of_token
        per_row = np.bincount(sequence[rollouts.loss_mask], minlength=len(rollouts))
        for rows in shards(per_row, SHARD_TOKENS):
            inside = rollouts.loss_mask & np.isin(sequence, rows)
            if inside.any():
                self._score_shard(scores, rollouts, half[sequence], inside, trainer, sampler)
        self._measure_noise(scores, rollouts, trainer, sampler)
        return scores

    def _score_shard(
        self,
        scores: StepScores,
        rollouts: Rollouts,
        half: Ints,
        inside: Bools,
        trainer: Path | None,
        sampler: Callable[[int], Path | None],
    ) -> None:
        """Score the tokens marked by ``inside``: the trainer once, then each sampler version on its own tokens."""
        if trainer is None:
            _count(scores.reasons, "no checkpoint of the trainer's weights at this step", int(inside.sum()))
        trainer_states = None if trainer is None else self._states(trainer, rollouts, inside)
        for version in np.unique(rollouts.sampler_version[inside]):
            mine = inside & (rollouts.sampler_version == version)
            place = np.flatnonzero(mine)
            stale = sampler(int(version))
            if stale is None:
                what = "unknown sampler version" if version == UNKNOWN_VERSION else f"sampler version {version}"
                _count(scores.reasons, f"no checkpoint for {what}", len(place))
            states = None if trainer_states is None else trainer_states[torch.from_numpy(mine[inside])]
            if stale is not None and trainer is not None and states is not None and stale != trainer:
                self._pair(scores, rollouts, half, mine, (stale, trainer), states)
            else:
                self._single(scores, rollouts, mine, stale, trainer, states)
                if stale is not None and stale == trainer:
                    # The same weights: the lag is zero by identity, not by measurement.
                    scores.bias_lag_tokens += np.bincount(half[place], minlength=2)
                    self._add_bias(scores, np.zeros((2, self._networks.get(stale).vocab_size)))

    def _pair(
        self,
        scores: StepScores,
        rollouts: Rollouts,
        half: Ints,
        mine: Bools,
        paths: tuple[Path, Path],
        trainer_states: Tensor,
    ) -> None:
        stale_states = self._states(paths[0], rollouts, mine)
        stale, trainer = self._networks.get(paths[0]), self._networks.get(paths[1])
        _same_vocabulary(stale, trainer)
        place = np.flatnonzero(mine)
        device = stale_states.device
        pair = compare(
            (stale, stale_states),
            (trainer, trainer_states),
            torch.from_numpy(rollouts.response.values[place]).to(device),
            torch.from_numpy(half[place]).to(device),
            self._options.temperature,
            self._options.chunk_elements,
        )
        for name, values in _columns(pair).items():
            getattr(scores, name)[place] = values.cpu().numpy()
        self._add_bias(scores, pair.bias_sum.cpu().numpy())
        scores.bias_lag_tokens += np.bincount(half[place], minlength=2)

    def _single(
        self,
        scores: StepScores,
        rollouts: Rollouts,
        mine: Bools,
        stale: Path | None,
        trainer: Path | None,
        trainer_states: Tensor | None,
    ) -> None:
        """Tokens with one set of weights: the same for both, or only one of them there."""
        path = trainer or stale
        if path is None:
            return
        states = self._states(path, rollouts, mine) if trainer_states is None else trainer_states
        place = np.flatnonzero(mine)
        ids = torch.from_numpy(rollouts.response.values[place]).to(states.device)
        one = score(self._networks.get(path), states, ids, self._options.temperature, self._options.chunk_elements)
        for role, own in (("stale", stale), ("trainer", trainer)):
            if own is not None:
                getattr(scores, f"{role}_logprob")[place] = one.logprob.cpu().numpy()
                getattr(scores, f"entropy_{role}")[place] = one.entropy.cpu().numpy()
        if stale is not None and stale == trainer:
            for name in ("kl_stale_trainer", "kl_trainer_stale", "total_variation"):
                getattr(scores, name)[place] = 0.0

    def _add_bias(self, scores: StepScores, bias_sum: Floats) -> None:
        scores.bias_lag_sum = bias_sum if scores.bias_lag_sum is None else scores.bias_lag_sum + bias_sum

    def _states(self, path: Path, rollouts: Rollouts, wanted: Bools) -> Tensor:
        """Hidden state before each wanted token, in token order, (wanted tokens, H)."""
        network = self._networks.get(path)
        sequence = rollouts.sequence_of_token
        rows = np.unique(sequence[wanted])
        lengths = rollouts.prompt.lengths[rows] + rollouts.response.lengths[rows]
        destination = np.cumsum(wanted) - 1
        out: Tensor | None = None
        for batch in batches(lengths, self._options.max_tokens):
            hidden = network.hidden(_pad(rollouts, rows[batch], int(lengths[batch].max())))
            if out is None:
                out = hidden.new_empty(int(wanted.sum()), hidden.shape[-1])
            for at, row in enumerate(rows[batch]):
                start, stop = rollouts.response.offsets[row], rollouts.response.offsets[row + 1]
                tokens = start + np.flatnonzero(wanted[start:stop])
                # The state at t predicts token t + 1, so the first response token hangs on the last prompt token.
                source = len(rollouts.prompt[row]) + (tokens - start) - 1
                out[torch.from_numpy(destination[tokens])] = hidden[at, torch.from_numpy(source)]
            self._on_tokens(int(lengths[batch].sum()))
        assert out is not None
        return out

    def _measure_noise(
        self, scores: StepScores, rollouts: Rollouts, trainer: Path | None, sampler: Callable[[int], Path | None]
    ) -> None:
        """Score a few sequences again, each alone: what the batch shape does to a score is the probe's own noise."""
        sequence = rollouts.sequence_of_token
        scored = rollouts.loss_mask & ~np.isnan(scores.stale_logprob)
        rows = np.unique(sequence[scored])
        chosen = rows[np.unique(np.linspace(0, len(rows) - 1, NOISE_SEQUENCES).astype(int))] if len(rows) else rows
        differences = []
        for row in chosen:
            alone = rollouts.take(np.array([row]))
            again = StepScores(len(alone.response.values))
            for version in np.unique(alone.sampler_version[alone.loss_mask]):
                mine = alone.loss_mask & (alone.sampler_version == version)
                self._single(again, alone, mine, sampler(int(version)), None, None)
            before = scores.stale_logprob[rollouts.response.offsets[row] : rollouts.response.offsets[row + 1]]
            gap = again.stale_logprob - before
            differences.append(gap[~np.isnan(gap)])
        scores.noise = np.concatenate(differences) if differences else np.zeros(0)


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


def _pad(rollouts: Rollouts, rows: Ints, width: int) -> Tensor:
    ids = np.zeros((len(rows), width), dtype=np.int64)
    for at, row in enumerate(rows):
        whole = np.concatenate([rollouts.prompt[row], rollouts.response[row]])
        ids[at, : len(whole)] = whole
    return torch.from_numpy(ids)


def _count(reasons: dict[str, int], reason: str, tokens: int) -> None:
    reasons[reason] = reasons.get(reason, 0) + tokens


def _same_vocabulary(stale: Network, trainer: Network) -> None:
    from mismatch_probe.errors import CheckpointError

    if stale.vocab_size != trainer.vocab_size:
        raise CheckpointError(
            f"{stale.path} has {stale.vocab_size} output rows and {trainer.path} has {trainer.vocab_size}. "
            "Both must be exported with the same vocabulary padding"
        )
