"""Names of tensors: from what a trainer's wrappers made of them back to Hugging Face names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from mismatch_probe.errors import CheckpointError

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module)\.")
"""Parts that torch.compile, FSDP, activation checkpointing and DDP put into a name."""
_EMBEDDINGS = (
    *("model.language_model.embed_tokens.weight", "language_model.model.embed_tokens.weight"),
    *("model.decoder.embed_tokens.weight", "model.embed_tokens.weight", "transformer.wte.weight"),
    *("transformer.word_embeddings.weight", "gpt_neox.embed_in.weight", "backbone.embeddings.weight"),
)
"""Input embeddings under Hugging Face names, longer ones first: what stands before one is the trainer's prefix."""


def model_names(names: Iterable[str], path: Path) -> dict[str, str]:
    """Trainer's name -> Hugging Face name of each tensor of the model; those of optimizers are left out.

    Raises:
        CheckpointError: several models are in it, or two names become one.
    """
    plain = {name: _WRAPPERS.sub("", name) for name in names if "optim" not in name.split(".")[0]}
    prefixes = {prefix for name in plain.values() if (prefix := _prefix(name)) is not None}
    if len(prefixes) > 1:
        listed = ", ".join(sorted(prefixes))
        raise CheckpointError(f"{path}: holds several models ({listed}). Save the policy alone")
    prefix = prefixes.pop() if prefixes else ""
    found = {raw: name.removeprefix(prefix) for raw, name in plain.items() if name.startswith(prefix)}
    if len(set(found.values())) < len(found):
        raise CheckpointError(f"{path}: two tensors have one name once wrappers are taken off. Save the policy alone")
    return found


def _prefix(name: str) -> str | None:
    """What stands before the input embedding; None where ``name`` is another tensor or an optimizer's."""
    for embedding in _EMBEDDINGS:
        head = name.removesuffix(embedding)
        if head != name and (not head or head.endswith(".")):
            return None if "optim" in head else head
    return None


def input_embedding(names: Iterable[str]) -> str | None:
    """Name of the input embedding among Hugging Face names, None where it goes by a name that is not known."""
    return next((name for name in names if name in _EMBEDDINGS), None)
