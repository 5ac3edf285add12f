"""The head pass on a GPU, fused: logits live in registers only. ``head`` says what is computed and is its oracle.

Tokens are cut into chunks whose partial sums (a block of tokens by the vocabulary, a token by a run of tiles) stay
within ``_PARTIAL_BYTES`` times ``chunk_elements``. Logits differ from ``head``'s in the order of summation alone. KL
divergences are sums of terms that are never negative, so that they are good to a thousandth at 1e-9 nats.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mismatch_probe.scoring.head import PairScores, TokenScores, empty_pair, empty_scores
from mismatch_probe.scoring.kernels import differ, normalise
from mismatch_probe.scoring.network import Network
from mismatch_probe.scoring.sketch import CAP, Factors, HeadSketch, Running

_TOKENS = 64
"""Chunks are whole blocks of so many tokens."""
BLOCKS = {
    ("normalise", True): (64, 128),
    ("normalise", False): (64, 128),
    ("differ", True): (64, 128),
    ("differ", False): (64, 64),
    ("sketch", True): (64, 64),
    ("sketch", False): (32, 64),
}
"""Tokens and words of a tile, by what is done with it and whether the device is a Hopper or later: the largest whose
arrays fit the registers, as the compiler says. From Hopper on products want 64 rows."""
_PARTIAL_BYTES = 8
_PROGRAMS = 4
"""Programs a multiprocessor, at least, where there are as many tiles."""
_KINDS = (torch.float32, torch.float16, torch.bfloat16)


def interpreted() -> bool:
    """True where Triton runs its kernels on the CPU, one operation at a time (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_not_supported(network: Network) -> str:
    """Why a network's head cannot go through the kernels; empty where it can."""
    weight = network.weight
    if not weight.is_cuda and not interpreted():
        return "it is not on a CUDA device"
    if weight.dtype not in _KINDS:
        return f"its weights are {str(weight.dtype).removeprefix('torch.')}"
    if type(weight) not in (Tensor, torch.nn.Parameter) or not weight.is_contiguous():
        return "its weights are not laid out row by row"
    return ""


@torch.inference_mode()
def score(
    network: Network,
    hidden: Tensor,
    token_ids: Tensor,
    temperature: float,
    chunk_elements: int,
    sketch: HeadSketch | None = None,
) -> tuple[TokenScores, Factors | None]:
    """As ``head.score``."""
    scores = empty_scores(hidden)
    factors = None if sketch is None else sketch.empty(hidden)
    token_ids = token_ids.to(hidden.device)
    for span in _chunks(len(token_ids), network.vocab_size, chunk_elements):
        one = _Normalised(network, hidden[span], token_ids[span], temperature)
        one.put(scores, span)
        if sketch is not None and factors is not None:
            found = _second_pass(None, one, None, temperature, sketch)
            assert found.running is not None
            found.running.put(factors, span, token_ids[span], hidden[span], None)
    return scores, factors


@torch.inference_mode()
def compare(
    stale: tuple[Network, Tensor],
    trainer: tuple[Network, Tensor],
    token_ids: Tensor,
    half: Tensor,
    temperature: float,
    chunk_elements: int,
    sketch: HeadSketch | None = None,
) -> PairScores:
    """As ``head.compare``."""
    pair = empty_pair(stale, trainer, sketch)
    token_ids, half = token_ids.to(stale[1].device), half.to(stale[1].device)
    for span in _chunks(len(token_ids), stale[0].vocab_size, chunk_elements):
        ids = token_ids[span]
        s, t = (_Normalised(network, states[span], ids, temperature) for network, states in (stale, trainer))
        s.put(pair.stale, span)
        t.put(pair.trainer, span)
        found = _second_pass(s, t, half[span], temperature, sketch)
        pair.kl_stale_trainer[span], pair.kl_trainer_stale[span] = found.kl_s, found.kl_t
        pair.same_top[span] = torch.where(found.kl_s.isnan(), torch.nan, (s.best == t.best).double())
        pair.total_variation[span] = 0.5 * found.variation
        pair.bias_sum.add_(found.bias)
        if found.running is not None and pair.factors is not None:
            ratio = (pair.trainer.logprob[span] - pair.stale.logprob[span]).exp()
            found.running.put(pair.factors, span, ids, trainer[1][span], ratio)
    return pair


class _Normalised:
    """First pass of one network over one chunk: largest logits, masses, entropies; what the second pass needs of it."""

    def __init__(self, network: Network, hidden: Tensor, token_ids: Tensor, temperature: float) -> None:
        self.hidden = hidden.to(network.weight.dtype).contiguous()
        self.weight = network.weight
        self.bias = network.weight if network.bias is None else network.bias
        self.biased, self.capped = network.bias is not None, network.softcap is not None
        self.multiplier, self.cap = network.multiplier, network.softcap or 1.0
        self._grid = _Grid.over(self.sizes, self.weight, "normalise")
        most, own = (self._runs(torch.float32) for _ in range(2))
        mass, weighted = (self._runs(torch.float64) for _ in range(2))
        best = self._runs(torch.int64)
        normalise[self._grid.programs](
            self.hidden, self.weight, self.bias, token_ids, most, mass, weighted, own, best,
            *self.sizes, self._grid.tiles, self.multiplier, self.cap, temperature,
            BIASED=self.biased, CAPPED=self.capped, **self._grid.constants,
        )  # fmt: skip
        self.most, run = most.max(0)
        moved = (most - self.most).double()
        self.mass = (moved.exp() * mass).sum(0)
        self._weighted = (moved.exp() * (weighted + moved * mass)).sum(0)
        self._own = own.sum(0).double() - self.most
        self.best = best.gather(0, run[None])[0]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Tokens, vocabulary, width."""
        return len(self.hidden), *self.weight.shape

    def put(self, scores: TokenScores, span: slice) -> None:
        """Log-probs and entropies."""
        log_mass = self.mass.log()
        scores.logprob[span] = self._own - log_mass
        scores.entropy[span] = log_mass - self._weighted / self.mass

    def _runs(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self._grid.runs, len(self.hidden), dtype=dtype, device=self.hidden.device)


@dataclass(frozen=True)
class _Grid:
    """``blocks`` of tokens by ``runs`` of ``tiles`` tiles of the vocabulary, and what the kernels are compiled for."""

    blocks: int
    runs: int
    tiles: int
    constants: dict[str, int | bool]

    @classmethod
    def over(cls, sizes: tuple[int, int, int], weight: Tensor, work: str) -> _Grid:
        """Enough programs to fill the device; the tiles of a run follow one another, which leaves few sums to store."""
        tokens, vocab_size, _ = sizes
        device, units, hopper = weight.device, 1, True
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            units, hopper = properties.multi_processor_count, properties.major >= 9
        block_t, block_v = BLOCKS[work, hopper]
        blocks, tiles = -(-tokens // block_t), -(-vocab_size // block_v)
        in_run = max(1, tiles // -(-_PROGRAMS * units // blocks))
        constants: dict[str, int | bool] = {
            # The interpreter multiplies bfloat16 as if it were integers; a float32 product is the same.
            "WIDEN": interpreted() and weight.dtype != torch.float32,
            "BLOCK_T": block_t,
            "BLOCK_V": block_v,
            "BLOCK_H": 32 if weight.dtype == torch.float32 else 64,
        }
        if not interpreted():
            constants |= {"num_warps": 8, "num_stages": 3}
        return cls(blocks, -(-tiles // in_run), in_run, constants)

    @property
    def programs(self) -> tuple[int, int]:
        return self.blocks, self.runs


@dataclass(frozen=True)
class _Found:
    """Sums of the second pass over one chunk; ``running`` where a sketch was given."""

    kl_s: Tensor
    kl_t: Tensor
    variation: Tensor
    bias: Tensor
    running: Running | None


def _second_pass(
    s: _Normalised | None, t: _Normalised, half: Tensor | None, temperature: float, sketch: HeadSketch | None
) -> _Found:
    count, vocab_size, _ = t.sizes
    grid, device = _Grid.over(t.sizes, t.weight, "differ" if sketch is None else "sketch"), t.hidden.device
    signs = t.weight if sketch is None or sketch.rows is None else sketch.rows
    kept = 16 if sketch is None else signs.shape[1]

    def sums(*shape: int, there: bool, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.empty(shape if there else (0,), dtype=dtype, device=device)

    pair, sketched = s is not None, sketch is not None
    kl_s, kl_t, variation = (sums(grid.runs, count, there=pair) for _ in range(3))
    bias = sums(grid.blocks, 2, vocab_size, there=pair)
    mean = sums(grid.runs, count, kept, there=sketched, dtype=torch.float32)
    capped = sums(grid.runs, count, kept, there=sketched and pair, dtype=torch.float32)
    left = sums(grid.runs, count, there=sketched and pair)
    other = t if s is None else s
    offset = (other.mass.log() - t.mass.log()).float()
    differ[grid.programs](
        other.hidden, other.weight, other.bias, other.most, other.mass.reciprocal().float(),
        t.hidden, t.weight, t.bias, t.most, t.mass.reciprocal().float(),
        offset, t.best if half is None else half, signs,
        kl_s, kl_t, variation, bias, mean, capped, left,
        *t.sizes, grid.tiles, other.multiplier, other.cap, t.multiplier, t.cap, temperature, CAP,
        PAIR=pair, SKETCH=sketched, KEPT=kept,
        BIASED_S=other.biased, CAPPED_S=other.capped, BIASED_T=t.biased, CAPPED_T=t.capped, **grid.constants,
    )  # fmt: skip
    running = None
    if sketch is not None:
        running = Running(sketch, t.hidden)
        running.take(mean.sum(0), capped.sum(0) if pair else None, left.sum(0) if pair else None)
    return _Found(kl_s.sum(0), kl_t.sum(0), variation.sum(0), bias.sum(0), running)


def _chunks(tokens: int, vocab_size: int, chunk_elements: int) -> Iterator[slice]:
    """Runs of whole blocks of tokens. A block leaves 2 V sums for the bias, two half blocks twice as many."""
    width = _TOKENS * max(1, _PARTIAL_BYTES * chunk_elements // (2 * 8 * vocab_size))
    return (slice(start, min(start + width, tokens)) for start in range(0, tokens, width))
