"""Training batches as SkyRL writes them, from its documented fields; the fixtures beside the tests are its own."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.reader_cases import Case
from tests.stand_ins import named

MODULE = "skyrl.backends.skyrl_train.training_batch"


def fields(cases: list[Case], left: bool = True) -> dict[str, Any]:
    """The batch of ``cases``; ``left``: all padding on the left (since 2026-03-18), else responses on the right."""
    width = max(len(case.response) for case in cases)
    prompts = max(len(case.prompt) for case in cases)
    total = max(len(case.prompt) + len(case.response) for case in cases) if left else prompts + width
    n = len(cases)
    out: dict[str, Any] = {
        "sequences": np.zeros((n, total), np.int64),
        "attention_mask": np.zeros((n, total), np.int64),
    }
    out |= {"response_mask": np.zeros((n, width), np.int64), "loss_mask": np.zeros((n, width), np.float32)}
    names = ("rollout_logprobs", "action_log_probs", "base_action_log_probs", "advantages", "returns")
    out |= {name: np.zeros((n, width), np.float32) for name in names}
    for row, case in enumerate(cases):
        length = len(case.response)
        start = total - length if left else prompts
        out["sequences"][row, start - len(case.prompt) : start + length] = case.prompt + case.response
        out["attention_mask"][row, start - len(case.prompt) : start + length] = 1
        cells = slice(width - length, width) if left else slice(0, length)
        out["response_mask"][row, cells] = 1
        out["loss_mask"][row, cells] = case.mask
        out["rollout_logprobs"][row, cells] = case.sampler
        out["action_log_probs"][row, cells] = case.trainer
        out["base_action_log_probs"][row, cells] = -3.0
        out["advantages"][row, cells] = case.advantage
    return {**out, "values": None, "kl": None, "rollout_expert_indices": None}


def boundaries(cases: list[Case]) -> list[tuple[int, int]]:
    """``policy_prompt_boundaries`` of cases whose groups are contiguous."""
    starts = [row for row, case in enumerate(cases) if not row or case.group != cases[row - 1].group]
    return list(zip(starts, [*starts[1:], len(cases)], strict=True))


def torch_bytes(value: Any) -> bytes:
    """What ``torch.save`` makes of it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def encode(array: Any, encoding: str) -> Any:
    """One tensor: "numpy", "numpy without format", "torch", "bytes" or "tensor_list"; what is a dict stays as it is."""
    if isinstance(array, dict):
        return array
    if encoding == "bytes":
        return torch_bytes(None if array is None else torch.from_numpy(array))
    if array is None:
        return None
    if encoding == "torch":
        return {"format": "torch", "data": encode(array, "bytes")}
    if encoding == "tensor_list":
        return {"format": "tensor_list", "items": [encode(row, "numpy") for row in array]}
    plain = {"data": array.tobytes(), "shape": array.shape, "dtype": str(array.dtype)}
    return plain if encoding == "numpy without format" else {"format": "numpy", **plain}


def write(
    run_dir: Path,
    batch: dict[str, Any],
    metadata: dict[str, Any],
    step: int = 4,
    encoding: str = "numpy",
    reduced: bool = True,
) -> Path:
    """Pickle one step; ``reduced``: by ``_rebuild_tensor_batch``, else as the dict subclass of before 2026-03-24."""
    state = {
        "batch_dict": {name: encode(array, encoding) for name, array in batch.items()},
        "batch_size": len(batch["sequences"]),
        "device": torch.device("cpu"),
        "metadata": metadata,
    }

    def rebuild(cls: type, state: Any) -> Any:
        raise AssertionError("never called here")

    class Reduced(dict):
        def __reduce__(self) -> Any:
            return rebuild, (Reduced, state)

    class Plain(dict):
        def __getstate__(self) -> Any:
            return state

    file = run_dir / "dumped_data" / f"global_step_{step}_training_input.pkl"
    file.parent.mkdir(parents=True, exist_ok=True)
    module = MODULE if reduced else "skyrl_train.training_batch"
    tensors = {name: torch.from_numpy(a) for name, a in batch.items() if isinstance(a, np.ndarray)}
    with (
        named(f"{module}._rebuild_tensor_batch", rebuild),
        named(f"{module}.TrainingInputBatch", Reduced if reduced else Plain),
    ):
        file.write_bytes(pickle.dumps((Reduced if reduced else Plain)(tensors)))
    return file
