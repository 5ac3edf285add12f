from __future__ import annotations

from pathlib import Path

from tests.field.base import base, codes, find, rescore


def test_a_recomputed_column_is_no_copy(tmp_path: Path) -> None:
    run = base()
    for step, rows in run.rows.items():
        for row in rows:
            row["trainer_logprobs"] = rescore(run.models[step], row).tolist()
    assert codes(find(run.write(tmp_path / "run"))) == []
