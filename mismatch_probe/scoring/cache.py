"""Scores of units on disk, by content: what was scored once is never scored again, in this run or in another."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import mismatch_probe
from mismatch_probe.errors import OutputError
from mismatch_probe.scoring.network import ScoringOptions
from mismatch_probe.scoring.scores import COLUMNS, StepScores
from mismatch_probe.scoring.sketch import StepFactors
from mismatch_probe.scoring.units import Unit
from mismatch_probe.table_io import output_error

_ALWAYS = ("noise", "noise_place", "bias_lag_tokens")
_PART = ".part-"
_ABANDONED = 3600.0
"""Seconds after which a file that is still being written is taken for a dead process's."""
_FACTORS = ("wanted", "score", "centred", "state")
_CODE = ("scoring", "checkpoints")
"""Packages whose source decides what a score is."""


class ScoreCache:
    """Files of scores in one folder, one a unit.

    The key covers weights, tokens, temperature, dtype, bounds, kind of device, this program's code and the libraries':
    a score is found only where scoring again would give the same bytes. A file that is torn or of another kind is
    scored again.

    Args:
        folder: created when something is put.
        options: how units are scored.
    """

    def __init__(self, folder: Path, options: ScoringOptions) -> None:
        self.folder = folder
        self._settings = json.dumps(
            {
                **environment(options),
                "dtype": options.dtype,
                "temperature": options.temperature,
                "bounds": [options.max_tokens, options.chunk_elements],
                "kernels": [options.attention, options.head, options.tensor_parallel],
            }
        ).encode()

    def path(self, unit: Unit, fingerprints: dict[Path, str]) -> Path:
        """File of a unit's scores, whether or not it is there."""
        mark = hashlib.blake2b(self._settings, digest_size=20)
        mark.update(unit.content(fingerprints))
        return entry(self.folder, mark.hexdigest())

    def get(self, path: Path) -> StepScores | None:
        """The scores in a file; None where there are none."""
        arrays = read_arrays(path)
        try:
            return None if arrays is None else _scores(arrays)
        except (ValueError, KeyError):
            return None

    def put(self, path: Path, scores: StepScores) -> None:
        """Keep scores, whole or not at all.

        Raises:
            OutputError: the folder is full or cannot be written.
        """
        write_arrays(path, _arrays(scores))


def environment(options: ScoringOptions) -> dict[str, Any]:
    """What every number depends on beside its inputs: this program's code, the libraries, the kind of device."""
    return {
        "code": code_digest(),
        "libraries": [version(name) for name in ("torch", "transformers")],
        "device": options.torch_device().type,
    }


def entry(folder: Path, name: str) -> Path:
    """File of a cache; many of them in one folder are slow to list."""
    return folder / name[:2] / f"{name}.npz"


def read_arrays(path: Path) -> dict[str, np.ndarray] | None:
    """The arrays of a file in a cache; None where there is none, or it is torn."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as found:
            return {name: found[name] for name in found.files}
    # A damaged file fails in many ways; whatever it is, its scores are made again.
    except Exception:
        return None


def write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Keep arrays in a file two folders below the cache's own, whole or not at all.

    Raises:
        OutputError: the folder is full or cannot be written.
    """
    part = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path.parent)
        # A name that no other process on any machine has.
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=_PART, delete=False) as stream:
            part = Path(stream.name)
            np.savez(stream, **arrays)  # type: ignore[arg-type]
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            if part is not None:
                part.unlink(missing_ok=True)
        reason = output_error(path.parent.parent, error)
        raise OutputError(f"{reason}, or pass --no-cache") from None


def _sweep(folder: Path) -> None:
    """Remove what a killed process left half written."""
    for part in folder.glob(f"{_PART}*"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > _ABANDONED:
                part.unlink()


@cache
def code_digest() -> str:
    """Digest of the source files that decide what a score is."""
    mark = hashlib.blake2b(mismatch_probe.__version__.encode(), digest_size=12)
    root = Path(mismatch_probe.__file__).parent
    for package in _CODE:
        for file in sorted((root / package).glob("*.py")):
            mark.update(file.name.encode() + file.read_bytes())
    return mark.hexdigest()


def _arrays(scores: StepScores) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {name: getattr(scores, name) for name in COLUMNS}
    arrays |= {name: getattr(scores, name) for name in _ALWAYS}
    arrays["reasons"] = np.array(json.dumps(list(scores.reasons.items())))
    if scores.bias_lag_sum is not None:
        arrays["bias_lag_sum"] = scores.bias_lag_sum
    if scores.factors is not None:
        arrays |= {f"factors_{name}": getattr(scores.factors, name) for name in _FACTORS}
        arrays["factors_exact"] = np.array(scores.factors.exact)
    return arrays


def _scores(arrays: dict[str, np.ndarray]) -> StepScores:
    scores = StepScores(len(arrays[COLUMNS[0]]))
    for name in COLUMNS:
        setattr(scores, name, arrays[name])
    for name in _ALWAYS:
        setattr(scores, name, arrays[name])
    scores.bias_lag_sum = arrays.get("bias_lag_sum")
    scores.reasons = dict(json.loads(str(arrays["reasons"])))
    if "factors_score" in arrays:
        wanted, *factors = (arrays[f"factors_{name}"] for name in _FACTORS)
        scores.factors = StepFactors(wanted, bool(arrays["factors_exact"]), *factors)
    return scores
