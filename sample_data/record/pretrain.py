"""The supervised start that every run shares as version 0: ``python pretrain.py FOLDER``."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import torch
from model import new_model, response_logprobs, save_model
from task import demonstration, sample_prompt

ERROR_RATE = 0.15
UPDATES = 1600
BATCH = 128
LEARNING_RATE = 3e-3
WARMUP = 50


def pretrain(folder: Path, seed: int = 0) -> None:
    """Train on demonstrations with wrong sums among them, and write the weights to ``folder``."""
    torch.set_num_threads(2)
    model = new_model(seed)
    rng = np.random.default_rng([seed, 0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    cosine = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP, 0.5 + 0.5 * math.cos(math.pi * step / UPDATES))
    )
    for update in range(UPDATES):
        prompts = [sample_prompt(rng) for _ in range(BATCH)]
        values, mask = response_logprobs(model, prompts, [demonstration(p, ERROR_RATE, rng) for p in prompts])
        loss = -values[mask].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        cosine.step()
        if update % 200 == 0 or update == UPDATES - 1:
            print(f"supervised update {update}: loss {loss.item():.4f}", flush=True)
    save_model(model, folder)


if __name__ == "__main__":
    pretrain(Path(sys.argv[1]))
