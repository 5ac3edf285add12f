"""What ``decompose`` loads and says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from mismatch_probe.entry import main
from tests.decompose_cases import decompose, rewrite, steps
from tests.planted import VOCAB, Planted


def test_a_checkpoint_is_loaded_once_a_step_however_the_tokens_are_cut(run: Planted, monkeypatch) -> None:
    from mismatch_probe.scoring.network import Network

    loads: list[str] = []
    create = Network.__init__

    def counted(self, path, *options) -> None:
        loads.append(path.name)
        create(self, path, *options)

    for row in run.rows[3]:
        row["sampler_version"] = [i % 3 for i in range(len(row["response_ids"]))]
    rewrite(run, 3)
    monkeypatch.setattr(Network, "__init__", counted)
    monkeypatch.setattr("mismatch_probe.scoring.score.STATE_BYTES", VOCAB * 8 * 20)
    assert decompose(run, "--steps", "3") == 0
    assert sorted(loads) == [f"step_{v:06d}" for v in range(4)]
    loads.clear()
    assert decompose(run, "--steps", "0:3", "--overwrite") == 0
    assert sorted(loads) == [f"step_{v:06d}" for v in range(3)]  # version 0 stays loaded from step to step


def test_progress_in_a_terminal(run: Planted) -> None:
    """On a terminal stderr shows the bar with its rate and the time left."""
    import pty

    main_end, program_end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "mismatch_probe", "decompose", str(run.path)],
        stdout=subprocess.DEVNULL,
        stderr=program_end,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
    )
    os.close(program_end)
    seen = b""
    while True:
        try:
            chunk = os.read(main_end, 4096)
        except OSError:
            break
        if not chunk:
            break
        seen += chunk
    assert process.wait() == 0
    assert b"(4/4)" in seen and b"%" in seen and b"wrote" in seen


def test_without_shared_batches_there_is_no_noise_to_tell(run: Planted) -> None:
    assert decompose(run, "--steps", "1", "--max-tokens", "1") == 0
    assert np.isnan(steps(run).loc[1, "noise_floor_max"]) and steps(run).loc[1, "noise_floor_tokens"] == 0
    assert decompose(run, "--steps", "1", "--overwrite") == 0
    assert steps(run).loc[1, "noise_floor_tokens"] > 0


@pytest.mark.parametrize(
    "config",
    [{"text_config": "x"}, {"architectures": 3}, {"vocab_size": VOCAB, "text_config": [1]}],
)
def test_a_config_that_makes_no_sense_is_one_line(run: Planted, config: dict, capsys) -> None:
    (run.path / "checkpoints" / "step_000002" / "config.json").write_text(json.dumps(config))
    assert decompose(run) == 2
    error = capsys.readouterr().err
    assert "makes no sense" in error and error.count("\n") == 1 and "--skip-bad-rows" in error


def test_another_vocabulary_is_left_out_on_request(run: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    """The sampler's weights were exported with padding rows, the trainer's were not."""
    from tests.tiny import save_model

    shutil.rmtree(run.path / "checkpoints" / "step_000000")
    save_model(run.path / "checkpoints" / "step_000000", "llama", vocab_size=VOCAB + 8)
    assert decompose(run, "--steps", "1") == 2
    assert "same vocabulary padding. Or pass --skip-bad-rows" in capsys.readouterr().err
    assert decompose(run, "--steps", "1", "--skip-bad-rows") == 0
    assert steps(run).loc[1, "status"] == "unjudged" and steps(run).loc[1, "log_ratio_rms"] > 0


def test_scoring_below_float32_is_said(run: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decompose", str(run.path), "--steps", "1", "--dtype", "bfloat16"]) == 0
    assert "scored in bfloat16: its rounding is part of D and L" in capsys.readouterr().err
    assert main(["decompose", str(run.path), "--steps", "1", "--overwrite"]) == 0
    assert "its rounding" not in capsys.readouterr().err
