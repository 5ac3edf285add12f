"""What the dtype of scoring does to the numbers, in words."""

from __future__ import annotations

from mismatch_probe.run import Run
from mismatch_probe.scoring.devices import emulation_notice
from mismatch_probe.scoring.network import ScoringOptions


def precision_notices(run: Run, device: str, dtype: str | None) -> list[str]:
    """Notices on the precision of scoring; ``dtype`` None means the trainer's own."""
    dtype = dtype or run.settings.trainer_dtype
    if run.trainer_checkpoints is None or dtype in ("float32", "float64"):
        return []
    emulated = emulation_notice(ScoringOptions(device=device).torch_device(), dtype)
    return [
        f"scored in {dtype}: its rounding is part of D and L (in bfloat16 some .04 nats rms a log-prob). "
        "Pass --dtype float32 to see a lag below that",
        *([emulated] if emulated else []),
    ]
