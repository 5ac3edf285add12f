from __future__ import annotations

import math

from mismatch_probe.stats.levels import StepDiscrepancy, discrepancy_sentence


def test_a_usual_discrepancy_is_only_described() -> None:
    told = discrepancy_sentence([StepDiscrepancy(0, 0.045, 1e-3), StepDiscrepancy(9, 0.05, 1.2e-3)])
    assert told == (
        "Engine numerics: rms D 0.0450 at step 0, 0.0500 at step 9; largest KL(mu || pi_s) 1.2e-03 nats, at step 9."
    )


def test_a_large_or_a_growing_one_is_pointed_at() -> None:
    large = discrepancy_sentence([StepDiscrepancy(0, 0.1, 5e-3)])
    assert "above 0.003" in large and "sync or logging fault" in large and "at step 0;" in large
    growing = discrepancy_sentence([StepDiscrepancy(0, 0.005, 1e-5), StepDiscrepancy(1, 0.03, 4e-4)])
    assert "6.0 times the first" in growing


def test_null_is_said() -> None:
    assert "null throughout" in discrepancy_sentence([StepDiscrepancy(0, math.nan, math.nan)])
