"""Two checkpoints, tensor by tensor: what stayed, what moved, what is missing."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from mismatch_probe.checkpoints.config import Config, ConfigDifference, config_differences, read_config, ties_head
from mismatch_probe.checkpoints.difference import Content, Difference, content, difference, ratio
from mismatch_probe.checkpoints.names import input_embedding
from mismatch_probe.checkpoints.tensors import open_tensors
from mismatch_probe.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_HEAD = "lm_head.weight"


class State(StrEnum):
    """What a tensor of B is to that of A."""

    IDENTICAL = "identical"
    SAME_VALUES = "same_values"
    ROUNDED = "rounded"
    CHANGED = "changed"
    SHAPE_DIFFERS = "shape_differs"
    ONLY_IN_A = "only_in_a"
    ONLY_IN_B = "only_in_b"


UNMOVED = frozenset({State.IDENTICAL, State.SAME_VALUES, State.ROUNDED})
COMPARABLE = UNMOVED | {State.CHANGED}


@dataclass(frozen=True)
class TensorComparison:
    """One tensor name: its contents on each side (None where absent) and their difference (None unless of one shape).

    ``identical``: same dtype and bytes. ``same_values``: equal values, other dtype or zero signs. ``rounded``: one is
    the other in bfloat16 or float16. ``tied`` names the side that has no such tensor because its head is its
    embedding, which stands for it here.
    """

    name: str
    family: str
    state: State
    a: Content | None
    b: Content | None
    difference: Difference | None = None
    tied: str | None = None


@dataclass(frozen=True)
class FamilyComparison:
    """Tensors whose names differ only in layer and expert numbers, as if they were one. What cannot be said is None.

    ``states`` counts them by state. ``largest`` is max |B - A|, found in ``largest_in``; ``relative`` is
    rms(B - A) / rms(A); ``unchanged_share`` the share of elements of equal value.
    """

    family: str
    states: dict[State, int]
    unchanged_share: float | None
    relative: float | None
    largest: float | None
    largest_in: str | None

    @property
    def unmoved(self) -> bool:
        """True when no tensor moved, rounding aside."""
        return self.states.keys() <= UNMOVED


@dataclass(frozen=True)
class WeightComparison:
    """Two checkpoints. ``unmoved_families`` did not move (rounding aside) while other tensors did."""

    path_a: Path
    path_b: Path
    tensors: tuple[TensorComparison, ...]
    families: tuple[FamilyComparison, ...]
    unmoved_families: tuple[str, ...]
    config: tuple[ConfigDifference, ...]
    notices: tuple[str, ...]

    def of(self, *states: State) -> list[TensorComparison]:
        """The tensors in these states."""
        return [tensor for tensor in self.tensors if tensor.state in states]


def compare_checkpoints(
    a: Path, b: Path, base: Path | None = None, on_tensor: Callable[[int, int], None] | None = None
) -> WeightComparison:
    """Compare two checkpoints of any layouts; one tensor of each is in memory at a time.

    Args:
        a: the earlier, or the trainer's.
        b: the later, or the sampler's.
        base: base model of adapters, or the config's directory where a checkpoint has none.
        on_tensor: told (done, all) after each tensor.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    for path in (a, b):
        if not path.exists():
            raise CheckpointError(f"{path}: no such checkpoint. Give its directory, or a version number with RUN_DIR")
    tensors_a, tensors_b = open_tensors(a, base), open_tensors(b, base)
    config_a, config_b = read_config(a, base), read_config(b, base)
    names = sorted({*tensors_a, *tensors_b}, key=_natural)
    compared = []
    for done, name in enumerate(names):
        pair = _pair(name, (tensors_a, tensors_b), (config_a, config_b))
        compared.append(_compare(name, *pair))
        if on_tensor is not None:
            on_tensor(done + 1, len(names))
    families = _families(compared)
    moved = any(State.CHANGED in family.states for family in families)
    return WeightComparison(
        path_a=a,
        path_b=b,
        tensors=tuple(compared),
        families=families,
        unmoved_families=tuple(family.family for family in families if moved and family.unmoved),
        config=config_differences(config_a, config_b),
        notices=_notices((tensors_a, tensors_b), (config_a, config_b)),
    )


def family_of(name: str) -> str:
    """The name with layer and expert numbers removed: model.layers.*.mlp.up_proj.weight."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


_Tensors = Mapping[str, "torch.Tensor"]


def _pair(
    name: str, tensors: tuple[_Tensors, _Tensors], configs: tuple[Config, Config]
) -> tuple[torch.Tensor | None, torch.Tensor | None, str | None]:
    """The two tensors; a head that is absent because tied is the embedding of that side."""
    found: list[torch.Tensor | None] = []
    tied = None
    for side, mapping, config in zip("ab", tensors, configs, strict=True):
        embedding = input_embedding(mapping)
        if name == _HEAD and name not in mapping and embedding and ties_head(config):
            found.append(mapping[embedding])
            tied = side
        else:
            found.append(mapping.get(name))
    return found[0], found[1], tied


def _compare(name: str, a: torch.Tensor | None, b: torch.Tensor | None, tied: str | None) -> TensorComparison:
    of_a = None if a is None else content(a)
    of_b = None if b is None else content(b)
    found = None
    if of_a is None or of_b is None or a is None or b is None:
        state = State.ONLY_IN_B if a is None else State.ONLY_IN_A
    elif of_a.shape != of_b.shape:
        state = State.SHAPE_DIFFERS
    else:
        found = difference(a, b, identical=of_a.hash == of_b.hash)
        state = _state(of_a, of_b, found)
    return TensorComparison(name, family_of(name), state, of_a, of_b, found, tied)


def _state(a: Content, b: Content, found: Difference) -> State:
    if a.hash == b.hash:
        return State.IDENTICAL
    if found.unchanged == found.elements:
        return State.SAME_VALUES
    return State.ROUNDED if found.rounding else State.CHANGED


def _families(tensors: list[TensorComparison]) -> tuple[FamilyComparison, ...]:
    members: dict[str, list[TensorComparison]] = {}
    for tensor in tensors:
        members.setdefault(tensor.family, []).append(tensor)
    return tuple(_family(name, found) for name, found in members.items())


def _family(name: str, tensors: list[TensorComparison]) -> FamilyComparison:
    parts = {tensor.name: tensor.difference for tensor in tensors if tensor.difference is not None}
    finite = sum(part.finite for part in parts.values())
    elements = sum(part.elements for part in parts.values())
    square_a = sum(part.finite * (part.rms_a or 0.0) ** 2 for part in parts.values())
    square_change = sum(part.finite * (part.rms_change or 0.0) ** 2 for part in parts.values())
    changes = {which: part.largest for which, part in parts.items() if part.largest}
    largest_in = max(changes, key=lambda which: changes[which], default=None)
    return FamilyComparison(
        family=name,
        states=dict(Counter(tensor.state for tensor in tensors)),
        unchanged_share=sum(part.unchanged for part in parts.values()) / elements if elements else None,
        relative=ratio(math.sqrt(square_change), math.sqrt(square_a)) if finite else None,
        largest=changes[largest_in] if largest_in else (0.0 if finite else None),
        largest_in=largest_in,
    )


def _notices(tensors: tuple[_Tensors, _Tensors], configs: tuple[Config, Config]) -> tuple[str, ...]:
    lacks = [side for side, config in zip("AB", configs, strict=True) if config is None]
    notices = [f"no config.json in {' and '.join(lacks)}: config fields are not compared"] if lacks else []
    tied: dict[str, list[str]] = {}
    for side, mapping, config in zip("AB", tensors, configs, strict=True):
        embedding = input_embedding(mapping)
        if embedding and _HEAD not in mapping and ties_head(config):
            tied.setdefault(embedding, []).append(side)
        elif embedding and _HEAD not in mapping and any(_HEAD in other for other in tensors):
            notices.append(f"{_HEAD} is absent in {side}, and its config.json does not say that it is tied")
    for embedding, sides in tied.items():
        notices.append(f"{_HEAD} is absent in {' and '.join(sides)} because it is tied: {embedding} is the head")
    return tuple(notices)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Layer 2 before layer 10."""
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in name.split(".")]
