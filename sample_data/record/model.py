"""The policy: a Qwen3 network small enough to keep every version of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from task import EOS, MAX_RESPONSE_LENGTH, PAD, PROMPT_LENGTH, VOCAB_SIZE
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()


def new_model(seed: int) -> Qwen3ForCausalLM:
    """A float32 network with random weights: 63,936 parameters, tied embeddings."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # the smallest that vLLM's CPU attention takes
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.08,  # the default, 0.02, is meant for wider networks
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    model = Qwen3ForCausalLM(config).float().eval()
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD)
    return model


def save_model(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write a Hugging Face directory in float32.

    Bfloat16 would round away updates of this size, and a probe reading the files would see another lag than the
    trainer had.
    """
    model.save_pretrained(folder)


def load_model(folder: Path) -> Qwen3ForCausalLM:
    """Read a directory that :func:`save_model` wrote: float32, eval mode."""
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


def response_logprobs(
    model: Qwen3ForCausalLM, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the response tokens: ``(values, mask)``, both ``[sequences, MAX_RESPONSE_LENGTH]``.

    Prompts have one length, so right padding keeps every position id what the engine uses.
    """
    width = PROMPT_LENGTH + MAX_RESPONSE_LENGTH
    ids = torch.full((len(prompts), width), PAD)
    attention = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        length = len(prompt) + len(response)
        ids[row, :length] = torch.tensor([*prompt, *response])
        attention[row, :length] = 1
    logits = model(input_ids=ids, attention_mask=attention).logits[:, PROMPT_LENGTH - 1 : -1]
    values = logits.float().log_softmax(-1).gather(-1, ids[:, PROMPT_LENGTH:, None]).squeeze(-1)
    return values, attention[:, PROMPT_LENGTH:].bool()
