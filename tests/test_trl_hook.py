"""The TRL hook of docs/frameworks.md, run by TRL: what was trained on against what was written, field by field."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from mismatch_probe.entry import main
from mismatch_probe.readers import open_run
from tests.conftest import ROOT
from tests.test_frameworks_page import section


@pytest.fixture(scope="module", params=[1, 2], ids=["drawn-each-step", "drawn-every-second-step"])
def trained(request, tmp_path_factory) -> tuple[Path, list[dict], int]:
    """A run of two steps on a tiny Llama, what TRL's loss was given at each, and the steps that share a generation."""
    folder = tmp_path_factory.mktemp("trl")
    (hook, _) = re.findall(r"```python\n(.*?)```", section("TRL"), re.DOTALL)
    (folder / "hook.py").write_text(hook)
    command = [sys.executable, "-m", "tests.trl_run", str(folder / "hook.py"), str(folder / "run"), str(request.param)]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    made = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return folder / "run", torch.load(folder / "trained.pt", weights_only=True), request.param


def test_what_trl_trains_on_is_what_is_read(trained) -> None:
    path, batches, every = trained
    run = open_run(path)
    assert [step.index for step in run.steps] == [0, 1] == [batch["step"] for batch in batches]
    assert run.settings.temperature == 0.8
    for step, batch in zip(run.steps, batches, strict=True):
        rollouts = step.load()
        assert len(rollouts) == 8 and not rollouts.rejected
        for row in range(8):
            prompt, completion = batch["prompt_mask"][row].bool(), batch["completion_mask"][row].bool()
            assert rollouts.prompt[row].tolist() == batch["prompt_ids"][row][prompt].tolist()
            assert rollouts.response[row].tolist() == batch["completion_ids"][row][completion].tolist()
        lengths = rollouts.response.lengths
        assert rollouts.advantage.tolist() == np.repeat(batch["advantages"].double().numpy(), lengths).tolist()
        assert set(rollouts.sampler_version) == {step.index - step.index % every}
        assert np.isnan(rollouts.sampler_logprob).all()  # without vLLM, TRL keeps none
        assert set(rollouts.group_of_sequence) <= {0, 1} and rollouts.loss_mask.all()


def test_rescored_at_the_weights_that_drew_log_probs_are_trls_own(trained, tmp_path: Path) -> None:
    """From TRL's checkpoints, against what TRL computed when it drew; no lag where each step draws its own batch."""
    path, batches, every = trained
    assert main(["decompose", str(path), "--run-format", "native", "-o", str(tmp_path), "-q"]) == 0
    tokens = pd.read_parquet(tmp_path / "tokens")
    second = tokens[tokens["step"].astype(int) == 1]
    if every == 1:
        assert (tokens["lag"] == 0.0).all() and "old_per_token_logps" not in batches[1]
    else:
        drawn = batches[1]["old_per_token_logps"][batches[1]["completion_mask"].bool()]
        np.testing.assert_allclose(second["stale_trainer_logprob"], drawn, atol=2e-6)
        assert second["lag"].abs().mean() > 0.1  # a real lag, or the comparison shows nothing
