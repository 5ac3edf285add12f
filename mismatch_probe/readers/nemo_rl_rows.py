"""One line of NeMo-RL's training log -> a native row."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from mismatch_probe.readers.files import Row
from mismatch_probe.run import UNKNOWN_TOKEN


def native_row(step: int, number: int, line: Row) -> Row:
    """One line in native field names; arrays are cut to ``input_lengths`` and at the first loss token."""

    ids = np.asarray(line["token_ids"][0], dtype=np.int64)
    length = int(_value(line, "input_lengths", len(ids)))
    arrays: dict[str, Any] = {"token_ids": ids[:length]}
    for key in ("token_loss_mask", "generation_logprobs", "prev_logprobs", "advantages"):
        item = line.get(key)
        if item is None and key in ("token_loss_mask", "generation_logprobs"):
            raise KeyError(key)
        arrays[key] = None if item is None else np.asarray(item[0], dtype=np.float64)[:length]
        if arrays[key] is not None and len(arrays[key]) != len(arrays["token_ids"]):
            raise ValueError(f"{key} has {len(arrays[key])} values for {len(arrays['token_ids'])} tokens")
    mask = arrays["token_loss_mask"] * float(_value(line, "sample_loss_mask", 1.0))
    # The first token has no prefix; its log-prob is a filler whatever the mask says.
    mask[:1] = 0.0
    trained = np.flatnonzero(arrays["token_loss_mask"][1:]) + 1
    if not len(trained):
        raise ValueError("token_loss_mask marks no response token")
    start = int(trained[0])
    prompt = arrays["token_ids"][:start]
    prev = arrays["prev_logprobs"]
    if prev is not None and not bool(prev[start:].any()):
        prev = None
    return {
        "sequence_id": f"step{step}-{_value(line, 'idx', number - 1)}",
        "group_id": f"step{step}-prompt-{hashlib.blake2b(prompt.tobytes(), digest_size=6).hexdigest()}",
        "prompt_ids": prompt,
        "response_ids": arrays["token_ids"][start:],
        "sampler_logprobs": arrays["generation_logprobs"][start:],
        "trainer_logprobs": None if prev is None else prev[start:],
        "loss_mask": (mask[start:] > 0).astype(np.float64),
        "advantages": None if arrays["advantages"] is None else arrays["advantages"][start:],
        # Under dynamic sampling `rewards` is the batch before filtering, and its rows are not these.
        "reward": _value(line, "filtered_rewards", _value(line, "rewards")),
    }


def native_row_without_ids(step: int, number: int, line: Row) -> Row:
    """One line of v0.3 to v0.5, which logged neither ids nor masks.

    Those writers leave 0.0 in ``generation_logprobs`` wherever nothing was sampled, so a token counts where it is not
    0.0; a sampled token whose probability rounds to 1 is lost by that.
    """
    generation = np.asarray(_value(line, "generation_logprobs"), dtype=np.float64).ravel()
    previous = np.asarray(_value(line, "prev_logprobs"), dtype=np.float64).ravel()
    length = int(_value(line, "input_lengths", len(generation)))
    generation, previous = generation[:length], previous[:length]
    if len(generation) != len(previous):
        raise ValueError(f"prev_logprobs has {len(previous)} values for {len(generation)} tokens")
    generation[:1] = 0.0
    sampled = np.flatnonzero(generation)
    if not len(sampled):
        raise ValueError("generation_logprobs is 0.0 throughout")
    start = int(sampled[0])
    content = _value(line, "content")
    prompt = str(content[0]) if isinstance(content, list) and content else str(content)
    counted = generation[start:] != 0.0
    computed = bool(previous[start:][counted].any())
    return {
        "sequence_id": f"step{step}-{_value(line, 'idx', number - 1)}",
        "group_id": f"step{step}-prompt-{hashlib.blake2b(prompt.encode(errors='replace'), digest_size=6).hexdigest()}",
        "prompt_ids": np.full(max(start, 1), UNKNOWN_TOKEN),
        "response_ids": np.full(length - start, UNKNOWN_TOKEN),
        "sampler_logprobs": generation[start:],
        "trainer_logprobs": previous[start:] if computed else None,
        "loss_mask": counted.astype(np.float64),
        "reward": _value(line, "filtered_rewards", _value(line, "rewards")),
    }


def _value(line: Row, key: str, default: Any = None) -> Any:
    """A value out of its list of length 1."""
    item = line.get(key, default)
    return item[0] if isinstance(item, list) and len(item) == 1 else item
