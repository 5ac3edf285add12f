"""PEFT adapters: LoRA merged into the base's tensors, W + scale B A, each adapter module matched to one of the base."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_probe.checkpoints.files import read_json, safetensors_sources
from mismatch_probe.checkpoints.names import input_embedding
from mismatch_probe.checkpoints.sources import LazyTensors, Source
from mismatch_probe.checkpoints.torchfile import tensor_sources
from mismatch_probe.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_PREFIX = "base_model.model."
_HEAD = "lm_head.weight"
_LORA = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?:\.default)?(?:\.weight)?")
_CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
"""Architectures whose projections store their weight transposed, (in, out)."""
_HARMLESS = frozenset(
    {
        *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "exclude_modules"),
        *("fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform"),
        *("lora_alpha", "lora_dropout", "megatron_core", "modules_to_save", "peft_type", "peft_version", "r"),
        *("qalora_group_size", "rank_pattern", "revision", "runtime_config", "target_modules", "task_type"),
        *("use_rslora", "eva_config"),
    }
)
"""Settings that the merge takes into account, or that do not change what an adapter computes."""
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initialisations that leave the base's weights as they are."""

_SLOW = re.compile(r"\)[*+{]|\([^)]*[*+].*\)[*+?{]")
_QUANTIFIERS = re.compile(r"[*+{]")
"""What a pattern must not hold, or not often: a pattern from a file must not keep the matcher busy."""


@dataclass(frozen=True)
class Merged:
    """W + scale B A, in float32 or wider; transposed where the base stores (in, out)."""

    weight: Source
    a: Source
    b: Source
    scale: float
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the base's tensor."""
        return self.weight.shape

    @property
    def dtype(self) -> str:
        """F64 where a part is, otherwise F32: rounding the sum to bfloat16 would lose most of the adapter."""
        return "F64" if "F64" in (self.weight.dtype, self.a.dtype, self.b.dtype) else "F32"

    def load(self) -> torch.Tensor:
        """Compute it."""
        import torch

        wide = torch.float64 if self.dtype == "F64" else torch.float32
        delta = (self.b.load().to(wide) @ self.a.load().to(wide)) * self.scale
        return self.weight.load().to(wide) + (delta.T if self.transposed else delta)


def matches(path: Path) -> bool:
    """True where ``adapter_config.json`` lies."""
    return (path / "adapter_config.json").is_file()


def base_of(path: Path, base: Path | None) -> Path:
    """The base's directory.

    Raises:
        CheckpointError: it was not given; the adapter's own note of it is a name on another machine.
    """
    if base is None:
        noted = read_json(path / "adapter_config.json").get("base_model_name_or_path")
        raise CheckpointError(
            f"{path}: an adapter needs the model that it was trained over ({noted}). Put that model's directory "
            "under adapter_base in run.toml"
        )
    return base


def merge(path: Path, base: Mapping[str, torch.Tensor], config: Path) -> LazyTensors:
    """The base's tensors with the adapter merged in.

    Args:
        path: directory of ``adapter_config.json`` and ``adapter_model.safetensors`` or ``.bin``.
        base: the base's tensors.
        config: directory of the base's ``config.json``.

    Raises:
        CheckpointError: not LoRA, a kind of LoRA that is not merged here, or tensors that match no base module.
    """
    settings = _Settings(path, read_json(path / "adapter_config.json"), read_json(config / "config.json"))
    if not isinstance(base, LazyTensors):
        raise CheckpointError(f"{path}: adapters are merged into Hugging Face directories and shards. Export its base")
    return LazyTensors(_merged(path, settings, dict(base.sources), _adapter(path)))


def merge_inside(path: Path, sources: Mapping[str, Source], config: Path) -> dict[str, Source]:
    """Tensors of a model that was saved with its LoRA unmerged, as verl saves one, with the LoRA merged.

    Rank and alpha stand in ``lora_train_meta.json``; they are all that verl notes, so rank-stabilised scaling cannot
    be told and is not assumed.

    Args:
        path: directory of that file.
        sources: tensors under the names that peft gives them, ``base_model.model`` taken off.
        config: the model's ``config.json``; it may be missing.

    Raises:
        CheckpointError: the note is missing, or as for ``merge``.
    """
    noted = path / "lora_train_meta.json"
    if not noted.is_file():
        raise CheckpointError(
            f"{path}: its tensors hold LoRA unmerged, and there is no lora_train_meta.json to say its alpha. Write one "
            'such as {"r": 16, "lora_alpha": 32}'
        )
    table = {key: value for key, value in read_json(noted).items() if key in ("r", "lora_alpha")}
    model = read_json(config) if config.is_file() else {}
    plain = {key.replace(".base_layer.", "."): value for key, value in sources.items() if ".lora_" not in key}
    adapter = {key: value for key, value in sources.items() if ".lora_" in key}
    return _merged(path, _Settings(path, {"peft_type": "LORA", **table}, model), plain, adapter)


def _adapter(path: Path) -> dict[str, Source]:
    for name, read in (("adapter_model.safetensors", safetensors_sources), ("adapter_model.bin", tensor_sources)):
        if (path / name).is_file():
            # peft wraps a module that has LoRA; what it saves of the wrapped one belongs to the module itself.
            return {
                key.removeprefix(_PREFIX).replace(".base_layer.", "."): source
                for key, source in read(path / name).items()
            }
    raise CheckpointError(
        f"{path}: adapter_config.json and neither adapter_model.safetensors nor adapter_model.bin. Copy it anew"
    )


class _Settings:
    """What ``adapter_config.json`` and the base's config say about the merge; refuses what is not understood."""

    def __init__(self, path: Path, table: dict[str, Any], base: dict[str, Any]) -> None:
        self._path, self._table = path, table
        kind = str(table.get("peft_type"))
        if kind != "LORA":
            raise CheckpointError(f"{path}: a PEFT adapter of type {kind}; only LORA is merged. Merge it with peft")
        odd = sorted(key for key, value in table.items() if value and key not in _HARMLESS)
        if odd:
            raise CheckpointError(
                f"{path}: LoRA with {odd[0]} = {table[odd[0]]!r} is not merged here. Merge it with peft "
                "(merge_and_unload) and save the model"
            )
        init = table.get("init_lora_weights")
        if init not in _PLAIN_INITS:
            raise CheckpointError(
                f"{path}: init_lora_weights = {init!r} alters the base's own weights, which the adapter does not hold. "
                "Merge it with peft (merge_and_unload) and save the model"
            )
        self.tied = bool(table.get("ensure_weight_tying"))
        self._conv1d = base.get("model_type") in _CONV1D

    def scale(self, module: str, rank: int) -> float:
        """Factor of B A at a module.

        Raises:
            CheckpointError: the settings name another rank than the tensors have.
        """
        r = self._pattern("rank_pattern", module, self._table.get("r"))
        alpha = self._pattern("alpha_pattern", module, self._table.get("lora_alpha"))
        if r != rank or rank < 1 or not isinstance(alpha, int | float):
            raise CheckpointError(
                f"{self._path}: {module} has rank {rank}, and adapter_config.json says r = {r}, lora_alpha = {alpha}. "
                "Copy the adapter anew from the run"
            )
        return float(alpha) / (math.sqrt(rank) if self._table.get("use_rslora") else rank)

    def transposed(self, module: str) -> bool:
        """Whether the base stores the module's weight as (in, out)."""
        if self._conv1d:
            return module != "lm_head"
        return bool(self._table.get("fan_in_fan_out"))

    def _pattern(self, key: str, module: str, default: Any) -> Any:
        """Value of the first pattern that the module's name, or the end of it, matches."""
        patterns = self._table.get(key) or {}
        if not isinstance(patterns, dict):
            raise CheckpointError(f"{self._path}: {key} is not a table of patterns. Copy the adapter anew")
        for pattern, value in patterns.items():
            if _SLOW.search(pattern) or len(_QUANTIFIERS.findall(pattern)) > 4:
                raise CheckpointError(f"{self._path}: {key}: {pattern!r} may match for ever. Write the modules' names")
            try:
                if re.match(rf"(.*\.)?({pattern})$", module):
                    return value
            except re.error as error:
                raise CheckpointError(f"{self._path}: {key}: {pattern!r} is not a pattern ({error})") from None
        return default


def _merged(
    path: Path, settings: _Settings, base: dict[str, Source], adapter: Mapping[str, Source]
) -> dict[str, Source]:
    embedding = input_embedding(base)
    touched = {name for name in (*adapter, *(f"{_split(key)[0]}.weight" for key in adapter))}
    if embedding is not None and _HEAD not in base and touched & {embedding, _HEAD}:
        if settings.tied:
            raise CheckpointError(
                f"{path}: ensure_weight_tying with a tied head is not merged here. Merge it with peft"
            )
        base[_HEAD] = base[embedding]  # in training the adapter is on one side only: the two are no longer tied
    merged, pairs, unmatched = dict(base), dict[str, dict[str, Source]](), []
    for key, source in adapter.items():
        module, side, is_embedding = _split(key)
        if side and f"{module}.weight" in base:
            pairs.setdefault(module, {})[side] = source
            pairs[module]["E" if is_embedding else "L"] = source
        elif not side and key in base and "lora_" not in key:
            merged[key] = source
        else:
            unmatched.append(key)
    unmatched += [module for module, pair in pairs.items() if not {"A", "B"} <= set(pair)]
    if unmatched:
        more = f" and {len(unmatched) - 1} more" if len(unmatched) > 1 else ""
        raise CheckpointError(
            f"{path}: {sorted(unmatched)[0]}{more} match no weight of the base, or lack their A or B. Give the base "
            "that the adapter was trained over"
        )
    for module, pair in pairs.items():
        merged[f"{module}.weight"] = _one(path, settings, module, merged[f"{module}.weight"], pair)
    return merged


def _split(key: str) -> tuple[str, str, bool]:
    """Module, A or B, and whether it is of an embedding; side is empty for a tensor that replaces the base's."""
    match = _LORA.fullmatch(key)
    if match is None:
        return key.removesuffix(".weight"), "", False
    return match["module"], match["side"], match["embedding"] is not None


def _one(path: Path, settings: _Settings, module: str, weight: Source, pair: dict[str, Source]) -> Merged:
    a, b = pair["A"], pair["B"]
    transposed = "E" in pair or settings.transposed(module)
    fits = len(a.shape) == len(b.shape) == 2 and a.shape[0] == b.shape[1]
    delta = (b.shape[0], a.shape[1]) if fits else ()
    if not fits or (delta[::-1] if transposed else delta) != weight.shape:
        raise CheckpointError(
            f"{path}: {module}: A {a.shape} and B {b.shape} do not fit the base's weight {weight.shape}. Give the base "
            "that the adapter was trained over"
        )
    return Merged(weight, a, b, settings.scale(module, a.shape[0]), transposed)
