"""Cost of everything that the head pass of two networks gives, over two plain head passes.

    OMP_NUM_THREADS=1 python -m benchmarks.head_cost

A plain pass is the product, log_softmax and the sampled token's log-prob, float32, in chunks of the same size.
Processor seconds, best of three.
"""
# ruff: noqa: T201

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from mismatch_probe.scoring.head import compare
from mismatch_probe.scoring.network import ScoringOptions
from mismatch_probe.scoring.sketch import HeadSketch

CASES = ((49_152, 576, 1024), (151_936, 896, 512))
"""Vocabulary, width, tokens."""


class Head:
    """What ``compare`` needs of a network."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.vocab_size, self.logits_dtype = weight, len(weight), weight.dtype

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """(n, H) -> (n, V)."""
        return torch.mm(hidden, self.weight.T, out=out)


def seconds(run: Callable[[], object]) -> float:
    """Best processor time of three."""
    best = float("inf")
    for _ in range(3):
        started = time.process_time()
        run()
        best = min(best, time.process_time() - started)
    return best


@torch.inference_mode()
def measure(vocab_size: int, width: int, tokens: int) -> None:
    """Print one row."""
    generator = torch.Generator().manual_seed(0)
    first = 0.05 * torch.randn(vocab_size, width, generator=generator)
    heads = [Head(first), Head(first + 1e-3 * torch.randn(first.shape, generator=generator))]
    states = [torch.randn(tokens, width, generator=generator) for _ in heads]
    ids = torch.randint(0, vocab_size, (tokens,), generator=generator)
    chunk = ScoringOptions().chunk_elements
    rows = chunk // vocab_size
    sketch = HeadSketch(heads[1].weight)

    def spans() -> range:
        return range(0, tokens, rows)

    def products() -> None:
        for head, hidden in zip(heads, states, strict=True):
            for at in spans():
                head.logits(hidden[at : at + rows])

    def plain() -> None:
        for head, hidden in zip(heads, states, strict=True):
            for at in spans():
                head.logits(hidden[at : at + rows]).log_softmax(-1).gather(-1, ids[at : at + rows, None])

    pair = tuple(zip(heads, states, strict=True))
    ours, sketched = (
        seconds(lambda with_=with_: compare(*pair, ids, ids % 2, 1.0, chunk, with_)) for with_ in (None, sketch)
    )
    usual, bare = seconds(plain), seconds(products)
    ratios = f"{ours / usual:.2f} | {sketched / usual:.2f} | {ours / bare:.2f}"
    print(f"| {vocab_size:,} x {width} | {ratios} |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("| head | all / two plain passes | with the gradient's factors | all / two bare products |")
    print("|---|---:|---:|---:|")
    for case in CASES:
        measure(*case)
