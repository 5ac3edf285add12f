"""How far vLLM is from transformers on a real small language model.

Sample with vLLM in bfloat16 and lay the samples out as a run of two steps (environment: the ``record`` extra):

    python benchmarks/engine_gap.py record CHECKPOINT RUN_DIR

CHECKPOINT is a Hugging Face directory with one safetensors file and a tokenizer. Step 0 holds the samples under the
weights that drew them. Step 1 holds the same samples, drawn by version 0, with version 1 = version 0 plus Gaussian
noise as the trainer: its lag is made up, its scoring is what a stale step costs. Then, for each dtype:

    mismatch-probe decompose RUN_DIR --dtype float32 -o RUN_DIR/float32
    mismatch-probe decompose RUN_DIR --dtype bfloat16 -o RUN_DIR/bfloat16
    python benchmarks/engine_gap.py show RUN_DIR/float32 RUN_DIR/bfloat16
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

PROMPTS = (
    "The history of the lighthouse begins",
    "To make a good vegetable soup, first",
    "Dear Sir or Madam,\n\nI am writing to",
    "def fibonacci(n):\n",
    "Question: What is 17 times 24?\nAnswer:",
    "The three laws of thermodynamics state that",
    "Once upon a time, in a village by the sea,",
    "In economics, inflation is",
    "Translate to French: The weather is nice today.\n",
    "Patient presents with a cough and",
    "SELECT name, COUNT(*) FROM orders",
    "Roses are red,\n",
    "The match was decided in the last minute when",
    "My favourite book is",
    "Step 1: Turn off the power. Step 2:",
    "Let x be a real number such that x^2 - 5x + 6 = 0. Then",
)
SAMPLES, MAX_TOKENS = 4, 128
SETTINGS = """name = "engine_gap"
temperature = 1.0
top_p = 1.0
top_k = -1
logprobs_mode = "processed"
trainer_dtype = "float32"
max_response_length = {max_tokens}
checkpoints = "checkpoints/step_{{version:06d}}"
"""
SHOWN = (
    *("discrepancy_mean_abs", "discrepancy_rms", "discrepancy_k3", "discrepancy_mean_weight", "lag_rms"),
    *("log_ratio_rms", "ess_discrepancy_sequence", "ess_lag_sequence", "prefix_kl_stale_trainer", "noise_floor_rms"),
)


def sample(checkpoint: Path) -> list[dict[str, Any]]:
    """Rows of the native layout: ``SAMPLES`` responses to each prompt, at temperature 1 with nothing cut off."""
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams, TokensPrompt

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS for _ in range(SAMPLES)]
    llm = LLM(
        model=str(checkpoint),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=len(prompts),
        logprobs_mode="processed_logprobs",
        generation_config="vllm",  # the checkpoint's own sampling defaults must not get in
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    common: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 0}
    common |= {"max_tokens": MAX_TOKENS, "stop_token_ids": [tokenizer.eos_token_id], "detokenize": False}
    params = [SamplingParams(seed=seed, **common) for seed in range(len(prompts))]
    requests = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], params, use_tqdm=False)
    rows = []
    for at, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        ids = list(request.outputs[0].token_ids)
        entries = zip(ids, request.outputs[0].logprobs, strict=True)
        row: dict[str, Any] = {"sequence_id": f"{at // SAMPLES}-{at % SAMPLES}", "group_id": str(at // SAMPLES)}
        row |= {"prompt_ids": prompt, "response_ids": ids, "loss_mask": [True] * len(ids), "sampler_version": 0}
        row["sampler_logprobs"] = [entry[token].logprob for token, entry in entries]
        rows.append(row | {"finish_reason": request.outputs[0].finish_reason})
    return rows


def record(checkpoint: Path, run: Path, noise: float) -> None:
    """Write the run directory."""
    import torch
    from safetensors.torch import load_file, save_file

    rows = sample(checkpoint)
    versions = [run / f"checkpoints/step_{version:06d}" for version in (0, 1)]
    versions[1].mkdir(parents=True)
    (run / "rollouts").mkdir()
    versions[0].symlink_to(checkpoint.resolve(), target_is_directory=True)
    (versions[1] / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(checkpoint / "model.safetensors")
    for tensor in tensors.values():
        if tensor.ndim > 1:  # the norms' gains stay
            tensor += noise * tensor.std() * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, versions[1] / "model.safetensors", metadata={"format": "pt"})
    (run / "run.toml").write_text(SETTINGS.format(max_tokens=MAX_TOKENS))
    for step in (0, 1):
        pq.write_table(pa.Table.from_pylist(rows), run / f"rollouts/step_{step:06d}.parquet")
    lengths = [len(row["response_ids"]) for row in rows]
    print(f"{len(rows)} responses, {sum(lengths)} tokens, {lengths.count(MAX_TOKENS)} at the length limit")


def show(folders: list[Path]) -> None:
    """Print the steps tables side by side, as Markdown."""
    columns = {(f, row["step"]): row for f in folders for row in pq.read_table(f / "steps.parquet").to_pylist()}
    print("| | " + " | ".join(f"{folder.name}, step {step}" for folder, step in columns) + " |")
    print("|---|" + "---:|" * len(columns))
    for name in SHOWN:
        ends = [[row.get(f"{name}{end}") for end in ("", "_ci_low", "_ci_high")] for row in columns.values()]
        cells = ["{:.5g} [{:.5g}, {:.5g}]".format(*e) if e[1] is not None else f"{e[0] or 0:.3g}" for e in ends]
        print(f"| `{name}` | " + " | ".join(cells) + " |")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("checkpoint", type=Path)
    recording.add_argument("run", type=Path)
    recording.add_argument("--noise", type=float, default=0.01, help="of version 1, in each tensor's deviations")
    commands.add_parser("show").add_argument("folder", type=Path, nargs="+")
    options = parser.parse_args()
    if options.command == "record":
        record(options.checkpoint, options.run, options.noise)
    else:
        show(options.folder)


if __name__ == "__main__":
    main()
