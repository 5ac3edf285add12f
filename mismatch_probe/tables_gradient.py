"""Columns of the steps table on the gradient's bias and on clipping."""

from __future__ import annotations

import pyarrow as pa

from mismatch_probe.columns import Column

_MEANING = {
    "none": "no correction, w = 1",
    "token_tis": "truncated importance sampling, w = min(e^d, 2)",
    "token_mask": "token mask (IcePop), w = e^d inside [0.5, 5], else 0",
    "sequence_is": "sequence importance sampling, w = e^(sum of d)",
    "geometric_mask": "sequence mask, w = 1 where e^(mean of d) is inside [0.99, 1.01], else 0",
    "ppo_clip": "PPO's clip anchored at pi_s, w = e^L or 0",
    "dlc": "score weighted with min(e^L, 2), less its mean under pi_s",
}


def _number(name: str, definition: str, interval: bool = True) -> Column:
    return Column(name, pa.float64(), definition, "1", interval)


GRADIENT = (
    *(
        column
        for name, meaning in _MEANING.items()
        for column in (
            _number(f"gradient_{name}_relative_size", f"length of the head's update over the target's: {meaning}"),
            _number(f"gradient_{name}_cosine", f"cosine of that update ({name}) and the on-policy target"),
            _number(f"gradient_{name}_bias_discrepancy", f"length, over the target's, of what D adds to {name}"),
            _number(f"gradient_{name}_bias_lag", f"length, over the target's, of the bias {name} has without any D"),
        )
    ),
    _number("gradient_signal", "share of the target's squared length that is expectation, not the draw of prompts"),
    _number("gradient_target_ess", "ESS of the target's weights; below 1/2 there is no target", False),
    _number(
        "gradient_sketch_error",
        "largest standard error by the projection, relative for numbers above 1; 0 = exact",
        False,
    ),
    Column("gradient_tokens", pa.int64(), "tokens of the sequences whose gradients were compared"),
    Column("gradient_advantages", pa.string(), "logged, or reward - group mean; null = neither is known"),
    _number("clip_share_positive", "share of tokens with A > 0 whose lag ratio is outside [1 - eps, 1 + eps]"),
    _number("clip_share_negative", "the same with A < 0"),
    Column("clip_skew", pa.float64(), "mean of sign(A) d over the tokens outside", "nats", True),
    _number("clip_flips", "share of tokens whose PPO clip decision differs between pi / pi_s and pi / mu"),
)
