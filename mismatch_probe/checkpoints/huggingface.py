"""A checkpoint of any layout -> a transformers model in eval mode."""

from __future__ import annotations

import os
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mismatch_probe.checkpoints import directory, gguf
from mismatch_probe.checkpoints.layouts import Layout, find
from mismatch_probe.checkpoints.names import input_embedding
from mismatch_probe.checkpoints.tensors import config_dir, open_tensors
from mismatch_probe.errors import CheckpointError

# Weights come from the run directory only; a typing error must not become a download.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging


def load_model(
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    base: Path | None = None,
    attention: str | None = None,
    parallel: int = 1,
) -> Any:
    """Load a causal LM in eval mode.

    Every weight that the architecture names must come from the files: transformers would fill what is missing with
    random numbers and only log it.

    Args:
        path: a checkpoint of any layout.
        device: where the model goes.
        dtype: of its weights.
        trust_remote_code: run code that lies beside ``config.json``.
        base: for an adapter the model that it was trained over; for shards without ``config.json``, where to find it.
        attention: transformers' name of an attention implementation, None for its own choice.
        parallel: processes that each load a slice; torch.distributed must be up.

    Raises:
        CheckpointError: the checkpoint cannot be read, or tensors are missing, unexpected or of another shape.
    """
    layout, root = find(path)
    how: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    if parallel > 1:
        how |= _plan(path, root, layout, parallel)
    if layout is Layout.GGUF:
        return load_gguf(gguf.gguf_file(root), dtype, **how).to(device).eval().requires_grad_(False)
    if layout is Layout.HUGGING_FACE:
        directory.read_tensors(root, None)  # headers and pickles are checked before transformers opens the files
        model = _load(path, dtype, AutoModelForCausalLM, root, trust_remote_code=trust_remote_code, **how)
    else:
        model = _from_tensors(path, dtype, trust_remote_code, base, **how)
    return model.to(device).eval().requires_grad_(False)


def _plan(path: Path, root: Path, layout: Layout, parallel: int) -> dict[str, Any]:
    """What makes transformers cut the weights by its plan for the architecture."""
    if layout is Layout.GGUF:
        raise CheckpointError(f"{path}: a GGUF file cannot be cut for --tensor-parallel. Convert it to safetensors")
    try:
        from transformers.distributed import DistributedConfig
    except ImportError:  # before transformers 5.10
        return {"tp_plan": "auto"}
    return {"distributed_config": DistributedConfig(tp_size=parallel, tp_plan="auto")}


def load_gguf(file: Path, dtype: torch.dtype, **how: Any) -> Any:
    """Load a GGUF file on the CPU; quantised tensors are dequantised. ``how`` goes to transformers.

    Raises:
        CheckpointError: a package is missing, the file is torn or its architecture is unknown to transformers.
    """
    gguf.read_header(file)
    for package in ("gguf", "accelerate"):
        if find_spec(package) is None:
            raise CheckpointError(f"{file}: GGUF files need the package {package}: pip install 'mismatch-probe[gguf]'")
    return _load(file, dtype, AutoModelForCausalLM, file.parent, gguf_file=file.name, **how)


def _from_tensors(path: Path, dtype: torch.dtype, trust_remote_code: bool, base: Path | None, **how: Any) -> Any:
    """A model from its config and its tensors: transformers takes them as it takes a file's."""
    tensors = dict(open_tensors(path, base))
    folder = config_dir(path, base)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model_class = type(AutoModelForCausalLM.from_config(deepcopy(config), trust_remote_code=trust_remote_code))
    # Each architecture's config raises its own kind.
    except Exception as error:
        raise _unloadable(folder, error) from None
    text = config.get_text_config()
    embedding, head = input_embedding(tensors), tensors.get("lm_head.weight")
    if getattr(text, "tie_word_embeddings", False) and embedding is not None and head is not None:
        tied = torch.equal(tensors[embedding], head)
        config.tie_word_embeddings = text.tie_word_embeddings = tied  # what was trained apart stays apart
    return _load(path, dtype, model_class, None, config=config, state_dict=tensors, **how)


def _load(path: Path, dtype: torch.dtype, model_class: Any, source: Path | None, **arguments: Any) -> Any:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        model, loading = model_class.from_pretrained(
            source,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are named below
            **arguments,
        )
    # Each file format and architecture raises its own kind here; all of them mean "not loadable as it is".
    except Exception as error:
        raise _unloadable(path, error) from None
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        keys = sorted(str(key) for key in loading.get(kind) or ())
        if keys:
            named = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
            raise CheckpointError(
                f"{path}: {kind.replace('_', ' ')}: {named}. The weights do not fit config.json; export them again"
            )
    return model


def _unloadable(path: Path, error: Exception) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    hint = "Copy the checkpoint anew from the run"
    if "trust_remote_code" in str(error):
        hint = "Pass --trust-remote-code if you trust its code"
    elif "tp_plan" in str(error):
        reason = "transformers does not know how to cut this architecture"
        hint = "Drop --tensor-parallel"
    elif "attention implementation" in str(error):
        reason = reason.split(". Please")[0]
        hint = "Use --attn eager, or --attn auto"
    return CheckpointError(f"{path}: cannot be loaded ({reason}). {hint}")
