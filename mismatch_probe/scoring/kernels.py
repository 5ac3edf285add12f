"""Triton kernels of the head pass: one tile of logits at a time, made, reduced and forgotten.

Products are summed in float32 and the logits are float32. Within a tile differences and products are float32, and all
sums over the vocabulary and over tokens are float64. A program owns ``BLOCK_T`` tokens and one run of tiles of the
vocabulary; what programs leave is added up outside, in a fixed order, so that no result depends on timing.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    # The series near 0, where 1 - 2 / (e^2x + 1) cancels; below 0.25 it is good to 1e-8 of the value.
    square = x * x
    series = 1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(tl.abs(x) < 0.25, x * series, tl.where(x < 0, -far, far))


@triton.jit
def _one_less_exp(x):
    # 1 - e^-x for x >= 0; the series near 0, where the difference cancels, is good to 1e-8 of the value.
    series = 1.0 - x / 2 * (1.0 - x / 3 * (1.0 - x / 4 * (1.0 - x / 5 * (1.0 - x / 6 * (1.0 - x / 7)))))
    return tl.where(x < 0.25, x * series, 1.0 - tl.exp(-x))


@triton.jit
def _divergence(p, log_ratio, gain):
    # p log(p / q) - p + q, which is never negative, given log(p / q) and p - q. Near 0 by its series: the sum over the
    # vocabulary is KL(p || q), and errors common to all of a row's log ratios touch it in the second order alone.
    x = log_ratio
    series = 1.0 - x / 3 * (1.0 - x / 4 * (1.0 - x / 5 * (1.0 - x / 6 * (1.0 - x / 7 * (1.0 - x / 8)))))
    return tl.where(tl.abs(x) < 0.25, p * x * x / 2 * series, p * x - gain)


@triton.jit
def _logits(
    hidden,
    weight,
    bias,
    rows,
    cols,
    tokens,
    vocab_size,
    width,
    multiplier,
    cap,
    temperature,
    BIASED: tl.constexpr,
    CAPPED: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    total = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
    for start in range(0, width, BLOCK_H):
        place = start + tl.arange(0, BLOCK_H)
        states = tl.load(
            hidden + rows[:, None] * width + place[None, :],
            mask=(rows < tokens)[:, None] & (place < width)[None, :],
            other=0.0,
        )
        weights = tl.load(
            weight + cols[None, :] * width + place[:, None],
            mask=(cols < vocab_size)[None, :] & (place < width)[:, None],
            other=0.0,
        )
        if WIDEN:
            states, weights = states.to(tl.float32), weights.to(tl.float32)
        total = tl.dot(states, weights, total, input_precision="ieee")
    if BIASED:
        total += tl.load(bias + cols, mask=cols < vocab_size, other=0.0).to(tl.float32)[None, :]
    total = total * multiplier
    if CAPPED:
        total = _tanh(tl.div_rn(total, tl.zeros_like(total) + cap)) * cap
    return tl.div_rn(total, tl.zeros_like(total) + temperature)


@triton.jit
def normalise(
    hidden,
    weight,
    bias,
    token_ids,
    most_out,
    mass_out,
    weighted_out,
    own_out,
    best_out,
    tokens,
    vocab_size,
    width,
    tiles,
    multiplier,
    cap,
    temperature,
    BIASED: tl.constexpr,
    CAPPED: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """First pass over the vocabulary, one network.

    For a run of ``tiles`` tiles and each token, with m the largest logit of the run: m, sum exp(z - m),
    sum exp(z - m)(z - m), the logit of the token drawn (0 where it is in another run), and where m lies.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    drawn = tl.load(token_ids + rows, mask=rows < tokens, other=-1)
    most = tl.full((BLOCK_T,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK_T,), tl.float64)
    weighted = tl.zeros((BLOCK_T,), tl.float64)
    own = tl.zeros((BLOCK_T,), tl.float32)
    best = tl.zeros((BLOCK_T,), tl.int64)
    first = tl.program_id(1).to(tl.int64) * tiles * BLOCK_V
    for tile in range(tiles):
        cols = first + tile * BLOCK_V + tl.arange(0, BLOCK_V)
        there = (cols < vocab_size)[None, :]
        z = _logits(
            hidden, weight, bias, rows, cols, tokens, vocab_size, width, multiplier, cap, temperature,
            BIASED, CAPPED, WIDEN, BLOCK_T, BLOCK_V, BLOCK_H,
        )  # fmt: skip
        own += tl.sum(tl.where(cols[None, :] == drawn[:, None], z, 0.0), 1)
        z = tl.where(there, z, float("-inf"))
        top, where = tl.max(z, 1, return_indices=True)
        best = tl.where(top > most, first + tile * BLOCK_V + where, best)
        higher = tl.maximum(most, top)
        below = tl.where(there, z - higher[:, None], 0.0)
        raised = tl.where(there, tl.exp(below), 0.0)
        moved = tl.where(most == float("-inf"), 0.0, most - higher).to(tl.float64)
        weighted = tl.exp(moved) * (weighted + moved * mass) + tl.sum((raised * below).to(tl.float64), 1)
        mass = tl.exp(moved) * mass + tl.sum(raised.to(tl.float64), 1)
        most = higher
    out = tl.program_id(1).to(tl.int64) * tokens + rows
    tl.store(most_out + out, most, mask=rows < tokens)
    tl.store(mass_out + out, mass, mask=rows < tokens)
    tl.store(weighted_out + out, weighted, mask=rows < tokens)
    tl.store(own_out + out, own, mask=rows < tokens)
    tl.store(best_out + out, best, mask=rows < tokens)


@triton.jit
def differ(
    hidden_s,
    weight_s,
    bias_s,
    most_s,
    inverse_s,
    hidden_t,
    weight_t,
    bias_t,
    most_t,
    inverse_t,
    offset,
    half,
    signs,
    kl_s_out,
    kl_t_out,
    variation_out,
    bias_out,
    mean_out,
    capped_out,
    left_out,
    tokens,
    vocab_size,
    width,
    tiles,
    multiplier_s,
    cap_s,
    multiplier_t,
    cap_t,
    temperature,
    ratio_cap,
    PAIR: tl.constexpr,
    SKETCH: tl.constexpr,
    KEPT: tl.constexpr,
    BIASED_S: tl.constexpr,
    CAPPED_S: tl.constexpr,
    BIASED_T: tl.constexpr,
    CAPPED_T: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Second pass, both networks (``PAIR``) or the trainer's alone, whose largest logits and masses are known.

    For a run of tiles and each token: its parts of KL(p_s || p_t), KL(p_t || p_s) and sum |p_s - p_t|; for a block of
    tokens and each word: the sum of p_s - p_t over the tokens of either half. With ``SKETCH`` also, for a run and each
    token: the projections of p_t and of min(p_t, ratio_cap p_s), and the latter's sum.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    here = rows < tokens
    top_t = tl.load(most_t + rows, mask=here, other=0.0)[:, None]
    over_t = tl.load(inverse_t + rows, mask=here, other=0.0)[:, None]
    if PAIR:
        top_s = tl.load(most_s + rows, mask=here, other=0.0)[:, None]
        over_s = tl.load(inverse_s + rows, mask=here, other=0.0)[:, None]
        apart = tl.load(offset + rows, mask=here, other=0.0)[:, None]
        side = tl.load(half + rows, mask=here, other=-1)[:, None]
    kl_s = tl.zeros((BLOCK_T,), tl.float64)
    kl_t = tl.zeros((BLOCK_T,), tl.float64)
    variation = tl.zeros((BLOCK_T,), tl.float64)
    left = tl.zeros((BLOCK_T,), tl.float64)
    mean = tl.zeros((BLOCK_T, KEPT), tl.float32)
    capped = tl.zeros((BLOCK_T, KEPT), tl.float32)
    first = tl.program_id(1).to(tl.int64) * tiles * BLOCK_V
    for tile in range(tiles):
        cols = first + tile * BLOCK_V + tl.arange(0, BLOCK_V)
        there = (cols < vocab_size)[None, :]
        z_t = _logits(
            hidden_t, weight_t, bias_t, rows, cols, tokens, vocab_size, width, multiplier_t, cap_t, temperature,
            BIASED_T, CAPPED_T, WIDEN, BLOCK_T, BLOCK_V, BLOCK_H,
        )  # fmt: skip
        below_t = tl.where(there, z_t - top_t, 0.0)
        raised_t = tl.where(there, tl.exp(below_t), 0.0)
        p_t = raised_t * over_t
        if PAIR:
            z_s = _logits(
                hidden_s, weight_s, bias_s, rows, cols, tokens, vocab_size, width, multiplier_s, cap_s, temperature,
                BIASED_S, CAPPED_S, WIDEN, BLOCK_T, BLOCK_V, BLOCK_H,
            )  # fmt: skip
            below_s = tl.where(there, z_s - top_s, 0.0)
            raised_s = tl.where(there, tl.exp(below_s), 0.0)
            p_s = raised_s * over_s
            # p_s - p_t by way of log p_s - log p_t: what is common to both cancels before exp rounds it.
            log_ratio = tl.where(there, (below_s - below_t) - apart, 0.0)
            size = tl.maximum(p_s, p_t) * _one_less_exp(tl.abs(log_ratio))
            gain = tl.where(log_ratio < 0, -size, size)
            kl_s += tl.sum(_divergence(p_s, log_ratio, gain).to(tl.float64), 1)
            kl_t += tl.sum(_divergence(p_t, -log_ratio, -gain).to(tl.float64), 1)
            variation += tl.sum(size.to(tl.float64), 1)
            # A token whose networks give NaN would spoil the sum of all others.
            signed = tl.where(gain == gain, gain, 0.0).to(tl.float64)
            out = bias_out + (tl.program_id(0).to(tl.int64) * 2) * vocab_size + cols
            tl.store(out, tl.sum(tl.where(side == 0, signed, 0.0), 0), mask=cols < vocab_size)
            tl.store(out + vocab_size, tl.sum(tl.where(side == 1, signed, 0.0), 0), mask=cols < vocab_size)
        if SKETCH:
            kept = tl.arange(0, KEPT)
            projection = tl.load(
                signs + cols[:, None] * KEPT + kept[None, :], mask=(cols < vocab_size)[:, None], other=0.0
            )
            mean = tl.dot(p_t, projection, mean, input_precision="tf32x3")
            if PAIR:
                lower = tl.minimum(p_t, ratio_cap * p_s)
                capped = tl.dot(lower, projection, capped, input_precision="tf32x3")
                left += tl.sum(lower.to(tl.float64), 1)
    out = tl.program_id(1).to(tl.int64) * tokens + rows
    if PAIR:
        tl.store(kl_s_out + out, kl_s, mask=here)
        tl.store(kl_t_out + out, kl_t, mask=here)
        tl.store(variation_out + out, variation, mask=here)
    if SKETCH:
        wide = out[:, None] * KEPT + tl.arange(0, KEPT)[None, :]
        tl.store(mean_out + wide, mean, mask=here[:, None])
        if PAIR:
            tl.store(capped_out + wide, capped, mask=here[:, None])
            tl.store(left_out + out, left, mask=here)
