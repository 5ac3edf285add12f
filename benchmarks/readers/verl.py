"""verl's ``tq_batch.pt`` of one step, and ``torch.load`` as the plain parser of it.

The archive is what verl 0.9.1 writes, column by column, but for the class of its table: where tensordict is not
installed, a class of the same name stands in, which pickles alike.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch

_LENGTH, _PROMPT, _GROUP = 1000, 200, 8


def write(run_dir: Path, tokens: int) -> list[Path]:
    """One step of ``tokens`` response tokens in responses of about 1000."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(_LENGTH // 2, 3 * _LENGTH // 2, size=max(1, tokens // _LENGTH))
    rows = [_row(rng, int(length)) for length in lengths]
    keys = [f"{i // _GROUP:08d}-0000-4000-8000-000000000000_{i % _GROUP}_0" for i in range(len(rows))]
    tags = [{"status": "success", "global_steps": 2, "min_global_steps": 1, "max_global_steps": 1} for _ in rows]
    nested = torch.nested.as_nested_tensor
    columns = {name: nested([row[name] for row in rows], layout=torch.jagged) for name in rows[0]}
    folder = run_dir / "exp_proj" / f"GBS128_N{_GROUP}_in{_PROMPT}_out{2 * _LENGTH}" / "2" / "0"
    folder.mkdir(parents=True)
    payload = {"tensordict": _table(columns, len(rows)), "tags": tags, "keys": keys, "global_steps": 2}
    torch.save(payload, folder / "tq_batch.pt")
    (folder / "meta.json").write_text(json.dumps({"global_steps": 2, "num_trajectories": len(rows)}))
    return [folder / "tq_batch.pt"]


def parse(files: list[Path]) -> None:
    """Load the archives with torch."""
    _module()
    for file in files:
        torch.load(file, weights_only=False)


def _row(rng: np.random.Generator, length: int) -> dict[str, torch.Tensor]:
    prompt, response = (torch.from_numpy(rng.integers(3, 150_000, size=n)) for n in (_PROMPT, length))
    mask = torch.ones(length, dtype=torch.int64)
    score = torch.zeros(length)
    score[-1] = 1.0
    return {
        "prompts": prompt,
        "responses": response,
        "response_mask": mask,
        "rollout_log_probs": torch.from_numpy(-rng.exponential(0.5, size=length).astype(np.float32)),
        "rm_scores": score,
        "loss_mask": mask,
        "input_ids": torch.cat([prompt, response]),
        "position_ids": torch.arange(_PROMPT + length),
    }


def _table(columns: dict[str, Any], rows: int) -> Any:
    made = _module()
    if hasattr(made, "stand_in"):
        return made.TensorDict(columns, torch.Size([rows]))
    return made.TensorDict(columns, batch_size=[rows])


def _module() -> Any:
    """Tensordict, or modules of its name with the two names that its pickles hold."""
    try:
        import tensordict
    except ImportError:
        tensordict, inner, reductions = (types.ModuleType(f"tensordict{part}") for part in ("", "._td", "._reductions"))

        def _make_td(kind: type, state: Any) -> Any:
            made = kind.__new__(kind)
            made.__dict__.update(state)
            return made

        class TensorDict:
            def __init__(self, columns: dict[str, Any], batch_size: Any) -> None:
                self._tensordict, self._batch_size = columns, batch_size

            def __reduce__(self) -> Any:
                return _make_td, (type(self), dict(self.__dict__))

        _make_td.__module__, _make_td.__qualname__ = reductions.__name__, "_make_td"
        TensorDict.__module__, TensorDict.__qualname__ = inner.__name__, "TensorDict"
        reductions._make_td, inner.TensorDict, tensordict.TensorDict = _make_td, TensorDict, TensorDict
        tensordict.stand_in = True
        for module in (tensordict, inner, reductions):
            sys.modules[module.__name__] = module
    return tensordict
