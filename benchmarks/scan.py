"""What the scans of diagnose cost beside decompose, on a run with many checkpoints:

    python -m benchmarks.scan [--checkpoints 50] [--groups 8] [--length 128] [--hidden 128] [--layers 4]

Step k trains version k on responses of version k - 1, so that decompose runs two networks a step. Responses are random
tokens, their logged log-probs those of version k - 1 with the noise of bfloat16. Times are processor seconds: set
OMP_NUM_THREADS=1. The precision is the half-width of the 95 % interval of a step's mean |D| under one version.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mismatch_probe.diagnosis.diagnose import diagnose
from mismatch_probe.diagnosis.evidence import Evidence
from mismatch_probe.diagnosis.job import collect
from mismatch_probe.entry import main as command
from mismatch_probe.folder import open_analysis
from mismatch_probe.readers import ReadOptions, open_run
from mismatch_probe.scoring.network import ScoringOptions

VOCABULARY, PROMPT, MEMBERS, NOISE = 1024, 64, 8, 0.015


def write_run(path: Path, options: argparse.Namespace) -> int:
    """A run of as many steps as there are checkpoints; returns its response tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    model = LlamaForCausalLM(config).eval()
    rng = np.random.default_rng(0)
    before, tokens = model, 0
    for step in range(options.checkpoints):
        model.save_pretrained(path / f"checkpoints/step_{step:06d}")
        sampler, claimed = (model, 0) if step == 0 else (before, step - 1)
        rows = sample(sampler, step, claimed, options, rng)
        tokens += sum(len(row["response_ids"]) for row in rows)
        file = path / f"rollouts/step_{step:06d}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        before = LlamaForCausalLM(config).eval()
        before.load_state_dict(model.state_dict())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.001 * torch.randn_like(parameter)
    settings = 'name = "scan"\ntemperature = 1.0\ntrainer_dtype = "float32"\nlogprobs_mode = "processed"\n'
    (path / "run.toml").write_text(settings)
    return tokens


@torch.no_grad()
def sample(
    model: LlamaForCausalLM, step: int, claimed: int, options: argparse.Namespace, rng: np.random.Generator
) -> list[dict[str, object]]:
    """Rows of random tokens with a model's log-probs."""
    rows: list[dict[str, object]] = []
    for group in range(options.groups):
        prompt = rng.integers(3, VOCABULARY, size=PROMPT)
        ids = np.concatenate(
            [np.tile(prompt, (MEMBERS, 1)), rng.integers(3, VOCABULARY, size=(MEMBERS, options.length))], 1
        )
        logits = model(torch.from_numpy(ids)).logits[:, PROMPT - 1 : -1]
        found = torch.log_softmax(logits, -1).gather(-1, torch.from_numpy(ids[:, PROMPT:])[..., None])[..., 0].numpy()
        for member in range(MEMBERS):
            length = int(rng.integers(options.length // 2, options.length + 1))
            logged = found[member, :length] + NOISE * rng.normal(size=length)
            rows.append(
                {
                    "sequence_id": f"{step}-{group}-{member}",
                    "group_id": f"{step}-{group}",
                    "prompt_ids": prompt.tolist(),
                    "response_ids": ids[member, PROMPT : PROMPT + length].tolist(),
                    "sampler_logprobs": np.minimum(logged, 0.0).tolist(),
                    "sampler_version": claimed,
                    "reward": float(rng.random() < 0.5),
                }
            )
    return rows


def precision(evidence: Evidence) -> float:
    """Median over steps of the half-width of the interval of mean |D|, as the scan sees it."""
    scan = evidence.scan
    assert scan is not None
    gap = np.abs(scan.spread_claimed(len(evidence.tokens), scan.declared) - evidence.tokens.sampler)
    steps = np.unique(evidence.step_of_token)
    ends = [evidence.mean(gap, evidence.step_of_token == step) for step in steps]
    return float(np.median([(high - low) / 2 for _, low, high in ends]))


def main() -> None:
    """Write, decompose, diagnose, and print one row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=int, default=50)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        tokens = write_run(path, options)
        start = time.process_time()
        with contextlib.redirect_stdout(io.StringIO()):
            command(["decompose", str(path), "-q"])
        alone = time.process_time() - start
        scored: list[int] = []
        start = time.process_time()
        run = open_run(path, ReadOptions(), None)
        scoring = ScoringOptions(device="cpu", dtype="float32")
        evidence = collect(run, open_analysis(path, None), scoring, on_tokens=scored.append)
        scanned = time.process_time() - start
        found = diagnose(evidence)
        more = time.process_time() - start
        print("| checkpoints | response tokens | decompose | scans | scans and checks | more | precision | findings |")
        print("|---:|---:|---:|---:|---:|---:|---:|---|")
        codes = ", ".join(finding.code for finding in found.findings) or "none"
        print(
            f"| {options.checkpoints} | {tokens} | {alone:.1f} s | {scanned:.1f} s | {more:.1f} s "
            f"| {more / alone:.0%} | {precision(evidence):.4f} nats | {codes} |"
        )
        print(f"\nTokens through networks in the scans: {sum(scored)}.")


if __name__ == "__main__":
    main()
