from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mismatch_probe.assemble import halves
from mismatch_probe.errors import CheckpointError, UsageError
from mismatch_probe.scoring import devices, heads
from mismatch_probe.scoring.network import Network, ScoringOptions
from mismatch_probe.scoring.networks import Networks
from mismatch_probe.scoring.score import StepScorer
from tests.tiny import random_rollouts, save_model

CPU = torch.device("cpu")


def logprobs(path: Path, attention: str) -> np.ndarray:
    rollouts = random_rollouts(np.random.default_rng(0))
    scorer = StepScorer(ScoringOptions(device="cpu", attention=attention))
    return scorer.score(rollouts, halves(rollouts), path, lambda _: path).trainer_logprob


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "mixtral"])
def test_every_attention_gives_the_same_scores(tmp_path: Path, kind: str) -> None:
    save_model(tmp_path / "one", kind)
    packed = logprobs(tmp_path / "one", "auto")
    assert logprobs(tmp_path / "one", "eager") == pytest.approx(packed, abs=1e-5, nan_ok=True)
    if kind == "gemma2":  # its cap on attention is no part of that kernel
        with pytest.raises(CheckpointError, match=r"scaled_dot_product_attention yet\)\. Use --attn eager"):
            logprobs(tmp_path / "one", "sdpa")
    else:
        assert logprobs(tmp_path / "one", "sdpa") == pytest.approx(packed, abs=1e-5, nan_ok=True)


def test_an_attention_that_was_asked_for_is_used_and_said(tmp_path: Path) -> None:
    save_model(tmp_path / "one", "qwen3")
    assert Network(tmp_path / "one", ScoringOptions(device="cpu")).no_packing == ""
    for attention in ("sdpa", "eager"):
        said: list[str] = []
        options = ScoringOptions(device="cpu", attention=attention)
        network = Networks(options, on_notice=said.append).get(tmp_path / "one")
        assert network._model.config._attn_implementation == attention
        assert said == [
            f"Qwen3ForCausalLM: prompts are not shared and sequences are padded, since --attn {attention} was asked for"
        ]


def test_flash_attention_needs_its_device_its_package_and_its_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    with pytest.raises(UsageError, match="needs a CUDA device, and this is cpu"):
        ScoringOptions(device="cpu", attention="flash").for_device()
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install flash-attn"):
        devices.attention_implementation("flash", cuda, torch.bfloat16)
    monkeypatch.setattr(devices, "find_spec", lambda name: name if name == "flash_attn_interface" else None)
    with pytest.raises(UsageError, match="needs --dtype bfloat16 or float16"):
        devices.attention_implementation("flash", cuda, torch.float32)
    assert devices.attention_implementation("flash", cuda, torch.float16) == "flash_attention_3"
    monkeypatch.setattr(devices, "find_spec", lambda name: name if name == "flash_attn" else None)
    assert devices.attention_implementation("flash", cuda, torch.bfloat16) == "flash_attention_2"
    with pytest.raises(UsageError, match="--attn quick: unknown"):
        devices.attention_implementation("quick", CPU, torch.float32)


def test_a_processor_without_half_precision_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_native", lambda dtype: dtype == "bfloat16")
    assert devices.emulation_notice(CPU, "float16").startswith("float16 is emulated on this processor")
    for device, dtype in ((CPU, "bfloat16"), (CPU, "float32"), (torch.device("cuda", 0), "float16")):
        assert devices.emulation_notice(device, dtype) == ""


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="the processor's flags are read from Linux's /proc")
def test_bfloat16_is_native_where_the_processor_says_so() -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    assert devices._native("bfloat16") == any(name in flags for name in ("avx512_bf16", "amx_bf16", "bf16"))


@pytest.mark.parametrize(("free", "tokens"), [(1, 1024), (4, 2048), (16, 8192), (20, 8192), (130, 16384)])
def test_passes_fit_the_memory_that_is_free(monkeypatch: pytest.MonkeyPatch, free: int, tokens: int) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free << 30, 141 << 30))
    assert devices.cuda_max_tokens(torch.device("cuda", 0)) == tokens


def test_triton_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path / "one", "qwen3")
    network = Network(tmp_path / "one", ScoringOptions(device="cpu"))
    monkeypatch.setattr(heads, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs the package triton"):
        heads.choose(network, "triton")
    assert heads.choose(network, "auto") == heads.choose(network, "torch") == ""
    assert not network.fused


_MEASURE = """
from pathlib import Path
import torch
from mismatch_probe.scoring import head
from mismatch_probe.scoring.network import Network, ScoringOptions
torch.set_num_threads(1)
head._TILE_ELEMENTS = 1 << 40  # one tile a chunk, as on a GPU
networks = []
for seed in range(2):
    torch.manual_seed(seed)
    network = Network.__new__(Network)
    network.weight = torch.randn(152_000, 4)
    network.bias, network.softcap, network.multiplier = None, None, 1.0
    networks.append(network)
tokens = 240

def kilobytes(field):
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0])

def reduce(n):
    pair = [(network, torch.randn(n, 4)) for network in networks]
    ids = torch.arange(n)
    return head.compare(*pair, ids, ids % 2, 1.0, ScoringOptions().chunk_elements)

reduce(1)
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = kilobytes("VmRSS")
assert reduce(tokens).kl_stale_trainer.isfinite().all()
print((kilobytes("VmHWM") - before) / 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_chunks_of_a_gpu_stay_within_512_mb() -> None:
    """At 152,000 words, with whole chunks for tiles: the arrays that a GPU would hold, measured on the CPU."""
    made = subprocess.run([sys.executable, "-c", _MEASURE], capture_output=True, text=True, check=True, env=os.environ)
    assert 200 < float(made.stdout) < 512
