"""One unit under the weights that sampled its tokens and under the trainer's."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mismatch_probe.run import UNKNOWN_VERSION, Bools, Ints, Rollouts
from mismatch_probe.scoring.head import PairScores, TokenScores
from mismatch_probe.scoring.heads import compare, score
from mismatch_probe.scoring.network import Network, ScoringOptions
from mismatch_probe.scoring.networks import Networks
from mismatch_probe.scoring.packing import sharing_rows
from mismatch_probe.scoring.plan import noise_rows, units
from mismatch_probe.scoring.scores import COLUMNS, GIVES_NO_NUMBER, StepScores, joined
from mismatch_probe.scoring.sketch import HeadSketch, StepFactors
from mismatch_probe.scoring.states import hidden_states
from mismatch_probe.scoring.units import Unit

STATE_BYTES = 1 << 29
"""Bytes of hidden states that are kept for sequences that a later step holds too."""


class UnitScorer:
    """Scores units one after another; networks that the next unit needs again stay loaded.

    Args:
        options: device, dtype, temperature, bounds.
        networks: where the weights come from.
        on_tokens: called with the number of tokens after each forward pass.
    """

    def __init__(self, options: ScoringOptions, networks: Networks, on_tokens: Callable[[int], None]) -> None:
        self.options = options
        self._networks, self._on_tokens = networks, on_tokens
        self._kept = _KeptStates(STATE_BYTES)
        self._sketch: HeadSketch | None = None

    def score(self, unit: Unit) -> StepScores:
        """Score every counted token: the trainer's weights once, then each sampler version on its own tokens.

        Raises:
            CheckpointError: a checkpoint cannot be loaded, or two of them differ in vocabulary.
        """
        scores = StepScores(len(unit.response.values))
        # What this unit needs again must outlive what it loads first.
        self._networks.touch(unit.paths)
        trainer = self._networks.usable(unit.trainer)
        states = None
        if trainer is None:
            scores.count("no checkpoint of the trainer's weights at this step", int(unit.counted.sum()))
        else:
            states = self._states(trainer, unit, unit.counted)
            scores.factors = self._factors(self._networks.get(trainer), unit)
        for version, path in unit.samplers.items():
            mine = unit.counted & (unit.version == version)
            self._networks.touch([trainer] if trainer is not None else [])
            stale = self._networks.usable(path, beside=trainer)
            if stale is None:
                what = "unknown sampler version" if version == UNKNOWN_VERSION else f"sampler version {version}"
                scores.count(f"no checkpoint for {what}", int(mine.sum()))
            if stale is None and trainer is None:
                continue
            own = None if states is None else states[torch.from_numpy(mine[unit.counted])]
            self._score_version(scores, unit, mine, (stale, trainer), own)
            self._measure_noise(scores, unit, mine, (stale, trainer))
        return scores

    def _score_version(
        self,
        scores: StepScores,
        unit: Unit,
        mine: Bools,
        paths: tuple[Path | None, Path | None],
        trainer_states: Tensor | None,
    ) -> None:
        """Tokens of one version under its weights and the trainer's, or under the one set of weights there is."""
        stale, trainer = paths
        place = np.flatnonzero(mine)
        ids = torch.from_numpy(unit.response.values[place])
        half = unit.half[unit.sequence_of_token[place]]
        if stale is not None and trainer is not None and stale != trainer:
            assert trainer_states is not None
            stale_states = self._states(stale, unit, mine)
            pair = (self._networks.get(stale), stale_states), (self._networks.get(trainer), trainer_states)
            found = compare(*pair, ids, torch.from_numpy(half), *self._bounds, self._sketch_for(scores, place))
            factors = found.factors
            for name, values in _columns(found).items():
                getattr(scores, name)[place] = values.cpu().numpy()
            known = np.isfinite(scores.kl_stale_trainer[place])
            scores.add_bias(found.bias_sum.cpu().numpy(), np.bincount(half[known], minlength=2))
        else:
            states = self._states(_either(paths), unit, mine) if trainer_states is None else trainer_states
            both = stale is not None and trainer is not None
            sketch = self._sketch_for(scores, place) if both else None
            one, factors = score(self._networks.get(_either(paths)), states, ids, *self._bounds, sketch)
            _put_one(scores, one, place, stale is not None, trainer is not None)
            if both:
                # The same weights: the lag is zero by identity, not by measurement.
                for name in ("kl_stale_trainer", "kl_trainer_stale", "total_variation"):
                    getattr(scores, name)[place] = 0.0
                scores.same_top[place] = 1.0
                vocab_size = self._networks.get(_either(paths)).vocab_size
                scores.add_bias(np.zeros((2, vocab_size)), np.bincount(half, minlength=2))
        if factors is not None and scores.factors is not None:
            scores.factors.put(factors, place)
        for role, own in (("stale", stale), ("trainer", trainer)):
            if own is not None:
                lost = int(np.isnan(getattr(scores, f"{role}_logprob")[place]).sum())
                scores.count(f"{own.name} {GIVES_NO_NUMBER}", lost)

    def _measure_noise(
        self, scores: StepScores, unit: Unit, mine: Bools, paths: tuple[Path | None, Path | None]
    ) -> None:
        """Score a few sequences again, each alone: what the batch shape does to a score is the probe's own noise.

        Only sequences that shared a pass tell anything.
        """
        before = scores.trainer_logprob if paths[0] is None else scores.stale_logprob
        network = self._networks.get(_either(paths))
        sequence = unit.sequence_of_token
        shared = sharing_rows(unit.prompt, unit.response, mine, self.options.max_tokens)
        for row in noise_rows(unit, shared):
            alone = mine & (sequence == row)
            states = hidden_states(network, unit.prompt, unit.response, alone, self.options.max_tokens, lambda _: None)
            again, _ = score(network, states, torch.from_numpy(unit.response.values[alone]), *self._bounds)
            gap = again.logprob.cpu().numpy() - before[alone]
            known = ~np.isnan(gap)
            scores.noise = np.concatenate([scores.noise, gap[known]])
            scores.noise_place = np.concatenate([scores.noise_place, np.flatnonzero(alone)[known]])

    def _factors(self, trainer: Network, unit: Unit) -> StepFactors | None:
        if unit.gradient is None or trainer.caps_logits:
            return None
        if self._sketch is None or self._sketch.shape != tuple(trainer.weight.shape):
            self._sketch = HeadSketch(trainer.weight)
        return StepFactors.of(unit.gradient, self._sketch)

    def _sketch_for(self, scores: StepScores, place: Ints) -> HeadSketch | None:
        """The sketch, where one of these tokens' factors is wanted."""
        return self._sketch if scores.factors is not None and bool(scores.factors.wanted[place].any()) else None

    @property
    def _bounds(self) -> tuple[float, int]:
        return self.options.temperature, self.options.chunk_elements

    def _states(self, path: Path, unit: Unit, wanted: Bools) -> Tensor:
        def run() -> Tensor:
            network = self._networks.get(path)
            return hidden_states(network, unit.prompt, unit.response, wanted, self.options.max_tokens, self._on_tokens)

        return self._kept.get((path, _key(unit, wanted)), run) if unit.recurs else run()


class _KeptStates:
    """Hidden states of sequences that several steps hold, the latest of them, up to ``most`` bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: OrderedDict[tuple[Path, bytes], Tensor] = OrderedDict()

    def get(self, key: tuple[Path, bytes], run: Callable[[], Tensor]) -> Tensor:
        """What is held, else what ``run`` gives."""
        if key not in self._held:
            self._held[key] = run()
        self._held.move_to_end(key)
        while sum(states.nbytes for states in self._held.values()) > self._most and len(self._held) > 1:
            self._held.popitem(last=False)
        return self._held[key]


class StepScorer:
    """Scores whole steps in this process, without a cache: what ``executors`` do with one.

    Args:
        options: device, dtype, temperature, bounds.
        on_tokens: called with the number of tokens after each forward pass.
        base: the model below checkpoints that are adapters.
    """

    def __init__(
        self, options: ScoringOptions, on_tokens: Callable[[int], None] = lambda _: None, base: Path | None = None
    ) -> None:
        self._options = options
        self._scorer = UnitScorer(options, Networks(options, base), on_tokens)

    def score(
        self,
        rollouts: Rollouts,
        half: Ints,
        trainer: Path | None,
        sampler: Callable[[int], Path | None],
        gradient: Bools | None = None,
    ) -> StepScores:
        """Score every counted token of a step; arguments as in ``plan.units``.

        Raises:
            CheckpointError: a checkpoint cannot be loaded, or two of them differ in vocabulary.
        """
        cut = units(0, rollouts, half, trainer, sampler, self._options.unit_tokens, gradient)
        return joined(len(rollouts.response.values), [(unit.place, self._scorer.score(unit)) for unit in cut])


def _key(unit: Unit, wanted: Bools) -> bytes:
    mark = hashlib.blake2b(digest_size=20)
    for array in (unit.prompt.offsets, unit.prompt.values, unit.response.offsets, unit.response.values, wanted):
        mark.update(array.tobytes())
    return mark.digest()


def _columns(pair: PairScores) -> dict[str, Tensor]:
    single = {
        "stale_logprob": pair.stale.logprob,
        "trainer_logprob": pair.trainer.logprob,
        "entropy_stale": pair.stale.entropy,
        "entropy_trainer": pair.trainer.entropy,
    }
    return single | {name: getattr(pair, name) for name in COLUMNS if name not in single}


def _either(paths: tuple[Path | None, Path | None]) -> Path:
    path = paths[1] if paths[0] is None else paths[0]
    assert path is not None
    return path


def _put_one(scores: StepScores, one: TokenScores, place: Ints, stale: bool, trainer: bool) -> None:
    for role, there in (("stale", stale), ("trainer", trainer)):
        if there:
            getattr(scores, f"{role}_logprob")[place] = one.logprob.cpu().numpy()
            getattr(scores, f"entropy_{role}")[place] = one.entropy.cpu().numpy()
