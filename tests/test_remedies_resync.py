"""ResyncMonitor against stats.ess, and over two processes."""

from __future__ import annotations

import math
import multiprocessing
import tempfile

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatch_probe.remedies import Batch, ResyncMonitor, sequence_index
from mismatch_probe.stats.ess import ess
from mismatch_probe.stats.ratios import Levels, group_log_means, sequence_sums

LEVELS = ("token", "sequence", "prompt")


def padded(seed: int, scale: float, rows: int = 12, length: int = 9) -> tuple[torch.Tensor, Batch, torch.Tensor]:
    """log pi, the batch with random lengths and holes, and a prompt group a row."""
    rng = torch.Generator().manual_seed(seed)
    logprobs, lag = (torch.randn(rows, length, generator=rng, dtype=torch.float64) for _ in range(2))
    mask = torch.arange(length) < torch.randint(0, length + 1, (rows, 1), generator=rng)
    mask &= torch.rand(rows, length, generator=rng) < 0.8
    mask[0, 0] = True
    stale = torch.where(mask, logprobs - scale * lag, torch.nan)
    return logprobs, Batch(torch.zeros_like(logprobs), torch.zeros(rows), stale, mask), torch.arange(rows) // 3 * 7


def truth(level: str, logprobs: torch.Tensor, batch: Batch, prompts: torch.Tensor) -> tuple[float, int]:
    """By the statistics of the analysis."""
    assert batch.stale_logprobs is not None and batch.mask is not None
    mask = batch.mask.numpy()
    lag = (logprobs - batch.stale_logprobs).numpy()[mask]
    sequence = np.broadcast_to(np.arange(len(mask))[:, None], mask.shape)[mask]
    levels = Levels(sequence, np.unique(prompts.numpy(), return_inverse=True)[1])
    sums = sequence_sums(lag, levels)
    weights = {"token": lag, "sequence": sums, "prompt": group_log_means(sums, levels)}[level]
    return ess(weights), int((~np.isnan(weights)).sum())


@given(seed=st.integers(0, 2**31), scale=st.sampled_from([0.0, 0.1, 1.0, 30.0, 400.0]))
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("level", LEVELS)
def test_the_ess_is_that_of_the_statistics(level: str, seed: int, scale: float) -> None:
    logprobs, batch, prompts = padded(seed, scale)
    monitor = ResyncMonitor(level)
    monitor.observe(logprobs, batch, prompts)
    reading = monitor.reading()
    value, count = truth(level, logprobs, batch, prompts)
    assert reading.ess == pytest.approx(value, rel=1e-9) and reading.count == count
    assert reading.resync == (value < 0.5) and reading.smoothed == reading.ess


@pytest.mark.parametrize("level", LEVELS)
def test_float32_log_probs_agree_to_1e_6(level: str) -> None:
    logprobs, batch, prompts = padded(3, 0.3)
    monitor = ResyncMonitor(level)
    narrow = Batch(batch.sampler_logprobs.float(), batch.advantages, batch.stale_logprobs.float(), batch.mask)
    monitor.observe(logprobs.float(), narrow, prompts)
    rounded = Batch(batch.sampler_logprobs, batch.advantages, narrow.stale_logprobs.double(), batch.mask)
    assert abs(monitor.reading().ess - truth(level, logprobs.float().double(), rounded, prompts)[0]) < 1e-6


@pytest.mark.parametrize("level", LEVELS)
def test_micro_batches_are_pooled_and_packed_tokens_are_the_same(level: str) -> None:
    logprobs, batch, prompts = padded(5, 1.0)
    pieces, packed = ResyncMonitor(level), ResyncMonitor(level)
    for rows in (slice(0, 3), slice(3, 9), slice(9, 12)):
        part = Batch(batch.sampler_logprobs[rows], batch.advantages[rows], batch.stale_logprobs[rows], batch.mask[rows])
        pieces.observe(logprobs[rows], part, prompts[rows])
    lengths = torch.tensor([4, 0, *[9] * 10])
    keep = torch.arange(9) < lengths[:, None]
    index = sequence_index(torch.cat([torch.tensor([0]), lengths.cumsum(0)]), int(lengths.sum()))
    flat = (values[keep] for values in (batch.sampler_logprobs, batch.stale_logprobs, batch.mask, logprobs))
    sampler, stale, mask, trainer = flat
    packed.observe(trainer, Batch(sampler, batch.advantages, stale, mask, index, 12), prompts)
    cut = Batch(batch.sampler_logprobs, batch.advantages, batch.stale_logprobs, batch.mask & keep)
    assert pieces.reading().ess == pytest.approx(truth(level, logprobs, batch, prompts)[0], rel=1e-12)
    assert packed.reading().ess == pytest.approx(truth(level, logprobs, cut, prompts)[0], rel=1e-12)


def observed(monitor: ResyncMonitor, *lags: float) -> None:
    """Sequences of one token with these lags."""
    lag = torch.tensor(lags, dtype=torch.float64)[:, None]
    monitor.observe(lag, Batch(torch.zeros_like(lag), torch.zeros(len(lag)), torch.zeros_like(lag)))


def test_a_sync_resets_it() -> None:
    monitor = ResyncMonitor(smoothing=0.9)
    observed(monitor, 0.0, 9.0, 0.0, 0.0)
    first = monitor.reading()
    assert first.resync and first.ess == pytest.approx(0.25, abs=1e-3) and first.readings == 1
    observed(monitor, 5.0, -5.0)  # observed before the sync: not of the new weights
    monitor.synced()
    observed(monitor, 0.0, 0.0)
    after = monitor.reading()
    assert after.ess == after.smoothed == 1.0 and not after.resync
    assert after.count == 2 and after.readings == 1


def test_smoothing_judges_the_moving_average() -> None:
    monitor = ResyncMonitor(threshold=0.6, smoothing=0.75)
    observed(monitor, 0.0, 0.0)
    assert monitor.reading().smoothed == 1.0
    observed(monitor, 0.0, -math.inf)
    second = monitor.reading()
    assert second.ess == 0.5 and second.smoothed == 0.875 and not second.resync and second.readings == 2
    for _ in range(6):
        observed(monitor, 0.0, -math.inf)
        last = monitor.reading()
    assert last.smoothed == pytest.approx(0.5 + 0.5 * 0.75**7) and last.resync


def test_the_threshold_is_strict() -> None:
    monitor = ResyncMonitor()
    observed(monitor, 0.0, -math.inf)
    reading = monitor.reading()
    assert reading.ess == 0.5 and not reading.resync


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_no_number_is_an_error(level: str, value: float) -> None:
    logprobs, batch, prompts = padded(1, 0.1)
    logprobs[0, 0] = value
    monitor = ResyncMonitor(level)
    monitor.observe(logprobs, batch, prompts)
    with pytest.raises(ValueError, match=rf"1 of \d+ lag weights \({level} level\) are NaN or infinite.*mask those"):
        monitor.reading()
    observed(monitor, 0.0) if level != "prompt" else monitor.observe(*padded(2, 0.1))
    assert monitor.reading().ess <= 1.0  # the bad batch is gone


@pytest.mark.parametrize("level", LEVELS)
def test_an_empty_batch_is_an_error(level: str) -> None:
    logprobs, batch, prompts = padded(1, 0.1)
    monitor = ResyncMonitor(level)
    with pytest.raises(ValueError, match=f"no {level} was observed since the last reading"):
        monitor.reading()
    monitor.observe(logprobs, Batch(logprobs, batch.advantages, logprobs, torch.zeros_like(batch.mask)), prompts)
    with pytest.raises(ValueError, match="is the mask empty on every rank"):
        monitor.reading()
    none = torch.zeros(0, 9, dtype=torch.float64)
    monitor.observe(none, Batch(none, torch.zeros(0), none), torch.zeros(0, dtype=torch.int64))
    with pytest.raises(ValueError, match=f"no {level} was observed"):
        monitor.reading()


def test_weights_that_are_all_zero_are_an_error() -> None:
    monitor = ResyncMonitor()
    observed(monitor, -math.inf, -math.inf)
    with pytest.raises(ValueError, match="all 2 lag weights are 0"):
        monitor.reading()


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="none of token, sequence, prompt"):
        ResyncMonitor("group")  # type: ignore[arg-type]
    for wrong in (0.0, 1.5, math.nan):
        with pytest.raises(ValueError, match=r"give one in \(0, 1\]"):
            ResyncMonitor(threshold=wrong)
    for wrong in (-0.1, 1.0):
        with pytest.raises(ValueError, match="share below 1"):
            ResyncMonitor(smoothing=wrong)
    logprobs, batch, prompts = padded(1, 0.1)
    with pytest.raises(ValueError, match=r"one a sequence, \(12,\): none are given"):
        ResyncMonitor("prompt").observe(logprobs, batch)
    with pytest.raises(ValueError, match=r"one a sequence, \(12,\): \(11,\) are given"):
        ResyncMonitor("prompt").observe(logprobs, batch, prompts[1:])


def _rank(rank: int, folder: str, results) -> None:
    """Half the batch each; then all of it on rank 1 and none on rank 0; then a NaN on rank 1 alone."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    calls = []
    inner = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: (calls.append(1), inner(*args, **kwargs))[1]
    found: list[object] = []
    logprobs, batch, prompts = padded(11, 60.0)
    for level in LEVELS:
        for rows in (slice(6 * rank, 6 * rank + 6), slice(0, 12 * rank)):
            monitor = ResyncMonitor(level)
            part = (each[rows] for each in (batch.sampler_logprobs, batch.advantages, batch.stale_logprobs, batch.mask))
            monitor.observe(logprobs[rows], Batch(*part), prompts[rows])
            reading = monitor.reading()
            found.append((reading.ess, reading.count))
    monitor = ResyncMonitor()
    if rank:
        observed(monitor, 0.0, 1.0)
    found.append((monitor.reading().ess, len(calls)))
    if rank:
        alone = ResyncMonitor(pooled=False)
        observed(alone, 0.0)
        alone.reading()  # would wait for the other rank
    observed(monitor, 0.0, math.nan if rank else 0.0)
    try:
        monitor.reading()
    except ValueError as error:
        found.append(str(error))
    results.put((rank, found))
    dist.destroy_process_group()


def test_two_processes_pool_in_one_all_reduce() -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        workers = [context.Process(target=_rank, args=(rank, folder, results), daemon=True) for rank in range(2)]
        for worker in workers:
            worker.start()
        found = dict(results.get(timeout=60) for _ in workers)
        for worker in workers:
            worker.join(timeout=60)
    assert found[0] == found[1]
    logprobs, batch, prompts = padded(11, 60.0)
    for at, level in enumerate(LEVELS):
        value, count = truth(level, logprobs, batch, prompts)
        for ess_found, count_found in found[0][2 * at : 2 * at + 2]:
            assert ess_found == pytest.approx(value, rel=1e-9) and count_found == count
    assert found[0][6] == (pytest.approx(ess(np.array([0.0, 1.0]))), 7)  # seven readings, seven all-reduces
    assert "1 of 4 lag weights" in found[0][7]
