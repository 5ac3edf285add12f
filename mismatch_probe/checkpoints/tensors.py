"""Any checkpoint -> its tensors under Hugging Face names, and the directory whose ``config.json`` describes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mismatch_probe.checkpoints import dcp, directory, fsdp, gguf, megatron, peft, sharded
from mismatch_probe.checkpoints.layouts import Layout, find
from mismatch_probe.checkpoints.megatron_shape import config_folders
from mismatch_probe.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_READERS: dict[Layout, Callable[[Path, Path | None], Mapping[str, torch.Tensor]]] = {
    Layout.MEGATRON: megatron.read_tensors,
    Layout.DCP: dcp.read_tensors,
    Layout.FSDP: fsdp.read_tensors,
    Layout.SHARDED: sharded.read_tensors,
    Layout.HUGGING_FACE: directory.read_tensors,
    Layout.GGUF: gguf.read_tensors,
}
_CONFIGS = ("", "huggingface", ".hf_metadata")
"""Where a config lies beside weights: with them, or as verl and SkyRL, or as NeMo-RL put it."""


def open_tensors(path: Path, base: Path | None = None) -> Mapping[str, torch.Tensor]:
    """The model's tensors by Hugging Face name: on the CPU, in the dtype on disk, each read when it is asked for.

    Headers are read at once, so what is missing, torn or hostile is found before any number is. Tensors that an
    adapter changes come out merged, in float32 or wider.

    Args:
        path: a checkpoint of any layout.
        base: for an adapter the model that it was trained over.

    Raises:
        CheckpointError: no layout fits, or files of it cannot be read.
    """
    layout, root = find(path)
    if layout is not Layout.PEFT:
        return _READERS[layout](root, base)
    base = peft.base_of(root, base)
    return peft.merge(root, open_tensors(base), config_dir(base, None))


def config_dir(path: Path, base: Path | None = None) -> Path:
    """The directory whose ``config.json`` describes the model: the checkpoint's, a folder in it, or the base's.

    Raises:
        CheckpointError: there is none.
    """
    layout, root = find(path)
    if layout is Layout.PEFT:
        return config_dir(peft.base_of(root, base), None)
    inner = (place / inner for place in (root, path) for inner in _CONFIGS)
    for folder in (*(config_folders(root) if layout is Layout.MEGATRON else ()), *inner):
        if (folder / "config.json").is_file():
            return folder
    if base is not None:
        return config_dir(base, None)
    raise CheckpointError(
        f"{path}: {layout.value} without config.json, here or in huggingface/. Put the base model's config.json "
        "there, or name the base model's directory (adapter_base in run.toml)"
    )
