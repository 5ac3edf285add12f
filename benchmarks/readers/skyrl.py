"""SkyRL's batch in its numpy form, parsed by what SkyRL does itself: unpickle, and make an array of each field."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from tests.skyrl_writer import MODULE
from tests.skyrl_writer import write as write_batch
from tests.stand_ins import named

RESPONSE, PROMPT, GROUP = 1000, 200, 8


def write(run_dir: Path, tokens: int) -> list[Path]:
    """One step of ``tokens`` response tokens, a tenth of the batch padding."""
    rng = np.random.default_rng(0)
    rows = max(GROUP, round(tokens / (0.9 * RESPONSE)))
    lengths = rng.integers(int(0.8 * RESPONSE), RESPONSE + 1, size=rows)
    response = np.arange(RESPONSE)[None] >= RESPONSE - lengths[:, None]
    attention = np.arange(RESPONSE + PROMPT)[None] >= RESPONSE - lengths[:, None]
    logprobs = np.where(response, -rng.exponential(size=response.shape), 0.0).astype(np.float32)
    fields: dict[str, Any] = {
        "sequences": rng.integers(0, 150_000, size=attention.shape),
        "attention_mask": attention.astype(np.int64),
        "response_mask": response.astype(np.int64),
        "loss_mask": response.astype(np.float32),
    }
    names = ("rollout_logprobs", "action_log_probs", "base_action_log_probs", "advantages", "returns")
    fields |= dict.fromkeys(names, logprobs)
    starts = range(0, rows, GROUP)
    bounds = [(start, min(start + GROUP, rows)) for start in starts]
    return [write_batch(run_dir, fields, {"policy_prompt_boundaries": bounds, "pad_size": 0})]


def parse(files: list[Path]) -> None:
    """Unpickle, and copy each field out of its bytes."""

    def rebuild(cls: type, state: Any) -> Any:
        decoded = {}
        for name, value in state["batch_dict"].items():
            if value is not None:
                decoded[name] = np.frombuffer(value["data"], dtype=value["dtype"]).reshape(value["shape"]).copy()
        return decoded

    class Batch(dict[str, Any]):
        pass

    with named(f"{MODULE}._rebuild_tensor_batch", rebuild), named(f"{MODULE}.TrainingInputBatch", Batch):
        for file in files:
            pickle.loads(file.read_bytes())
