"""ROLL's dump in its consolidated form, parsed by what ROLL does itself: unpickle, and ``torch.load`` the inside."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from tests.roll_writer import write as write_batch
from tests.stand_ins import named

RESPONSE, PROMPT, GROUP = 1000, 200, 8


def write(run_dir: Path, tokens: int) -> list[Path]:
    """One step of ``tokens`` response tokens, a tenth of the responses' room padding."""
    torch.manual_seed(0)
    rows = max(GROUP, round(tokens / (0.9 * RESPONSE)))
    ends = PROMPT + torch.randint(int(0.8 * RESPONSE), RESPONSE + 1, (rows, 1))
    column = torch.arange(PROMPT + RESPONSE)[None]
    response = (column >= PROMPT) & (column < ends)
    logprobs = torch.where(response, -torch.rand(response.shape), torch.zeros(()))
    tensors = {
        "input_ids": torch.randint(0, 150_000, response.shape),
        "attention_mask": (column < ends).long(),
        "position_ids": column.expand(rows, -1).contiguous(),
        "prompt_mask": (column < PROMPT).expand(rows, -1).contiguous(),
        "response_mask": response.long(),
        "infer_logprobs": logprobs[:, 1:].contiguous(),
        "prompt_id": torch.arange(rows) // GROUP,
        "scores": torch.rand(rows),
    }
    return [write_batch(run_dir / "train", tensors)]


def parse(files: list[Path]) -> None:
    """Unpickle, load the storage and make a tensor of each field."""

    def rebuild(metadata: dict[str, Any], storage: torch.Tensor) -> dict[str, torch.Tensor]:
        made = {}
        for name, (dtype, shape, start, stop, padding) in metadata["leaves"].items():
            made[name] = storage[start : stop - padding].view(getattr(torch, dtype.split(".")[1])).view(shape)
        return made

    class DataProto:
        def __setstate__(self, state: Any) -> None:
            state[0].seek(0)
            self.batch = torch.load(state[0], weights_only=False)

    function = "tensordict._reductions._rebuild_tensordict_files_consolidated"
    with named(function, rebuild), named("roll.distributed.scheduler.protocol.DataProto", DataProto):
        for file in files:
            pickle.loads(file.read_bytes())
