"""Rows of padded batches: where a row's prompt and response lie, whichever side the padding is on."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def response_span(attention: Array, response: Array) -> tuple[int, int, int]:
    """Columns of one row of a padded batch: first of the prompt, first of the response, one past the response.

    Args:
        attention: (width,), nonzero at real tokens, which must be adjacent.
        response: (width,), nonzero at response tokens; may be zero inside the response, at tool tokens.

    Raises:
        ValueError: the row holds no real or no response token, or the masks contradict each other; says which.
    """
    real, marked = np.flatnonzero(attention), np.flatnonzero(response)
    if not len(real):
        raise ValueError("attention_mask marks no token")
    first, end = int(real[0]), int(real[-1]) + 1
    if end - first != len(real):
        raise ValueError("attention_mask has gaps between real tokens")
    if not len(marked):
        raise ValueError("the response is empty")
    if marked[0] < first or marked[-1] >= end:
        raise ValueError("the response mask marks padding")
    return first, int(marked[0]), end


def prompt_name(step: int, prompt: Array) -> str:
    """A group's name where nothing but the prompt's tokens says which sequences belong together."""
    digest = hashlib.blake2b(np.ascontiguousarray(prompt, dtype=np.int64).tobytes(), digest_size=6).hexdigest()
    return f"step{step}-prompt-{digest}"
