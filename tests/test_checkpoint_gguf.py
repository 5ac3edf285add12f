"""GGUF files, written by the ``gguf`` package as llama.cpp's converter writes a Llama."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from mismatch_probe.checkpoints.describe import describe, digest
from mismatch_probe.checkpoints.layouts import Layout, layout_of
from mismatch_probe.checkpoints.tensors import open_tensors
from mismatch_probe.errors import CheckpointError
from tests.checkpoints import gap, load, logits
from tests.tiny import save_model

F32, F16, Q8_0 = (gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "Q8_0"))
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    module = name.removesuffix(".weight")
    if module in NAMES:
        return f"{NAMES[module]}.weight"
    _, _, block, rest = module.split(".", 3)
    return f"blk.{block}.{NAMES[rest]}.weight"


def permuted(value: np.ndarray, heads: int) -> np.ndarray:
    """The order of rotary pairs in llama.cpp: halves become neighbours."""
    return value.reshape(heads, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)


def write_gguf(file: Path, model: Any, kind: gguf.GGMLQuantizationType) -> None:
    config, writer = model.config, gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_token_scores([0.0] * config.vocab_size)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        value = tensor.float().numpy()
        if "q_proj" in name or "k_proj" in name:
            value = permuted(value, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        wide = F32 if value.ndim == 1 else kind
        data = gguf.quants.quantize(np.ascontiguousarray(value), wide)
        writer.add_tensor(gguf_name(name), data, raw_dtype=wide)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_f32_is_exact(tmp_path: Path, tied: bool, inside: bool) -> None:
    model = save_model(tmp_path / "model", "llama", tied=tied)
    folder = tmp_path / "step_000001"
    folder.mkdir()
    write_gguf(folder / "policy.gguf", model, F32)
    path = folder if inside else folder / "policy.gguf"
    assert layout_of(path) is Layout.GGUF
    assert gap(path, model) <= 1e-6
    tensors = open_tensors(path)
    for name, value in model.state_dict().items():
        assert torch.equal(tensors[name], value), name
    found = describe(path)
    assert (found.vocab_size, found.hidden_size, found.max_positions) == (61, 32, None)
    assert found.architecture == "llama" and found.dtypes == ("F32",) and not found.notes
    assert found.parameters == sum(p.numel() for p in model.parameters())


def test_f16_is_exact(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama")
    write_gguf(tmp_path / "policy.gguf", model, F16)
    for parameter in model.parameters():
        if parameter.ndim > 1:  # norms are kept in F32, as llama.cpp keeps them
            parameter.data = parameter.half().float()
    assert gap(tmp_path / "policy.gguf", model) <= 1e-6
    assert torch.equal(open_tensors(tmp_path / "policy.gguf")["lm_head.weight"], model.lm_head.weight)
    assert describe(tmp_path / "policy.gguf").dtypes == ("F16", "F32")


def test_quantised_weights_are_dequantised_and_said(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama", intermediate_size=64)
    write_gguf(tmp_path / "policy.gguf", model, Q8_0)
    found = describe(tmp_path / "policy.gguf")
    (note,) = found.notes
    assert found.dtypes == ("F32", "GGML_8") and "dequantised" in note
    distance = float((logits(load(tmp_path / "policy.gguf")) - logits(model)).abs().max())
    assert 1e-4 < distance < 0.2


def test_a_missing_package_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "policy.gguf", save_model(tmp_path / "model", "llama"), F32)
    monkeypatch.setattr("mismatch_probe.checkpoints.huggingface.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"need the package gguf: pip install 'mismatch-probe\[gguf\]'"):
        load(tmp_path / "policy.gguf")
    assert describe(tmp_path / "policy.gguf").parameters  # the header needs no package


def test_two_files_are_not_guessed_between(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama")
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / name, model, F32)
    with pytest.raises(CheckpointError, match=r"2 GGUF files \(a\.gguf, b\.gguf\)"):
        describe(tmp_path)


@pytest.mark.parametrize("keep", [0, 3, 20, 700, -1, -2000])
def test_a_torn_file_is_one_line(tmp_path: Path, keep: int) -> None:
    file = tmp_path / "policy.gguf"
    write_gguf(file, save_model(tmp_path / "model", "llama"), F32)
    file.write_bytes(file.read_bytes()[:keep])
    for attempt in (describe, load, open_tensors):
        with pytest.raises(CheckpointError, match="not a readable GGUF file") as error:
            attempt(file)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("at", [8, 16])
def test_declared_counts_are_held_against_the_file(tmp_path: Path, at: int) -> None:
    """Numbers of tensors (byte 8) and of settings (byte 16)."""
    file = tmp_path / "policy.gguf"
    write_gguf(file, save_model(tmp_path / "model", "llama"), F32)
    data = bytearray(file.read_bytes())
    data[at : at + 8] = struct.pack("<Q", 10**15)
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="declares 1000000000000000 items"):
        load(file)


def test_declared_shapes_are_held_against_the_file(tmp_path: Path) -> None:
    file = tmp_path / "policy.gguf"
    write_gguf(file, save_model(tmp_path / "model", "llama"), F32)
    data = file.read_bytes()
    name = b"output_norm.weight"
    at = data.index(name) + len(name) + 4
    file.write_bytes(data[:at] + struct.pack("<Q", 10**15) + data[at + 8 :])
    with pytest.raises(CheckpointError, match=r"output_norm\.weight of shape \(10{15},\)"):
        load(file)


def test_the_digest_follows_the_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "policy.gguf", save_model(tmp_path / "model", "llama"), F32)
    before = digest(tmp_path / "policy.gguf")
    write_gguf(tmp_path / "policy.gguf", save_model(tmp_path / "model", "llama", seed=1), F32)
    assert digest(tmp_path / "policy.gguf") != before
