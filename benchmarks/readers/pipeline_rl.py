"""PipelineRL: one step in both streams, as packed batches and as groups."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson

LENGTH, GROUP = 2000, 8


def write(run_dir: Path, tokens: int) -> list[Path]:
    """One step of ``tokens`` response tokens in responses of LENGTH, GROUP a prompt."""
    rng = np.random.default_rng(0)
    sequences = -(-tokens // LENGTH)
    texts = []
    for at in range(sequences):
        ids = rng.integers(0, 150_000, size=200 + LENGTH).tolist()
        texts.append(
            {
                "text": "word " * LENGTH,
                "n_predicted": 5 * LENGTH,
                "reward": 1.0,
                "logprobs": (-rng.exponential(0.5, size=LENGTH)).tolist(),
                "ref_logprobs": [],
                "input_ids": ids,
                "labels": [-100] * 200 + ids[200:],
                "group_id": f"maker_{at // GROUP}",
                "finished": True,
                "metadata": {"model_version": 0, "rollout_index": at % GROUP, "step_index": 0},
            }
        )
    (run_dir / "conf").mkdir(parents=True)
    config = f"finetune: {{train_batch_size: 1, gradient_accumulation_passes: {sequences}}}\n"
    (run_dir / "conf" / "exp_config.yaml").write_text(config)
    actor = run_dir / "streams" / "actor" / "0" / "0" / "0.jsonl"
    training = run_dir / "streams" / "training_data" / "0" / "0" / "0.jsonl"
    for file in (actor, training):
        file.parent.mkdir(parents=True)
    with actor.open("wb") as stream:
        for start in range(0, sequences, GROUP):
            stream.write(orjson.dumps(texts[start : start + GROUP]) + b"\n")
    with training.open("wb") as stream:
        for start in range(0, sequences, 5):
            stream.write(orjson.dumps(_batch(texts[start : start + 5]), option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
    return [actor, training]


def parse(files: list[Path]) -> None:
    """What reading costs at least: every line through orjson."""
    for file in files:
        with file.open("rb") as stream:
            for line in stream:
                orjson.loads(line)


def _batch(texts: list[dict]) -> dict:
    ids = np.concatenate([text["input_ids"] for text in texts])[None]
    old = np.concatenate([np.concatenate([np.zeros(200), text["logprobs"]]) for text in texts])[None]
    zeros, ones = np.zeros(ids.shape, np.float32), np.ones(ids.shape, np.float32)
    bounds = np.concatenate([[0], np.cumsum([len(text["input_ids"]) for text in texts])])
    return {
        "input_ids": ids,
        "attention_mask": np.ones(ids.shape, np.int64),
        "labels": np.concatenate([text["labels"] for text in texts])[None],
        "position_ids": np.arange(ids.shape[1])[None],
        "segment_ids": np.zeros(ids.shape, np.int64),
        "rewards": ones,
        "advantages": ones,
        "ref_logprobs": old.astype(np.float32),
        "old_logprobs": old.astype(np.float32),
        "group_tokens": ones,
        "num_labels": ones,
        "overflow": zeros,
        "model_version": 0,
        "sentinel": False,
        "padding": 0,
        "is_packed": True,
        "seq_boundaries": bounds,
    }
