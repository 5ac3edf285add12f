"""verl's two dump files, built without verl: for what the fixtures that verl itself wrote do not hold.

Classes of the names that verl's pickles hold stand in while they are written. ``tests/fixtures/verl`` shows that the
reader takes the real ones alike.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from mismatch_probe.readers import ReadOptions, open_run
from mismatch_probe.run import Rollouts

FOLDER = "exp_proj/GBS4_N2_in8_out16"


@contextlib.contextmanager
def _modules() -> Iterator[types.SimpleNamespace]:
    """``verl.protocol.DataProto`` and the names of tensordict, importable while the block runs."""
    names = (
        *("verl", "verl.protocol", "tensordict", "tensordict._td", "tensordict._reductions"),
        "tensordict.tensorclass",
    )
    modules = {name: types.ModuleType(name) for name in names}

    class DataProto:
        def __init__(self, state: Any) -> None:
            self.state = state

        def __getstate__(self) -> Any:
            return self.state

        def __reduce_ex__(self, protocol: Any) -> Any:
            return object.__reduce_ex__(self, max(2, int(protocol)))

    def _make_td(kind: type, state: Any) -> None:
        raise AssertionError("the reader never calls it")

    class TensorDict:
        def __init__(self, columns: dict[str, Any]) -> None:
            self.columns = columns

        def __reduce__(self) -> Any:
            return _make_td, (TensorDict, {"_tensordict": self.columns})

    class NonTensorData:
        def __init__(self, value: Any) -> None:
            self.non_tensordict = {"data": value}

    class NonTensorStack:
        def __init__(self, *values: Any) -> None:
            self.tensordicts = [NonTensorData(value) for value in values]

    for module, thing in (
        ("verl.protocol", DataProto),
        ("tensordict.tensorclass", NonTensorData),
        ("tensordict.tensorclass", NonTensorStack),
        ("tensordict._td", TensorDict),
        ("tensordict._reductions", _make_td),
    ):
        thing.__module__, thing.__qualname__ = module, thing.__name__
        setattr(modules[module], thing.__name__, thing)
    with mock.patch.dict(sys.modules, modules):
        yield types.SimpleNamespace(DataProto=DataProto, TensorDict=TensorDict, NonTensorStack=NonTensorStack)


def tq_bytes(
    rows: list[dict[str, Any]], tags: list[Any] | None = None, keys: Any = None, more: dict[str, Any] | None = None
) -> bytes:
    """``tq_batch.pt`` of rows {column: values}: lists become a jagged nested tensor, other values objects.

    ``more`` holds columns that are written as they are.
    """
    with _modules() as names:
        columns: dict[str, Any] = {}
        for name in rows[0]:
            values = [row[name] for row in rows]
            if all(isinstance(value, list) for value in values):
                columns[name] = torch.nested.as_nested_tensor([torch.tensor(v) for v in values], layout=torch.jagged)
            else:
                columns[name] = names.NonTensorStack(*[torch.tensor(v) if isinstance(v, list) else v for v in values])
        keys = keys or [f"prompt{i // 2}_{i % 2}_0" for i in range(len(rows))]
        tags = [{"min_global_steps": 0, "max_global_steps": 0}] * len(rows) if tags is None else tags
        payload = {
            "tensordict": names.TensorDict(columns | (more or {})),
            "tags": tags,
            "keys": keys,
            "global_steps": 1,
        }
        stream = io.BytesIO()
        torch.save(payload, stream)
        return stream.getvalue()


def dp_bytes(batch: Any, others: dict[str, Any] | None = None) -> bytes:
    """A pickled DataProto: ``batch`` as {column: array} is written in the numpy form, anything else as it is."""
    if isinstance(batch, dict):
        columns = {
            name: (str(array.dtype), array.shape, np.frombuffer(array.tobytes(), dtype=np.uint8))
            for name, array in batch.items()
        }
        batch = ((len(next(iter(batch.values()))),), None, columns)
    with _modules() as names:
        return pickle.dumps(names.DataProto((batch, others or {}, {})))


def padded(rows: list[dict[str, Any]], prompt: int = 8, response: int = 16) -> dict[str, np.ndarray]:
    """Rows as ``tq_bytes`` takes them, in verl's padded columns."""

    def column(name: str, width: int, left: bool = False, dtype: Any = np.int64) -> np.ndarray:
        out = np.zeros((len(rows), width), dtype=dtype)
        for at, row in enumerate(rows):
            n = len(row[name])
            out[at, width - n if left else 0 : width if left else n] = row[name]
        return out

    made = {"prompts": column("prompts", prompt, left=True), "responses": column("responses", response)}
    made["response_mask"] = column("response_mask", response)
    attention = np.zeros((len(rows), prompt + response), dtype=np.int64)
    for at, row in enumerate(rows):
        attention[at, prompt - len(row["prompts"]) : prompt + len(row["responses"])] = 1
    made["attention_mask"] = attention
    for name in ("rollout_log_probs", "rm_scores"):
        if name in rows[0]:
            made[name] = column(name, response, dtype=np.float32)
    return made


def row(number: int, length: int = 4, prompt: tuple[int, ...] = (5, 6, 7)) -> dict[str, Any]:
    """One trajectory with log-probs of its own."""
    return {
        "prompts": list(prompt),
        "responses": [10 + number + i for i in range(length)],
        "response_mask": [1] * length,
        "rollout_log_probs": [-(1 + number + i) / 16 for i in range(length)],
        "rm_scores": [0.0] * (length - 1) + [float(number % 2)],
    }


def save(run_dir: Path, data: bytes, step: int = 1, inner: str | None = "0", folder: str = FOLDER) -> Path:
    """Write a file where verl writes it, with its meta.json: ``tq_batch.pt``, or ``gen_batch.dp`` for inner None."""
    where = run_dir / folder / str(step) / (inner or "")
    where.mkdir(parents=True, exist_ok=True)
    file = where / ("gen_batch.dp" if inner is None else "tq_batch.pt")
    file.write_bytes(data)
    (where / "meta.json").write_text(json.dumps({"global_steps": step}))
    return file


def load(run_dir: Path, *overrides: str) -> Rollouts:
    """The first step of a run, under ``--set`` overrides."""
    return open_run(run_dir, ReadOptions(overrides=overrides)).steps[0].load()
