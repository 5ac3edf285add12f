"""From the options of ``decompose`` to the engine that is asked again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from mismatch_probe.errors import UsageError
from mismatch_probe.run import Run
from mismatch_probe.scoring.engine import ENGINE_DTYPE, EngineOptions, engine_arguments
from mismatch_probe.scoring.engine_session import EngineSession
from mismatch_probe.scoring.network import ScoringOptions

if TYPE_CHECKING:
    from mismatch_probe.decompose import DecomposeOptions


def engine_session(
    run: Run, options: DecomposeOptions, scoring: ScoringOptions, say: Callable[[str], None]
) -> EngineSession | None:
    """The engine of an analysis, None where none is asked for; nothing is started yet.

    Args:
        run: what is analysed.
        options: of ``decompose``.
        scoring: how its tokens are scored in this process.
        say: called with what the user must know.

    Raises:
        UsageError: the run has no checkpoints, or an argument for the engine makes no sense.
    """
    if options.engine is None:
        return None
    if run.trainer_checkpoints is None:
        raise UsageError("--engine: the run holds no checkpoints for an engine to load")
    if options.engine_dtype is None:
        say(f"engine dtype {ENGINE_DTYPE} is assumed. Pass --engine-dtype where the sampler had another")
    engine = EngineOptions(
        dtype=options.engine_dtype or ENGINE_DTYPE,
        temperature=scoring.temperature,
        top_k=options.engine_top_k,
        trust_remote_code=options.trust_remote_code,
        arguments=engine_arguments(options.engine_set),
        python=str(options.engine_python or sys.executable),
    )
    return EngineSession(engine, scoring, run.adapter_base, say)
