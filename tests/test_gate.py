from __future__ import annotations

import json
import math
from pathlib import Path

import pandas as pd
import pytest

from mismatch_probe.config import Thresholds, load_thresholds
from mismatch_probe.entry import main
from mismatch_probe.errors import BadFileError, NothingToJudgeError, UsageError
from mismatch_probe.gate import Outcome, run_checks
from tests.planted import Planted


def table(**columns: list[float]) -> pd.DataFrame:
    n = len(next(iter(columns.values())))
    frame = pd.DataFrame({"step": range(10, 10 + n), "nearest_gap_max": 0, "sampler_from_engine": 0})
    known = {
        **{f"ess_lag_{level}": [1.0] * n for level in ("token", "sequence", "prompt")},
        **{name: [0.0] * n for name in ("discrepancy_k3", "prefix_kl_stale_trainer", "bias_lag_tv")},
        "bias_discrepancy_tv": [0.0] * n,
        "discrepancy_mean_weight": [1.0] * n,
        "discrepancy_rms": [0.01] * n,
        **{name: [1e-6] * n for name in ("noise_floor_rms", "noise_floor_max")},
        **columns,
    }
    for name, values in known.items():
        frame[name] = values
        for end in ("low", "high"):
            if f"{name}_ci_{end}" not in known:
                frame[f"{name}_ci_{end}"] = values
    return frame


def outcomes(frame: pd.DataFrame, **thresholds) -> dict[str, Outcome]:
    return {check.name: check.outcome for check in run_checks(frame, Thresholds(**thresholds))}


def test_the_lowest_ess_decides_and_the_first_failing_step_is_named() -> None:
    (check, other) = run_checks(table(ess_lag_sequence=[0.9, 0.49, 0.2, 0.6]), Thresholds())
    assert (check.outcome, check.value, check.step, check.first_failing_step) == (Outcome.FAILED, 0.2, 12, 11)
    assert (check.steps_failing, check.steps_judged) == (2, 4)
    assert other.outcome is Outcome.PASSED
    assert "2 steps fail, first at step 11; 4 steps judged" in check.sentence()


def test_each_threshold_fails_on_its_own() -> None:
    frame = table(
        discrepancy_k3=[0.03], prefix_kl_stale_trainer=[0.2], bias_lag_tv=[0.3], discrepancy_mean_weight=[0.9]
    )
    found = outcomes(frame, max_prefix_kl=0.1, max_bias_tv=0.2, max_mass_error=0.05)
    assert found == {
        "min-ess": Outcome.PASSED,
        "max-discrepancy-k3": Outcome.FAILED,
        "max-prefix-kl": Outcome.FAILED,
        "max-bias-tv (lag)": Outcome.FAILED,
        "max-bias-tv (discrepancy)": Outcome.PASSED,
        "max-mass-error": Outcome.FAILED,
    }


def test_mass_errors_within_sampling_error_pass() -> None:
    frame = table(
        discrepancy_mean_weight=[0.9],
        discrepancy_mean_weight_ci_low=[0.7],
        discrepancy_mean_weight_ci_high=[1.1],
    )
    assert outcomes(frame, max_mass_error=0.05)["max-mass-error"] is Outcome.PASSED


def test_null_is_never_a_pass() -> None:
    frame = table(ess_lag_sequence=[math.nan], discrepancy_k3=[math.nan])
    assert set(outcomes(frame).values()) == {Outcome.UNJUDGED}
    with pytest.raises(NothingToJudgeError, match="no check is switched on"):
        run_checks(table(ess_lag_token=[1.0]), Thresholds(min_ess=None, max_discrepancy_k3=None))
    partly = table(ess_lag_sequence=[math.nan], discrepancy_k3=[0.01])
    assert outcomes(partly)["min-ess"] is Outcome.UNJUDGED
    half = run_checks(table(ess_lag_sequence=[math.nan, 0.9]), Thresholds())[0]
    assert half.outcome is Outcome.PASSED and half.sentence().endswith("1 steps judged, 1 null or approximate")


def test_options_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    (tmp_path / "mismatch-probe.toml").write_text('ess_level = "token"\nmin_ess = 0.7\nmax_discrepancy_k3 = false\n')
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    found, source = load_thresholds(below, None, {"min_ess": 0.6, "max_prefix_kl": None})
    assert found == Thresholds(ess_level="token", min_ess=0.6, max_discrepancy_k3=None)
    assert source == str(tmp_path / "mismatch-probe.toml")


def test_pyproject_is_a_home_too_and_the_nearest_file_wins(tmp_path: Path) -> None:
    (tmp_path / "mismatch-probe.toml").write_text("min_ess = 0.9\n")
    near = tmp_path / "near"
    near.mkdir()
    (near / "pyproject.toml").write_text("[tool.other]\nx = 1\n")
    assert load_thresholds(near, None, {})[0].min_ess == 0.9
    (near / "pyproject.toml").write_text("[tool.mismatch-probe]\nmin_ess = 0.4\n")
    assert load_thresholds(near, None, {})[0].min_ess == 0.4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("min_es = 0.5", "unknown key 'min_es'. Did you mean 'min_ess'?"),
        ("min_ess = 'half'", "min_ess = 'half' is not a finite number"),
        ("min_ess = 2", "is above 1"),
        ("min_ess = nan", "is not a finite number"),
        ("ess_level = 'word'", "is not one of token, sequence, prompt"),
        ("min_ess = ", "not readable as TOML"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mismatch-probe.toml"
    file.write_text(text)
    with pytest.raises(BadFileError) as caught:
        load_thresholds(tmp_path, None, {})
    assert str(file) in str(caught.value) and message in str(caught.value)


def test_a_wrong_option_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--min-ess 3"):
        load_thresholds(tmp_path, None, {"min_ess": 3.0})


def test_the_command(planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["gate", str(planted.path), "--min-ess", "0.01"]) == 0
    assert "Gate passed" in capsys.readouterr().out
    assert main(["gate", str(planted.path), "--min-ess", "0.999"]) == 1
    assert "Gate failed: min-ess" in capsys.readouterr().out
    assert main(["gate", str(planted.path), "--min-ess", "0.999", "--exit-zero"]) == 0
    capsys.readouterr()
    monkeypatch.setenv("MISMATCH_PROBE_MIN_ESS", "0.999")
    assert main(["gate", str(planted.path), "--format", "json"]) == 1
    parsed = json.loads(capsys.readouterr().out)
    assert parsed["checks"][0]["outcome"] == "failed" and parsed["checks"][0]["threshold"] == 0.999
    (tmp_path / "strict.toml").write_text("max_discrepancy_k3 = 1e-9\n")
    monkeypatch.delenv("MISMATCH_PROBE_MIN_ESS")
    assert main(["gate", str(planted.path), "--config", str(tmp_path / "strict.toml")]) == 1
    assert "max-discrepancy-k3" in capsys.readouterr().out


def test_a_check_that_judges_no_step_is_no_pass(planted: Planted, tmp_path: Path, monkeypatch, capsys) -> None:
    """The lag is unknown throughout, the discrepancy is fine: exit 5, in every format, until the check is off."""
    import shutil

    shutil.copytree(planted.path, tmp_path / "run")
    for version in range(1, 5):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{version:06d}")
    monkeypatch.chdir(tmp_path)
    command = ["run", "-o", "analysis"]
    assert main(["decompose", *command, "--steps", "1:", "-q"]) == 0
    capsys.readouterr()
    assert main(["gate", *command]) == 5
    assert "Gate cannot judge: min-ess" in capsys.readouterr().out
    assert main(["gate", *command, "--format", "json"]) == 5
    assert json.loads(capsys.readouterr().out)["checks"][0]["outcome"] == "unjudged"
    (tmp_path / "mismatch-probe.toml").write_text("min_ess = false\n")
    assert main(["gate", *command]) == 0
