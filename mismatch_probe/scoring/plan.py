"""Which sequences go through the network together."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mismatch_probe.run import Ints

CPU_MAX_TOKENS, CUDA_MAX_TOKENS = 2048, 16384
"""Padded tokens in one forward pass. On a CPU larger passes fall out of the caches and cost page faults."""
STATE_BYTES = 1 << 29
"""Bytes of hidden states that are held at once for one network; two are at work, and picking tokens copies one."""


def batches(lengths: Ints, max_tokens: int) -> Iterator[Ints]:
    """Cut sequences into right-padded batches of at most ``max_tokens`` padded tokens, longest first.

    Sorting by length keeps the padding small; longest first finds a lack of memory at once. A sequence that is longer
    than the budget goes alone.

    Args:
        lengths: tokens of each sequence, (n,).
        max_tokens: rows times longest row.

    Yields:
        Row numbers of one batch.
    """
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        rows = max(1, max_tokens // max(1, int(lengths[order[start]])))
        yield order[start : start + rows]
        start += rows


def shards(tokens: Ints, max_tokens: int) -> Iterator[Ints]:
    """Cut sequences, in order, into runs whose scored tokens sum to about ``max_tokens``: hidden states of one shard
    are held at a time.
    """
    shard_of_row = (np.cumsum(tokens) - tokens) // max_tokens
    for shard in np.unique(shard_of_row):
        yield np.flatnonzero(shard_of_row == shard)
