from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest

from mismatch_probe.entry import main
from mismatch_probe.errors import UsageError
from mismatch_probe.run import Rollouts
from mismatch_probe.scoring import networks
from mismatch_probe.scoring.network import ScoringOptions, check_shares
from mismatch_probe.scoring.parallel import check_devices
from tests.planted import write_rows
from tests.tiny import random_rollouts, save_model

VALUES = ("stale_trainer_logprob", "trainer_logprob", "lag", "entropy_stale", "kl_stale_trainer", "total_variation")


def write_run(path: Path, kind: str, tied: bool) -> None:
    """Two steps: on-policy, then one version behind."""
    for version in range(2):
        save_model(path / "checkpoints" / f"step_{version:06d}", kind, tied=tied, seed=version)
    for step in range(2):
        rollouts = random_rollouts(np.random.default_rng(step), n=6)
        write_rows(path / "rollouts" / f"step_{step:06d}.parquet", rows(rollouts))
    (path / "run.toml").write_text('name = "parallel"\ntrainer_dtype = "float32"\n')


def rows(rollouts: Rollouts) -> list[dict]:
    offsets = rollouts.response.offsets
    spans = [slice(offsets[row], offsets[row + 1]) for row in range(len(rollouts))]
    return [
        {
            "sequence_id": f"s{row}",
            "group_id": f"g{row // 2}",
            "prompt_ids": rollouts.prompt[row].tolist(),
            "response_ids": rollouts.response[row].tolist(),
            "sampler_logprobs": [-3.0] * (span.stop - span.start),
            "loss_mask": rollouts.loss_mask[span].tolist(),
            "sampler_version": 0,
        }
        for row, span in enumerate(spans)
    ]


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, env=os.environ | environment, timeout=180
    )


def decompose(path: Path, output: str, *options: str) -> subprocess.CompletedProcess[str]:
    return run("mismatch_probe", "decompose", str(path), "-o", str(path / output), *options)


def tokens(folder: Path) -> dict[str, np.ndarray]:
    table = pq.read_table(folder / "tokens")
    return {name: table[name].to_numpy() for name in VALUES}


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of two architectures, scored by one process."""
    found = {}
    for kind, tied in (("llama", False), ("qwen3", True)):
        found[kind] = tmp_path_factory.mktemp(kind)
        write_run(found[kind], kind, tied)
        assert decompose(found[kind], "one").returncode == 0
    return found


def check_equal(path: Path, output: str) -> None:
    expected, found = tokens(path / "one"), tokens(path / output)
    assert np.nanstd(expected["lag"]) > 0.1
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, abs=1e-5, nan_ok=True), name


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_two_processes_score_as_one(scored: dict[str, Path], kind: str) -> None:
    options = ("two", "--overwrite", "--tensor-parallel", "2", "--max-tokens", "64")
    two = decompose(scored[kind], *options)
    assert two.returncode == 0, two.stderr
    assert "padded" not in two.stderr  # packing is exact there too
    assert two.stdout.count("D numerics") == 1
    check_equal(scored[kind], "two")
    if kind == "llama":  # every score is there now: the others are sent nothing, and end
        again = decompose(scored[kind], *options)
        assert (again.returncode, again.stdout) == (0, two.stdout), again.stderr


def test_torchrun_starts_it_too_and_the_first_process_alone_writes(scored: dict[str, Path]) -> None:
    path = scored["llama"]
    launch = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "mismatch_probe", "decompose")
    two = run(*launch, str(path), "-o", str(path / "launched"))
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("D numerics") == 1
    check_equal(path, "launched")


def test_what_cannot_be_shared_out_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"--tensor-parallel 3: .* has 2 key-value heads"):
        check_shares(Path("model"), SimpleNamespace(num_key_value_heads=2, num_attention_heads=4), 3)
    check_shares(Path("model"), SimpleNamespace(num_key_value_heads=2, num_attention_heads=4), 2)
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="torchrun started 2 processes"):
        check_devices(ScoringOptions(device="cpu", tensor_parallel=4))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(UsageError, match="transformers puts the parts on CUDA"):
        check_devices(ScoringOptions(device="cpu", tensor_parallel=2))


def test_processes_let_go_of_networks_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much memory each has: one that reloads what another still holds would wait for it for ever."""
    monkeypatch.setattr(networks, "free_memory", lambda device: 1 << 50)
    held = SimpleNamespace(bytes=1)
    for processes, kept in ((1, 2), (2, 1)):
        found = networks.Networks(ScoringOptions(device="cpu", tensor_parallel=processes))
        found._networks.update({Path("a"): held, Path("b"): held})
        found._make_room()
        assert len(found._networks) == kept


def test_what_runs_in_one_process_is_refused(scored: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["decompose", str(scored["llama"]), "-o", str(scored["llama"] / "out"), "--tensor-parallel", "2"]
    assert main([*command, "--reference", "float64"]) == 2
    assert "--reference and --fresh-rollouts run in one process" in capsys.readouterr().err


def test_an_architecture_without_a_plan_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, "gpt2", False)
    found = decompose(tmp_path, "out", "--tensor-parallel", "2")
    assert found.returncode == 2
    assert "does not know how to cut this architecture" in found.stderr
    assert not (tmp_path / "out" / "steps.parquet").exists()


def test_a_process_that_dies_ends_the_command() -> None:
    """Else the first would wait for its part of a sum for ever."""
    script = (
        "import sys, time\n"
        "from mismatch_probe.scoring import parallel\n"
        "parallel._FOLLOWER = ('-c', 'raise SystemExit(\"no device\")')\n"
        "parallel._Followers(3)\n"
        "time.sleep(60)\n"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert found.returncode == 2
    assert found.stderr == "error: a process of --tensor-parallel ended (exit code 1): no device\n"
