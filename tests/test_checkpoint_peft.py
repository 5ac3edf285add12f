"""PEFT adapters, written by peft itself and held against what peft computes with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import DeloraConfig, IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mismatch_probe.checkpoints.describe import describe, digest
from mismatch_probe.checkpoints.layouts import Layout, layout_of
from mismatch_probe.checkpoints.tensors import config_dir, open_tensors
from mismatch_probe.errors import CheckpointError
from tests.checkpoints import Hostile, edit_json, gap, load, logits
from tests.tiny import save_model

# peft warns of what transformers 5 has renamed, and of tied heads.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"target_modules": ["q_proj", "v_proj"]}),
    "every projection": ("qwen3", {"target_modules": ALL}),
    "rslora": ("llama", {"target_modules": ALL, "use_rslora": True}),
    "patterns": (
        "llama",
        {
            "target_modules": ALL,
            "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 6},
            "alpha_pattern": {r"^model\.layers\.0\.self_attn\.v_proj": 3, "down_proj": 32},
        },
    ),
    "head and embedding": ("llama", {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    "modules to save": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    "biases": ("qwen2", {"target_modules": ["q_proj", "k_proj"], "bias": "all"}),
    "only lora's biases": ("qwen2", {"target_modules": ["q_proj", "k_proj"], "bias": "lora_only"}),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "conv1d with a linear head": ("gpt2", {"target_modules": ["c_attn", "c_proj", "lm_head"], "fan_in_fan_out": True}),
    "opt": ("opt", {"target_modules": ["q_proj", "fc1"]}),
}


def save_adapter(folder: Path, kind: str, settings: dict[str, Any], *, seed: int = 3, **extra: Any) -> Any:
    """``folder/base`` and ``folder/adapter``, every trained tensor random; returns peft's model, unmerged."""
    base = save_model(folder / "base", kind, **extra)
    torch.manual_seed(seed)
    model = get_peft_model(base, LoraConfig(**{"r": 4, "lora_alpha": 7, **settings})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder / "adapter")
    return model


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("tied", [False, True])
def test_merging_is_what_peft_computes(tmp_path: Path, name: str, tied: bool) -> None:
    """Against peft unmerged, which is what the trainer ran; with a tied head the two sides then differ."""
    kind, settings = ADAPTERS[name]
    model = save_adapter(tmp_path, kind, settings, tied=tied)
    assert layout_of(tmp_path / "adapter") is Layout.PEFT
    assert gap(tmp_path / "adapter", model, tmp_path / "base") <= 1e-5
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    assert float((logits(plain) - logits(model)).abs().max()) > 1e-2  # the adapter does something


@pytest.mark.parametrize("name", ADAPTERS)
def test_merged_tensors_are_pefts(tmp_path: Path, name: str) -> None:
    kind, settings = ADAPTERS[name]
    model = save_adapter(tmp_path, kind, settings, tied=False)
    merged = model.merge_and_unload().state_dict()
    found = open_tensors(tmp_path / "adapter", tmp_path / "base")
    assert set(found) == set(merged)
    for key, value in merged.items():
        assert torch.allclose(found[key], value, atol=1e-6, rtol=0), key


def test_a_loaded_adapter_is_pefts_too(tmp_path: Path) -> None:
    """The way back from disk, as a user of peft would do it."""
    save_adapter(tmp_path, "llama", ADAPTERS["patterns"][1])
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().eval()
    assert gap(tmp_path / "adapter", model, tmp_path / "base") <= 1e-6


def test_a_bfloat16_base_loses_nothing_of_the_adapter(tmp_path: Path) -> None:
    """W + B A is kept in float32: rounded to bfloat16 most of a small adapter would vanish."""
    model = save_adapter(tmp_path, "llama", ADAPTERS["plain"][1], dtype="bfloat16")
    name = "model.layers.0.self_attn.q_proj"
    layer = model.get_submodule(f"base_model.model.{name}")
    exact = (layer.base_layer.weight.double() + layer.get_delta_weight("default").double()).detach()
    found = open_tensors(tmp_path / "adapter", tmp_path / "base")
    assert found[f"{name}.weight"].dtype == torch.float32
    assert float((found[f"{name}.weight"] - exact).abs().max()) < 1e-6
    assert found["lm_head.weight"].dtype == torch.bfloat16
    assert describe(tmp_path / "adapter", tmp_path / "base").dtypes == ("BF16", "F32")


def test_adapters_in_bin_files_are_read(tmp_path: Path) -> None:
    model = save_adapter(tmp_path, "llama", ADAPTERS["plain"][1])
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    torch.save(load_file(file), file.with_suffix(".bin"))
    file.unlink()
    assert gap(tmp_path / "adapter", model.merge_and_unload(), tmp_path / "base") <= 1e-6
    witness = tmp_path / "witness"
    torch.save({"w": Hostile(witness)}, file.with_suffix(".bin"))
    with pytest.raises(CheckpointError, match="Nothing in it was run"):
        load(tmp_path / "adapter", tmp_path / "base")
    assert not witness.exists()


def test_an_adapter_is_described_with_its_base(tmp_path: Path) -> None:
    save_adapter(tmp_path, "llama", ADAPTERS["plain"][1])
    found, base = describe(tmp_path / "adapter", tmp_path / "base"), describe(tmp_path / "base")
    assert (found.parameters, found.vocab_size, found.architecture) == (base.parameters, 61, "LlamaForCausalLM")
    assert found.bytes > base.bytes and found.layout == "PEFT adapter"
    assert config_dir(tmp_path / "adapter", tmp_path / "base") == tmp_path / "base"
    before = digest(tmp_path / "adapter", tmp_path / "base")
    save_model(tmp_path / "base", "llama", seed=5)
    assert digest(tmp_path / "adapter", tmp_path / "base") != before  # another base is another checkpoint


def test_an_adapter_without_a_base_says_where_to_put_it(tmp_path: Path) -> None:
    save_adapter(tmp_path, "llama", ADAPTERS["plain"][1])
    for attempt in (describe, load, open_tensors):
        with pytest.raises(CheckpointError, match=r"trained over \(.*base\).*adapter_base in run\.toml"):
            attempt(tmp_path / "adapter")


def test_unmatched_modules_are_named(tmp_path: Path) -> None:
    save_adapter(tmp_path, "llama", ADAPTERS["plain"][1])
    save_model(tmp_path / "other", "gpt2")
    with pytest.raises(
        CheckpointError, match=r"model\.layers\.0\.self_attn\.q_proj\.lora_A\.weight and 7 more match no"
    ):
        load(tmp_path / "adapter", tmp_path / "other")
    save_model(tmp_path / "wide", "llama", hidden_size=64)
    with pytest.raises(CheckpointError, match=r"q_proj: A \(4, 32\) and B .* do not fit the base's weight"):
        load(tmp_path / "adapter", tmp_path / "wide")


def test_half_a_pair_is_named(tmp_path: Path) -> None:
    save_adapter(tmp_path, "llama", ADAPTERS["plain"][1])
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    del tensors["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn\.v_proj match no weight .* lack"):
        load(tmp_path / "adapter", tmp_path / "base")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"use_dora": True}, "LoRA with use_dora = True is not merged here"),
        ({"lora_bias": True}, "LoRA with lora_bias = True is not merged here"),
        ({"trainable_token_indices": [1, 2]}, r"LoRA with trainable_token_indices = \[1, 2\]"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa' alters the base's own weights"),
        ({"init_lora_weights": "olora"}, "init_lora_weights = 'olora' alters the base's own weights"),
    ],
)
def test_kinds_of_lora_that_are_not_merged_are_refused_by_name(tmp_path: Path, settings: dict, reason: str) -> None:
    save_adapter(tmp_path, "llama", {"target_modules": ["q_proj"], **settings})
    with pytest.raises(CheckpointError, match=reason):
        load(tmp_path / "adapter", tmp_path / "base")


@pytest.mark.parametrize(("config", "kind"), [(IA3Config, "IA3"), (DeloraConfig, "DELORA")], ids=["ia3", "delora"])
def test_other_adapters_are_refused_by_name(tmp_path: Path, config: type, kind: str) -> None:
    extra = {"feedforward_modules": ["down_proj"]} if kind == "IA3" else {}
    model = get_peft_model(
        save_model(tmp_path / "base", "llama"), config(target_modules=["q_proj", "down_proj"], **extra)
    )
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=f"a PEFT adapter of type {kind}; only LORA"):
        describe(tmp_path / "adapter", tmp_path / "base")


def test_a_setting_from_the_future_is_refused_not_ignored(tmp_path: Path) -> None:
    save_adapter(tmp_path, "llama", ADAPTERS["plain"][1])
    edit_json(tmp_path / "adapter" / "adapter_config.json", use_novel_scaling=True)
    with pytest.raises(CheckpointError, match="LoRA with use_novel_scaling = True"):
        load(tmp_path / "adapter", tmp_path / "base")


@pytest.mark.parametrize("values", [{"r": 5}, {"lora_alpha": None}, {"rank_pattern": {"q_proj": 9}}])
def test_settings_that_contradict_the_tensors_are_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    save_adapter(tmp_path, "llama", ADAPTERS["plain"][1])
    edit_json(tmp_path / "adapter" / "adapter_config.json", **values)
    with pytest.raises(CheckpointError, match=r"q_proj has rank 4, and adapter_config\.json says"):
        load(tmp_path / "adapter", tmp_path / "base")


def damage_config(adapter: Path) -> None:
    (adapter / "adapter_config.json").write_text("{")


def truncate(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def lose_weights(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").unlink()


def forge_pattern(adapter: Path) -> None:
    edit_json(adapter / "adapter_config.json", alpha_pattern={"(": 1})


def forge_slow_pattern(adapter: Path) -> None:
    edit_json(adapter / "adapter_config.json", rank_pattern={"(.*_*)*!": 1})


def forge_table(adapter: Path) -> None:
    edit_json(adapter / "adapter_config.json", rank_pattern=[1])


def forge_list(adapter: Path) -> None:
    (adapter / "adapter_config.json").write_text(json.dumps([1]))


@pytest.mark.parametrize(
    "harm", [damage_config, truncate, lose_weights, forge_pattern, forge_slow_pattern, forge_table, forge_list]
)
def test_a_torn_adapter_is_one_line(tmp_path: Path, harm) -> None:
    save_adapter(tmp_path, "llama", ADAPTERS["plain"][1])
    harm(tmp_path / "adapter")
    with pytest.raises(CheckpointError) as error:
        load(tmp_path / "adapter", tmp_path / "base")
    assert "\n" not in str(error.value) and "adapter" in str(error.value)


def test_the_base_may_be_shards(tmp_path: Path, sharded: Path) -> None:
    """Any layout serves as the base."""
    shutil.copytree(sharded / "untied" / "fsdp", tmp_path / "shards")
    shutil.copytree(sharded / "untied" / "model", tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
    model.save_pretrained(tmp_path / "adapter")
    assert gap(tmp_path / "adapter", model.merge_and_unload(), tmp_path / "shards") <= 1e-6


def test_lora_inside_verls_shards_is_merged(tmp_path: Path) -> None:
    """verl saves the wrapped model's state dict and notes rank and alpha in lora_train_meta.json (0.9.1)."""
    model = save_adapter(tmp_path, "llama", {"target_modules": ALL, "modules_to_save": None})
    actor = tmp_path / "global_step_1" / "actor"
    shutil.copytree(tmp_path / "base", actor / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(model.state_dict(), actor / "model_world_size_1_rank_0.pt")
    with pytest.raises(CheckpointError, match=r"LoRA unmerged, and there is no lora_train_meta\.json"):
        load(actor)
    (actor / "lora_train_meta.json").write_text(json.dumps({"r": 4, "lora_alpha": 7, "task_type": "CAUSAL_LM"}))
    assert gap(actor.parent, model.merge_and_unload()) <= 1e-6
