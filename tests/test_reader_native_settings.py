"""The native layout: run.toml and the folder around the rows."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from mismatch_probe.errors import BadFileError, InputError, UsageError
from mismatch_probe.readers import ReadOptions, open_run
from tests.planted import write_toml
from tests.test_reader_native import row, write


def test_unknown_keys_of_run_toml_name_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, [row()])
    write_toml(tmp_path, temprature=1.0)
    with pytest.raises(BadFileError, match=r"run\.toml: unknown key 'temprature'\. Did you mean 'temperature'\?"):
        open_run(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", 0),
        ("temperature", math.inf),
        ("logprobs_mode", "cooked"),
        ("vocab_size", -1),
        ("trainer_dtype", "int8"),
        ("top_p", 1.5),
    ],
)
def test_values_of_run_toml_are_checked(tmp_path: Path, key: str, value) -> None:
    write(tmp_path, [row()])
    write_toml(tmp_path, **{key: value})
    with pytest.raises(BadFileError, match=f"{key} = "):
        open_run(tmp_path)


def test_run_toml_lists_and_patterns(tmp_path: Path) -> None:
    write(tmp_path, [row()])
    write_toml(tmp_path, eos_token_id=[1, 2], checkpoints="weights/v{version}")
    (tmp_path / "weights" / "v12").mkdir(parents=True)
    run = open_run(tmp_path)
    assert run.settings.eos_token_id == (1, 2)
    assert run.trainer_checkpoint(12) == tmp_path / "weights" / "v12" and run.trainer_checkpoint(3) is None
    assert run.trainer_checkpoints.versions() == [12]
    for pattern in ("weights/latest", "v{version:zz}", "v{version!r}", "v{step}", "v{version}{version}"):
        write_toml(tmp_path, checkpoints=pattern)
        with pytest.raises(BadFileError, match=r"is not a path that holds \{version\} once"):
            open_run(tmp_path)
    write_toml(tmp_path)
    with pytest.raises(UsageError, match=r"--set checkpoints=here: .* is not a path that holds \{version\} once"):
        open_run(tmp_path, ReadOptions(overrides=("checkpoints=here",)))


def test_the_base_of_adapters_is_found_below_the_run_or_anywhere(tmp_path: Path) -> None:
    write(tmp_path, [row()])
    write_toml(tmp_path, adapter_base="base")
    with pytest.raises(InputError, match=r"adapter_base: no .*base"):
        open_run(tmp_path)
    (tmp_path / "base").mkdir()
    assert open_run(tmp_path).adapter_base == tmp_path / "base"
    write_toml(tmp_path, adapter_base=str(tmp_path.parent))
    assert open_run(tmp_path).adapter_base == tmp_path.parent


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such run directory"):
        open_run(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"no run found\. Looked for native: run\.toml.*nemo-rl"):
        open_run(tmp_path)
    write_toml(tmp_path)
    with pytest.raises(InputError, match="holds no step_"):
        open_run(tmp_path)
    with pytest.raises(UsageError, match="--run-format verls: unknown"):
        open_run(tmp_path, format="verls")


def test_strangers_in_the_folder_are_said(tmp_path: Path) -> None:
    write(tmp_path, [row()])
    (tmp_path / "rollouts" / "notes.txt").write_text(json.dumps({}))
    assert open_run(tmp_path).notices == ("rollouts/: not step files, left unread: notes.txt",)
