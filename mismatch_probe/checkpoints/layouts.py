"""Which layout a checkpoint has, judged by the files that lie there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path

from mismatch_probe.checkpoints import dcp, directory, fsdp, gguf, megatron, peft, sharded
from mismatch_probe.errors import CheckpointError


class Layout(Enum):
    """A way in which a trainer or an exporter lays a model out on disk."""

    MEGATRON = "Megatron torch_dist"
    DCP = "torch DCP"
    FSDP = "FSDP shards"
    PEFT = "PEFT adapter"
    SHARDED = "sharded safetensors"
    HUGGING_FACE = "Hugging Face directory"
    GGUF = "GGUF file"


# In this order: Megatron's is a DCP of other names, and a directory of shards may hold a config.json as well.
_MATCHES: dict[Layout, Callable[[Path], bool]] = {
    Layout.MEGATRON: megatron.matches,
    Layout.DCP: dcp.matches,
    Layout.FSDP: fsdp.matches,
    Layout.PEFT: peft.matches,
    Layout.SHARDED: sharded.matches,
    Layout.HUGGING_FACE: directory.matches,
    Layout.GGUF: gguf.matches,
}
_LOOKED_FOR = (
    "config.json with *.safetensors or pytorch_model*.bin, adapter_config.json, model_world_size_*_rank_*.pt, "
    ".metadata with *.distcp, *.gguf"
)
_INNER = (
    *("", "actor", "policy", "policy/weights", "policy/weights/model", "trainer", "weights", "model"),
    *("dist_ckpt", "model/dist_ckpt", "actor/dist_ckpt", "actor/model/dist_ckpt"),
)
"""Where frameworks put the policy below a step's directory: verl, SkyRL, NeMo-RL, prime-rl and others."""


def find(path: Path) -> tuple[Layout, Path]:
    """The layout and the directory (or GGUF file) in which it lies: ``path`` or a known place below it.

    Raises:
        CheckpointError: nothing that is known lies there.
    """
    for root in _roots(path):
        for layout, matches in _MATCHES.items():
            if matches(root):
                return layout, root
    raise CheckpointError(f"{path}: no checkpoint found. Looked for {_LOOKED_FOR}, here and in {', '.join(_INNER[1:])}")


def _roots(path: Path) -> Iterator[Path]:
    """``path`` and known places below it, with Megatron's folder of an iteration where there is one and no other."""
    for inner in _INNER:
        yield path / inner
        iterations = list((path / inner).glob("iter_[0-9]*"))
        if len(iterations) == 1:
            yield iterations[0]


def layout_of(path: Path) -> Layout:
    """The layout of a checkpoint.

    Raises:
        CheckpointError: nothing that is known lies there.
    """
    return find(path)[0]
