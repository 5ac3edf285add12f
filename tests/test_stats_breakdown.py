"""Breakdown as a test: status by interval, the first bad step against a lasting one, and the verdict in words."""

from __future__ import annotations

import math

import pytest

from mismatch_probe.stats.breakdown import Rule, Status, StepEss, find_breakdown, verdict

BAD, DOUBT, GOOD = (0.3, 0.2, 0.4), (0.48, 0.4, 0.6), (0.9, 0.8, 0.95)
NULL, LONELY = (math.nan, math.nan, math.nan), (0.3, math.nan, math.nan)


def steps(*rows: tuple[float, float, float]) -> list[StepEss]:
    return [StepEss(step, *row) for step, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("row", "status"),
    [
        (GOOD, Status.OK),
        ((0.55, 0.45, 0.7), Status.WARNING),
        ((0.45, 0.3, 0.6), Status.WARNING),
        (BAD, Status.BREAKDOWN),
        ((0.5, 0.5, 0.6), Status.OK),
        ((0.4, 0.3, 0.5), Status.WARNING),
        (NULL, Status.UNJUDGED),
        (LONELY, Status.UNJUDGED),
    ],
)
def test_a_step_is_judged_by_its_whole_interval(row: tuple[float, float, float], status: Status) -> None:
    assert StepEss(0, *row).status(0.5) is status


def test_approximate_steps_are_never_judged() -> None:
    assert StepEss(0, *BAD, approximate=True).status(0.5) is Status.APPROXIMATE


def test_a_single_bad_step_is_told_from_a_lasting_breakdown() -> None:
    found = find_breakdown(steps(GOOD, BAD, GOOD, BAD, BAD, DOUBT, BAD, BAD, BAD, BAD), Rule())
    assert found.first is not None and found.first.step == 1
    assert found.lasting is not None and found.lasting.step == 6 and found.steps == 7
    shorter = find_breakdown(steps(GOOD, BAD, GOOD, BAD, BAD, DOUBT, BAD), Rule(lasting=2))
    assert shorter.lasting is not None and shorter.lasting.step == 3
    assert find_breakdown(steps(BAD, BAD, GOOD), Rule()).lasting is None
    assert find_breakdown(steps(GOOD, GOOD), Rule()).first is None


def test_steps_that_cannot_be_judged_neither_continue_nor_end_a_row() -> None:
    found = find_breakdown(steps(BAD, NULL, BAD, LONELY, BAD), Rule())
    assert found.lasting is not None and found.lasting.step == 0


def test_verdict_of_a_lasting_breakdown() -> None:
    assert verdict(steps(GOOD, BAD, GOOD, BAD, BAD, BAD, DOUBT), Rule()) == (
        "Importance weighting breaks down at step 3 and stays broken: the sequence ESS of the lag falls to 0.300 "
        "[0.200, 0.400], all of it below 0.5, for 3 judged steps in a row or more; 4 of 7 steps judged are in "
        "breakdown, 1 more is in doubt. A first bad step was 1, at 0.300 [0.200, 0.400]."
    )


def test_verdict_of_a_single_bad_step() -> None:
    assert verdict(steps(GOOD, BAD, GOOD), Rule("token", 0.5, "total")) == (
        "Importance weighting breaks down at step 1: the token ESS of the total ratio falls to 0.300 [0.200, 0.400], "
        "all of it below 0.5. It is not shown to last (no 3 judged steps in a row); 1 of 3 steps judged is in "
        "breakdown."
    )


def test_verdict_of_a_healthy_a_doubtful_and_an_unjudged_run() -> None:
    assert verdict(steps(GOOD, (0.8, 0.7, 0.9), NULL), Rule("token")) == (
        "Importance weighting holds: the token ESS of the lag stays above 0.5 at all 2 steps judged (lowest 0.800 "
        "[0.700, 0.900] at step 1). 1 of 3 steps could not be judged."
    )
    assert verdict(steps(GOOD, DOUBT), Rule()) == (
        "No breakdown is proven, and it is not ruled out: the interval of the sequence ESS of the lag reaches below "
        "0.5 at 1 of 2 steps judged (lowest 0.480 [0.400, 0.600] at step 1)."
    )
    assert "null throughout" in verdict(steps(NULL), Rule())
    assert "one prompt group" in verdict(steps(LONELY), Rule())
    assert "approximate at every step" in verdict([StepEss(0, *BAD, approximate=True)], Rule())
