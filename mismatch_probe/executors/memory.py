"""Smaller passes where the memory does not hold those asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from mismatch_probe.errors import UsageError
from mismatch_probe.scoring.memory import out_of_memory
from mismatch_probe.scoring.networks import Networks
from mismatch_probe.scoring.parallel import Scorer
from mismatch_probe.scoring.scores import StepScores
from mismatch_probe.scoring.units import Unit

LEAST_TOKENS = 16
"""Passes are not made smaller than this."""


def score_in_memory(scorer: Scorer, networks: Networks, unit: Unit, on_notice: Callable[[str], None]) -> StepScores:
    """Score a unit; where memory runs out halve the scorer's passes, which stay halved, and begin it again.

    Raises:
        UsageError: the memory does not hold the smallest pass.
    """
    while True:
        try:
            return scorer.score(unit)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            # What can be loaded again goes first.
            if not networks.release():
                _halve(scorer, networks, on_notice)


def _halve(scorer: Scorer, networks: Networks, on_notice: Callable[[str], None]) -> None:
    options = scorer.options
    tokens = options.max_tokens // 2
    if tokens < LEAST_TOKENS:
        raise UsageError(
            f"{options.torch_device()}: out of memory with passes of {options.max_tokens} tokens. "
            "Use a device with more memory, or a narrower --dtype"
        ) from None
    chunk = max(networks.vocab_size, options.chunk_elements // 2)
    scorer.options = replace(options, max_tokens=tokens, chunk_elements=chunk)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    on_notice(
        f"{options.torch_device()}: out of memory; passes of {tokens} tokens from here on "
        f"(--max-tokens {tokens} begins with them)"
    )
