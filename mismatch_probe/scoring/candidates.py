"""Log-probs of some sequences under many checkpoints, temperatures and output heads: the scans' raw material."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mismatch_probe.run import Bools, Floats, Ragged
from mismatch_probe.scoring.heads import score
from mismatch_probe.scoring.network import Network, ScoringOptions
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
    """

    def __init__(
        self, options: ScoringOptions, base: Path | None = None, on_tokens: Callable[[int], None] = lambda _: None
    ) -> None:
        self._options, self._on_tokens = options, on_tokens
        self._networks = Networks(options, base)

    def score(
        self,
        body: Path,
        prompt: Ragged,
        response: Ragged,
        wanted: Bools,
        temperatures: Sequence[float],
        head: Path | None = None,
    ) -> CandidateScores:
        """Log-probs at the wanted tokens.

        Args:
            body: the checkpoint.
            prompt, response: the sequences.
            wanted: which response tokens, (tokens,).
            temperatures: logits are divided by each in turn.
            head: a checkpoint whose output head takes the place of the body's own.

        Raises:
            CheckpointError: a checkpoint cannot be loaded, or two of them differ in shape.
        """
        network = self._networks.get(body)
        states = hidden_states(network, prompt, response, wanted, self._options.max_tokens, self._on_tokens)
        top = network if head is None else self._networks.get(head)
        ids = torch.from_numpy(response.values[wanted])
        return _at(top, states, ids, temperatures, self._options.chunk_elements)

    def heads(
        self, body: Path, heads: Sequence[Path], prompt: Ragged, response: Ragged, wanted: Bools, temperature: float
    ) -> Floats:
        """Log-probs at the wanted tokens with the body of one checkpoint and each head in turn, (heads, n).

        The body runs once. Arguments as in ``score``.
        """
        states = hidden_states(
            self._networks.get(body), prompt, response, wanted, self._options.max_tokens, self._on_tokens
        )
        ids = torch.from_numpy(response.values[wanted])
        rows = []
        for head in heads:
            top = self._networks.get(head)
            rows.append(_at(top, states, ids, [temperature], self._options.chunk_elements).logprob[0])
        return np.array(rows)


def _at(
    network: Network, states: Tensor, ids: Tensor, temperatures: Sequence[float], chunk_elements: int
) -> CandidateScores:
    found = [score(network, states, ids, temperature, chunk_elements)[0] for temperature in temperatures]
    return CandidateScores(
        np.array([one.logprob.cpu().numpy() for one in found]).reshape(len(found), -1),
        np.array([one.entropy.cpu().numpy() for one in found]).reshape(len(found), -1),
    )
