"""What a checkpoint holds, told from its config and tensor headers alone: no torch, no weights read, no pickle run."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mismatch_probe.checkpoints import gguf, peft
from mismatch_probe.checkpoints.files import read_json
from mismatch_probe.checkpoints.layouts import Layout, find
from mismatch_probe.checkpoints.names import input_embedding
from mismatch_probe.checkpoints.sources import LazyTensors, Source
from mismatch_probe.checkpoints.tensors import config_dir, open_tensors
from mismatch_probe.errors import CheckpointError

_LEARNED_POSITIONS = ("wpe.weight", "embed_positions.weight", "position_embeddings.weight")
_COPY = "Copy the checkpoint anew from the run"
_EDGE = 1 << 20
_WEIGHTS = (
    *("*.safetensors", "pytorch_model*.bin", "adapter_model.bin", "model_world_size_*_rank_*.pt"),
    *(".metadata", "*.distcp", "common.pt", "*.gguf"),
)
SETTINGS_FILES = ("config.json", "huggingface/config.json", "adapter_config.json", "lora_train_meta.json")


@dataclass(frozen=True)
class Description:
    """Facts about one checkpoint.

    ``max_positions`` is the longest sequence that a table of learned positions allows, None where there is no table.
    ``parameters`` and ``dtypes`` are None and empty where the headers do not say. ``notes`` are what a user must know
    of how it is read.
    """

    path: Path
    architecture: str
    vocab_size: int | None
    max_positions: int | None
    hidden_size: int | None
    parameters: int | None
    dtypes: tuple[str, ...]
    bytes: int
    layout: str = Layout.HUGGING_FACE.value
    notes: tuple[str, ...] = ()


def describe(path: Path, base: Path | None = None) -> Description:
    """Read the config and the headers of a checkpoint of any layout.

    Args:
        path: the checkpoint.
        base: for an adapter the model that it was trained over.

    Raises:
        CheckpointError: no layout fits, no ``config.json``, or a file that cannot be parsed.
    """
    layout, root = find(path)
    if layout is Layout.GGUF:
        return _describe_gguf(path, root)
    config = read_json(config_dir(path, base) / "config.json")
    tensors = open_tensors(path, base)
    sources = tensors.sources if isinstance(tensors, LazyTensors) else {}
    files = weight_files(root)
    if layout is Layout.PEFT:
        files += weight_files(find(peft.base_of(root, base))[1])
    try:
        return _describe(path, layout, config, sources, files)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"{path}: config.json or a weight file's header makes no sense ({error!r}). {_COPY}"
        ) from None


def _describe(
    path: Path, layout: Layout, config: dict[str, Any], sources: dict[str, Source], files: list[Path]
) -> Description:
    text_config = config.get("text_config") or config
    positions = [source.shape[0] for name, source in sources.items() if name.endswith(_LEARNED_POSITIONS)]
    # OPT-like tables begin with rows for padding that no position uses; the config then says what is usable.
    limit = min([*positions, text_config.get("max_position_embeddings") or math.inf]) if positions else None
    if text_config.get("tie_word_embeddings", config.get("tie_word_embeddings")) and input_embedding(sources):
        sources = {name: source for name, source in sources.items() if name != "lm_head.weight"}  # counted once
    return Description(
        path=path,
        architecture=", ".join(config.get("architectures") or ["unknown"]),
        vocab_size=text_config.get("vocab_size"),
        max_positions=None if limit is None else int(limit),
        hidden_size=text_config.get("hidden_size") or text_config.get("n_embd"),
        parameters=sum(math.prod(source.shape) for source in sources.values()) or None,
        dtypes=tuple(sorted({source.dtype for source in sources.values()})),
        bytes=sum(file.stat().st_size for file in files),
        layout=layout.value,
    )


def _describe_gguf(path: Path, root: Path) -> Description:
    file, header = gguf.gguf_file(root), gguf.read_header(root)
    embedding = header.tensors.get("token_embd.weight")
    quantised = (f"{file}: quantised ({', '.join(header.dtypes)}); its weights are dequantised to be scored",)
    return Description(
        path=path,
        architecture=header.architecture,
        vocab_size=embedding[0][-1] if embedding else None,
        max_positions=header.value("context_length") if "position_embd.weight" in header.tensors else None,
        hidden_size=header.value("embedding_length"),
        parameters=header.parameters,
        dtypes=header.dtypes,
        bytes=file.stat().st_size,
        layout=Layout.GGUF.value,
        notes=quantised if header.quantised else (),
    )


def weight_files(path: Path) -> list[Path]:
    """Files that hold tensors, sorted by name."""
    if path.is_file():
        return [path]
    return sorted({file for pattern in _WEIGHTS for file in path.glob(pattern)})


def digest(path: Path, base: Path | None = None) -> str:
    """Fingerprint of a checkpoint: config, names, sizes and the first and last MiB of each weight file.

    A cheap certificate, not a cryptographic one: gigabytes of weights are not read whole to name them. An adapter's
    covers its base too.
    """
    mark = hashlib.blake2b(digest_size=16)
    layout, root = find(path)
    for settings in (root / name for name in SETTINGS_FILES):
        mark.update(settings.read_bytes() if settings.is_file() else b"")
    for file in weight_files(root):
        size = file.stat().st_size
        mark.update(f"{file.name}:{size}".encode())
        with file.open("rb") as stream:
            mark.update(stream.read(_EDGE))
            stream.seek(max(0, size - _EDGE))
            mark.update(stream.read(_EDGE))
    if layout is Layout.PEFT and base is not None:
        mark.update(digest(base).encode())
    return mark.hexdigest()
