"""Statistics of the numerics checks on planted truth, without a run directory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mismatch_probe.diagnosis import monitoring, numerics
from mismatch_probe.diagnosis.buckets import buckets, concentration, worst_share
from mismatch_probe.diagnosis.diagnose import diagnose
from mismatch_probe.diagnosis.evidence import Evidence
from mismatch_probe.diagnosis.finding import Diagnosis, Severity
from mismatch_probe.diagnosis.numerics_levels import with_baseline
from mismatch_probe.diagnosis.spread import bucket_means, difference, intraclass, mean_of
from mismatch_probe.run import Settings
from mismatch_probe.stats.ess import ess
from tests.field.in_memory import planted_evidence

CHECKS = (*numerics.CHECKS, *monitoring.CHECKS)
LONG = 20


def planted(seed: int = 0, sd: float = 0.01, groups: int = 40, members: int = 4, steps: int = 5) -> Evidence:
    """Evidence with log-probs of a wide range and D ~ N(0, sd^2) in log-odds; no lag."""
    rng = np.random.default_rng(seed)
    names = [(step, group) for step in range(steps) for group in range(groups // steps)]
    rows = [
        {
            "sequence_id": f"{step}-{group}-{member}",
            "group_id": f"{group}",
            "prompt_ids": [2, group + 3, step + 3],
            "response_ids": rng.integers(3, 30, size=int(rng.integers(LONG // 2, LONG + 1))).tolist(),
            "sampler_version": step,
            "reward": float(rng.random() < 0.5),
            "finish_reason": "stop",
        }
        for step, group in names
        for member in range(members)
    ]
    n = sum(len(row["response_ids"]) for row in rows)
    stale = np.log(rng.beta(1.0, 1.0, size=n) * 0.98 + 0.01)
    odds = stale - np.log1p(-np.exp(stale)) + sd * rng.normal(size=n)
    evidence = planted_evidence(
        rows, [step for step, _ in names for _ in range(members)], stale, stale.copy(), np.full(n, 1.0), Settings()
    )
    return with_sampler(evidence, -np.logaddexp(0.0, -odds))


def with_sampler(evidence: Evidence, sampler: np.ndarray) -> Evidence:
    tokens = replace(evidence.tokens, sampler=sampler)
    return replace(evidence, tokens=tokens, usable=tokens.counted & ~np.isnan(sampler) & ~np.isnan(tokens.stale))


def off_by(evidence: Evidence, d: np.ndarray, where: np.ndarray) -> Evidence:
    """D of some tokens is d (kept below log-prob 0 by its sign)."""
    exact = evidence.tokens.stale
    wrong = np.where(exact - d < 0, exact - d, exact - np.abs(d))
    return with_sampler(evidence, np.where(where, wrong, evidence.tokens.sampler))


def named(diagnosis: Diagnosis, least: Severity = Severity.WARNING) -> list[str]:
    return [finding.code for finding in diagnosis.findings if finding.severity >= least]


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_gets_no_warning(seed: int) -> None:
    sd = (0.001, 0.01, 0.03, 0.06)[seed % 4]
    evidence = planted(seed, sd, members=(1, 2, 4)[seed % 3])
    assert named(diagnose(evidence, CHECKS)) == []


def test_intervals_of_a_mean_cover_it() -> None:
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(30), 10)
    covered = 0
    for _ in range(300):
        values = rng.normal(size=30)[group] + rng.normal(size=300)
        _, low, high = mean_of(values, group)
        covered += low <= 0 <= high
    assert 0.91 < covered / 300 < 0.985


def test_intervals_of_a_difference_cover_it_within_and_between_groups() -> None:
    rng = np.random.default_rng(1)
    group = np.repeat(np.arange(30), 10)
    for there in (np.arange(300) % 2 == 0, group < 15):
        covered = 0
        for _ in range(300):
            values = rng.normal(size=30)[group] + rng.normal(size=300) + 0.5 * there
            found, low, high = difference(values, there, group)
            covered += low <= 0.5 <= high
        assert 0.90 < covered / 300 < 0.995
    assert found == pytest.approx(values[there].mean() - values[~there].mean())


def test_bucket_means_are_those_of_each_bucket() -> None:
    rng = np.random.default_rng(2)
    values, level, group = rng.normal(size=200), rng.integers(-1, 3, size=200), rng.integers(0, 9, size=200)
    found = bucket_means(values, level, group, 4)
    for at in range(3):
        assert found.mean[at] == pytest.approx(values[level == at].mean())
        assert found.low[at] < found.mean[at] < found.high[at]
    assert found.tokens.tolist() == [*(int((level == at).sum()) for at in range(3)), 0]
    assert np.isnan(found.mean[3])


def test_the_intraclass_correlation_is_the_share_between_kinds() -> None:
    rng = np.random.default_rng(3)
    kind = rng.integers(0, 200, size=20_000)
    values = np.sqrt(0.3) * rng.normal(size=200)[kind] + np.sqrt(0.7) * rng.normal(size=20_000)
    assert intraclass(values, kind) == pytest.approx(0.3, abs=0.05)
    assert intraclass(rng.normal(size=20_000), kind) == pytest.approx(0.0, abs=0.01)


def test_the_worst_share_and_the_table_of_buckets() -> None:
    assert worst_share(np.array([1.0, 1.0, 2.0, 6.0]), 0.25) == 0.6
    evidence = planted()
    last = np.zeros(len(evidence.tokens), dtype=bool)
    last[evidence.sequences.first[1:] - 1] = True
    diagnosis = diagnose(off_by(evidence, np.full(len(last), 3.0), last), CHECKS)
    of_place = {row.level: row for row in diagnosis.buckets if row.bucket == "place"}
    assert of_place["last token, stop"].mean_abs == pytest.approx(2.0)
    assert of_place["between"].mean_abs is not None and of_place["between"].mean_abs < 0.02
    assert {"position", "probability", "token id"} <= {row.bucket for row in diagnosis.buckets}
    shares = {number.name: number.value for number in diagnosis.concentration}
    assert shares["share of |D| in the worst 1 % of tokens"] > 0.1


def test_nothing_usable_gives_no_buckets() -> None:
    evidence = planted()
    empty = replace(evidence, usable=np.zeros(len(evidence.tokens), dtype=bool))
    assert buckets(empty) == () and concentration(empty) == ()
    diagnosis = diagnose(empty, CHECKS)
    assert named(diagnosis) == []
    assert {"MP301", "MP303", "MP306", "MP307", "MP308", "MP312"} <= {
        code for entry in diagnosis.not_testable for code in entry.codes
    }


def test_a_bias_of_each_id_is_found_by_split_halves() -> None:
    evidence = planted()
    bias = 0.03 * np.random.default_rng(4).normal(size=40)
    shifted = with_sampler(evidence, np.minimum(evidence.tokens.sampler - bias[evidence.tokens.token_id], -1e-6))
    diagnosis = diagnose(shifted, CHECKS)
    assert named(diagnosis) == ["MP312"]
    shares = {number.name: number for number in diagnosis.findings[0].numbers}
    assert shares["standard deviation of an id's bias"].value == pytest.approx(0.03, rel=0.4)
    assert diagnosis.findings[0].explains > 0.3


def test_a_dense_model_with_a_heavy_tail_is_told_of_its_tokens() -> None:
    evidence = planted(sd=0.005)
    rng = np.random.default_rng(5)
    n = len(evidence.tokens)
    diagnosis = diagnose(off_by(evidence, 0.5 * rng.normal(size=n), rng.random(n) < 0.05), CHECKS)
    assert named(diagnosis) == ["MP302"]
    assert any("MP311" in entry.codes for entry in diagnosis.not_testable)
    with_experts = diagnose(
        replace(off_by(evidence, 0.5 * rng.normal(size=n), rng.random(n) < 0.05), config={"num_experts": 8}), CHECKS
    )
    assert named(with_experts) == ["MP311"]


def test_the_window_of_the_config_is_named() -> None:
    evidence = planted()
    absolute = 3 + evidence.tokens.position
    d = 0.2 * np.random.default_rng(6).normal(size=len(absolute))
    wrong = replace(off_by(evidence, d, absolute >= 11), config={"sliding_window": 11})
    diagnosis = diagnose(wrong, CHECKS)
    assert named(diagnosis) == ["MP306"]
    assert "sliding_window = 11" in diagnosis.findings[0].summary


def test_less_confident_tokens_late_in_the_response_are_no_growth_with_position() -> None:
    evidence = planted(sd=0.05)
    late = evidence.tokens.position >= 10
    rng = np.random.default_rng(7)
    stale = np.where(late, np.log(rng.uniform(0.05, 0.4, len(late))), np.log(rng.uniform(0.97, 0.995, len(late))))
    odds = stale - np.log1p(-np.exp(stale)) + 0.05 * rng.normal(size=len(late))
    tokens = replace(evidence.tokens, stale=stale, trainer=stale)
    found = with_sampler(replace(evidence, tokens=tokens), -np.logaddexp(0.0, -odds))
    assert np.abs(found.discrepancy[late]).mean() > 5 * np.abs(found.discrepancy[~late]).mean()
    assert "MP306" not in named(diagnose(found, CHECKS))


def test_a_gap_above_what_is_usual_is_a_warning_and_a_declared_precision_moves_the_line() -> None:
    evidence = planted(sd=0.2)
    diagnosis = diagnose(evidence, CHECKS)
    assert named(diagnosis) == ["MP309"]
    assert "not declared" in diagnosis.findings[0].summary
    coarse = replace(evidence, settings=Settings(sampler_dtype="fp8"), config={"model_type": "llama"})
    assert named(diagnose(coarse, CHECKS)) == []
    fine = replace(planted(sd=0.05), settings=Settings(sampler_dtype="float32", trainer_dtype="float32"))
    assert named(diagnose(fine, CHECKS)) == ["MP309"]


def test_a_baseline_decides_by_the_interval_of_the_difference_and_says_what_differs_first() -> None:
    one = replace(planted(1, 0.05), settings=Settings(about=("tensor_parallel=16", "nodes=2")))
    other = replace(planted(2, 0.013), settings=Settings(name="one node", about=("tensor_parallel=8",)))
    found = with_baseline(one, other)
    assert (found.code, found.severity) == ("MP309", Severity.WARNING)
    assert found.summary.index("tensor_parallel: 16, 8") < found.summary.index("mean |D|")
    assert "nodes: 2, not declared" in found.summary and "one node" in found.summary
    gap = found.numbers[0]
    assert gap.low is not None and gap.low > 0
    same = with_baseline(planted(3, 0.013), planted(4, 0.013))
    assert (same.code, same.severity) == ("MP301", Severity.INFO)
    assert "not different" in same.summary and "settings are the same" in same.summary
    assert with_baseline(other, one).severity == Severity.INFO
    assert "smaller than" in with_baseline(other, one).summary


def test_pooled_ess_is_that_of_all_weights() -> None:
    weights = np.log([1.0, 1, 1, 1, 2, 2, 2, 2])
    assert ess(weights) == pytest.approx(0.9)
    assert np.mean([ess(weights[:4]), ess(weights[4:])]) == 1.0
    rng = np.random.default_rng(8)
    for _ in range(200):
        assert 0 < ess(rng.normal(size=rng.integers(1, 9)) * 10) <= 1.0


def test_the_gap_does_not_change_with_masked_rows() -> None:
    evidence = planted()
    gaps = []
    for masked in (0, 40, 120):
        rows = evidence.tokens.sequence
        counted = (rows < 4) | (rows >= 4 + masked)
        tokens = replace(evidence.tokens, counted=counted)
        among = rows < 4
        gaps.append(replace(evidence, tokens=tokens, usable=counted).gap(among))
    assert gaps[0] == gaps[1] == gaps[2]


def test_a_copy_of_the_sampler_s_log_probs_says_nothing_of_the_trainer() -> None:
    evidence = planted()
    tokens = replace(evidence.tokens, trainer_logged=evidence.tokens.sampler.copy())
    diagnosis = diagnose(replace(evidence, tokens=tokens), CHECKS)
    assert any("a copy" in entry.because for entry in diagnosis.not_testable if "MP305" in entry.codes)


def test_a_trainer_s_own_rounding_is_no_noise() -> None:
    evidence = planted(sd=0.03)
    noise = 0.02 * np.random.default_rng(9).normal(size=len(evidence.tokens))
    tokens = replace(evidence.tokens, trainer_logged=np.minimum(evidence.tokens.trainer + noise, 0.0))
    assert named(diagnose(replace(evidence, tokens=tokens), CHECKS)) == []
