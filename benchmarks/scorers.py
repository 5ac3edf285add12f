"""The ways of scoring given tokens that the benchmark compares; each is a function from a workload to log-probs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.workload import Workload

Score = Callable[[Workload], np.ndarray]
Build = Callable[[Path, Path, str], Score]
"""(model, second model, dtype) -> what scores: the models are loaded, the clock is not running yet."""


def ours(model: Path, second: Path, dtype: str) -> Score:
    """``decompose``'s scorer, one version: log-probs, entropies and the noise floor's second scoring."""
    return _step_scorer(model, model, dtype)


def ours_pair(model: Path, second: Path, dtype: str) -> Score:
    """Two versions: also both KL, total variation, top-1 agreement, the bias vectors and the noise floor."""
    return _step_scorer(model, second, dtype)


def _step_scorer(model: Path, second: Path, dtype: str) -> Score:
    from mismatch_probe.assemble import halves
    from mismatch_probe.scoring.network import ScoringOptions
    from mismatch_probe.scoring.score import StepScorer

    scorer = StepScorer(ScoringOptions(device="cpu", dtype=dtype))

    def score(work: Workload) -> np.ndarray:
        rollouts = work.rollouts()
        return scorer.score(rollouts, halves(rollouts), second, lambda _: model).stale_logprob

    return score


def one_by_one(model: Path, second: Path, dtype: str) -> Score:
    """One sequence at a time, all its logits, float32 log_softmax: what ``martingale recompute`` does."""
    import torch

    network = _model(model, dtype)

    @torch.inference_mode()
    def score(work: Workload) -> np.ndarray:
        parts = []
        for prompt, response in work.pairs:
            ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
            logp = network(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            parts.append(logp[torch.arange(len(response)), torch.from_numpy(response)])
        return torch.cat(parts).double().numpy()

    return score


def martingale(model: Path, second: Path, dtype: str) -> Score:
    """The scoring function of the package martingale itself."""
    from martingale.diagnostics.reference import hf_score_fn

    fn = hf_score_fn(str(model), dtype=dtype)
    return lambda work: np.concatenate([np.array(fn(list(p), list(r))) for p, r in work.pairs])


def padded(model: Path, second: Path, dtype: str) -> Score:
    """Right-padded batches of a group, log_softmax and gather: what trainers without fused kernels do."""
    import torch

    network = _model(model, dtype)

    @torch.inference_mode()
    def score(work: Workload) -> np.ndarray:
        parts = []
        for prompt, rows in zip(work.prompts, work.responses, strict=True):
            width = max(map(len, rows))
            ids = np.zeros((len(rows), len(prompt) + width), dtype=np.int64)
            for at, response in enumerate(rows):
                ids[at, : len(prompt) + len(response)] = np.concatenate([prompt, response])
            whole = torch.from_numpy(ids)
            logits = network(input_ids=whole, logits_to_keep=width + 1).logits[:, :-1]
            logp = logits.float().log_softmax(-1).gather(-1, whole[:, len(prompt) :, None])[..., 0]
            parts += [logp[at, : len(response)] for at, response in enumerate(rows)]
        return torch.cat(parts).double().numpy()

    return score


def vllm(model: Path, second: Path, dtype: str) -> Score:
    """vLLM's prompt log-probs, its prefix cache off: asking for prompt log-probs would not read it."""
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    from vllm import LLM, SamplingParams, TokensPrompt

    engine = LLM(
        model=str(model),
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=1024,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    ask = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)

    def score(work: Workload) -> np.ndarray:
        prompts = [TokensPrompt(prompt_token_ids=[*map(int, p), *map(int, r)]) for p, r in work.pairs]
        values = []
        for (prompt, response), made in zip(work.pairs, engine.generate(prompts, ask, use_tqdm=False), strict=True):
            found = made.prompt_logprobs[len(prompt) :]
            values += [entry[int(token)].logprob for entry, token in zip(found, response, strict=True)]
        return np.array(values)

    return score


def _model(path: Path, dtype: str):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()


SCORERS: dict[str, Build] = {
    "StepScorer": ours,
    "StepScorer, two versions": ours_pair,
    "one by one": one_by_one,
    "martingale": martingale,
    "padded batches": padded,
    "vLLM prompt log-probs": vllm,
}


def ceiling(model: Path, work: Workload, dtype: str, rounds: int = 3) -> tuple[float, dict[str, float]]:
    """Processor seconds that the matrix products of the unique tokens take alone, and their FLOPs by kind.

    Linear layers run on passes of one group, the head on response tokens in float32 (a bfloat16 logit is good to 1/16
    nat). Attention's products are counted for the pairs of tokens that see each other, at the linear layers' rate.
    """
    import torch

    network = _model(model, dtype)
    config = network.config
    layers = [w for n, w in network.named_parameters() if w.dim() == 2 and "embed" not in n and "lm_head" not in n]
    head = network.get_output_embeddings().weight.float()
    per_group = work.unique // len(work.prompts)
    inputs = {w.shape[1]: torch.randn(per_group, w.shape[1], dtype=w.dtype) for w in layers}
    last = torch.randn(256, head.shape[1])

    @torch.inference_mode()
    def seconds(run: Callable[[], object]) -> float:
        best = float("inf")
        for _ in range(rounds):
            started = time.process_time()
            run()
            best = min(best, time.process_time() - started)
        return best

    def body() -> None:
        for weight in layers:
            inputs[weight.shape[1]] @ weight.T

    parameters = sum(w.numel() for w in layers)
    rate = 2 * parameters * per_group / seconds(body)
    head_rate = 2 * head.numel() * 256 / seconds(lambda: last @ head.T)
    seen = sum(
        len(prompt) ** 2 / 2 + sum(len(r) * len(prompt) + len(r) ** 2 / 2 for r in rows)
        for prompt, rows in zip(work.prompts, work.responses, strict=True)
    )
    width = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    flops = {
        "linear": 2.0 * parameters * work.unique,
        "attention": 4.0 * config.num_hidden_layers * width * seen,
        "head": 2.0 * head.numel() * work.tokens,
    }
    return (flops["linear"] + flops["attention"]) / rate + flops["head"] / head_rate, flops
