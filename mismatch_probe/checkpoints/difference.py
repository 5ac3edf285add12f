"""Two tensors of one name: what is the same, what moved, how far. In pieces, so that no whole copy is made."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_PIECE = 1 << 18
"""Elements compared at once: few enough that memory is reused and stays near, five times as fast as 1 << 22."""
_ROUNDED_TO = ("bfloat16", "float16")


@dataclass(frozen=True)
class Content:
    """One tensor: shape, dtype, blake2b of dtype, shape and bytes, and how many elements are NaN or infinite."""

    shape: tuple[int, ...]
    dtype: str
    hash: str
    nan: int
    inf: int


@dataclass(frozen=True)
class Difference:
    """B against A, element by element. What cannot be said is None.

    ``unchanged`` counts elements of equal value: NaN equals NaN, and a dtype that differs does not matter.
    Over the ``finite`` elements, those finite in both: ``largest`` is max |B - A|, ``largest_at`` its index (None where
    nothing changed), ``rms_a`` and ``rms_change`` are of A and of B - A, ``relative`` is their ratio.
    ``rounding`` says that one is the other rounded: "B = bfloat16(A)".
    """

    elements: int
    finite: int
    unchanged: int
    largest: float | None
    largest_at: tuple[int, ...] | None
    rms_a: float | None
    rms_change: float | None
    relative: float | None
    rounding: str | None


def content(tensor: torch.Tensor) -> Content:
    """Facts about one tensor of any dtype."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    mark = hashlib.blake2b(f"{dtype}:{shape}:".encode(), digest_size=16)
    nan = inf = 0
    for start in range(0, flat.numel(), _PIECE):
        piece = flat[start : start + _PIECE]
        mark.update(piece.view(torch.uint8).numpy().data)
        if tensor.is_floating_point():
            values = piece.double()
            nan += int(values.isnan().sum())
            inf += int(values.isinf().sum())
    return Content(shape, dtype, mark.hexdigest(), nan, inf)


def difference(a: torch.Tensor, b: torch.Tensor, identical: bool = False) -> Difference:
    """Compare two tensors of one shape, in float64; ``identical`` ones need no search for a rounding."""
    flat_a, flat_b = a.detach().contiguous().reshape(-1), b.detach().contiguous().reshape(-1)
    roundings = {} if identical else _possible_roundings(a, b)
    finite = unchanged = 0
    square_a = square_change = 0.0
    largest, at = -1.0, -1
    for start in range(0, a.numel(), _PIECE):
        piece_a, piece_b = flat_a[start : start + _PIECE], flat_b[start : start + _PIECE]
        x, y = piece_a.double(), piece_b.double()
        # 64-bit integers do not fit a float64.
        exact = not (a.is_floating_point() or b.is_floating_point())
        unchanged += int((piece_a == piece_b).sum() if exact else _same(x, y).sum())
        roundings = {text: how for text, how in roundings.items() if _is_rounded(piece_a, piece_b, *how)}
        both = x.isfinite() & y.isfinite()
        finite += int(both.sum())
        change = (y - x).masked_fill(~both, 0.0)
        square_a += float(x.masked_fill(~both, 0.0).square().sum())
        square_change += float(change.square().sum())
        peak = int(change.abs().argmax())
        if float(change[peak].abs()) > largest:
            largest, at = float(change[peak].abs()), start + peak
    rms_a, rms_change = _rms(square_a, finite), _rms(square_change, finite)
    return Difference(
        elements=a.numel(),
        finite=finite,
        unchanged=unchanged,
        largest=largest if finite else None,
        largest_at=_index(at, a.shape) if finite and largest > 0 else None,
        rms_a=rms_a,
        rms_change=rms_change,
        relative=ratio(rms_change, rms_a),
        rounding=next(iter(roundings), None) if unchanged < a.numel() else None,
    )


def ratio(change: float | None, size: float | None) -> float | None:
    """Relative change: unknown, never infinite, where A is all zero and B is not."""
    if change is None or size is None:
        return None
    return change / size if size > 0 else (0.0 if change == 0 else None)


def _possible_roundings(a: torch.Tensor, b: torch.Tensor) -> dict[str, tuple[str, bool]]:
    """Each statement with the dtype of the rounded side, and whether that is A."""
    if not (a.is_floating_point() and b.is_floating_point()):
        return {}
    of_a = {f"B = {name}(A)": (name, False) for name in _ROUNDED_TO}
    return of_a | {f"A = {name}(B)": (name, True) for name in _ROUNDED_TO}


def _is_rounded(a: torch.Tensor, b: torch.Tensor, name: str, swap: bool) -> bool:
    import torch

    exact, coarse = (b, a) if swap else (a, b)
    return bool(_same(exact.to(getattr(torch, name)).double(), coarse.double()).all())


def _same(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x == y) | (x.isnan() & y.isnan())


def _rms(square: float, count: int) -> float | None:
    return math.sqrt(square / count) if count else None


def _index(flat: int, shape: torch.Size) -> tuple[int, ...]:
    place: list[int] = []
    for size in reversed(shape):
        flat, rest = divmod(flat, size)
        place.insert(0, rest)
    return tuple(place)
