"""What ``RolloutWriter`` adds to a training step, in seconds and as a share of the step:

    python benchmarks/rollout_writer.py [--tokens N] [--rounds R] [--checkpoint DIR] [--trained-tokens M]

One step of N response tokens in sequences of 64 to 2,048 tokens, with prompts, sampler and trainer log-probs, mask and
advantages. Each input kind is timed from the call to the finished, synced file, and compared with ``json.dumps`` of
the same rows into a file. The step it is compared with is a lower bound of a training step: log-softmax of the sampled
tokens, forward and backward, by a causal model, over M tokens, scaled to N; no optimizer, no sampling, no second
forward. Without --checkpoint the model has the shape of SmolLM2-135M and random weights. It runs on a GPU, in bfloat16,
where there is one, else in float32 on the CPU; the tensors of "torch, padded" lie on the same device.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_probe.log import RolloutWriter

VOCAB = 49_152
Columns = dict[str, list[Any]]


def make(tokens: int, seed: int = 0) -> Columns:
    """Ragged columns as numpy arrays: ids, float32 log-probs, masks."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(min(int(rng.integers(64, 2049)), tokens - sum(lengths)))
    columns: Columns = {"sampler_version": [11] * len(lengths), "group_id": [at // 8 for at in range(len(lengths))]}
    columns["prompt_ids"] = [rng.integers(0, VOCAB, int(rng.integers(64, 257))) for _ in lengths]
    columns["response_ids"] = [rng.integers(0, VOCAB, n) for n in lengths]
    columns["loss_mask"] = [rng.random(n) < 0.9 for n in lengths]
    columns["sampler_logprobs"] = [-rng.exponential(0.5, n).astype(np.float32) for n in lengths]
    columns["trainer_logprobs"] = [
        lp + (0.01 * rng.standard_normal(len(lp))).astype(np.float32) for lp in columns["sampler_logprobs"]
    ]
    columns["advantages"] = [float(value) for value in rng.standard_normal(len(lengths))]
    return columns


def as_lists(columns: Columns) -> Columns:
    """The same as Python lists."""
    return {key: [x.tolist() if isinstance(x, np.ndarray) else x for x in value] for key, value in columns.items()}


def as_padded(columns: Columns, kind: Callable[[Any], Any]) -> dict[str, Any]:
    """The same as a left- and right-padded batch of arrays of ``kind``."""
    prompts, responses = columns["prompt_ids"], columns["response_ids"]
    left, right = max(map(len, prompts)), max(map(len, responses))
    batch = {
        "input_ids": np.zeros((len(prompts), left + right), np.int64),
        "attention_mask": np.zeros((len(prompts), left + right), np.int64),
        "response_mask": np.zeros((len(prompts), right), np.int64),
        "loss_mask": np.zeros((len(prompts), right), np.int64),
        "sampler_logprobs": np.zeros((len(prompts), right), np.float32),
        "trainer_logprobs": np.zeros((len(prompts), right), np.float32),
    }
    for at, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        batch["input_ids"][at, left - len(prompt) : left + len(response)] = np.concatenate([prompt, response])
        batch["attention_mask"][at, left - len(prompt) : left + len(response)] = 1
        batch["response_mask"][at, : len(response)] = 1
        for key in ("loss_mask", "sampler_logprobs", "trainer_logprobs"):
            batch[key][at, : len(response)] = columns[key][at]
    scalars = {"advantages": np.array(columns["advantages"]), "sampler_version": 11, "group_id": columns["group_id"]}
    return {key: kind(value) for key, value in batch.items()} | scalars


def write_json(folder: Path, columns: Columns) -> None:
    """One JSON object a row, as frameworks that log with json.dumps do."""
    with (folder / "rows.jsonl").open("w") as stream:
        for row in zip(*columns.values(), strict=True):
            stream.write(json.dumps(dict(zip(columns, row, strict=True))) + "\n")


def train_seconds(checkpoint: Path | None, tokens: int, length: int = 512) -> float:
    """Seconds a token of forward and backward through the log-softmax of the sampled tokens."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if checkpoint is None:
        sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": VOCAB}
        heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes, **heads))
    else:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    rows = 1
    if torch.cuda.is_available():
        model, rows = model.to("cuda", torch.bfloat16), 32
    ids = torch.randint(0, model.config.vocab_size, (max(1, tokens // (rows * length)), rows, length))
    ids = ids.to(model.device)

    def step(batches: Any) -> None:
        for batch in batches:
            logits = model(input_ids=batch).logits[:, :-1]
            logits.float().log_softmax(-1).gather(-1, batch[:, 1:, None]).mean().neg().backward()
        batches.sum().item()  # waits for a GPU

    step(ids[:1])
    start = time.perf_counter()
    step(ids)
    return (time.perf_counter() - start) / ids.numel()


def timed(rounds: int, work: Callable[[Path], object]) -> tuple[float, float, float, int]:
    """Median and largest seconds, median processor seconds, and bytes written; each round in a folder of its own."""
    seconds, busy, size = [], [], 0
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            start, cpu = time.perf_counter(), time.process_time()
            work(Path(folder))
            seconds.append(time.perf_counter() - start)
            busy.append(time.process_time() - cpu)
            size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    return statistics.median(seconds), max(seconds), statistics.median(busy), size


def main() -> None:
    """Read the command line, print one line a kind of input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--trained-tokens", type=int, default=4096)
    options = parser.parse_args()
    import torch

    columns = make(options.tokens)
    lists, padded = as_lists(columns), as_padded(columns, np.asarray)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = as_padded(columns, lambda array: torch.as_tensor(array, device=device))
    works: dict[str, Callable[[Path], object]] = {
        "lists": lambda folder: RolloutWriter(folder).write_batch(12, **lists),
        "numpy, ragged": lambda folder: RolloutWriter(folder).write_batch(12, **columns),
        "numpy, padded": lambda folder: RolloutWriter(folder).write_padded(12, **padded),
        "torch, padded": lambda folder: RolloutWriter(folder).write_padded(12, **tensors),
        "json.dumps of the lists": lambda folder: write_json(folder, lists),
    }
    timed(1, works["lists"])
    step = train_seconds(options.checkpoint, options.trained_tokens) * options.tokens
    print(f"{options.tokens:,} tokens, {len(columns['group_id'])} sequences; forward and backward: {step:.0f} s")
    print("| input | seconds, median | largest | processor | share of the step | MB |\n|---" + "|---:" * 5 + "|")
    for name, work in works.items():
        median, largest, busy, size = timed(options.rounds, work)
        numbers = f"{median:.3f} | {largest:.3f} | {busy:.3f} | {median / step:.4%} | {size / 1e6:.1f}"
        print(f"| {name} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
