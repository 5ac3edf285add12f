"""What the corrections cost beside the plain policy-gradient loss, forward and backward, from logits to their gradient:

    python benchmarks/remedies.py [--tokens N] [--vocabulary V] [--head K] [--rounds R] [--only NAME] [--dtype D]

Two plain losses stand for the trainer's own: ``usual`` is log_softmax and gather, as most trainers write it; ``lean``
is this package's code without any correction. In each round each loss is timed beside a ``usual`` and a ``lean`` of its
own, in processor time on one thread; ratios are medians over rounds of those pairs. Memory is the most that a loss
holds at once beside its inputs, in arrays of the logits' size, of which the gradient is one.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from mismatch_probe.remedies import (
    CORRECTIONS,
    Batch,
    FullCentre,
    TopKCentre,
    dlc_loss,
    token_and_head_logprobs,
    token_logprobs,
)

Loss = Callable[[Tensor], Tensor]


def losses(tokens: int, words: int, head: int, logits: Tensor) -> dict[str, Loss]:
    """Each from logits, (1, tokens, words), to a scalar."""
    stale = (logits.float() + 0.3 * torch.randn(1, tokens, words)).log_softmax(-1)
    sampler = (stale + 0.03 * torch.randn(1, tokens, words)).log_softmax(-1)
    ids = torch.distributions.Categorical(logits=sampler).sample()
    head_ids = sampler.topk(head).indices
    at, old = (each.gather(-1, ids[..., None])[..., 0] for each in (sampler, stale))
    head_at, head_old = sampler.gather(-1, head_ids), stale.gather(-1, head_ids)
    batch = Batch(at, torch.randn(1, tokens), old)

    def usual(values: Tensor) -> Tensor:
        logprobs = values.float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        return -(batch.advantages * logprobs).mean()

    def corrected(name: str, values: Tensor) -> Tensor:
        return CORRECTIONS[name](token_logprobs(values, ids), batch)

    def top_k(values: Tensor) -> Tensor:
        logprobs, now = token_and_head_logprobs(values, ids, head_ids)
        return dlc_loss(logprobs, batch, centre=TopKCentre(now, head_at, head_old))

    def full(values: Tensor) -> Tensor:
        logprobs = token_logprobs(values.detach(), ids)
        return dlc_loss(logprobs, batch, centre=FullCentre(values, ids, sampler, stale))

    found: dict[str, Loss] = {"usual": usual, "lean": partial(corrected, "none"), f"dlc, top {head}": top_k}
    found |= {name: partial(corrected, name) for name in CORRECTIONS if name not in ("none", "dlc")}
    return found | {"dlc, sampled": partial(corrected, "dlc"), "dlc, full": full}


def timed(loss: Loss, logits: Tensor) -> float:
    """Seconds of processor time of forward and backward; a machine busy with other work disturbs them less."""
    logits.grad = None
    started = time.process_time()
    loss(logits).backward()  # type: ignore[no-untyped-call]
    return time.process_time() - started


def peak(loss: Loss, logits: Tensor) -> float:
    """Most that is held at once beside the inputs, over the size of the logits."""
    logits.grad = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        loss(logits).backward()  # type: ignore[no-untyped-call]
    held = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most / (logits.numel() * logits.element_size())


def main() -> None:
    """Print a line a loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=50_000)
    parser.add_argument("--head", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="losses whose name holds this")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    logits = 3 * torch.randn(1, options.tokens, options.vocabulary)
    logits = logits.to(getattr(torch, options.dtype)).requires_grad_()
    made = losses(options.tokens, options.vocabulary, options.head, logits.detach())
    shape = f"{options.tokens} tokens, vocabulary {options.vocabulary}, {options.dtype}"
    print(f"{shape}, one thread, {options.rounds} rounds")
    print(f"{'loss':16} {'ms':>8} {'/ usual':>8} {'/ lean':>8} {'memory':>8}")
    for name, loss in made.items():
        if options.only not in name:
            continue
        rounds = []
        for turn in range(options.rounds + 1):
            trio = [timed(each, logits) for each in (made["usual"], loss, made["lean"])]
            rounds += [trio] if turn else []  # the first round warms up
        usual, mine, lean = torch.tensor(rounds, dtype=torch.float64).unbind(-1)
        ratios = float((mine / usual).median()), float((mine / lean).median())
        seconds = 1e3 * float(mine.median())
        print(f"{name:16} {seconds:8.1f} {ratios[0]:8.3f} {ratios[1]:8.3f} {peak(loss, logits):8.2f}", flush=True)


if __name__ == "__main__":
    main()
