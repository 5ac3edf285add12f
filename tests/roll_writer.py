"""Rollout dumps as ROLL writes them, from its documented fields; the fixtures beside the tests are its own."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.reader_cases import Case
from tests.stand_ins import named


def fields(cases: list[Case]) -> dict[str, torch.Tensor]:
    """The tensors of ``cases``: everything padded on the right, log-probs shifted to the left by one."""
    width = max(len(case.prompt) + len(case.response) for case in cases) + 2
    names = ("input_ids", "attention_mask", "response_mask")
    out = {name: torch.zeros(len(cases), width, dtype=torch.int64) for name in names}
    logprobs = torch.zeros(len(cases), width)
    for row, case in enumerate(cases):
        start, end = len(case.prompt), len(case.prompt) + len(case.response)
        out["input_ids"][row, :end] = torch.tensor(case.prompt + case.response)
        out["attention_mask"][row, :end] = 1
        out["response_mask"][row, start:end] = torch.tensor(case.mask, dtype=torch.int64)
        logprobs[row, start:end] = torch.tensor(case.sampler)
    scores = torch.tensor([case.reward for case in cases])
    return {**out, "infer_logprobs": logprobs[:, 1:].contiguous(), "scores": scores}


def shifted(cases: list[Case], width: int) -> torch.Tensor:
    """The trainer's log-probs, laid out as ``infer_logprobs``."""
    out = torch.zeros(len(cases), width)
    for row, case in enumerate(cases):
        out[row, len(case.prompt) : len(case.prompt) + len(case.response)] = torch.tensor(case.trainer)
    return out[:, 1:].contiguous()


def archive(tensors: dict[str, torch.Tensor], consolidated: bool) -> bytes:
    """What ``torch.save`` makes of a TensorDict of these tensors: tensordict's two forms, without tensordict."""
    storage = bytearray()
    leaves = {}
    for name, tensor in tensors.items() if consolidated else ():
        data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        padding = -len(data) % 8
        start = len(storage)
        storage += data + bytes(padding)
        leaves[name] = (str(tensor.dtype), list(tensor.shape), start, len(storage), padding)

    def rebuild(*args: Any) -> Any:
        raise AssertionError("never called here")

    class TensorDict:
        pass

    class Saved:
        def __reduce__(self) -> Any:
            if consolidated:
                metadata = {
                    "cls": "TensorDict",
                    "non_tensors": {},
                    "leaves": leaves,
                    "cls_metadata": {"batch_size": []},
                }
                return rebuild, (metadata, torch.frombuffer(storage, dtype=torch.uint8))
            return rebuild, (TensorDict, {"_tensordict": tensors, "_batch_size": torch.Size([2]), "_device": None})

    function = "_rebuild_tensordict_files_consolidated" if consolidated else "_make_td"
    buffer = io.BytesIO()
    with named(f"tensordict._reductions.{function}", rebuild), named("tensordict._td.TensorDict", TensorDict):
        torch.save(Saved(), buffer)
    assert zipfile.is_zipfile(buffer)
    return buffer.getvalue()


def write(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    objects: dict[str, list[Any]] | None = None,
    step: int = 4,
    consolidated: bool = True,
    remote: bool = True,
    meta: Any = None,
) -> Path:
    """Pickle one step; ``remote``: the state has four parts, as since 2026-06-18, else three."""
    columns = {name: np.array(values, dtype=object) for name, values in (objects or {}).items()}
    rest = (columns, None, meta or {}) if remote else (columns, meta or {})

    class DataProto:
        def __getstate__(self) -> Any:
            return (io.BytesIO(archive(tensors, consolidated)), *rest)

    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"step_{step:06d}.pkl"
    with named("roll.distributed.scheduler.protocol.DataProto", DataProto):
        file.write_bytes(pickle.dumps(DataProto(), protocol=pickle.HIGHEST_PROTOCOL))
    return file
