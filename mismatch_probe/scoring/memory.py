"""What running out of memory looks like, and smaller passes where it happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from mismatch_probe.errors import UsageError

if TYPE_CHECKING:
    from mismatch_probe.scoring.network import ScoringOptions
    from mismatch_probe.scoring.networks import Networks

LEAST_TOKENS = 16
"""Passes are not made smaller than this."""

T = TypeVar("T")


class Bounded(Protocol):
    """A scorer whose passes can be made smaller."""

    @property
    def options(self) -> ScoringOptions:
        """The bounds in force."""

    @options.setter
    def options(self, value: ScoringOptions) -> None: ...


def out_of_memory(error: BaseException) -> bool:
    """True for what torch raises when a device, or the host, has no memory left."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def in_memory(scorer: Bounded, networks: Networks, work: Callable[[], T], on_notice: Callable[[str], None]) -> T:
    """Do some scoring; where memory runs out halve the scorer's passes, which stay halved, and begin it again.

    Raises:
        UsageError: the memory does not hold the smallest pass.
    """
    while True:
        try:
            return work()
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            # What can be loaded again goes first.
            if not networks.release():
                _halve(scorer, networks, on_notice)


def _halve(scorer: Bounded, networks: Networks, on_notice: Callable[[str], None]) -> None:
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
