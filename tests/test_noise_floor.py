"""The probe's noise floor beside every discrepancy, and no finding that rests on what lies within it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mismatch_probe.config import Thresholds
from mismatch_probe.entry import main
from mismatch_probe.folder import Analysis, open_analysis
from mismatch_probe.gate import Check, Outcome, run_checks
from mismatch_probe.noise import floor_sentence, noise_steps
from mismatch_probe.reporters.ess_report import as_json, ess_report
from mismatch_probe.reporters.plots import plot_decomposition, plot_distributions
from mismatch_probe.stats.breakdown import Rule
from mismatch_probe.stats.floor import floor_top, noise_floor, within_floor
from mismatch_probe.stats.intervals import ClusterIntervals
from mismatch_probe.stats.levels import StepDiscrepancy, discrepancy_sentence
from tests.planted import plant
from tests.tiny import save_model

SUSPECT = "more than rounding usually explains"


@pytest.fixture(scope="module")
def analysis(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    """Twelve steps whose discrepancy jumps, grows and has a mean weight off 1: by itself every alarm goes off."""
    path = tmp_path_factory.mktemp("run")
    run = plant(path, steps=12, groups=8, drift=0.01)
    rng = np.random.default_rng(0)
    for step, rows in run.rows.items():
        for row in rows:
            size = 0.05 if step < 6 else 0.5
            row["sampler_logprobs"] = (np.array(row["sampler_logprobs"]) - size * (1 + 0.2 * rng.random())).tolist()
        pq.write_table(pa.Table.from_pylist(rows), path / "rollouts" / f"step_{step:06d}.parquet")
    assert main(["decompose", str(path), "--quiet"]) == 0
    return open_analysis(path, None)


def with_floor(analysis: Analysis, rms: float, rows: slice = slice(None)) -> Analysis:
    """The same analysis by a probe whose noise is ``rms`` at some steps."""
    steps = analysis.steps.copy()
    for name, factor in (("rms", 1.0), ("rms_ci_low", 0.8), ("rms_ci_high", 1.2), ("max", 4.0)):
        steps.loc[steps.index[rows], f"noise_floor_{name}"] = factor * rms
    return Analysis(analysis.folder, steps, analysis.trends, analysis.record)


def gate(analysis: Analysis) -> dict[str, Check]:
    thresholds = Thresholds(min_ess=None, max_discrepancy_k3=0.01, max_mass_error=0.01, max_bias_tv=0.05)
    return {check.name: check for check in run_checks(analysis.steps, thresholds)}


OF_D = ("max-discrepancy-k3", "max-mass-error", "max-bias-tv (discrepancy)")


def test_the_alarms_go_off_where_the_floor_is_low(analysis: Analysis) -> None:
    assert (analysis.steps["noise_floor_rms"] < 1e-12).all()
    report = ess_report(analysis, Rule())
    assert SUSPECT in report.numerics and "Mass audit fails" in report.numerics
    assert any("rms D changes between steps 5 and 6" in answer for answer in report.answers)
    assert any("Is the discrepancy constant? No" in answer or "Changing" in answer for answer in report.answers)
    checks = gate(analysis)
    assert all(checks[name].outcome is Outcome.FAILED for name in OF_D)


def test_within_the_floor_none_of_them_does(analysis: Analysis) -> None:
    noisy = with_floor(analysis, 2.0)
    report = ess_report(noisy, Rule())
    assert SUSPECT not in report.numerics and "Mass audit fails" not in report.numerics
    assert "Within the probe's noise floor at 12 of 12 steps, so no finding there." in report.numerics
    assert not any("rms D changes" in answer for answer in report.answers)
    constancy = next(trend for trend in report.trends if trend["name"] == "discrepancy_constancy")
    assert constancy["answer"] == "changing"
    assert constancy["sentence"].endswith(
        "D is within the probe's noise floor at every step: a change may be the probe's own."
    )
    for name in OF_D:
        check = gate(noisy)[name]
        assert check.outcome is Outcome.PASSED and check.steps_within_noise_floor == 12
        assert "within the probe's noise floor at 12 steps, which fail nothing" in check.sentence()


def test_breakdown_of_the_discrepancy_is_not_declared_within_the_floor(analysis: Analysis) -> None:
    rule = Rule("sequence", 0.9999, "discrepancy")
    assert "breaks down" in ess_report(analysis, rule).verdict or "not ruled out" in ess_report(analysis, rule).verdict
    verdict = ess_report(with_floor(analysis, 2.0), rule).verdict
    assert verdict.startswith("No verdict") and "within the probe's noise floor" in verdict
    assert ess_report(with_floor(analysis, 2.0), Rule()).verdict == ess_report(analysis, Rule()).verdict


def test_steps_outside_the_floor_are_still_judged(analysis: Analysis) -> None:
    """The early steps drown in the noise; the later ones do not."""
    half = with_floor(analysis, 0.1, slice(0, 6))
    assert noise_steps(half.steps).tolist() == [True] * 6 + [False] * 6
    report = ess_report(half, Rule())
    assert "at 6 of 12 steps" in report.numerics and SUSPECT in report.numerics
    check = gate(half)["max-discrepancy-k3"]
    assert check.outcome is Outcome.FAILED and check.first_failing_step == 6
    assert check.steps_within_noise_floor == 6 and check.step is not None and check.step >= 6


def test_every_place_quotes_the_floor(analysis: Analysis, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(analysis.folder)
    run = str(analysis.folder.parent)
    floor = floor_sentence(analysis.steps)
    assert "nats rms, at most" in floor and "tokens)" in floor
    assert main(["decompose", run, "--overwrite", "--quiet"]) == 0
    assert floor in " ".join(capsys.readouterr().out.split())
    for form in ("text", "markdown", "json"):
        main(["ess-report", "-o", folder, "--format", form])
        assert floor in " ".join(capsys.readouterr().out.split())
    assert main(["gate", "-o", folder, "--max-discrepancy-k3", "9"]) == 0
    assert "noise floor at step" in " ".join(capsys.readouterr().out.split())
    assert '"noise_floor": "The probe' in as_json(ess_report(analysis, Rule()))


def test_the_figures_of_d_show_the_floor(analysis: Analysis) -> None:
    noisy = with_floor(analysis, 0.2)
    for plot in (plot_decomposition, plot_distributions):
        figure = plot(noisy, "sequence", 0.5)
        assert figure is not None
        axes = figure.axes[0]
        assert "noise floor, up to 2.4e-01" in " ".join(text.get_text() for text in axes.texts)
        bands = [path.get_paths()[0].vertices[:, 1].max() for path in axes.collections]
        assert any(top == pytest.approx(0.24) for top in bands)


def test_the_floor_is_measured_with_an_interval_over_groups(tmp_path: Path) -> None:
    run = plant(tmp_path, steps=1)
    for version in range(2):
        save_model(run.path / "checkpoints" / f"step_{version:06d}", "qwen3", vocab_size=16, seed=version)
    options = ["--dtype", "bfloat16", "--quiet"]
    assert main(["decompose", str(tmp_path), *options]) == 0
    row = open_analysis(tmp_path, None).steps.iloc[0]
    assert 0 < row["noise_floor_rms_ci_low"] < row["noise_floor_rms"] < row["noise_floor_rms_ci_high"]
    assert row["noise_floor_max"] < 0.5


def test_the_interval_of_the_floor() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(100):
        found = noise_floor(0.01 * rng.normal(size=800), np.arange(800) % 8, ClusterIntervals(20))
        covered += found.low <= 0.01 <= found.high
    assert covered >= 88
    nothing = noise_floor(np.zeros(0), np.zeros(0, dtype=np.int64), ClusterIntervals(3))
    assert math.isnan(nothing.value) and math.isnan(nothing.high)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_the_top_is_an_end_that_is_known(rms: float, high: float, largest: float) -> None:
    nan = np.array(np.nan)
    assert floor_top(np.array(high), np.array(largest)) == min(high, largest)
    assert floor_top(nan, np.array(largest)) == largest
    assert not within_floor(np.array(rms), floor_top(nan, nan))
    assert not within_floor(nan, np.array(high))
    assert within_floor(np.array(rms), np.array(high)) == (rms <= high)


def test_growth_is_measured_from_the_floor() -> None:
    """From a first step below the floor, nobody knows how far below, no growth is counted."""
    steps = [StepDiscrepancy(0, 0.001, 1e-6, 0.05), StepDiscrepancy(1, 0.06, 1e-3, 0.05)]
    assert SUSPECT not in discrepancy_sentence(steps)
    grown = discrepancy_sentence([steps[0], StepDiscrepancy(1, 0.2, 1e-3, 0.05)])
    assert "rms D at step 1 is 4.0 times the first" in grown


def test_a_run_without_a_second_scoring_says_nothing_of_a_floor() -> None:
    names = ("noise_floor_rms", "noise_floor_rms_ci_high", "noise_floor_max", "discrepancy_rms")
    frame = pd.DataFrame({**{name: [math.nan] for name in names}, "noise_floor_tokens": [0]})
    assert floor_sentence(frame) == "" and not noise_steps(frame).any()
