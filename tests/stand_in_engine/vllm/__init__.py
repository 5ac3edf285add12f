"""What engine_child.py uses of vLLM, for the models of tests/planted.py; STAND_IN_FAULT is what it does wrong."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from vllm.v1.sample.sampler import Sampler

__version__ = "0.0.0"
FAULT = os.environ.get("STAND_IN_FAULT", "")


class TokensPrompt(dict):
    pass


class SamplingParams:
    def __init__(self, temperature: float, max_tokens: int, prompt_logprobs: int, detokenize: bool) -> None:
        assert max_tokens == 1 and not detokenize
        self.prompt_logprobs = prompt_logprobs


class LLM:
    def __init__(self, model: str, dtype: str, max_model_len: int, enable_prefix_caching: bool, **_: Any) -> None:
        if FAULT == "start":
            raise RuntimeError("no such device")
        assert not enable_prefix_caching
        self.dtype, self.longest = getattr(torch, dtype), max_model_len
        head = load_file(f"{model}/model.safetensors")["lm_head.weight"].to(self.dtype)  # (V, V)
        if FAULT == "head":
            torch.manual_seed(0)
            head = torch.randn_like(head)
        self.logits_after = head.T * head.shape[1] ** 0.5
        self.llm_engine = SimpleNamespace(vllm_config=self._config())

    def _config(self) -> SimpleNamespace:
        backend = SimpleNamespace(get_name=lambda: "STAND_IN")
        layer = SimpleNamespace(get_attn_backend=lambda: backend)
        return SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context={"layer": layer}),
            model_config=SimpleNamespace(dtype=self.dtype, max_model_len=self.longest, quantization=None),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=1),
            cache_config=SimpleNamespace(cache_dtype="auto", enable_prefix_caching=False),
        )

    def generate(self, prompts: list[TokensPrompt], params: SamplingParams, use_tqdm: bool) -> list[SimpleNamespace]:
        if FAULT == "score":
            os._exit(9)
        return [self._one(prompt["prompt_token_ids"], params.prompt_logprobs) for prompt in prompts]

    @torch.inference_mode()
    def _one(self, row: list[int], top_k: int) -> SimpleNamespace:
        assert len(row) < self.longest
        ids = torch.tensor(row)
        logprobs = Sampler.compute_logprobs(self.logits_after[ids.roll(1) if FAULT == "ids" else ids])
        places: list[Any] = [None]
        for place in range(1, len(row)):
            values, order = logprobs[place - 1].sort(descending=True)
            rank = {int(token): at + 1 for at, token in enumerate(order)}
            kept = dict.fromkeys([row[place], *map(int, order[:top_k])])
            places.append(
                {token: SimpleNamespace(logprob=float(values[rank[token] - 1]), rank=rank[token]) for token in kept}
            )
        return SimpleNamespace(prompt_logprobs=places)
