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
    assert "rms D at step 1 is 6.0 times the first" in growing


def test_null_is_said() -> None:
    assert "null throughout" in discrepancy_sentence([StepDiscrepancy(0, math.nan, math.nan)])


def test_what_is_beyond_float64_is_the_worst() -> None:
    told = discrepancy_sentence([StepDiscrepancy(0, 0.01, 1e-4), StepDiscrepancy(1, 50.0, math.inf)])
    assert "inf nats, at step 1" in told and "above 0.003 and rms D at step 1 is 5000.0 times" in told


def test_the_step_of_the_largest_rms_counts_wherever_k3_is_largest() -> None:
    told = discrepancy_sentence([StepDiscrepancy(0, 0.01, 9e-4), StepDiscrepancy(1, 0.05, 1e-4)])
    assert "at step 0." in told and "rms D at step 1 is 5.0 times the first" in told
