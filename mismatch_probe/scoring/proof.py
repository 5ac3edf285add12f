"""What a network's attention lets it do, tried out on a few tokens when it is loaded: packing, batches, or neither."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mismatch_probe.errors import in_a_line
from mismatch_probe.run import Ragged
from mismatch_probe.scoring.attention import NAME, Memory, run_packed, seen_windows
from mismatch_probe.scoring.packing import packs

_PROMPT, _RESPONSES = 5, (4, 3, 1)
_LAYERS = {"full_attention", "sliding_attention"}


@torch.inference_mode()
def why_not_packed(model: Any) -> str:
    """Switch a model to packed attention and prove it on a few tokens; where it is not exact, switch back.

    Returns:
        Empty when packed sequences give what each alone gives, else the reason why the model goes on in batches.
    """
    before = model.config._attn_implementation
    try:
        reason = _try_packing(model)
    # Each architecture fails in its own way when it is asked for what it does not know.
    except Exception as error:
        reason = in_a_line(error)
    if reason and model.config._attn_implementation != before:
        model.set_attn_implementation(before)
    return reason


def _try_packing(model: Any) -> str:
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - _LAYERS
    if kinds or getattr(config, "attention_chunk_size", None):
        return f"its layers are not plain attention ({', '.join(sorted(kinds)) or 'chunked attention'})"
    if positions_vary(model):
        return "its rotary positions depend on the longest sequence of a pass"
    rng = np.random.default_rng(0)
    draw = [rng.integers(0, config.vocab_size, size) for size in (_PROMPT, *_RESPONSES)]
    device = model.get_output_embeddings().weight.device
    rows = [torch.from_numpy(np.concatenate([draw[0], response[:-1]]))[None].to(device) for response in draw[1:]]
    alone = [model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, _PROMPT - 1 :] for ids in rows]
    model.set_attn_implementation(NAME)
    seen_windows.asked.clear()
    seen_windows.given.clear()
    count = len(_RESPONSES)
    response = Ragged.of(draw[1:])
    found = torch.zeros(len(response.values), alone[0].shape[-1], dtype=alone[0].dtype, device=device)
    memory = Memory()
    # A budget below the group's size also tries what is kept from one pass to the next.
    for pack in packs(Ragged.of([draw[0]] * count), response, np.ones(len(response.values), bool), _PROMPT + 4):
        states = run_packed(model.base_model, pack, memory, device)
        found[torch.from_numpy(pack.target)] = states[torch.from_numpy(pack.source)]
    unseen = [window for window in seen_windows.asked - seen_windows.given if window is not None]
    if unseen:
        return f"its window of {', '.join(map(str, sorted(unseen)))} tokens is in a mask alone"
    expected = torch.cat(alone)
    tolerance = 1e-4 if expected.dtype in (torch.float32, torch.float64) else 5e-2
    gap = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
    return "" if gap <= tolerance else f"packed and separate passes differ by {gap:.1e} of the largest state"


def positions_vary(model: Any) -> bool:
    """True where the rotary positions of a sequence depend on the longest one that runs beside it, or ran before."""
    return bool(_rope_types(model.config.get_text_config()) & {"dynamic", "longrope"})


def reset_positions(model: Any) -> None:
    """Forget the longest sequence that ran before: dynamic rotary positions would go on from it."""
    for module in model.modules():
        for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
            prefix = name.removesuffix("max_seq_len_cached")
            setattr(module, name, module.original_max_seq_len)
            setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq").clone())


@torch.inference_mode()
def looks_ahead(model: Any) -> bool:
    """True where the states of a sequence's beginning depend on what follows: no score of such a model is one."""
    ids = (
        torch.arange(1, 9, device=model.get_output_embeddings().weight.device)[None]
        % model.config.get_text_config().vocab_size
    )
    whole, part = (
        model.base_model(input_ids=row, use_cache=False).last_hidden_state[0, :5] for row in (ids, ids[:, :5])
    )
    tolerance = 1e-3 if whole.dtype in (torch.float32, torch.float64) else 1e-1
    return bool((whole - part).abs().max() > tolerance * whole.abs().max())


def _rope_types(config: Any) -> set[str]:
    """Kinds of rotary positions: one for the model, or one for each kind of layer."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    parts = [found, *(part for part in found.values() if isinstance(part, dict))]
    return {str(part.get("rope_type", part.get("type"))) for part in parts}
