"""Log-probs of some sequences under many checkpoints, temperatures and output heads: the scans' raw material."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mismatch_probe.run import Bools, Floats, Ints, Ragged
from mismatch_probe.scoring.heads import score
from mismatch_probe.scoring.memory import in_memory
from mismatch_probe.scoring.network import ScoringOptions
from mismatch_probe.scoring.networks import Networks
from mismatch_probe.scoring.states import hidden_states


@dataclass(frozen=True, eq=False)
class CandidateScores:
    """One candidate at n tokens: ``logprob`` of each and ``entropy`` of its prefix, by temperature, nats, (T, n)."""

    logprob: Floats
    entropy: Floats


class CandidateScorer:
    """Scores the same few sequences under one checkpoint after another.

    Args:
        options: device, dtype, bounds; its temperature is not used.
        base: the model below checkpoints that are adapters.
        on_tokens: called with the number of tokens after each forward pass.
        on_notice: called with what a user must know of how a network is run.
    """

    def __init__(
        self,
        options: ScoringOptions,
        base: Path | None = None,
        on_tokens: Callable[[int], None] = lambda _: None,
        on_notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.options, self._on_tokens, self._on_notice = options, on_tokens, on_notice
        self._networks = Networks(options, base)

    def score(
        self,
        body: Path,
        prompt: Ragged,
        response: Ragged,
        wanted: Bools,
        temperatures: Sequence[float],
    ) -> CandidateScores:
        """Log-probs at the wanted tokens.

        Args:
            body: the checkpoint.
            prompt, response: the sequences.
            wanted: which response tokens, (tokens,).
            temperatures: logits are divided by each in turn.

        Raises:
            CheckpointError: a checkpoint cannot be loaded, or two of them differ in shape.
        """

        def work() -> CandidateScores:
            states = self._states(body, prompt, response, wanted)
            return self._at(body, states, response.values[wanted], temperatures)

        return in_memory(self, self._networks, work, self._on_notice)

    def heads(
        self, body: Path, heads: Sequence[Path], prompt: Ragged, response: Ragged, wanted: Bools, temperature: float
    ) -> Floats:
        """Log-probs at the wanted tokens with the body of one checkpoint and each head in turn, (heads, n).

        The body runs once. Arguments as in ``score``.
        """

        def work() -> Floats:
            states, ids = self._states(body, prompt, response, wanted), response.values[wanted]
            return np.array([self._at(head, states, ids, [temperature]).logprob[0] for head in heads])

        return in_memory(self, self._networks, work, self._on_notice)

    def _states(self, body: Path, prompt: Ragged, response: Ragged, wanted: Bools) -> Tensor:
        network = self._networks.get(body)
        return hidden_states(network, prompt, response, wanted, self.options.max_tokens, self._on_tokens)

    def _at(self, head: Path, states: Tensor, ids: Ints, temperatures: Sequence[float]) -> CandidateScores:
        """What the output head of one checkpoint makes of the states."""
        network, tokens = self._networks.get(head), torch.from_numpy(ids)
        found = [score(network, states, tokens, one, self.options.chunk_elements)[0] for one in temperatures]
        return CandidateScores(
            np.array([one.logprob.cpu().numpy() for one in found]).reshape(len(found), -1),
            np.array([one.entropy.cpu().numpy() for one in found]).reshape(len(found), -1),
        )
