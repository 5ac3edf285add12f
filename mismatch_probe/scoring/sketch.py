"""Tokens' gradients of the output head, as factors small enough to keep.

The gradient of one token's log-prob in the head's weights is the outer product of e_a - pi and the hidden state x,
(V, H). A fixed random projection of either side keeps inner products of sums of such products: with signs of +-1 they
are unbiased, and their error does not grow with the vocabulary or the width.
Source: Johnson and Lindenstrauss (1984); Achlioptas (2003), "Database-friendly random projections".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from mismatch_probe.run import Bools, Ints

ROWS = COLUMNS = 64
"""Dimensions that are kept of the vocabulary and of the hidden state."""
CAP = 2.0
"""Cap of the lag ratio pi / pi_s in the centred score."""
_SEED = 20609


@dataclass(frozen=True)
class Factors:
    """What is kept of n tokens: float32, or float64 where the weights are.

    ``score`` projects e_a - pi, (n, k). ``centred`` projects the score weighted with w = min(pi / pi_s, CAP), less its
    mean under pi_s, (n, k). ``state`` projects the hidden state of the trainer, (n, m).
    """

    score: Tensor
    centred: Tensor
    state: Tensor


class HeadSketch:
    """The projection of one head's shape: k by V and m by H signs, the same at every step. A side that is no longer
    than what would be kept of it is kept whole.

    Args:
        weight: the head, (V, H); gives shape, device and precision.
    """

    def __init__(self, weight: Tensor) -> None:
        self.shape = tuple(weight.shape)
        self.dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        generator = torch.Generator().manual_seed(_SEED)
        self._rows = self._signs(weight.shape[0], ROWS, weight.device, generator)
        self._columns = self._signs(weight.shape[1], COLUMNS, weight.device, generator)

    def _signs(self, size: int, kept: int, device: torch.device, generator: torch.Generator) -> Tensor | None:
        if size <= kept:
            return None
        signs = torch.randint(0, 2, (size, kept), generator=generator, dtype=torch.int8).to(device, self.dtype)
        return signs.mul_(2).sub_(1).mul_(kept**-0.5)

    @property
    def rows(self) -> Tensor | None:
        """Signs of the vocabulary's projection, (V, k); None where it is kept whole."""
        return self._rows

    @property
    def exact(self) -> bool:
        """True when both sides are kept whole."""
        return self._rows is None and self._columns is None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Lengths of a token's three factors."""
        rows = self.shape[0] if self._rows is None else ROWS
        return rows, rows, self.shape[1] if self._columns is None else COLUMNS

    def empty(self, hidden: Tensor) -> Factors:
        """Factors to be filled, for as many tokens as there are hidden states, (n, H)."""
        return Factors(*(torch.empty(len(hidden), k, dtype=self.dtype, device=hidden.device) for k in self.sizes))

    def drawn(self, token_ids: Tensor) -> Tensor:
        """Projection of e_a for each token, (n, k)."""
        if self._rows is None:
            return torch.nn.functional.one_hot(token_ids, self.shape[0]).to(self.dtype)
        return self._rows[token_ids]

    def state(self, hidden: Tensor) -> Tensor:
        """Projection of hidden states, (n, H) -> (n, m)."""
        hidden = hidden.to(self.dtype)
        return hidden if self._columns is None else hidden @ self._columns

    def add_mass(self, into: Tensor, tile: slice, mass: Tensor) -> None:
        """Add the projection of one tile of the vocabulary, (n, w), to that of the whole, (n, k)."""
        if self._rows is None:
            into[:, tile] += mass
        else:
            into += mass @ self._rows[tile]


class Running:
    """Sums over the vocabulary that the factors of one chunk of tokens need, tile by tile.

    Args:
        sketch: the projection.
        logits: of the chunk, (n, V), or anything else that has its length and device.
    """

    def __init__(self, sketch: HeadSketch, logits: Tensor) -> None:
        self._sketch = sketch
        shape = len(logits), sketch.sizes[0]
        self._mean, self._capped = (torch.zeros(shape, dtype=sketch.dtype, device=logits.device) for _ in range(2))
        self._left = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)

    def add(self, tile: slice, stale: Tensor | None, trainer: Tensor) -> None:
        """Take in one tile: probabilities under pi_s, None where its weights are the trainer's, and pi, (n, w)."""
        self._sketch.add_mass(self._mean, tile, trainer.to(self._sketch.dtype))
        if stale is not None:
            mass = torch.minimum(trainer, CAP * stale).to(self._sketch.dtype)
            self._sketch.add_mass(self._capped, tile, mass)
            self._left += mass.sum(-1, dtype=torch.float64)

    def take(self, mean: Tensor, capped: Tensor | None, left: Tensor | None) -> None:
        """Take in the whole vocabulary, summed elsewhere: projections of pi and of min(pi, CAP pi_s), (n, k), and the
        sum of the latter, (n,); None where the weights are the same.
        """
        self._mean += mean
        if capped is not None and left is not None:
            self._capped += capped
            self._left += left

    def put(self, into: Factors, span: slice, token_ids: Tensor, hidden: Tensor, ratio: Tensor | None) -> None:
        """Fill the tokens of one chunk.

        Args:
            into: factors of all tokens.
            span: which tokens these are.
            token_ids: (n,).
            hidden: the trainer's states, (n, H).
            ratio: pi / pi_s at each token, (n,); None where its weights are the trainer's.
        """
        drawn = self._sketch.drawn(token_ids)
        into.score[span] = drawn - self._mean
        into.state[span] = self._sketch.state(hidden)
        if ratio is None:
            into.centred[span] = into.score[span]
            return
        weight = ratio.clamp_max(CAP)
        left = (self._left - weight).to(self._sketch.dtype)[:, None]
        into.centred[span] = weight.to(self._sketch.dtype)[:, None] * drawn - self._capped + left * self._mean


@dataclass(eq=False)
class StepFactors:
    """Factors of a step's (or a unit's) tokens, in host memory: score and centred (m, k), state (m, l) of the m tokens
    ``wanted``, (tokens,), in their order; NaN until they are put. ``exact`` says that nothing was projected.
    """

    wanted: Bools
    exact: bool
    score: NDArray[Any]
    centred: NDArray[Any]
    state: NDArray[Any]

    @classmethod
    def empty(cls, wanted: Bools, exact: bool, sizes: Sequence[int], kind: DTypeLike) -> StepFactors:
        """Factors to be put, of the given lengths and type."""
        return cls(wanted, exact, *(np.full((int(wanted.sum()), size), np.nan, kind) for size in sizes))

    @classmethod
    def of(cls, wanted: Bools, sketch: HeadSketch) -> StepFactors:
        """Factors that the sketch will make."""
        kind = np.float64 if sketch.dtype == torch.float64 else np.float32
        return cls.empty(wanted, sketch.exact, sketch.sizes, kind)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Lengths of a token's three factors."""
        return self.score.shape[1], self.centred.shape[1], self.state.shape[1]

    def put(self, factors: Factors, place: Ints) -> None:
        """Keep the wanted ones of the factors of the tokens at ``place``, (n,)."""
        mine = self.wanted[place]
        chosen = torch.from_numpy(np.flatnonzero(mine))
        rows = (np.cumsum(self.wanted) - 1)[place[mine]]
        for name in _NAMES:
            values = getattr(factors, name)
            getattr(self, name)[rows] = values[chosen.to(values.device)].cpu().numpy()

    @classmethod
    def joined(cls, tokens: int, parts: Sequence[tuple[Ints, StepFactors]]) -> StepFactors:
        """Those of a step from those of its units, each with the places of its tokens among the step's ``tokens``."""
        wanted = np.zeros(tokens, dtype=np.bool_)
        for place, part in parts:
            wanted[place] = part.wanted
        first = parts[0][1]
        whole = cls.empty(wanted, first.exact, first.sizes, first.score.dtype)
        row = np.cumsum(wanted) - 1
        for place, part in parts:
            for name in _NAMES:
                getattr(whole, name)[row[place[part.wanted]]] = getattr(part, name)
        return whole


_NAMES = ("score", "centred", "state")
