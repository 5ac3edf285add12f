"""``--target-precision``: no more is scored than the verdict needs."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from mismatch_probe.entry import main
from mismatch_probe.scoring.network import Network
from tests.decompose_cases import tables
from tests.planted import plant

OPTIONS = ("-q", "--no-diagnose")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty prompt groups a step; the lag is small at step 1 and large at step 3."""
    path = tmp_path_factory.mktemp("large") / "run"
    plant(path, steps=4, groups=40, per_group=4, drift=0.25, noise=0.02)
    assert main(["decompose", str(path), *OPTIONS]) == 0
    return path


def row(folder: Path) -> pd.DataFrame:
    return pd.read_parquet(folder / "steps.parquet").set_index("step")


def test_the_verdict_is_that_of_all_groups_and_tokens_are_saved(
    large: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["decompose", str(large), "--no-diagnose", "-o", str(tmp_path / "a"), "--target-precision", "0.02"]) == 0
    )
    said = capsys.readouterr().err
    full, found = row(large / "mismatch_probe"), row(tmp_path / "a")
    record = json.loads((tmp_path / "a" / "run.json").read_text())["target_precision"]
    saved = 0
    for one in record["steps"]:
        step = one["step"]
        assert one["groups"] == found.loc[step, "groups"]
        assert one["tokens"] == found.loc[step, "tokens"]
        assert one["of_tokens"] == full.loc[step, "tokens"]
        assert one["of_groups"] == 40
        saved += one["of_tokens"] - one["tokens"]
        low, high = (found.loc[step, f"ess_lag_sequence_ci_{end}"] for end in ("low", "high"))
        assert low <= full.loc[step, "ess_lag_sequence"] <= high
        if one["why"] == "decided":
            assert found.loc[step, "status"] == full.loc[step, "status"]
            assert any("sampled: " in reason for reason in found.loc[step, "reasons"])
        if one["why"] == "all groups":
            assert found.loc[step, "ess_lag_sequence"] == pytest.approx(full.loc[step, "ess_lag_sequence"], abs=1e-12)
            assert found.loc[step, "ess_lag_sequence_ci_low"] == pytest.approx(low)
    assert saved > 0
    assert f"{record['steps'][0]['of_tokens']:,}" not in said  # the sentence is about the whole run
    assert "steps stopped early" in said


def test_the_same_command_gives_the_same_bytes_and_scores_nothing(large: Path, tmp_path: Path, monkeypatch) -> None:
    arguments = ["decompose", str(large), *OPTIONS, "-o", str(tmp_path / "a"), "--target-precision", "0.02"]
    assert main(arguments) == 0
    first = tables(tmp_path / "a")
    loaded: list[Path] = []
    begin = Network.__init__
    monkeypatch.setattr(
        Network, "__init__", lambda self, path, *rest: (loaded.append(path), begin(self, path, *rest))[1]
    )
    assert main([*arguments, "--overwrite"]) == 0
    assert not loaded
    assert tables(tmp_path / "a") == first
    assert main([*arguments, "--overwrite", "--no-cache"]) == 0
    assert loaded
    assert tables(tmp_path / "a") == first


def test_a_finer_target_goes_on_from_the_looks_that_were_made(large: Path, tmp_path: Path, monkeypatch) -> None:
    cache = str(tmp_path / "cache")
    arguments = ["decompose", str(large), *OPTIONS, "--steps", "1", "--cache", cache]
    assert main([*arguments, "-o", str(tmp_path / "a"), "--target-precision", "0.5"]) == 0
    passes: list[int] = []
    packed = Network.packed
    monkeypatch.setattr(
        Network, "packed", lambda self, pack, memory: (passes.append(len(pack.ids)), packed(self, pack, memory))[1]
    )
    assert (
        main([*arguments, "-o", str(tmp_path / "b"), "--target-precision", "0.0001", "--ess-threshold", "0.999"]) == 0
    )
    again = sum(passes)
    passes.clear()
    assert (
        main(
            [
                *arguments[:-2],
                "--no-cache",
                "-o",
                str(tmp_path / "c"),
                *("--target-precision", "0.0001"),
                "--ess-threshold",
                "0.999",
            ]
        )
        == 0
    )
    assert again < sum(passes)
    assert tables(tmp_path / "b")["steps.parquet"] == tables(tmp_path / "c")["steps.parquet"]


@pytest.mark.parametrize(
    "rival",
    [
        ["--limit", "8"],
        ["--fresh-rollouts", "4"],
        ["--engine", "vllm"],
        ["--executor", "ray"],
        ["--tensor-parallel", "2"],
    ],
)
def test_what_it_does_not_go_with_is_refused(large: Path, rival: list[str], capsys) -> None:
    assert main(["decompose", str(large), "-q", "--overwrite", "--target-precision", "0.02", *rival]) == 2
    assert f"not with {' '.join(rival[:2]) if rival[0] == '--executor' else rival[0]}" in capsys.readouterr().err
