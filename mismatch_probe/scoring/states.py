"""Hidden states of chosen tokens: pad, run the body, pick."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from mismatch_probe.run import Bools, Ints, Rollouts
from mismatch_probe.scoring.network import Network
from mismatch_probe.scoring.plan import batches


def hidden_states(
    network: Network, rollouts: Rollouts, wanted: Bools, max_tokens: int, on_tokens: Callable[[int], None]
) -> Tensor:
    """Hidden state of the position before each wanted token, in token order, (wanted tokens, H).

    Args:
        network: the weights.
        rollouts: the sequences; only those with a wanted token are run.
        wanted: which response tokens, (tokens,).
        max_tokens: padded tokens in one forward pass.
        on_tokens: called with the number of tokens after each pass.
    """
    rows = np.unique(rollouts.sequence_of_token[wanted])
    lengths = rollouts.prompt.lengths[rows] + rollouts.response.lengths[rows]
    destination = np.cumsum(wanted) - 1
    out = torch.empty(int(wanted.sum()), network.hidden_size, dtype=network.weight.dtype, device=network.weight.device)
    for batch in batches(lengths, max_tokens):
        hidden = network.hidden(_pad(rollouts, rows[batch], int(lengths[batch].max())))
        for at, row in enumerate(rows[batch]):
            start, stop = rollouts.response.offsets[row], rollouts.response.offsets[row + 1]
            tokens = start + np.flatnonzero(wanted[start:stop])
            # The state at t predicts token t + 1, so the first response token hangs on the last prompt token.
            source = len(rollouts.prompt[row]) + (tokens - start) - 1
            out[torch.from_numpy(destination[tokens])] = hidden[at, torch.from_numpy(source)]
        on_tokens(int(lengths[batch].sum()))
    return out


def _pad(rollouts: Rollouts, rows: Ints, width: int) -> Tensor:
    ids = np.zeros((len(rows), width), dtype=np.int64)
    for at, row in enumerate(rows):
        whole = np.concatenate([rollouts.prompt[row], rollouts.response[row]])
        ids[at, : len(whole)] = whole
    return torch.from_numpy(ids)
