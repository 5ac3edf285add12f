"""Write the native layout from inside a trainer: ``RolloutWriter``.

    writer = RolloutWriter("runs/a", temperature=1.0, checkpoints="checkpoints/step_{version:06d}")
    with writer.step(12) as step:
        step.add(group_id=..., prompt_ids=..., response_ids=..., sampler_logprobs=..., sampler_version=12)

Lists, numpy arrays and torch tensors are taken; torch is never imported here.
"""

from __future__ import annotations

from mismatch_probe.log.step import StepWriter
from mismatch_probe.log.writer import RolloutWriter

__all__ = ["RolloutWriter", "StepWriter"]
