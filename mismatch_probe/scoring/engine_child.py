"""The engine's process: ids come in and log-probs go out through files of one folder.

Run as ``python -P engine_child.py FOLDER``. It imports nothing of this package, so that it runs wherever vLLM is.
``settings.json`` says what to load. When the engine is up, ``engine.json`` says what it runs with and ``ready`` is
written to stdout. Then each line on stdin names a file of ids, and ``done`` answers it. All else goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np


def main(folder: Path) -> None:
    """Answer until stdin ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints must not be taken for an answer
    settings = json.loads((folder / "settings.json").read_text())
    llm = _start(settings)
    (folder / "engine.json").write_text(json.dumps(_facts(llm, settings)))
    replies.write("ready\n")
    replies.flush()
    for line in sys.stdin:
        with np.load(folder / f"{line.strip()}.ids.npz") as ids:
            found = _score(llm, ids["values"], ids["offsets"], ids["first"], settings["top_k"])
        np.savez(folder / f"{line.strip()}.logprobs.npz", **found)
        replies.write("done\n")
        replies.flush()


def _start(settings: dict[str, Any]) -> Any:
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        # A position beyond the model's is never run: the one token that follows the ids is drawn and dropped.
        VLLM_ALLOW_LONG_MAX_MODEL_LEN="1",
    )
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM

    if settings["temperature"] != 1.0:
        _divide_logits(settings["temperature"])
    return LLM(**settings["arguments"])


def _divide_logits(temperature: float) -> None:
    """Prompt log-probs skip the temperature; divide as the sampler does for tokens that it draws, in float32."""
    from vllm.v1.sample.sampler import Sampler

    Sampler.compute_logprobs = staticmethod(lambda logits: logits.float().div(temperature).log_softmax(dim=-1))


def _facts(llm: Any, settings: dict[str, Any]) -> dict[str, Any]:
    import torch
    import vllm

    config = llm.llm_engine.vllm_config
    layers = config.compilation_config.static_forward_context.values()
    backends = {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
    return {
        "engine": "vllm",
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "attention_backends": sorted(backends),
        "max_model_len": config.model_config.max_model_len,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "quantization": config.model_config.quantization,
        "temperature": settings["temperature"],
        "arguments": {key: value for key, value in settings["arguments"].items() if key != "model"},
    }


def _score(llm: Any, values: Any, offsets: Any, first: Any, top_k: int) -> dict[str, Any]:
    """Log-probs of each row's tokens from its ``first`` on, (tokens,), and the K most probable of each, (tokens, K)."""
    from vllm import SamplingParams, TokensPrompt

    rows = [values[start:stop].tolist() for start, stop in pairwise(offsets)]
    params = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=top_k, detokenize=False)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=row) for row in rows], params, use_tqdm=False)
    chosen: list[float] = []
    ids: list[list[int]] = []
    tops: list[list[float]] = []
    for row, start, output in zip(rows, first, outputs, strict=True):
        for place in range(int(start), len(row)):
            entry = output.prompt_logprobs[place]
            chosen.append(entry[row[place]].logprob)
            best = sorted((item for item in entry.items() if item[1].rank <= top_k), key=lambda item: item[1].rank)
            ids.append([token for token, _ in best])
            tops.append([found.logprob for _, found in best])
    return {
        "logprob": np.array(chosen, dtype=np.float64),
        "top_ids": np.array(ids, dtype=np.int64).reshape(len(chosen), top_k),
        "top_logprob": np.array(tops, dtype=np.float64).reshape(len(chosen), top_k),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
