"""What a device can do: attention kernels, native half precision, tokens in a pass."""

from __future__ import annotations

import platform
from importlib.util import find_spec

import torch

from mismatch_probe.errors import UsageError
from mismatch_probe.scoring.plan import CUDA_MAX_TOKENS

ATTENTIONS = ("auto", "sdpa", "flash", "eager")
_FLASH = {"flash_attn": "flash_attention_2", "flash_attn_interface": "flash_attention_3"}
_TOKEN_BYTES = 1 << 18
"""Memory that one token of a pass takes, taken as twice what an 8B model's widest layer holds of it in bfloat16."""
_PASS_SHARE = 8
"""A pass may take one part in so many of the memory that is free."""
_LEAST_TOKENS = 1024


def attention_implementation(attention: str, device: torch.device, dtype: torch.dtype | None) -> str | None:
    """transformers' name of the attention that was asked for; None for its own choice.

    Raises:
        UsageError: the name is unknown, or the device, the package or the dtype does not allow it.
    """
    if attention not in ATTENTIONS:
        raise UsageError(f"--attn {attention}: unknown. Use {', '.join(ATTENTIONS)}")
    if attention != "flash":
        return None if attention == "auto" else attention
    if device.type != "cuda":
        raise UsageError(f"--attn flash: needs a CUDA device, and this is {device}. Use --attn sdpa")
    package = next((name for name in _FLASH if find_spec(name) is not None), None)
    if package is None:
        raise UsageError("--attn flash: needs the package flash-attn: pip install flash-attn. Or use --attn sdpa")
    if dtype not in (torch.float16, torch.bfloat16):
        raise UsageError("--attn flash: needs --dtype bfloat16 or float16. Use --attn sdpa")
    return _FLASH[package]


def emulation_notice(device: torch.device, dtype: str) -> str:
    """What to say of a half precision that a CPU has no instructions for; empty where there is nothing to say."""
    if device.type != "cpu" or dtype not in ("bfloat16", "float16") or _native(dtype):
        return ""
    return f"{dtype} is emulated on this processor and slower than float32. --dtype float32 is faster and more exact"


def cuda_max_tokens(device: torch.device) -> int:
    """Tokens in one pass that leave room for the weights: a power of two, by the memory that is free."""
    free, _ = torch.cuda.mem_get_info(device)
    tokens = max(_LEAST_TOKENS, min(CUDA_MAX_TOKENS, free // (_PASS_SHARE * _TOKEN_BYTES)))
    return 1 << (int(tokens).bit_length() - 1)


def _native(dtype: str) -> bool:
    """Whether the CPU multiplies in ``dtype``."""
    if dtype == "float16":
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    if platform.machine().lower() in ("x86_64", "amd64"):
        # oneDNN takes bfloat16 wherever AVX-512 is, and widens it there.
        checks = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
        return any(check is not None and bool(check()) for check in checks)
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
