"""When to resynchronise the sampler: the effective sample size of the lag ratio."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mismatch_probe.remedies.batch import Batch

Level = Literal["token", "sequence", "prompt"]


@dataclass(frozen=True)
class Reading:
    """ESS of one batch's lag weights, in (0, 1], over ``count`` tokens, sequences or prompt groups of all ranks.

    ``smoothed`` is what ``resync`` was judged on: ``ess`` itself, unless the monitor smooths. ``readings`` counts those
    since the last sync, this one included.
    """

    ess: float
    smoothed: float
    count: int
    readings: int
    resync: bool


class ResyncMonitor:
    """Says when the lag ratio has spread so far that the sampler must be given the current weights.

        ESS = (sum w)^2 / (n sum w^2)

    w is pi / pi_s of a token; of a sequence, the product over its tokens; of a prompt group, the mean over its
    sequences.

    ``observe`` each micro-batch, then take one ``reading`` an update: ``if monitor.reading().resync``, sync the sampler
    and call ``synced``. With few weights ESS is biased upwards: it cannot fall below 1 / n, and of one weight it is 1.

    Args:
        level: which weights. The token level hardly moves before it is too late.
        threshold: resync below it. At 1/2 the variance of a weighted mean has doubled.
        smoothing: 0 judges each batch alone; b in (0, 1) judges b times the value before plus 1 - b times this batch's.
        group: process group to pool over; None for the default one, where torch.distributed is initialised. A prompt
            group's sequences must be on one rank and in one call of ``observe``.
        pooled: False for this rank alone, where not every rank comes to the ``reading`` (pipeline parallelism).

    Raises:
        ValueError: an unknown level, or a threshold or smoothing out of range.

    Source: Kish (1965); Kong (1992); the threshold from "Training-Inference Mismatch in LLM RL" (2026), which level it
    means is not known.
    """

    def __init__(
        self,
        level: Level = "sequence",
        threshold: float = 0.5,
        smoothing: float = 0.0,
        group: dist.ProcessGroup | None = None,
        pooled: bool = True,
    ) -> None:
        if level not in ("token", "sequence", "prompt"):
            raise ValueError(f"level {level!r} is none of token, sequence, prompt")
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold is {threshold:g}: an ESS is a share, give one in (0, 1]")
        if not 0 <= smoothing < 1:
            raise ValueError(f"smoothing is {smoothing:g}: give 0 for none, or a share below 1")
        self.level, self.threshold, self.smoothing = level, threshold, smoothing
        self._group, self._is_pooled = group, pooled
        self.synced()

    def synced(self) -> None:
        """The sampler has the current weights: forget what was observed."""
        self._sums: list[Tensor] = []
        self._smoothed: float | None = None
        self._readings = 0

    @torch.no_grad()
    def observe(self, logprobs: Tensor, batch: Batch, prompts: Tensor | None = None) -> None:
        """Add a micro-batch's lag weights; nothing is read back from the device and nothing is sent.

        Args:
            logprobs: log pi of the sampled tokens, nats, of the shape of ``batch.sampler_logprobs``.
            batch: the tokens. Where it has no ``stale_logprobs`` every weight is 1.
            prompts: which prompt group each sequence belongs to, any integers, (S,); at prompt level only.

        Raises:
            ValueError: shapes that do not fit, or no ``prompts`` at prompt level.
        """
        terms = batch.terms(logprobs)
        lag, mask = terms.lag.double(), terms.mask
        if self.level == "token":
            log_weights = torch.where(mask, lag, -math.inf).reshape(-1)
            present = mask.reshape(-1)
        else:
            present = batch.sums(mask.double()) > 0
            log_weights = torch.where(present, batch.sums(lag), -math.inf)
        if self.level == "prompt":
            if prompts is None or prompts.shape != present.shape:
                given = "none are" if prompts is None else f"{tuple(prompts.shape)} are"
                raise ValueError(f"prompt level needs prompts, one a sequence, {tuple(present.shape)}: {given} given")
            log_weights, present = _group_log_means(log_weights, present, prompts)
        # NaN and +inf are told at the reading, by all ranks: an error on one alone would leave the others waiting.
        bad = present & (log_weights.isnan() | (log_weights == math.inf))
        good = torch.where(present & ~bad, log_weights, -math.inf)
        peak = good.max() if len(good) else good.new_tensor(-math.inf)
        scaled = (good - torch.where(peak.isfinite(), peak, 0.0)).exp()
        count, wrong = (flags.sum().double() for flags in (present, bad))
        self._sums.append(torch.stack([count, wrong, peak, scaled.sum(), scaled.square().sum()]))

    def reading(self) -> Reading:
        """ESS of all that was observed since the last reading, on all ranks, in one all-reduce.

        Every rank must call it; all get the same answer, or the same error.

        Raises:
            ValueError: nothing was observed on any rank; or some weight is NaN or infinite, or all are 0.
        """
        rows, self._sums = self._sums, []
        parts = self._pooled(_merged(torch.stack(rows)) if rows else None)
        count, wrong, peak, total, squares = _merged(parts).tolist()
        if wrong:
            raise ValueError(
                f"{wrong:.0f} of {count:.0f} lag weights ({self.level} level) are NaN or infinite: log pi and log pi_s "
                "must be numbers at every counted token; mask those that are not known"
            )
        if not count:
            raise ValueError(f"no {self.level} was observed since the last reading: is the mask empty on every rank?")
        if peak == -math.inf:
            raise ValueError(f"all {count:.0f} lag weights are 0: log pi is -inf somewhere in each {self.level}")
        ess = min(total**2 / (count * squares), 1.0)
        before = ess if self._smoothed is None else self._smoothed
        self._smoothed = self.smoothing * before + (1 - self.smoothing) * ess
        self._readings += 1
        return Reading(ess, self._smoothed, int(count), self._readings, self._smoothed < self.threshold)

    def _pooled(self, mine: Tensor | None) -> Tensor:
        """The sums of each rank, (ranks, 5). Each fills its own row of zeros, so that adding is gathering."""
        if not (self._is_pooled and dist.is_available() and dist.is_initialized()):
            return _nothing()[None] if mine is None else mine[None]
        ranks, rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        device = _device(self._group) if mine is None else mine.device
        rows = torch.zeros(ranks, 5, dtype=torch.float64, device=device)
        mine = _nothing() if mine is None else mine
        rows[rank] = torch.where(mine == -math.inf, -_LARGEST, mine).to(device)
        dist.all_reduce(rows, group=self._group)
        return torch.where(rows == -_LARGEST, -math.inf, rows)


_LARGEST = torch.finfo(torch.float64).max


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Where this group's backend wants its tensors, for a rank that observed nothing."""
    on_gpu = "nccl" in str(dist.get_backend(group))
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _nothing() -> Tensor:
    return torch.tensor([0.0, 0.0, -math.inf, 0.0, 0.0], dtype=torch.float64)


def _merged(rows: Tensor) -> Tensor:
    """(count, wrong, peak, sum w / e^peak, sum w^2 / e^2 peak) of several, (r, 5) to (5,)."""
    peak = rows[:, 2].max()
    factor = torch.where(rows[:, 2] == -math.inf, 0.0, (rows[:, 2] - peak).exp())
    sums = (rows[:, 3] * factor).sum(), (rows[:, 4] * factor.square()).sum()
    return torch.stack([rows[:, 0].sum(), rows[:, 1].sum(), peak, *sums])


def _group_log_means(log_weights: Tensor, present: Tensor, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """Log of each prompt group's mean weight, and whether it has any sequence."""
    names, index = torch.unique(prompts, return_inverse=True)
    zeros: Any = log_weights.new_zeros(len(names))
    peak = (zeros - math.inf).scatter_reduce(0, index, log_weights, "amax")
    base = torch.where(peak.isfinite(), peak, 0.0)
    weights = torch.where(present, (log_weights - base[index]).exp(), 0.0)
    count = zeros.index_add(0, index, present.to(zeros.dtype))
    return base + (zeros.index_add(0, index, weights) / count.clamp(min=1)).log(), count > 0
