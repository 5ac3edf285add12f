"""Accuracy and speed of the scorer on a CUDA device, in one table:

    python -m benchmarks.gpu_check [--device cuda] [--model DIRECTORY] [--dtype float32 bfloat16 float16]

Without a CUDA device it says so and exits 5; ``--device cpu`` runs the same checks there, on a small model. Without
``--model`` the weights are random, in the shapes of Qwen3-0.6B. Accuracy: packed, batched and one-by-one passes
against each other, the fused head pass against torch's, the noise floor. Speed: FLOP/s of the unique tokens over those
that bare torch.matmul of the model's own shapes reaches, best of three. Exit 1 when a result is beyond its bound.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.device_checks import Check, Size
from mismatch_probe.errors import ExitCode

SHAPES: dict[str, dict[str, Any]] = {
    "cuda": {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "initializer_range": 0.05,
    },
    "cpu": {
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "initializer_range": 0.25,
    },
}
SIZES = {"cuda": Size(32, 512, 64, 256, 32_000), "cpu": Size(2, 24, 4, 12, 200)}


def second_version(model: Any, folder: Path) -> Path:
    """Every matrix moved by a thousandth of its size."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight += 1e-3 * weight.std() * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(folder)
    return folder


def versions(given: Path | None, kind: str, folder: Path) -> tuple[Path, Path]:
    """The model and a second version of it; random weights where none is given."""
    from transformers import AutoModelForCausalLM, Qwen3Config
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if given is not None:
        return given, second_version(AutoModelForCausalLM.from_pretrained(given), folder / "second")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SHAPES[kind], tie_word_embeddings=True))
    model.save_pretrained(folder / "first")
    return folder / "first", second_version(model, folder / "second")


def main(arguments: list[str] | None = None) -> int:
    """Run every check and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16", "float16"])
    options = parser.parse_args(arguments)
    kind = torch.device(options.device).type
    if kind == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("gpu-check: no CUDA device here, nothing measured; --device cpu runs it on a small model\n")
        return int(ExitCode.NOTHING_TO_JUDGE)
    name = torch.cuda.get_device_name(options.device) if kind == "cuda" else f"{torch.get_num_threads()} CPU threads"
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        check = Check(options.device, *versions(options.model, kind, Path(folder)), SIZES[kind])
        print(
            f"{name}, torch {torch.__version__}: {check.work.tokens:,} response tokens, {check.work.unique:,} unique\n"
        )
        print("| check | dtype | result | bound or ceiling | |\n|---|---|---|---|---|")
        for dtype in options.dtype:
            for row in check.rows(dtype):
                failed += row.passed is False
                print(f"| {row.check} | {row.dtype} | {row.result} | {row.limit} | {row.verdict} |", flush=True)
    print(f"\n{failed} beyond their bound" if failed else "\nall within their bounds")
    return int(ExitCode.GATE_FAILED if failed else ExitCode.OK)


if __name__ == "__main__":
    sys.exit(main())
