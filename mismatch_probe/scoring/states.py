"""Hidden states of chosen tokens: pack or pad, run the body, pick."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from mismatch_probe.run import Bools, Ints, Ragged
from mismatch_probe.scoring.attention import Memory
from mismatch_probe.scoring.network import Network
from mismatch_probe.scoring.packing import packs, unique_tokens
from mismatch_probe.scoring.plan import batches


def hidden_states(
    network: Network,
    prompt: Ragged,
    response: Ragged,
    wanted: Bools,
    max_tokens: int,
    on_tokens: Callable[[int], None],
) -> Tensor:
    """Hidden state of the position before each wanted token, in token order, (wanted tokens, H).

    Args:
        network: the weights.
        prompt, response: the sequences; only those with a wanted token are run.
        wanted: which response tokens, (tokens,).
        max_tokens: tokens in one forward pass.
        on_tokens: called with the number of tokens after each pass.
    """
    weight = network.weight
    out = torch.empty(int(wanted.sum()), network.hidden_size, dtype=weight.dtype, device=weight.device)
    if network.no_packing:
        _batched(network, prompt, response, wanted, max_tokens, on_tokens, out)
        return out
    memory = Memory()
    for pack in packs(prompt, response, wanted, max_tokens):
        hidden = network.packed(pack, memory)
        out[torch.from_numpy(pack.target)] = hidden[torch.from_numpy(pack.source)]
        on_tokens(len(pack.ids))
    return out


def _batched(
    network: Network,
    prompt: Ragged,
    response: Ragged,
    wanted: Bools,
    max_tokens: int,
    on_tokens: Callable[[int], None],
    out: Tensor,
) -> None:
    """Every sequence whole, beside others of about its length."""
    rows = np.unique(response.row_of_value[wanted])
    lengths = prompt.lengths[rows] + response.lengths[rows]
    destination = np.cumsum(wanted) - 1
    unique, finished, reported = unique_tokens(prompt, response, wanted), 0, 0
    for batch in batches(lengths, 1 if network.one_at_a_time else max_tokens):
        hidden = network.hidden(_pad(prompt, response, rows[batch], int(lengths[batch].max())))
        for at, row in enumerate(rows[batch]):
            start, stop = response.offsets[row], response.offsets[row + 1]
            tokens = start + np.flatnonzero(wanted[start:stop])
            # The state at t predicts token t + 1, so the first response token hangs on the last prompt token.
            source = len(prompt[row]) + (tokens - start) - 1
            out[torch.from_numpy(destination[tokens])] = hidden[at, torch.from_numpy(source)]
        # What was planned counts a prompt once, whoever runs it.
        done = int(unique * (finished := finished + int(lengths[batch].sum())) / lengths.sum())
        on_tokens(done - reported)
        reported = done


def _pad(prompt: Ragged, response: Ragged, rows: Ints, width: int) -> Tensor:
    ids = np.zeros((len(rows), width), dtype=np.int64)
    for at, row in enumerate(rows):
        whole = np.concatenate([prompt[row], response[row]])
        ids[at, : len(whole)] = whole
    return torch.from_numpy(ids)
