"""How a run is scored, from its settings and what the user asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mismatch_probe.run import Run
from mismatch_probe.scoring.network import ScoringOptions

if TYPE_CHECKING:
    from mismatch_probe.decompose import DecomposeOptions


def scoring_choice(run: Run, options: DecomposeOptions) -> ScoringOptions:
    """The scoring options.

    Raises:
        UsageError: the device, or what is asked of it, is not there.
    """
    scoring = ScoringOptions(
        device=options.device,
        dtype=options.dtype or run.settings.trainer_dtype,
        temperature=run.settings.scoring_temperature,
        trust_remote_code=options.trust_remote_code,
        attention=options.attention,
        head=options.head,
        tensor_parallel=options.tensor_parallel,
    ).for_device()  # a device that is not there fails before anything is read
    return scoring if options.max_tokens is None else replace(scoring, max_tokens=options.max_tokens)
