"""Arguments and options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class ExecutorName(StrEnum):
    """Where units are scored."""

    local = "local"
    ray = "ray"


class Level(StrEnum):
    """Unit whose weight is judged."""

    token = "token"
    sequence = "sequence"
    prompt = "prompt"


class Ratio(StrEnum):
    """Ratio whose weights are judged."""

    lag = "lag"
    discrepancy = "discrepancy"
    total = "total"


class Intervals(StrEnum):
    """How intervals over prompt groups are made."""

    jackknife = "jackknife"
    bca = "bca"
    percentile = "percentile"


class GradientTarget(StrEnum):
    """Weights of the on-policy target that updates are compared with."""

    token = "token"
    per_decision = "per-decision"
    sequence = "sequence"


class Engine(StrEnum):
    """Inference engines that can be asked again."""

    vllm = "vllm"


class EngineDtype(StrEnum):
    """Precision of the engine's weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Attention(StrEnum):
    """Attention kernels."""

    auto = "auto"
    sdpa = "sdpa"
    flash = "flash"
    eager = "eager"


class Head(StrEnum):
    """What reduces over the vocabulary."""

    auto = "auto"
    torch = "torch"
    triton = "triton"


class DataFormat(StrEnum):
    """Formats of commands for people and programs."""

    text = "text"
    json = "json"


class ReadableFormat(StrEnum):
    """Formats of commands whose result is also pasted elsewhere."""

    text = "text"
    json = "json"
    markdown = "markdown"


class FigureFormat(StrEnum):
    """Picture formats."""

    png = "png"
    svg = "svg"


RunArgument = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run directory.", show_default=True)]
AnalysisOption = Annotated[
    Path | None, typer.Option("-o", "--output", help="Analysis folder; default RUN_DIR/mismatch_probe.")
]
RunFormatOption = Annotated[
    str | None, typer.Option("--run-format", help="Framework that wrote the run, instead of recognising it.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A run.toml key, over what the run says. Repeatable."),
]
LevelOption = Annotated[Level, typer.Option(help="Level at which breakdown is judged.")]
ThresholdOption = Annotated[float, typer.Option(min=0, max=1, help="ESS below it is a breakdown.")]
RatioOption = Annotated[Ratio, typer.Option(help="Ratio whose ESS is judged: lag alone, discrepancy alone, or both.")]
IntervalsOption = Annotated[Intervals, typer.Option(help="How intervals over prompt groups are made.")]
ConfidenceOption = Annotated[float, typer.Option(min=0.5, max=0.999, help="Coverage of the intervals.")]
ConstancyMarginOption = Annotated[
    float,
    typer.Option(min=0.01, max=10, help="Change of the discrepancy's mean square over the run that counts as none."),
]
GradientOption = Annotated[
    bool, typer.Option("--gradient/--no-gradient", help="Compare the head's update under each correction.")
]
GradientTargetOption = Annotated[GradientTarget, typer.Option(help="Weights pi / mu of the on-policy update.")]
ClipOption = Annotated[float, typer.Option(min=0.001, max=0.999, help="PPO's clip range epsilon.")]
EngineOption = Annotated[
    Engine | None,
    typer.Option("--engine", help="Score the tokens with this inference engine too, and split D at its prefill."),
]
EngineDtypeOption = Annotated[
    EngineDtype | None, typer.Option(help="Precision in which the run's sampler ran; default bfloat16.")
]
EngineTopKOption = Annotated[int, typer.Option(min=0, help="Keep the engine's K most probable tokens of each place.")]
EngineSetOption = Annotated[
    list[str] | None,
    typer.Option("--engine-set", metavar="KEY=VALUE", help="An argument of vLLM's LLM, in JSON. Repeatable."),
]
EnginePythonOption = Annotated[
    Path | None, typer.Option(help="Interpreter of the environment that has vLLM; default: this one.")
]
AttentionOption = Annotated[
    Attention,
    typer.Option(
        "--attn",
        help="Attention kernel. auto packs sequences and shares prompts; any other pads sequences in batches, slower.",
    ),
]
HeadOption = Annotated[
    Head, typer.Option(help="Reduction over the vocabulary; auto: Triton's on CUDA, where it agrees with torch's.")
]
TensorParallelOption = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Cut each model over N devices; default 1, under torchrun all of them."),
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
MaxTokensOption = Annotated[
    int | None, typer.Option(min=1, help="Tokens in one forward pass; default 2048, on CUDA 16384.")
]
TrustOption = Annotated[bool, typer.Option("--trust-remote-code", help="Run model code that comes with a checkpoint.")]
SkipBadRowsOption = Annotated[
    bool, typer.Option("--skip-bad-rows", help="Set aside lines and files that cannot be parsed.")
]
StrictOption = Annotated[bool, typer.Option("--strict", help="End with exit 2 at the first row that does not fit.")]
QuietOption = Annotated[bool, typer.Option("-q", "--quiet", help="No progress and no notes on stderr.")]
ExecutorOption = Annotated[
    ExecutorName, typer.Option(help="Where to score: in this process, or on the machines of a Ray cluster.")
]
AddressOption = Annotated[
    str | None, typer.Option(metavar="ADDR", help="Ray cluster, host:port or auto; default one on this machine.")
]
GpusOption = Annotated[
    float | None, typer.Option(min=0.0, metavar="G", help="GPUs of a Ray worker; default 1 on CUDA, else 0.")
]
WorkersOption = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Ray workers at most; default as many as the cluster holds.")
]
