"""Hugging Face directories (config.json and safetensors) through transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mismatch_probe.errors import CheckpointError

# Weights come from the run directory only; a typing error must not become a download.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging


def load_model(path: Path, device: torch.device, dtype: torch.dtype, trust_remote_code: bool = False) -> Any:
    """Load a causal LM in eval mode.

    Every weight that the architecture names must come from the files: transformers would fill what is missing with
    random numbers and only log it.

    Raises:
        CheckpointError: the directory cannot be read, or tensors are missing, unexpected or of another shape.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    # Each file format and architecture raises its own kind here; all of them mean "not loadable as it is".
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        hint = (
            "Pass --trust-remote-code if you trust its code"
            if "trust_remote_code" in str(error)
            else ("Copy the checkpoint anew from the run")
        )
        raise CheckpointError(f"{path}: cannot be loaded ({reason}). {hint}") from None
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        keys = sorted(str(key) for key in loading.get(kind) or ())
        if keys:
            named = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
            raise CheckpointError(
                f"{path}: {kind.replace('_', ' ')}: {named}. The weights do not fit config.json; export them again"
            )
    return model.to(device).eval().requires_grad_(False)
