"""No array of tokens x vocabulary is made beside the trainer's logits and their gradient, nor kept for later."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from mismatch_probe.remedies import (
    CORRECTIONS,
    Batch,
    FullCentre,
    TopKCentre,
    token_and_head_logprobs,
    token_logprobs,
)
from mismatch_probe.remedies import logprobs as chunked

TOKENS, WORDS, HEAD = 96, 2000, 8
CASES = [
    *((name, "sampled") for name in CORRECTIONS),
    *((n, h) for n in ("score_centring", "dlc") for h in ("k", "full")),
]


class Allocations(profile):
    """``large`` says, in arrays of the logits' size, what was allocated at once of at least half that size."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.size = logits.numel() * logits.element_size()

    def large(self) -> list[float]:
        events = self.profiler.kineto_results.events()
        sizes = [event.nbytes() / self.size for event in events if event.name() == "[memory]"]
        return [size for size in sizes if size >= 0.5]


def place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "how"), CASES)
def test_only_the_gradient_is_as_large_as_the_logits(monkeypatch, name: str, how: str, dtype: torch.dtype) -> None:
    monkeypatch.setattr(chunked, "CHUNK_ELEMENTS", TOKENS * WORDS // 8)
    generator = torch.Generator().manual_seed(0)
    logits, stale, sampler = (torch.randn(4, TOKENS // 4, WORDS, generator=generator).to(dtype) for _ in range(3))
    stale, sampler = stale.log_softmax(-1), sampler.log_softmax(-1)
    ids, head = torch.randint(0, WORDS, (4, TOKENS // 4), generator=generator), sampler.topk(HEAD).indices
    at, old = (each.gather(-1, ids[..., None])[..., 0] for each in (sampler, stale))
    at_head, old_head = sampler.gather(-1, head), stale.gather(-1, head)
    batch = Batch(at, torch.randn(4, generator=generator), old)
    ids[0, 0] = -100  # as Hugging Face marks labels that do not count
    batch = replace(batch, mask=ids >= 0)
    logits.requires_grad_()
    saved: list[int] = []
    keep = torch.autograd.graph.saved_tensors_hooks(
        lambda each: (
            saved.append(each.untyped_storage().data_ptr()) if each.numel() >= TOKENS * WORDS else None,
            each,
        )[1],
        lambda each: each,
    )
    with Allocations(logits) as forward, keep:
        options: dict[str, Any] = {}
        logprobs = token_logprobs(logits, ids)
        if how == "k":
            logprobs, now_head = token_and_head_logprobs(logits, ids, head)
            options["centre"] = TopKCentre(now_head, at_head, old_head)
        elif how == "full":
            options["centre"] = FullCentre(logits, ids, sampler, stale)
        loss = CORRECTIONS[name](logprobs, batch, **options)
    with Allocations(logits) as backward:
        loss.backward()
    assert forward.large() == [] and backward.large() == [1.0]  # the gradient
    assert set(saved) <= {place(each) for each in (logits, stale, sampler)}


def test_the_watch_sees_what_log_softmax_makes() -> None:
    """The same watch on the loss as it is usually written: the test above can fail."""
    logits = torch.randn(TOKENS, WORDS, requires_grad=True)
    with Allocations(logits) as forward:
        loss = logits.log_softmax(-1).gather(-1, torch.zeros(TOKENS, 1, dtype=torch.int64)).mean()
    with Allocations(logits) as backward:
        loss.backward()
    assert forward.large() == [1.0] and len(backward.large()) > 1
