"""Padded and packed batches, what padding holds, reductions, compilation, bfloat16 autocast, shapes that do not fit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from mismatch_probe.remedies import (
    CORRECTIONS,
    Batch,
    FullCentre,
    TopKCentre,
    dlc_loss,
    score_centring_loss,
    sequence_index,
    token_and_head_logprobs,
    token_logprobs,
)
from mismatch_probe.remedies import logprobs as chunked

ROWS, LENGTH, WORDS, HEAD = 5, 7, 11, 3
LENGTHS = torch.tensor([7, 3, 0, 5, 1])
KEEP = torch.arange(LENGTH) < LENGTHS[:, None]
CASES = [
    *((name, "sampled") for name in CORRECTIONS),
    *((n, h) for n in ("score_centring", "dlc") for h in ("k", "full")),
]
# Bounds that leave something of ratios as far from 1 as these are.
WIDE = {"geometric_mask": {"band": (0.6, 1.3)}, "gspo": {"clip": (0.1, 0.1)}}


class Rollout:
    """Padded tensors of a random rollout; ``dirty``: padding holds NaN."""

    def __init__(self, *, dirty: bool = False, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(4)
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
        self.logits = 2 * draw(ROWS, LENGTH, WORDS)
        self.stale = (self.logits + 0.4 * draw(ROWS, LENGTH, WORDS)).log_softmax(-1)
        self.sampler = (self.stale + 0.3 * draw(ROWS, LENGTH, WORDS)).log_softmax(-1)
        self.ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)
        self.head = self.sampler.topk(HEAD).indices
        self.advantages = draw(ROWS)
        self.mask = KEEP & (torch.rand(ROWS, LENGTH, generator=generator) < 0.9)
        if dirty:
            for values in (self.stale, self.sampler):
                values[~self.mask] = torch.nan

    def select(self, pick: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        return tuple(pick(each) for each in (self.logits, self.stale, self.sampler, self.ids, self.head))


def loss_of(name: str, how: str, tensors: tuple[Tensor, ...], batch: dict[str, object], **options: object) -> Tensor:
    """The loss as a trainer forms it, from logits; at the sampled tokens, and at the centre's."""
    logits, stale, sampler, ids, head = tensors
    options = {**WIDE.get(name, {}), **options}
    taken = lambda values: values.gather(-1, ids[..., None])[..., 0]  # noqa: E731
    made = Batch(taken(sampler), stale_logprobs=taken(stale), **batch)
    logprobs = token_logprobs(logits, ids)
    if how == "k":
        logprobs, at_head = token_and_head_logprobs(logits, ids, head)
        options["centre"] = TopKCentre(at_head, sampler.gather(-1, head), stale.gather(-1, head), head)
    elif how == "full":
        options["centre"] = FullCentre(logits, ids, sampler, stale)
    return CORRECTIONS[name](logprobs, made, **options)


def padded(name: str, how: str, rollout: Rollout, **options: object) -> tuple[Tensor, Tensor]:
    """Loss and gradient of the logits, padded."""
    tensors = rollout.select(lambda values: values.clone())
    tensors[0].requires_grad_()
    loss = loss_of(name, how, tensors, {"advantages": rollout.advantages, "mask": rollout.mask}, **options)
    return loss.detach(), torch.autograd.grad(loss.sum(), tensors[0])[0]


@pytest.mark.parametrize(("name", "how"), CASES)
@pytest.mark.parametrize("reduction", ["token-mean", "sequence-mean", "sequence-sum", "sum", "none"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["(N,)", "(1, N)"])
def test_packed_and_padded_are_the_same(name: str, how: str, reduction: str, wrapped: bool) -> None:
    rollout = Rollout()
    loss, grad = padded(name, how, rollout, reduction=reduction)
    pick = lambda values: values[KEEP][None] if wrapped else values[KEEP]  # noqa: E731
    tensors = rollout.select(pick)
    tensors[0].requires_grad_()
    index = sequence_index(torch.cat([torch.zeros(1, dtype=torch.int64), LENGTHS.cumsum(0)]), int(KEEP.sum()))
    index = index[None] if wrapped else index
    about = {"mask": pick(rollout.mask), "advantages": rollout.advantages, "sequence": index, "n_sequences": ROWS}
    packed = loss_of(name, how, tensors, about, reduction=reduction)
    torch.testing.assert_close(packed.detach(), pick(loss) if reduction == "none" else loss, rtol=1e-12, atol=1e-13)
    (found,) = torch.autograd.grad(packed.sum(), tensors[0])
    torch.testing.assert_close(found, pick(grad), rtol=0, atol=1e-13)
    assert not grad[~KEEP].any() and grad[rollout.mask].abs().max() > 1e-3


@pytest.mark.parametrize(("name", "how"), CASES)
def test_what_padding_holds_has_no_effect(name: str, how: str) -> None:
    for found, wanted in zip(padded(name, how, Rollout(dirty=True)), padded(name, how, Rollout()), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "how"), CASES)
def test_a_null_that_counts_is_not_hidden(name: str, how: str) -> None:
    """A NaN log-prob of a counted token makes the loss NaN, in every loss that looks at it."""
    rollout = Rollout()
    rollout.sampler[rollout.mask] = torch.nan
    loss, _ = padded(name, how, rollout)
    blind = ("none", "ppo_clip", "gspo", "cispo")
    assert loss.isnan() == (name not in blind)


def test_reductions_are_the_means_they_are_named_for() -> None:
    rollout = Rollout()
    losses, _ = padded("none", "sampled", rollout, reduction="none")
    rows = losses.sum(-1)[LENGTHS > 0]
    counts = rollout.mask.sum(-1)[LENGTHS > 0]
    wanted = {
        "sum": losses.sum(),
        "token-mean": losses[rollout.mask].mean(),
        "sequence-sum": rows.mean(),
        "sequence-mean": (rows / counts).mean(),
    }
    for reduction, value in wanted.items():
        torch.testing.assert_close(padded("none", "sampled", rollout, reduction=reduction)[0], value)


@pytest.mark.parametrize("reduction", ["token-mean", "sequence-mean", "sequence-sum", "sum"])
def test_nothing_that_counts_gives_a_loss_of_0(reduction: str) -> None:
    rollout = Rollout()
    rollout.mask = torch.zeros_like(rollout.mask)
    for name, how in CASES:
        loss, grad = padded(name, how, rollout, reduction=reduction)
        assert loss == 0 and not grad.any()


def test_advantages_of_tokens_and_of_sequences() -> None:
    rollout = Rollout()
    wanted = padded("dlc", "k", rollout)
    for shape in (rollout.advantages[:, None], rollout.advantages[:, None].expand(ROWS, LENGTH)):
        rollout.advantages = shape
        for found, value in zip(padded("dlc", "k", rollout), wanted, strict=True):
            torch.testing.assert_close(found, value, rtol=0, atol=0)


def test_absent_entries_of_a_head_are_left_out() -> None:
    """A head of three of which the last is absent is a head of two, whatever the absent one holds."""
    rollout = Rollout()
    short = rollout.head[..., :2]
    absent = torch.cat([short, torch.full_like(short[..., :1], -1)], dim=-1)
    taken = lambda values, ids: values.gather(-1, ids.clamp(min=0))  # noqa: E731
    found = []
    for ids in (short, absent):
        logprobs, at_head = token_and_head_logprobs(rollout.logits.requires_grad_(), rollout.ids, ids)
        sampler, stale = (taken(each, ids) for each in (rollout.sampler, rollout.stale))
        stale = torch.where(ids < 0, torch.nan, stale)
        about = (taken(each, rollout.ids[..., None])[..., 0] for each in (rollout.sampler, rollout.stale))
        batch = Batch(next(about), rollout.advantages, next(about), rollout.mask)
        loss = dlc_loss(logprobs, batch, centre=TopKCentre(at_head, sampler, stale, ids))
        found.append((loss.detach(), torch.autograd.grad(loss, rollout.logits)[0]))
    for two, three in zip(*found, strict=True):
        torch.testing.assert_close(two, three, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("name", "how"), CASES)
def test_under_torch_compile(name: str, how: str) -> None:
    """One graph, without breaks, and the eager numbers; in machine code for the losses that differ in kind."""
    rollout = Rollout(dtype=torch.float32)
    torch._dynamo.reset()
    backend = "inductor" if name in ("none", "gspo", "dlc") else "aot_eager"
    about = {"advantages": rollout.advantages, "mask": rollout.mask}
    compiled = torch.compile(lambda tensors: loss_of(name, how, tensors, about), fullgraph=True, backend=backend)
    tensors = rollout.select(lambda values: values.clone())
    tensors[0].requires_grad_()
    loss = compiled(tensors)
    wanted, grad = padded(name, how, rollout)
    torch.testing.assert_close(loss.detach(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.autograd.grad(loss, tensors[0])[0], grad, rtol=1e-4, atol=1e-6)


def test_a_compiled_loss_is_not_compiled_anew_for_every_length() -> None:
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    for length in range(2, LENGTH + 1):
        rollout = Rollout()
        about = {"advantages": rollout.advantages, "mask": rollout.mask[:, :length]}
        tensors = rollout.select(lambda values, upto=length: values[:, :upto].clone())
        torch.testing.assert_close(compiled("dlc", "k", tensors, about), loss_of("dlc", "k", tensors, about))
    assert counters["stats"]["unique_graphs"] <= 3


@pytest.mark.parametrize(("name", "how"), CASES)
def test_in_bfloat16_autocast(name: str, how: str) -> None:
    """bfloat16 logits, as a model gives them there: the loss is float32, of these logits' exact values."""
    rollout = Rollout(dtype=torch.float32)
    rollout.logits = rollout.logits.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, grad = padded(name, how, rollout)
    exact = Rollout(dtype=torch.float32)
    exact.logits = rollout.logits.float()
    wanted, wanted_grad = padded(name, how, exact)
    assert loss.dtype == torch.float32 and grad.dtype == torch.bfloat16
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)
    # Rounded once for the sampled tokens and once for the centre.
    torch.testing.assert_close(grad.float(), wanted_grad, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("how", ["sampled", "k", "full"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_chunks_of_tokens_change_nothing(monkeypatch, how: str, dtype: torch.dtype) -> None:
    rollout = Rollout(dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    rollout.logits = rollout.logits.to(dtype)
    wanted = padded("dlc", how, rollout)
    monkeypatch.setattr(chunked, "CHUNK_ELEMENTS", 3 * WORDS)
    for found, value in zip(padded("dlc", how, rollout), wanted, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_log_softmax(temperature: float) -> None:
    rollout = Rollout()
    logits = rollout.logits.requires_grad_()
    wanted = (logits / temperature).log_softmax(-1)
    at, head = token_and_head_logprobs(logits, rollout.ids, rollout.head, temperature)
    torch.testing.assert_close(at, wanted.gather(-1, rollout.ids[..., None])[..., 0])
    torch.testing.assert_close(head, wanted.gather(-1, rollout.head))
    torch.testing.assert_close(token_logprobs(logits, rollout.ids, temperature), at, rtol=0, atol=0)
    for mine, theirs in (
        (at, wanted.gather(-1, rollout.ids[..., None])[..., 0]),
        (head, wanted.gather(-1, rollout.head)),
    ):
        weights = torch.linspace(-1, 1, mine.numel(), dtype=torch.float64).reshape(mine.shape)
        pair = [torch.autograd.grad((weights * each).sum(), logits, retain_graph=True)[0] for each in (mine, theirs)]
        torch.testing.assert_close(*pair, rtol=0, atol=1e-14)


def test_the_temperature_of_a_full_centre_divides_its_logits() -> None:
    rollout = Rollout()
    about = Batch(rollout.sampler[..., 0], rollout.advantages)
    losses = []
    for logits, temperature in ((rollout.logits, 0.7), (rollout.logits / 0.7, 1.0)):
        logits = logits.detach().requires_grad_()
        ids = torch.zeros_like(rollout.ids)
        logprobs = token_logprobs(logits, ids, temperature)
        centre = FullCentre(logits, ids, rollout.sampler, temperature=temperature)
        loss = score_centring_loss(logprobs, about, centre=centre)
        losses.append((loss.detach(), torch.autograd.grad(loss, logits)[0] * temperature))
    for one, other in zip(*losses, strict=True):
        torch.testing.assert_close(one, other)


def test_shapes_that_do_not_fit_are_refused() -> None:
    zeros = torch.zeros
    with pytest.raises(ValueError, match=r"mask is \(2, 4\), sampler_logprobs \(2, 3\): give the same shape"):
        Batch(zeros(2, 3), zeros(2), mask=zeros(2, 4))
    with pytest.raises(ValueError, match=r"advantages are \(3,\): give one a token, \(2, 3\), or a sequence, \(2,\)"):
        Batch(zeros(2, 3), zeros(3))
    with pytest.raises(ValueError, match="sequence and n_sequences go together"):
        Batch(zeros(3), zeros(3), sequence=zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"logprobs are \(2, 2\), sampler_logprobs \(2, 3\)"):
        dlc_loss(zeros(2, 2), Batch(zeros(2, 3), zeros(2)))
    with pytest.raises(ValueError, match="whole sequences are needed: give padded tokens"):
        CORRECTIONS["sequence_is"](zeros(3), Batch(zeros(3), zeros(3)))
