"""verl's dumps: what verl 0.9.1 itself wrote (tests/fixtures/verl/write.py), damaged and hostile ones."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from mismatch_probe.entry import main
from mismatch_probe.errors import BadFileError, InputError
from mismatch_probe.readers import _READERS, ReadOptions, open_run
from mismatch_probe.run import UNKNOWN_VERSION
from tests.foreign_pickle import Touch
from tests.reader_cases import Case, assert_same, cases
from tests.reader_fuzz import fuzz
from tests.tiny import save_model
from tests.verl_files import dp_bytes, row, save, tq_bytes

FIXTURES = Path(__file__).parent / "fixtures" / "verl"
VARIANTS = ("v1", "v1_inner", "v0", "v0_plain", "v0_numpy", "genstep", "single")
ABSENT = ("trainer_logprob", "advantage", "finish_reason")


def expected() -> list[Case]:
    """The cases, with null where verl names only the first and last version of a response."""
    made = cases(3)
    for case in made:
        if len(set(case.version)) > 1:
            case.version = [UNKNOWN_VERSION] * len(case.version)
    return made


@pytest.mark.parametrize("name", VARIANTS)
def test_what_verl_wrote_is_read_back(name: str) -> None:
    run = open_run(FIXTURES / name)
    assert run.format == "verl" and len(run.steps) == 1
    rollouts = run.steps[0].load()
    without = (*ABSENT, "sampler_version") if name == "single" else ABSENT
    assert_same(rollouts, expected(), without)
    set_aside = [] if name == "v1_inner" else ["response_ids is empty"]
    assert [rejected.reason for rejected in rollouts.rejected] == set_aside


@pytest.mark.parametrize("name", VARIANTS)
def test_no_other_reader_takes_it(name: str) -> None:
    assert [reader.FORMAT for reader in _READERS if reader.matches(FIXTURES / name)] == ["verl"]


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "single"])
def test_step_trains_the_version_before_it(name: str) -> None:
    run = open_run(FIXTURES / name)
    assert [step.index for step in run.steps] == [4] and run.trainer_version(4) == 3


def test_dump_directory_may_be_given_itself(tmp_path: Path) -> None:
    for part in ("v1/exp_proj/GBS3_N2_in8_out16", "v1/exp_proj", "v1"):
        assert len(open_run(FIXTURES / part).steps[0].load()) == 5
    shutil.copytree(FIXTURES / "v0", tmp_path / "run" / "rollout_dump")
    assert len(open_run(tmp_path / "run").steps[0].load()) == 5
    shutil.copytree(FIXTURES / "v1", tmp_path / "run" / "other_dump")
    with pytest.raises(InputError, match="holds 2 dumps"):
        open_run(tmp_path / "run")


def test_reading_imports_neither_torch_nor_tensordict() -> None:
    code = (
        "import sys; from pathlib import Path; from mismatch_probe.readers import open_run\n"
        "for name in sys.argv[1:]: open_run(Path(name)).steps[0].load()\n"
        "sys.exit(bool({'torch', 'tensordict', 'verl'} & set(sys.modules)))"
    )
    made = subprocess.run([sys.executable, "-c", code, *(str(FIXTURES / name) for name in VARIANTS)], check=False)
    assert made.returncode == 0


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("v1", "exp_proj/GBS3_N2_in8_out16/4/0/tq_batch.pt"),
        ("v0", "exp_proj/GBS3_N2_in8_out16/4/gen_batch.dp"),
        ("v0_plain", "exp_proj/GBS3_N2_in8_out16/4/gen_batch.dp"),
        ("v0_numpy", "exp_proj/GBS3_N2_in8_out16/4/gen_batch.dp"),
        ("genstep", "exp_proj/GBS3_N2_in8_out16/genstep_000008/gen_batch.dp"),
        ("single", "exp_proj_GBS3__N2"),
    ],
)
def test_damaged_files_read_or_end_in_a_clean_error(name: str, file: str) -> None:
    def make(run_dir: Path) -> Path:
        shutil.copytree(FIXTURES / name, run_dir, dirs_exist_ok=True)
        return run_dir / file

    fuzz(make)
    fuzz(make, examples=15, skip_bad_rows=True)


@pytest.mark.parametrize("name", ["v1", "v0", "v0_numpy"])
def test_a_truncated_file_is_named(tmp_path: Path, name: str) -> None:
    """Two steps, one of them cut short: an error, or set aside on request, or where verl had not finished it."""
    shutil.copytree(FIXTURES / name, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "exp_proj" / "GBS3_N2_in8_out16"
    shutil.copytree(folder / "4", folder / "5")
    file = next(path for path in (folder / "5").rglob("*batch*"))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    last = open_run(tmp_path).steps[1]
    with pytest.raises(BadFileError, match=str(file)):
        last.load()
    skipped = open_run(tmp_path, ReadOptions(skip_bad_rows=True)).steps[1].load()
    assert len(skipped) == 0 and skipped.rejected[0].row == 0
    (file.parent / "meta.json").unlink()
    unfinished = last_step(tmp_path).load()
    assert "meta.json, which is written last, is not there" in unfinished.rejected[0].reason
    with pytest.raises(BadFileError, match=r"5/.*batch"):
        open_run(tmp_path, ReadOptions(strict=True)).steps[1].load()


def last_step(path: Path):
    return open_run(path).steps[-1]


def test_an_empty_file_is_no_run(tmp_path: Path) -> None:
    save(tmp_path, b"")
    with pytest.raises(InputError, match="no run found"):
        open_run(tmp_path)


def hostile_files(target: Path) -> dict[str, tuple[bytes, str | None]]:
    """Files that pass for verl's and would create ``target`` if their pickles were run: (content, inner)."""
    touch = Touch(str(target))
    stream = io.BytesIO()
    torch.save(touch, stream)
    return {
        "tags of a tq file": (tq_bytes([row(0)], tags=[touch]), "0"),
        "other columns of a dp file": (dp_bytes({"prompts": np.ones((1, 2), dtype=np.int64)}, {"x": touch}), None),
        "batch of a dp file": (dp_bytes(stream.getvalue()), None),
        "batch of a dp file, not an archive": (dp_bytes(touch), None),
    }


@pytest.mark.parametrize("case", hostile_files(Path("unused")))
def test_a_hostile_pickle_runs_nothing(tmp_path: Path, case: str) -> None:
    target = tmp_path / "touched"
    content, inner = hostile_files(target)[case]
    save(tmp_path / "run", content, inner=inner)
    run = open_run(tmp_path / "run")
    assert run.format == "verl"
    with pytest.raises(BadFileError, match=r"mkdir.*nothing was run"):
        run.steps[0].load()
    assert not target.exists()


def test_inspect_names_the_format(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a checkpoint there is nothing to compare, and that is said."""
    assert main(["inspect", str(FIXTURES / "v1")]) == 5
    shown = " ".join(capsys.readouterr().out.split())
    assert "verl" in shown and "advantages are null" in shown and "global_step_{version}/actor" in shown


def test_decompose_scores_the_checkpoint_of_the_version(tmp_path: Path) -> None:
    """The engine's log-probs are the trainer's plus 1/8: D is -1/8 at every token. The rollouts are fresh: L is 0."""
    home = tmp_path / "checkpoints" / "proj" / "exp"
    model = save_model(home / "global_step_0" / "actor", "qwen3")
    rows = [row(number, length=6, prompt=(5, 6, 7 + number // 2)) for number in range(4)]
    for entry in rows:
        ids = torch.tensor([entry["prompts"] + entry["responses"]])
        with torch.no_grad():
            scores = torch.log_softmax(model(ids).logits[0, len(entry["prompts"]) - 1 : -1].double(), dim=-1)
        picked = scores.gather(1, torch.tensor(entry["responses"])[:, None])[:, 0]
        entry["rollout_log_probs"] = (picked + 0.125).float().tolist()
    save(tmp_path, tq_bytes(rows))
    assert main(["inspect", str(tmp_path)]) == 0
    assert main(["decompose", str(tmp_path), "-q"]) == 0
    tokens = pd.read_parquet(tmp_path / "mismatch_probe" / "tokens" / "step=1" / "part-0.parquet")
    assert len(tokens) == 24 and set(tokens["sampler_version"]) == set(tokens["trainer_version"]) == {0}
    np.testing.assert_allclose(tokens["discrepancy"], -0.125, atol=1e-4)
    np.testing.assert_allclose(tokens["lag"], 0.0, atol=1e-6)
