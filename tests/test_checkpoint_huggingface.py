"""Hugging Face directories in their variants, what of a directory is read, and adapters from run.toml to the tables."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from mismatch_probe.checkpoints.describe import describe, digest
from mismatch_probe.checkpoints.layouts import Layout, layout_of
from mismatch_probe.checkpoints.tensors import config_dir, open_tensors
from mismatch_probe.entry import main
from mismatch_probe.errors import CheckpointError
from tests.checkpoints import gap, load
from tests.planted import VOCAB, plant, write_toml
from tests.tiny import save_model


@pytest.mark.parametrize("tied", [False, True])
def test_sharded_safetensors_are_read_by_their_index(tmp_path: Path, tied: bool) -> None:
    model = save_model(tmp_path / "whole", "llama", tied=tied)
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    shards = sorted((tmp_path / "shards").glob("*.safetensors"))
    assert len(shards) > 2 and layout_of(tmp_path / "shards") is Layout.HUGGING_FACE
    assert gap(tmp_path / "shards", model) <= 1e-6
    assert set(open_tensors(tmp_path / "shards")) == set(open_tensors(tmp_path / "whole"))
    (tmp_path / "shards" / "consolidated.safetensors").write_bytes(b"stray")
    assert describe(tmp_path / "shards").parameters == describe(tmp_path / "whole").parameters
    shards[1].unlink()
    for attempt in (describe, load, open_tensors):
        with pytest.raises(CheckpointError, match=rf"{shards[1].name} is missing \(1 of {len(shards)} shards\)"):
            attempt(tmp_path / "shards")


def test_sharded_bin_files_are_read_by_their_index(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama")
    (tmp_path / "model" / "model.safetensors").unlink()
    state = model.state_dict()
    names = {name: f"pytorch_model-0000{1 + number % 2}-of-00002.bin" for number, name in enumerate(state)}
    for file in set(names.values()):
        torch.save({name: state[name] for name in state if names[name] == file}, tmp_path / "model" / file)
    index = tmp_path / "model" / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    assert gap(tmp_path / "model", model) <= 1e-6
    (tmp_path / "model" / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(CheckpointError, match=r"pytorch_model-00002-of-00002\.bin is missing \(1 of 2"):
        load(tmp_path / "model")


def test_a_tied_head_may_be_in_the_file_or_not(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama", tied=True)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    without = describe(tmp_path / "model")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    assert gap(tmp_path / "model", model) <= 1e-6
    assert describe(tmp_path / "model").parameters == without.parameters


@pytest.mark.parametrize("kind", ["gpt2", "opt", "gemma2", "mixtral"])
def test_tensors_are_those_of_the_files(tmp_path: Path, kind: str) -> None:
    save_model(tmp_path / "model", kind)
    expected = load_file(tmp_path / "model" / "model.safetensors")
    found = open_tensors(tmp_path / "model")
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("kind", ["mixtral", "gemma2"])
def test_shards_of_other_architectures_take_the_same_way(tmp_path: Path, kind: str) -> None:
    """Mixtral's experts are named one by one in files and lie in one tensor in memory."""
    model = save_model(tmp_path / "model", kind)
    torch.save(load_file(tmp_path / "model" / "model.safetensors"), tmp_path / "model_world_size_1_rank_0.pt")
    assert gap(tmp_path, model, tmp_path / "model") <= 1e-6


def test_missing_and_unexpected_tensors_are_named_in_every_layout(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama")
    state = model.state_dict()
    shard = tmp_path / "model_world_size_1_rank_0.pt"
    torch.save({name: value for name, value in state.items() if "norm" not in name}, shard)
    with pytest.raises(CheckpointError, match=r"missing keys: model\.layers\.0\.input_layernorm\.weight"):
        load(tmp_path, tmp_path / "model")
    torch.save({**state, "model.extra.weight": torch.ones(2)}, shard)
    with pytest.raises(CheckpointError, match=r"unexpected keys: model\.extra\.weight"):
        load(tmp_path, tmp_path / "model")
    torch.save({**state, "model.norm.weight": torch.ones(2)}, shard)
    with pytest.raises(CheckpointError, match=r"mismatched keys: .*model\.norm\.weight"):
        load(tmp_path, tmp_path / "model")


def test_what_is_no_checkpoint_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    for attempt in (layout_of, describe, digest, load, open_tensors, config_dir):
        with pytest.raises(CheckpointError, match=r"no checkpoint found\. Looked for config\.json .*\.distcp.*gguf"):
            attempt(tmp_path)


def test_symbolic_links_are_followed(tmp_path: Path) -> None:
    """The cache of huggingface_hub is made of them."""
    model = save_model(tmp_path / "blobs", "llama")
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    assert gap(tmp_path / "snapshot", model) <= 1e-6


def adapt(checkpoints: Path, base: Path) -> None:
    """Each checkpoint becomes an adapter over ``base``: the planted runs differ in their heads alone."""
    for folder in sorted(checkpoints.iterdir()):
        change = load_file(folder / "model.safetensors")["lm_head.weight"].double()
        change -= load_file(base / "model.safetensors")["lm_head.weight"].double()
        for file in folder.iterdir():
            file.unlink()
        pair = {"A": torch.eye(VOCAB, dtype=torch.float64), "B": change}
        tensors = {f"base_model.model.lm_head.lora_{side}.weight": value for side, value in pair.items()}
        save_file(tensors, folder / "adapter_model.safetensors")
        settings = {"peft_type": "LORA", "r": VOCAB, "lora_alpha": VOCAB, "target_modules": ["lm_head"]}
        (folder / "adapter_config.json").write_text(json.dumps(settings))


def test_a_run_of_adapters_is_decomposed_as_the_merged_run(tmp_path: Path) -> None:
    plant(tmp_path / "merged", steps=2)
    shutil.copytree(tmp_path / "merged", tmp_path / "adapters")
    shutil.copytree(tmp_path / "merged" / "checkpoints" / "step_000000", tmp_path / "adapters" / "base")
    adapt(tmp_path / "adapters" / "checkpoints", tmp_path / "adapters" / "base")
    write_toml(tmp_path / "adapters", adapter_base="base")
    tables = {}
    for name in ("merged", "adapters"):
        assert main(["decompose", str(tmp_path / name), "-o", str(tmp_path / f"out-{name}"), "-q"]) == 0
        tables[name] = pd.read_parquet(tmp_path / f"out-{name}" / "tokens")
    for column in ("discrepancy", "lag", "trainer_logprob", "stale_trainer_logprob", "kl_stale_trainer"):
        found, expected = tables["adapters"][column], tables["merged"][column]
        assert np.isfinite(expected).all() and np.abs(found - expected).max() < 1e-12, column
    assert main(["inspect", str(tmp_path / "adapters")]) == 0


def test_a_run_of_adapters_without_a_base_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant(tmp_path / "run", steps=1)
    shutil.copytree(tmp_path / "run" / "checkpoints" / "step_000000", tmp_path / "base")
    adapt(tmp_path / "run" / "checkpoints", tmp_path / "base")
    assert main(["decompose", str(tmp_path / "run"), "-q"]) == 2
    error = capsys.readouterr().err
    assert "adapter_base in run.toml" in error and error.count("\n") == 1
