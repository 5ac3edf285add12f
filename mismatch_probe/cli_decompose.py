"""The options of ``decompose``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mismatch_probe.cli_options import (
    AddressOption,
    AnalysisOption,
    Attention,
    AttentionOption,
    ClipOption,
    ConfidenceOption,
    ConstancyMarginOption,
    DeviceOption,
    EngineDtypeOption,
    EngineOption,
    EnginePythonOption,
    EngineSetOption,
    EngineTopKOption,
    ExecutorName,
    ExecutorOption,
    GpusOption,
    GradientOption,
    GradientTarget,
    GradientTargetOption,
    Head,
    HeadOption,
    Intervals,
    IntervalsOption,
    Level,
    LevelOption,
    MaxTokensOption,
    QuietOption,
    Ratio,
    RatioOption,
    RunFormatOption,
    SetOption,
    SkipBadRowsOption,
    StrictOption,
    TensorParallelOption,
    ThresholdOption,
    TrustOption,
    WorkersOption,
)


def decompose(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run directory, as its framework wrote it.")],
    output: AnalysisOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier analysis.")] = False,
    steps: Annotated[
        str | None, typer.Option(help="Steps FIRST:END:STRIDE (end left out), or a list: 10:40:5 or 3,8,20:30.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Sequences a step: whole prompt groups, drawn by seed.")
    ] = None,
    target_precision: Annotated[
        float | None,
        typer.Option(
            min=0.0001, max=0.5, metavar="W", help="Score prompt groups only until the judged ESS is decided or +-W."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of --limit and of the bootstrap.")] = 0,
    device: DeviceOption = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="float64, float32, bfloat16 or float16; default: the trainer's own.")
    ] = None,
    max_tokens: MaxTokensOption = None,
    attn: AttentionOption = Attention.auto,
    head: HeadOption = Head.auto,
    tensor_parallel: TensorParallelOption = None,
    executor: ExecutorOption = ExecutorName.local,
    address: AddressOption = None,
    gpus_per_worker: GpusOption = None,
    workers: WorkersOption = None,
    cache: Annotated[
        Path | None, typer.Option("--cache", help="Folder of finished scores; default scores/ in the analysis folder.")
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Neither use nor keep finished scores.")] = False,
    reference: Annotated[
        str | None, typer.Option(help="Say whose error D is, against float32; on a CPU also float64.")
    ] = None,
    reference_sequences: Annotated[int, typer.Option(min=1, help="Responses a step for --reference.")] = 16,
    fresh_rollouts: Annotated[
        int | None, typer.Option(min=1, help="Full KL: responses a step to draw from the trainer's weights.")
    ] = None,
    fresh_steps: Annotated[
        str | None, typer.Option(help="Steps for --fresh-rollouts, as --steps; default all.")
    ] = None,
    trust_remote_code: TrustOption = False,
    nearest: Annotated[
        bool,
        typer.Option("--nearest", help="Where a version has no checkpoint, score the closest; marked approximate."),
    ] = False,
    engine: EngineOption = None,
    engine_dtype: EngineDtypeOption = None,
    engine_top_k: EngineTopKOption = 0,
    engine_set: EngineSetOption = None,
    engine_python: EnginePythonOption = None,
    ess_level: LevelOption = Level.sequence,
    ess_threshold: ThresholdOption = 0.5,
    ess_ratio: RatioOption = Ratio.lag,
    confidence: ConfidenceOption = 0.95,
    intervals: IntervalsOption = Intervals.jackknife,
    constancy_margin: ConstancyMarginOption = 0.25,
    gradient: GradientOption = True,
    gradient_target: GradientTargetOption = GradientTarget.token,
    clip_eps: ClipOption = 0.2,
    diagnose: Annotated[bool, typer.Option("--diagnose/--no-diagnose", help="Look for causes at the end.")] = True,
    run_format: RunFormatOption = None,
    overrides: SetOption = None,
    skip_bad_rows: SkipBadRowsOption = False,
    strict: StrictOption = False,
    quiet: QuietOption = False,
) -> int:
    """Re-score every loss token and split its error into engine numerics and stale weights."""
    from mismatch_probe.decompose_command import run_decompose

    return run_decompose(
        run_dir,
        output,
        overwrite,
        run_format,
        tuple(overrides or ()),
        quiet,
        diagnose,
        steps=steps,
        limit=limit,
        target_precision=target_precision,
        seed=seed,
        device=device,
        dtype=dtype,
        max_tokens=max_tokens,
        attention=attn.value,
        head=head.value,
        tensor_parallel=tensor_parallel,
        executor=executor.value,
        address=address,
        gpus_per_worker=gpus_per_worker,
        workers=workers,
        cache=cache,
        keep_scores=not no_cache,
        reference=reference,
        reference_sequences=reference_sequences,
        fresh_rollouts=fresh_rollouts,
        fresh_steps=fresh_steps,
        trust_remote_code=trust_remote_code,
        nearest=nearest,
        engine=None if engine is None else engine.value,
        engine_dtype=None if engine_dtype is None else engine_dtype.value,
        engine_top_k=engine_top_k,
        engine_set=tuple(engine_set or ()),
        engine_python=engine_python,
        gradient=gradient,
        gradient_target=gradient_target.value,
        clip_eps=clip_eps,
        level=ess_level.value,
        threshold=ess_threshold,
        ratio=ess_ratio.value,
        intervals=intervals.value,
        constancy_margin=constancy_margin,
        confidence=confidence,
        skip_bad_rows=skip_bad_rows,
        strict=strict,
    )
