"""Runs whose every number is known: real checkpoints of a bigram language model, and tokens drawn from a known mu.

A Llama whose attention and MLP are zero computes logits = W norm(e_last). With embeddings c e_i and no epsilon in the
norm, norm(c e_i) = sqrt(H) e_i, so W[:, i] sqrt(H) is the row of logits after token i: any bigram table can be planted,
and every distribution is a row of its softmax.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 16


def log_softmax(table: np.ndarray) -> np.ndarray:
    peak = table.max(axis=-1, keepdims=True)
    return table - peak - np.log(np.exp(table - peak).sum(axis=-1, keepdims=True))


def write_bigram_checkpoint(path: Path, logits: np.ndarray) -> None:
    """Save a Llama whose logits after token i are ``logits[i]``, in float64."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=VOCAB,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        rms_norm_eps=0.0,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.zero_() if "norm" not in name else parameter.fill_(1.0)
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB))
        model.lm_head.weight.copy_(torch.from_numpy(logits.T / np.sqrt(VOCAB)))
    model.save_pretrained(path)


@dataclass
class Planted:
    """A run and its truth; ``trainer[v]`` are the log-probs of version v, ``mu[v]`` what the engine drew from."""

    path: Path
    trainer: list[np.ndarray]
    mu: list[np.ndarray]
    rows: dict[int, list[dict]] = field(default_factory=dict)


def draw(table: np.ndarray, prompt: list[int], length: int, rng: np.random.Generator) -> list[int]:
    tokens, last = [], prompt[-1]
    for _ in range(length):
        last = int(rng.choice(VOCAB, p=np.exp(table[last])))
        tokens.append(last)
    return tokens


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def plant(
    path: Path,
    *,
    steps: int = 3,
    groups: int = 6,
    per_group: int = 4,
    noise: float = 0.05,
    drift: float = 0.3,
    sampler_version=lambda step: 0,
    suffix: str = "parquet",
    temperature: float = 1.0,
    seed: int = 0,
) -> Planted:
    """Write a run with ``steps`` steps; version v + 1 moves the table of version v by ``drift``."""
    rng = np.random.default_rng(seed)
    raw = [rng.normal(size=(VOCAB, VOCAB))]
    for _ in range(steps):
        raw.append(raw[-1] + drift * rng.normal(size=(VOCAB, VOCAB)))
    trainer = [log_softmax(table / temperature) for table in raw]
    mu = [log_softmax(table / temperature + noise * rng.normal(size=table.shape)) for table in raw]
    planted = Planted(path, trainer, mu)
    for version, table in enumerate(raw):
        write_bigram_checkpoint(path / "checkpoints" / f"step_{version:06d}", table)
    for step in range(steps):
        version = sampler_version(step)
        rows = []
        for group in range(groups):
            prompt = rng.integers(0, VOCAB, size=rng.integers(1, 5)).tolist()
            for member in range(per_group):
                response = draw(mu[version], prompt, int(rng.integers(3, 9)), rng)
                prefix = [prompt[-1], *response[:-1]]
                rows.append(
                    {
                        "sequence_id": f"s{step}-{group}-{member}",
                        "group_id": f"s{step}-{group}",
                        "prompt_ids": prompt,
                        "response_ids": response,
                        "sampler_logprobs": mu[version][prefix, response].tolist(),
                        "loss_mask": [True] * len(response),
                        "sampler_version": version,
                        "reward": float(member),
                    }
                )
        planted.rows[step] = rows
        write_rows(path / "rollouts" / f"step_{step:06d}.{suffix}", rows)
    write_toml(path, temperature=temperature)
    return planted


def write_toml(path: Path, **extra) -> None:
    values = {"name": "planted", "trainer_dtype": "float64", "vocab_size": VOCAB, **extra}
    lines = [f"{key} = {json.dumps(value).replace('Infinity', 'inf')}" for key, value in values.items()]
    (path / "run.toml").write_text("\n".join(lines) + "\n")
