"""Tokens' gradients of the output head, as factors small enough to keep.

The gradient of one token's log-prob in the head's weights is the outer product of e_a - pi and the hidden state x,
(V, H). A fixed random projection of either side keeps inner products of sums of such products: with signs of +-1 they
are unbiased, and their error does not grow with the vocabulary or the width.
Source: Johnson and Lindenstrauss (1984); Achlioptas (2003), "Database-friendly random projections".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
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

    def put(
        self, into: Factors, span: slice, token_ids: Tensor, hidden: Tensor, stale: Tensor | None, trainer: Tensor
    ) -> None:
        """Fill the tokens of one chunk.

        Args:
            into: factors of all tokens.
            span: which tokens these are.
            token_ids: (n,).
            hidden: the trainer's states, (n, H).
            stale: probabilities under pi_s, (n, V); None where its weights are the trainer's.
            trainer: probabilities under pi, (n, V).
        """
        narrow = trainer.to(self.dtype)
        drawn, mean = self._drawn(token_ids, trainer.shape[1]), self._project(narrow)
        into.score[span] = drawn - mean
        into.state[span] = hidden.to(self.dtype) if self._columns is None else hidden.to(self.dtype) @ self._columns
        if stale is None:
            into.centred[span] = into.score[span]
            return
        at = token_ids[:, None]
        # A token that pi_s gives no mass at all has the capped weight, unless pi gives it none either.
        weight = (trainer.gather(-1, at) / stale.gather(-1, at)).nan_to_num_(1.0, CAP).clamp_max_(CAP)
        mass = stale.to(self.dtype, copy=True).mul_(CAP)
        torch.minimum(narrow, mass, out=mass)
        left = mass.sum(-1, keepdim=True) - weight.to(self.dtype)
        into.centred[span] = weight.to(self.dtype) * drawn - self._project(mass) + left * mean

    def _drawn(self, token_ids: Tensor, vocab_size: int) -> Tensor:
        if self._rows is None:
            return torch.nn.functional.one_hot(token_ids, vocab_size).to(self.dtype)
        return self._rows[token_ids]

    def _project(self, mass: Tensor) -> Tensor:
        return mass if self._rows is None else mass @ self._rows


class StepFactors:
    """Factors of a step's tokens, in host memory: score and centred (m, k), state (m, l) of the m tokens ``wanted``,
    in their order; NaN until they are put.

    Args:
        wanted: which response tokens, (tokens,).
        sketch: what made them.
    """

    def __init__(self, wanted: Bools, sketch: HeadSketch) -> None:
        self.wanted, self.exact = wanted, sketch.exact
        kind = np.float64 if sketch.dtype == torch.float64 else np.float32
        count = int(wanted.sum())
        self.score, self.centred, self.state = (np.full((count, size), np.nan, kind) for size in sketch.sizes)
        self._row = np.cumsum(wanted) - 1

    def put(self, factors: Factors, place: Ints) -> None:
        """Keep the wanted ones of the factors of the tokens at ``place``, (n,)."""
        mine = self.wanted[place]
        chosen, rows = torch.from_numpy(np.flatnonzero(mine)), self._row[place[mine]]
        for name in ("score", "centred", "state"):
            values = getattr(factors, name)
            getattr(self, name)[rows] = values[chosen.to(values.device)].cpu().numpy()
