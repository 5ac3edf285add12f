"""Fresh responses from a checkpoint: transformers generates them, each token drawn with a uniform number of its own.

Every response has its own stream of uniform numbers, by seed, prompt and copy. So what it says depends, but for
rounding, neither on the batch that it is in nor on the state of any global generator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList

from mismatch_probe.checkpoints.describe import describe
from mismatch_probe.checkpoints.huggingface import load_model
from mismatch_probe.errors import CheckpointError
from mismatch_probe.run import UNKNOWN_VERSION, Bools, Floats, Ints, Ragged, Rollouts
from mismatch_probe.scoring.memory import out_of_memory
from mismatch_probe.scoring.network import DTYPES, ScoringOptions

_PASSES = 8
"""Tokens of keys and values in memory at once, in forward passes."""


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn: first ``temperature`` (above 0), then ``top_k`` (0 or less: all), then ``top_p``.

    ``longest``: tokens after which a response is cut. ``eos``: tokens that end one and belong to it; with none given,
    those that the checkpoint's configuration names. ``scoring``: device, dtype, and what a batch may hold. ``base`` is
    the model below an adapter.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    longest: int = 256
    eos: tuple[int, ...] = ()
    scoring: ScoringOptions = field(default_factory=ScoringOptions)
    base: Path | None = None

    @property
    def dtype(self) -> str:
        """That of the run: but transformers gives float32 logits at most, and some masks are made for no more."""
        return "float32" if self.scoring.dtype == "float64" else self.scoring.dtype


def sample_fresh(checkpoint: Path, prompts: Ragged, settings: Sampling, n: int, seed: Sequence[int]) -> Rollouts:
    """Draw ``n`` responses to each prompt.

    Args:
        checkpoint: weights that answer.
        prompts: token ids, (P,) rows.
        settings: how.
        n: responses a prompt.
        seed: numbers of 0 or more; the same ones give the same responses.

    Returns:
        P n sequences, those of a prompt side by side. ``group_id`` is the prompt's number; ``sampler_logprob`` is the
        log-prob of each token at the temperature, before top-k and top-p; ``finish_reason`` is stop or length. The
        token that ends a response is its last; nothing after it is kept.

    Raises:
        CheckpointError: the checkpoint cannot be loaded, or gives no finite logits.
    """
    scoring = settings.scoring
    model = load_model(
        checkpoint, scoring.torch_device(), DTYPES[settings.dtype], scoring.trust_remote_code, settings.base
    )
    sampler = _Sampler(checkpoint, model, prompts, settings, n, tuple(seed))
    drawn: dict[int, tuple[Ints, Floats]] = {}
    for rows in sampler.batches():
        drawn |= sampler.draw(rows)
    parts = [drawn[row] for row in range(len(prompts) * n)]
    stopped = np.array([len(ids) > 0 and int(ids[-1]) in sampler.eos for ids, _ in parts], dtype=np.bool_)
    logprob = np.concatenate([np.zeros(0), *(logprob for _, logprob in parts)])
    return rollouts_of(prompts, n, Ragged.of([ids for ids, _ in parts]), logprob, stopped)


class _Sampler:
    """One checkpoint and what it is asked; row r is copy r % n of prompt r // n."""

    def __init__(
        self, checkpoint: Path, model: Any, prompts: Ragged, settings: Sampling, n: int, seed: tuple[int, ...]
    ) -> None:
        self._checkpoint, self._model, self._prompts, self._settings = checkpoint, model, prompts, settings
        self._n, self._seed = n, seed
        self.eos = settings.eos or _configured_eos(model)
        # What lies beside the weights (penalties, suppressed tokens, another temperature) is not how the run sampled.
        model.generation_config = GenerationConfig()
        self._positions = describe(checkpoint, settings.base).max_positions

    def batches(self) -> Iterator[Ints]:
        """Rows that are answered together, of about one prompt length, longest first."""
        rows = np.argsort(-np.repeat(self._prompts.lengths, self._n), kind="stable")
        scoring = self._settings.scoring
        most = scoring.chunk_elements // self._model.config.get_text_config().vocab_size
        start = 0
        while start < len(rows):
            length = len(self._prompts[int(rows[start]) // self._n]) + self._settings.longest
            count = max(1, min(most, _PASSES * scoring.max_tokens // length))
            yield rows[start : start + count]
            start += count

    def draw(self, rows: Ints) -> dict[int, tuple[Ints, Floats]]:
        """Response and its log-probs by row; a batch that the memory does not hold is halved."""
        try:
            found = self._generate(rows)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not out_of_memory(error) or len(rows) == 1:
                raise
        else:
            return found if self._finite(found) else self._by_length(rows)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        half = len(rows) // 2
        return self.draw(rows[:half]) | self.draw(rows[half:])

    def _by_length(self, rows: Ints) -> dict[int, tuple[Ints, Floats]]:
        """Prompts of one length at a time: some architectures give NaN at padding, and spread it."""
        length = self._prompts.lengths[rows // self._n]
        found: dict[int, tuple[Ints, Floats]] = {}
        for value in np.unique(length):
            found |= self._generate(rows[length == value])
        if not self._finite(found):
            raise CheckpointError(f"{self._checkpoint}: cannot be sampled from: its logits are not finite")
        return found

    @staticmethod
    def _finite(found: dict[int, tuple[Ints, Floats]]) -> bool:
        return all(bool(np.isfinite(logprob).all()) for _, logprob in found.values())

    @torch.inference_mode()
    def _generate(self, rows: Ints) -> dict[int, tuple[Ints, Floats]]:
        prompts = [self._prompts[int(row) // self._n] for row in rows]
        width = max(map(len, prompts))
        ids, mask = np.zeros((2, len(rows), width), dtype=np.int64)
        for at, prompt in enumerate(prompts):
            ids[at, width - len(prompt) :], mask[at, width - len(prompt) :] = prompt, 1
        device = self._model.get_output_embeddings().weight.device
        most = self._settings.longest if self._positions is None else self._positions - width
        longest = min(self._settings.longest, most)
        streams = [np.random.default_rng([*self._seed, *divmod(int(row), self._n)]) for row in rows]
        uniform = np.stack([stream.random(longest) for stream in streams])
        pick = _Pick(torch.from_numpy(uniform).to(device), self._settings)
        out = self._model.generate(
            input_ids=torch.from_numpy(ids).to(device),
            attention_mask=torch.from_numpy(mask).to(device),
            generation_config=self._generation(longest),
            logits_processor=LogitsProcessorList([pick]),
        )
        responses = out[:, width:].cpu().numpy()
        logprobs = torch.stack(pick.logprobs, dim=1).cpu().numpy()
        found = {}
        for row, response, logprob in zip(rows, responses, logprobs, strict=True):
            ends = np.flatnonzero(np.isin(response, self.eos))
            length = int(ends[0]) + 1 if len(ends) else len(response)
            found[int(row)] = response[:length].astype(np.int64), logprob[:length]
        return found

    def _generation(self, longest: int) -> GenerationConfig:
        static = bool(getattr(self._model, "_can_compile_fullgraph", False))
        return GenerationConfig(
            max_new_tokens=longest,
            do_sample=False,  # the processor has drawn already; the argmax only reads it
            eos_token_id=list(self.eos) or None,
            pad_token_id=self.eos[0] if self.eos else 0,
            cache_implementation="static" if static else None,
            disable_compile=True,
        )


class _Pick:
    """Draws one token a row by the inverse of its distribution function, and leaves it the only one possible."""

    def __init__(self, uniform: Tensor, settings: Sampling) -> None:
        self._uniform, self._settings = uniform, settings
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, V) logits -> 0 at the token that is drawn, -inf elsewhere."""
        log_p = torch.log_softmax(
            (scores if scores.dtype == torch.float64 else scores.float()) / self._settings.temperature, dim=-1
        )
        height = cut(log_p, self._settings.top_k, self._settings.top_p).exp().cumsum(dim=-1, dtype=torch.float64)
        mark = self._uniform[:, len(self.logprobs), None] * height[:, -1:]
        # The first place above the mark: a token of probability 0 raises nothing and is never it.
        token = torch.searchsorted(height, mark, right=True).clamp_(max=scores.shape[-1] - 1)
        self.logprobs.append(log_p.gather(-1, token)[:, 0].double())
        return torch.full_like(scores, -torch.inf).scatter_(-1, token, 0.0)


def cut(log_p: Tensor, top_k: int, top_p: float) -> Tensor:
    """Log-probs with -inf where top-k, then top-p of what it leaves, cut them off; (B, V), not renormalised.

    Ties at the k-th place all stay. Of the rest the smallest set of likeliest tokens stays that holds ``top_p``.
    """
    if 0 < top_k < log_p.shape[-1]:
        least = log_p.topk(top_k, dim=-1).values[:, -1:]
        log_p = log_p.masked_fill(log_p < least, -torch.inf)
    if top_p < 1.0:
        ordered, place = log_p.sort(dim=-1, descending=True, stable=True)
        mass = ordered.softmax(dim=-1).double()
        # A token stays while those before it hold less than top_p.
        beyond = mass.cumsum(dim=-1) - mass >= top_p
        beyond[:, 0] = False
        log_p = log_p.masked_fill(torch.zeros_like(beyond).scatter_(-1, place, beyond), -torch.inf)
    return log_p


def _configured_eos(model: Any) -> tuple[int, ...]:
    for config in (model.generation_config, model.config.get_text_config()):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return (found,) if isinstance(found, int) else tuple(found)
    return ()


def rollouts_of(prompts: Ragged, n: int, response: Ragged, logprob: Floats, stopped: Bools) -> Rollouts:
    """Drawn responses as rollouts, ``n`` to each prompt.

    Args:
        prompts: token ids, (P,) rows.
        n: responses a prompt.
        response: (P n,) rows.
        logprob: log-prob of each of their tokens, nats, (tokens,).
        stopped: a response came to its end, (P n,).
    """
    rows = [divmod(row, n) for row in range(len(response))]
    tokens = len(response.values)
    origin = np.empty(len(rows), dtype=object)
    origin[:] = [("fresh", row + 1) for row in range(len(rows))]
    return Rollouts(
        sequence_id=np.array([f"fresh-{prompt}-{copy}" for prompt, copy in rows], dtype=object),
        group_id=np.array([str(prompt) for prompt, _ in rows], dtype=object),
        origin=origin,
        prompt=Ragged.of([prompts[prompt] for prompt, _ in rows]),
        response=response,
        sampler_logprob=logprob,
        trainer_logprob=np.full(tokens, np.nan),
        loss_mask=np.ones(tokens, dtype=np.bool_),
        sampler_version=np.full(tokens, UNKNOWN_VERSION, dtype=np.int64),
        advantage=np.full(tokens, np.nan),
        reward=np.full(len(rows), np.nan),
        finish_reason=np.array(["stop" if over else "length" for over in stopped], dtype=object),
    )
