from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatch_probe.stats.attribution import Attribution, attribute, attribution_sentence, spread_sample
from mismatch_probe.stats.intervals import ClusterIntervals
from tests.properties import covers

GROUPS = 40


def planted(
    rng: np.random.Generator, engine: float, trainer: float, correlation: float, n: int = 8000
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """log mu, log pi_s and r, with normal errors of the given sizes and correlation."""
    common, own = rng.normal(size=(2, n))
    e_e = engine * common
    e_t = trainer * (correlation * common + math.sqrt(1 - correlation**2) * own)
    r = -rng.exponential(size=n)
    return r + e_e, r + e_t, r


def found(sampler: np.ndarray, stale: np.ndarray, reference: np.ndarray, groups: int = GROUPS) -> Attribution:
    sequence = np.arange(len(sampler)) * 4 * groups // len(sampler)
    return attribute(sampler, stale, reference, sequence, sequence // 4, ClusterIntervals(groups))


@pytest.mark.parametrize(
    ("engine", "trainer", "correlation"),
    [(0.02, 0.01, 0.0), (0.01, 0.03, 0.8), (0.02, 0.02, -0.5), (0.05, 0.001, 0.3)],
)
def test_planted_errors_are_recovered(engine: float, trainer: float, correlation: float) -> None:
    truth = {
        "error_engine_rms": engine,
        "error_trainer_rms": trainer,
        "error_correlation": correlation,
        "error_covariance": correlation * engine * trainer,
    }
    square = engine**2 + trainer**2 - 2 * truth["error_covariance"]
    truth["error_share_engine"] = engine**2 / square
    truth["error_share_trainer"] = trainer**2 / square
    truth["error_share_covariance"] = -2 * truth["error_covariance"] / square
    covered = dict.fromkeys(truth, 0)
    for seed in range(40):
        got = found(*planted(np.random.default_rng(seed), engine, trainer, correlation)).intervals
        for name, value in truth.items():
            covered[name] += got[name].low <= value <= got[name].high
    # 95 % intervals: of 40, fewer than 33 cover in one of 1,500 sets.
    assert min(covered.values()) >= 33, covered
    last = found(*planted(np.random.default_rng(99), engine, trainer, correlation, 200_000)).intervals
    for name, value in truth.items():
        assert last[name].value == pytest.approx(
            value, rel=0.03, abs=0.01 * (square if name == "error_covariance" else 1)
        )


def test_the_intervals_of_clustered_errors_are_over_groups() -> None:
    """An error that all tokens of a prompt share is one draw a prompt, not a thousand."""
    rng = np.random.default_rng(1)
    shared = np.repeat(rng.normal(size=GROUPS) * 0.02, 200)
    r = np.full(len(shared), -1.0)
    stale = r + 0.001 * rng.normal(size=len(r))
    interval = found(r + shared, stale, r).intervals["error_engine_rms"]
    assert interval.high - interval.low > 0.2 * interval.value


errors = st.lists(st.tuples(*[st.floats(-1, 1, allow_subnormal=False)] * 3), min_size=8, max_size=40)


@covers(attribute)
@settings(max_examples=100, deadline=None)
@given(errors)
def test_the_parts_add_up_to_the_mean_square_of_d(rows: list[tuple[float, float, float]]) -> None:
    sampler, stale, reference = np.array(rows).T
    got = found(sampler, stale, reference, groups=2).intervals
    square = float(np.square(stale - sampler).mean())
    engine, trainer = got["error_engine_rms"].value, got["error_trainer_rms"].value
    assert engine**2 + trainer**2 - 2 * got["error_covariance"].value == pytest.approx(square, abs=1e-12)
    if square > 1e-6:
        shares = [got[f"error_share_{part}"].value for part in ("engine", "trainer", "covariance")]
        assert sum(shares) == pytest.approx(1.0, abs=1e-6)
    if engine > 1e-6 and trainer > 1e-6:
        assert abs(got["error_correlation"].value) <= 1 + 1e-9


@covers(attribute)
@settings(max_examples=50, deadline=None)
@given(errors, st.floats(-5, 5))
def test_a_shift_of_all_log_probs_changes_nothing(rows: list[tuple[float, float, float]], shift: float) -> None:
    parts = np.array(rows).T
    before, after = (found(*(parts + by), groups=2).intervals for by in (0.0, shift))
    for name in ("error_engine_rms", "error_trainer_rms", "error_covariance"):
        assert after[name].value == pytest.approx(before[name].value, abs=1e-12)


def test_swapping_the_sides_swaps_their_numbers() -> None:
    sampler, stale, reference = planted(np.random.default_rng(0), 0.02, 0.01, 0.4)
    one, two = found(sampler, stale, reference).intervals, found(stale, sampler, reference).intervals
    assert one["error_share_engine"].value == two["error_share_trainer"].value
    assert one["error_covariance"].value == two["error_covariance"].value


def test_nulls_are_left_out_and_counted() -> None:
    sampler, stale, reference = planted(np.random.default_rng(0), 0.02, 0.01, 0.0)
    clean = found(sampler[:4000], stale[:4000], reference[:4000])
    assert clean.tokens == 4000 and clean.sequences == 4 * GROUPS
    sampler[4000:], reference[:100] = np.nan, np.nan
    half = found(sampler, stale, reference)
    assert half.tokens == 3900 and half.sequences < 4 * GROUPS
    assert found(np.full(8, np.nan), stale[:8], reference[:8]).intervals == {}


def test_no_error_on_the_trainers_side_has_no_correlation() -> None:
    sampler, _, reference = planted(np.random.default_rng(0), 0.02, 0.01, 0.0)
    got = found(sampler, reference.copy(), reference).intervals
    assert got["error_trainer_rms"].value == 0.0 and got["error_share_engine"].value == 1.0
    assert math.isnan(got["error_correlation"].value)


@covers(spread_sample)
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), min_size=1, max_size=60), st.integers(1, 30))
def test_the_sample_is_spread_over_groups(rows: list[tuple[bool, int]], size: int) -> None:
    usable, group = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    taken = spread_sample(usable, group, size, [3, 4])
    assert len(taken) == min(size, usable.sum()) == len(np.unique(taken))
    assert usable[taken].all() and (np.diff(taken) > 0).all()
    assert (taken == spread_sample(usable, group, size, [3, 4])).all()
    counts, most = (np.bincount(group[rows], minlength=7) for rows in (taken, np.flatnonzero(usable)))
    # No group has two more than another that still had rows to give.
    assert all(counts[a] <= counts[b] + 1 for a in range(7) for b in range(7) if counts[b] < most[b])


def columns(engine: float, trainer: float, correlation: float, tokens: int = 100) -> dict[str, float]:
    return {
        "error_engine_rms": engine,
        "error_trainer_rms": trainer,
        "error_covariance": correlation * engine * trainer,
        "reference_tokens": tokens,
    }


def test_the_sentence_names_the_side() -> None:
    null = columns(math.nan, math.nan, math.nan, 0)
    assert attribution_sentence([null], "float32") == ""
    assert "the engine's." in attribution_sentence([null, columns(0.04, 0.004, 0.0)], "float32")
    assert "the trainer's." in attribution_sentence([columns(0.004, 0.04, 0.0)], "float32")
    both = attribution_sentence([columns(0.03, 0.03, 0.5), columns(0.03, 0.03, 0.5)], "float64")
    assert "both sides'." in both and "100% engine, 100% trainer, -100% covariance (200 tokens)" in both
    assert "correlation 0.50" in both and "Against float64" in both
    assert "neither side differs" in attribution_sentence([columns(0.0, 0.0, 0.0)], "float32")
