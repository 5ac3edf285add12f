"""Small random models of real architectures, saved as Hugging Face directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mismatch_probe.run import Ragged, Rollouts

VOCAB = 61
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {**_COMMON, "head_dim": 8},
    "llama": dict(_COMMON),
    "gpt2": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.5},
    "qwen2": dict(_COMMON),
    "gemma2": {**_COMMON, "head_dim": 8, "final_logit_softcapping": 5.0, "sliding_window": 8},
    "gemma3_text": {**_COMMON, "head_dim": 8, "sliding_window": 6, "sliding_window_pattern": 2},
    "qwen3_moe": {**_COMMON, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt_oss": {**_COMMON, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    "mistral": {**_COMMON, "sliding_window": 6},
    "qwen2_moe": {
        **_COMMON,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "use_sliding_window": True,
        "sliding_window": 12,
        "max_window_layers": 0,
    },
    "phi3": {**_COMMON, "pad_token_id": 0},
    "bert": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "is_decoder": False,
    },
    "falcon": {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
    "bloom": {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "cohere": {**_COMMON, "logit_scale": 0.25},
    "granite": {**_COMMON, "logits_scaling": 4.0},
    "mixtral": {**_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2},
    "opt": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": 32,
        "dropout": 0.5,
    },
}


def save_model(
    path: Path, kind: str, *, tied: bool = False, seed: int = 0, dtype: str = "float32", **extra: Any
) -> Any:
    """Save a random model and return it, in eval mode."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**CONFIGS[kind], "tie_word_embeddings": tied, **extra})
    model = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # The default initialisation is so small that every distribution is nearly uniform.
            parameter.add_(0.15 * torch.randn_like(parameter))
    model.save_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()


def random_rollouts(rng: np.random.Generator, n: int = 12, longest: int = 20, version: int = 0) -> Rollouts:
    """Ragged sequences with some masked tokens."""
    prompts = [rng.integers(0, VOCAB, size=rng.integers(1, 9)) for _ in range(n)]
    responses = [rng.integers(0, VOCAB, size=rng.integers(1, longest)) for _ in range(n)]
    tokens = sum(map(len, responses))
    names = np.array([f"s{i}" for i in range(n)], dtype=object)
    return Rollouts(
        sequence_id=names,
        group_id=np.array([f"g{i // 3}" for i in range(n)], dtype=object),
        origin=np.array([("file", i) for i in range(n)] + [None], dtype=object)[:-1],
        prompt=Ragged.of(prompts),
        response=Ragged.of(responses),
        sampler_logprob=np.full(tokens, -1.0),
        trainer_logprob=np.full(tokens, np.nan),
        loss_mask=rng.random(tokens) < 0.8,
        sampler_version=np.full(tokens, version),
        advantage=np.full(tokens, np.nan),
        reward=np.full(n, np.nan),
        finish_reason=np.full(n, None, dtype=object),
    )
