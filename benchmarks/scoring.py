"""Speed of the scorer against the usual ones, on the same tokens, model and dtype, in one run:

    python -m benchmarks.scoring MODEL [--groups G] [--rounds R] [--dtype float32 bfloat16] [--vllm-python PYTHON]

MODEL is a Hugging Face directory of a Llama-like model with a tokenizer. The workload is groups of 8 responses of 64 to
256 tokens to a prompt of 512, cut from this project's pages; a second version of the weights is MODEL plus noise. Each
scorer runs in a process of its own with the model loaded and warm; the best of R rounds counts. Times are processor
seconds: set OMP_NUM_THREADS=1, or waiting threads are counted too. ``ceiling`` is the time of the same matrix products
alone, every prompt once. martingale and vLLM are left out where they are not installed; vLLM runs with PYTHON, the
interpreter of its own environment.

    python -m benchmarks.scoring --linear        time against tokens, 10^4 to 10^6, small random Llama
    python -m benchmarks.scoring --memory        peak memory of the head pass against tokens and vocabulary
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from benchmarks.scorers import SCORERS, ceiling
from benchmarks.workload import ROOT, workload


def measure(model: Path, second: Path, which: str, dtype: str, groups: int, rounds: int, out: Path) -> None:
    """In a process of its own: load, warm up, score."""
    score = SCORERS[which](model, second, dtype)
    work = workload(model, groups)
    score(workload(model, 1, seed=1))
    best = {"cpu": float("inf"), "wall": float("inf")}
    for _ in range(rounds):
        cpu, wall = time.process_time(), time.perf_counter()
        values = score(work)
        best["cpu"] = min(best["cpu"], time.process_time() - cpu)
        best["wall"] = min(best["wall"], time.perf_counter() - wall)
    np.savez(out, values=values, tokens=work.tokens, **best)


def perturbed(model: Path, folder: Path) -> Path:
    """A second version: every matrix moved by a thousandth of its size."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in network.parameters():
            if weight.dim() == 2:
                weight += 1e-3 * weight.std() * torch.randn(weight.shape, generator=generator)
    network.save_pretrained(folder)
    return folder


def compare(options: argparse.Namespace, dtype: str, second: Path) -> None:
    """Every scorer, and a row for each."""
    work = workload(options.model, options.groups)
    least, flops = ceiling(options.model, work, dtype)
    parts = ", ".join(f"{name} {value / sum(flops.values()):.0%}" for name, value in flops.items())
    whole = sum(len(prompt) + len(response) for prompt, response in work.pairs)
    print(f"\n{dtype}: {work.tokens} response tokens, {work.unique} unique of {whole} ({parts})\n")
    print("| scorer | tokens/s | time, StepScorer = 1 | share of the ceiling | max. difference |")
    print("|---|" + "---:|" * 4)
    first = None
    for which in SCORERS:
        python = options.vllm_python if which.startswith("vLLM") else sys.executable
        if python is None or (which == "martingale" and find_spec("martingale") is None):
            continue
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "found.npz"
            child = [str(options.model), "--child", which, dtype, str(second), str(out)]
            counts = ["--groups", str(options.groups), "--rounds", str(options.rounds)]
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            subprocess.run([python, "-m", "benchmarks.scoring", *child, *counts], check=True, env=environment, cwd=ROOT)
            found = dict(np.load(out))
        seconds, values = float(found["cpu"]), found["values"]
        first = (seconds, values) if first is None else first
        share = "" if which == "StepScorer, two versions" else f"{least / seconds:.0%}"
        gap = np.abs(values - first[1]).max()
        print(f"| {which} | {work.tokens / seconds:.0f} | {seconds / first[0]:.2f} | {share} | {gap:.1e} |", flush=True)
    print(f"| bare matrix products | {work.tokens / least:.0f} | {least / first[0]:.2f} | 100% | |")


def linear(folder: Path) -> None:
    """Time against tokens, and the exponent of the fit."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from mismatch_probe.assemble import halves
    from mismatch_probe.run import Ragged
    from mismatch_probe.scoring.network import ScoringOptions
    from mismatch_probe.scoring.score import StepScorer

    config = LlamaConfig(
        vocab_size=8192, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    scorer = StepScorer(ScoringOptions(device="cpu"))
    rng, sizes, seconds = np.random.default_rng(0), [], []
    for tokens in (10_000, 30_000, 100_000, 300_000, 1_000_000):
        from benchmarks.workload import Workload

        groups = tokens // 1280
        prompts = [rng.integers(0, 8192, 512) for _ in range(groups)]
        rollouts = Workload(prompts, [[rng.integers(0, 8192, 160) for _ in range(8)] for _ in prompts]).rollouts()
        assert isinstance(rollouts.prompt, Ragged)
        started = time.process_time()
        scorer.score(rollouts, halves(rollouts), folder, lambda _: folder)
        sizes.append(len(rollouts.response.values))
        seconds.append(time.process_time() - started)
        print(f"{sizes[-1]:>9,} tokens {seconds[-1]:8.2f} s {sizes[-1] / seconds[-1]:8.0f} tokens/s", flush=True)
    power = np.polyfit(np.log(sizes), np.log(seconds), 1)[0]
    print(f"seconds grow as tokens to the power {power:.3f}")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--vllm-python")
    parser.add_argument("--linear", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        which, dtype, second, out = options.child
        measure(options.model, Path(second), which, dtype, options.groups, options.rounds, Path(out))
        return
    with tempfile.TemporaryDirectory() as folder:
        if options.linear:
            linear(Path(folder))
        elif options.memory:
            from benchmarks.head_memory import table

            table()
        else:
            second = perturbed(options.model, Path(folder) / "second")
            for dtype in options.dtype:
                compare(options, dtype, second)


if __name__ == "__main__":
    main()
