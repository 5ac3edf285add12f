"""What the tests of checkpoint layouts share: logits of a checkpoint, and fixtures written by torch's own writers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from mismatch_probe.checkpoints.huggingface import load_model
from tests.tiny import VOCAB

ROOT = Path(__file__).resolve().parent.parent
IDS = torch.randint(0, VOCAB, (3, 17), generator=torch.Generator().manual_seed(7))


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits


def load(path: Path, base: Path | None = None, dtype: torch.dtype = torch.float32) -> Any:
    return load_model(path, torch.device("cpu"), dtype, False, base)


def gap(path: Path, model: Any, base: Path | None = None) -> float:
    """Largest difference of logits between a checkpoint, as it is loaded, and the model that wrote it."""
    return float((logits(load(path, base)) - logits(model)).abs().max())


def write_sharded(out: Path) -> None:
    """Run ``tests/write_sharded.py`` in a process of its own: it forks ranks, which a test process must not."""
    made = subprocess.run(
        [sys.executable, "-m", "tests.write_sharded", str(out)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr


def save_dcp(state: dict[str, torch.Tensor], folder: Path) -> None:
    """A torch DCP checkpoint of one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group is meant
        dcp.save(state, checkpoint_id=folder, no_dist=True)


class Hostile:
    """Unpickled by a plain unpickler, it writes a file."""

    def __init__(self, witness: Path) -> None:
        self._witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._witness}",)


def edit_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
