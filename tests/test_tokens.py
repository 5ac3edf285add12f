"""``tokens``: the worst sequences of a step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mismatch_probe.entry import main
from mismatch_probe.token_text import text_of_ids
from mismatch_probe.tokens_view import reason
from tests.conftest import SAMPLE


def test_the_worst_come_first_and_add_up(stale_analysis: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tokens", str(SAMPLE / "stale_run"), "-o", str(stale_analysis), "--step", "12", "--worst", "20"]
    assert main([*arguments, "--format", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)["sequences"]
    table = pd.read_parquet(stale_analysis / "tokens" / "step=12" / "part-0.parquet")
    totals = table["log_ratio"].abs().groupby(table["sequence_id"].astype(str)).sum().sort_values(ascending=False)
    assert [one["sequence_id"] for one in shown] == list(totals.index[:20])
    for one in shown:
        assert one["total"] == pytest.approx(totals[one["sequence_id"]], rel=1e-12)
        assert one["total"] == pytest.approx(sum(abs(token["log_ratio"]) for token in one["tokens"]), rel=1e-12)
        assert len(one["tokens"]) == one["facts"]["tokens"]
    assert shown[0]["tokens"][-1]["text"] == "<eos>"


def test_text_has_reason_text_and_log_probs_in_80_columns(
    stale_analysis: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tokens", str(SAMPLE / "stale_run"), "-o", str(stale_analysis), "--step", "12", "--by", "lag"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "<eos>" in out
    assert "nats" in out
    assert "\x1b" not in out


def test_without_a_tokenizer_ids_are_shown(stale_analysis: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokens", "-o", str(stale_analysis), "--step", "12", "--worst", "1"]) == 0
    assert "<eos>" not in capsys.readouterr().out


def test_one_sequence_by_name(stale_analysis: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = str(pd.read_parquet(stale_analysis / "sequences.parquet").query("step == 3")["sequence_id"].iloc[5])
    assert main(["tokens", "-o", str(stale_analysis), "--step", "3", "--sequence", name]) == 0
    assert capsys.readouterr().out.count("nats, ") == 1
    assert main(["tokens", "-o", str(stale_analysis), "--step", "3", "--sequence", "none"]) == 2
    assert "step 3 has none of that name" in capsys.readouterr().err
    assert main(["tokens", "-o", str(stale_analysis), "--step", "99"]) == 2
    assert "Analysed are 0, 1" in capsys.readouterr().err


def test_a_file_that_is_no_tokenizer_is_one_line(
    stale_analysis: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert main(["tokens", "-o", str(stale_analysis), "--step", "3", "--tokenizer", str(tmp_path)]) == 2
    assert "no tokenizer" in capsys.readouterr().err


def test_ids_beyond_the_tokenizer_are_shown_as_ids() -> None:
    text = text_of_ids(SAMPLE / "stale_run" / "tokenizer")
    assert text(1) == "<eos>"
    assert text(999) == "<999>"


PLACES = np.arange(12)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (np.eye(12)[7] * -3 + 0.01, "token 7 alone carries"),
        (np.where(PLACES < 6, 0.005, 0.5 * (-1.0) ** PLACES), "its second half carries 99% of it, from token 6 on"),
        (np.where(PLACES < 6, 0.5 * (-1.0) ** PLACES, 0.005), "its first half carries 99% of it"),
        (np.where(np.isin(PLACES, (1, 5, 9)), [1.0, -1.0] * 6, 0.02 * (-1.0) ** PLACES), "three tokens carry"),
        (np.full(12, -0.2), "D has one sign (-)"),
        (0.2 * (-1.0) ** PLACES, "spread over its tokens, 0.200 nats each"),
        (np.full(12, np.nan), "D is zero or unknown at every token"),
    ],
)
def test_the_reason_names_where_the_mismatch_lies(values: np.ndarray, said: str) -> None:
    assert said in reason(PLACES, values, "D")
