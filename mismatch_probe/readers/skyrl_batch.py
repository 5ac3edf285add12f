"""SkyRL's pickled ``TrainingInputBatch`` as numpy arrays, in each form it has had, without its code.

Since 2026-03-24 (c7348d079) a call of ``_rebuild_tensor_batch(class, state)``; before, a dict subclass whose tensors
were pickled twice, once raw, which is passed over. A tensor in the state is raw ``torch.save`` bytes (before
2026-01-28) or a dict: numpy bytes with shape and dtype, with or without ``format``, or ``torch.save`` bytes for
bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mismatch_probe.errors import BadFileError
from mismatch_probe.readers.files import read_bytes
from mismatch_probe.readers.pickles import REPAIR, Stub, load_pickle
from mismatch_probe.readers.torch_archive import PASSED_OVER, load_torch

Array = npt.NDArray[Any]

_RESPONSE_FIELDS = ("response_mask", "loss_mask", "rollout_logprobs", "action_log_probs", "advantages")


@dataclass(frozen=True, eq=False)
class Batch:
    """(rows, S) ids and attention, (rows, R) fields of the response; ``groups`` names each row's prompt, None unknown.

    ``padding_rows`` were cut off the end. ``zero_trainer``: ``action_log_probs`` was there, and 0.0 throughout.
    """

    sequences: Array
    attention_mask: Array
    response_mask: Array
    loss_mask: Array
    rollout_logprobs: Array | None
    action_log_probs: Array | None
    advantages: Array | None
    groups: list[str] | None
    padding_rows: int
    zero_trainer: bool

    @property
    def rows(self) -> int:
        """Sequences in the batch."""
        return len(self.sequences)


def load_batch(file: Path) -> Batch:
    """Read one step's file.

    Raises:
        BadFileError: it is no such pickle, a field that is needed is missing, or shapes do not fit one another.
    """
    state = _state(load_pickle(read_bytes(file), file, _is_skyrl, PASSED_OVER))
    try:
        return _batch(state, file)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise BadFileError(file, None, f"not a SkyRL training batch ({reason})", REPAIR) from None


def _state(loaded: Any) -> Any:
    """The dict that the batch was pickled as."""
    if not isinstance(loaded, Stub):
        return None
    return loaded.args[1] if len(loaded.args) == 2 else loaded.state


def _batch(state: Any, file: Path) -> Batch:
    tensors = state["batch_dict"]
    metadata = state.get("metadata") or {}

    def field(name: str, required: bool = False) -> Array | None:
        array = _tensor(tensors[name] if required else tensors.get(name), name, file)
        if array is None and required:
            raise KeyError(name)
        if array is not None and array.ndim != 2:
            raise ValueError(f"{name} has shape {array.shape}")
        return array

    sequences, attention = field("sequences", True), field("attention_mask", True)
    response = {name: field(name, name in ("response_mask", "loss_mask")) for name in _RESPONSE_FIELDS}
    assert sequences is not None and attention is not None and response["response_mask"] is not None
    shape = response["response_mask"].shape
    if attention.shape != sequences.shape or shape[0] != len(sequences) or shape[1] > sequences.shape[1]:
        raise ValueError(f"shapes {sequences.shape}, {attention.shape} and {shape} do not fit one another")
    for name, array in response.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape} beside a response_mask of {shape}")
    padding = metadata.get("pad_size")
    padding = padding if isinstance(padding, int) and 0 < padding < shape[0] else 0
    rows = shape[0] - padding
    cut = {name: None if array is None else array[:rows] for name, array in response.items()}
    trainer = cut["action_log_probs"]
    zero = trainer is not None and not bool(trainer.any())
    if zero:
        cut["action_log_probs"] = None
    groups = _groups(metadata, rows)
    return Batch(sequences[:rows], attention[:rows], **cut, groups=groups, padding_rows=padding, zero_trainer=zero)  # type: ignore[arg-type]


def _groups(metadata: Any, rows: int) -> list[str] | None:
    """Prompt of each row, from ``policy_prompt_boundaries`` or, in step-wise dumps before 2026-04, trajectory ids."""
    boundaries = metadata.get("policy_prompt_boundaries")
    if isinstance(boundaries, list | tuple):
        names: list[str] = []
        for prompt, pair in enumerate(boundaries):
            start, end = pair
            if start != len(names) or not start < end <= rows:
                break
            names += [str(prompt)] * (end - start)
        if len(names) == rows:
            return names
    trajectories = metadata.get("trajectory_ids")
    if isinstance(trajectories, list) and len(trajectories) >= rows and all(isinstance(t, str) for t in trajectories):
        return [trajectory.rpartition("_")[0] for trajectory in trajectories[:rows]]
    return None


def _tensor(value: Any, name: str, file: Path) -> Array | None:
    """One field, in any of the encodings."""
    if isinstance(value, bytes):
        return _array(load_torch(value, file, _nothing), name)
    if value is None:
        return None
    if value.get("format") == "torch":
        return _array(load_torch(value["data"], file, _nothing), name)
    if value.get("format", "numpy") != "numpy":
        raise ValueError(f"{name} is encoded as {value['format']!r}")
    dtype = np.dtype(str(value["dtype"]))
    if dtype.kind not in "biuf":
        raise ValueError(f"{name} has dtype {dtype}")
    return np.frombuffer(value["data"], dtype=dtype).reshape(value["shape"])


def _array(value: Any, name: str) -> Array | None:
    if value is not None and not isinstance(value, np.ndarray):
        raise ValueError(f"{name} is no tensor")
    return value


def _is_skyrl(name: str) -> bool:
    module = name.rpartition(".")[0]
    return module.startswith("skyrl") or module.endswith("training_batch") or name == "torch.device"


def _nothing(name: str) -> bool:
    return False
