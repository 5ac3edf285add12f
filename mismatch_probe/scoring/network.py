"""A checkpoint ready to score: the body gives hidden states, the head turns some of them into logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mismatch_probe.checkpoints.huggingface import load_model
from mismatch_probe.errors import CheckpointError, UsageError
from mismatch_probe.scoring.attention import Memory, run_packed, why_not_packed
from mismatch_probe.scoring.packing import Pack
from mismatch_probe.scoring.plan import CPU_MAX_TOKENS, CUDA_MAX_TOKENS, PASSES_IN_UNIT

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


_MM_WIDENS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)
"""From torch 2.8 on a half-precision product can come out in float32."""


@dataclass(frozen=True)
class ScoringOptions:
    """How to score.

    ``max_tokens``: tokens in one forward pass. ``chunk_elements``: entries of the largest array over the
    vocabulary. ``temperature``: logits are divided by it, as the sampler did. ``for_device`` gives the bounds that suit
    a CPU's caches or a GPU's width.
    """

    device: str = "auto"
    dtype: str = "float32"
    temperature: float = 1.0
    max_tokens: int = CPU_MAX_TOKENS
    chunk_elements: int = 1 << 24
    trust_remote_code: bool = False

    def for_device(self) -> ScoringOptions:
        """These options with the bounds of a GPU, where the device is one."""
        if self.torch_device().type != "cuda":
            return self
        return replace(self, max_tokens=CUDA_MAX_TOKENS, chunk_elements=1 << 25)

    @property
    def unit_tokens(self) -> int:
        """Counted tokens of one unit."""
        return PASSES_IN_UNIT * self.max_tokens

    def torch_device(self) -> torch.device:
        """The device meant by ``device``; auto takes CUDA where there is one.

        Raises:
            UsageError: CUDA is asked for and absent, or the name is unknown.
        """
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError:
            raise UsageError(f"--device {self.device}: unknown. Use auto, cpu, cuda or cuda:N") from None
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise UsageError(f"--device {self.device}: this machine has {torch.cuda.device_count()} CUDA devices")
        return device


class Network:
    """The trainer network at one set of weights.

    The head's product comes out in float32 whatever the weights' dtype (float64 for float64): a bfloat16 logit is
    good to 1/16 nat at best, which no later care can mend. ``base`` is the model below an adapter.
    ``no_packing`` says why sequences cannot be packed and share their prompts; empty where they can.
    """

    def __init__(self, path: Path, options: ScoringOptions, base: Path | None = None) -> None:
        self.path = path
        self._model = load_model(path, options.torch_device(), DTYPES[options.dtype], options.trust_remote_code, base)
        self._body = self._model.base_model
        head = self._model.get_output_embeddings()
        if head is None or self._body is self._model:
            raise CheckpointError(f"{path}: {type(self._model).__name__} has no body and output head to score with")
        self.weight: Tensor = head.weight  # (V, H)
        self._bias: Tensor | None = getattr(head, "bias", None)
        config = self._model.config.get_text_config()
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._multiplier = _logit_multiplier(config)
        self._wide_weight: Tensor | None = None
        self._check_head()
        self.no_packing = why_not_packed(self._model)

    @property
    def architecture(self) -> str:
        """Name of the model's class."""
        return type(self._model).__name__

    @property
    def bytes(self) -> int:
        """Size of its weights."""
        return sum(weight.nbytes for weight in self._model.parameters())

    @property
    def vocab_size(self) -> int:
        """Rows of the output head, V."""
        return self.weight.shape[0]

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states that the head takes, H."""
        return self.weight.shape[1]

    @property
    def caps_logits(self) -> bool:
        """True when the logits pass through a tanh, so that the head's gradient has its slope in it."""
        return self._softcap is not None

    @torch.inference_mode()
    def hidden(self, ids: Tensor) -> Tensor:
        """Final hidden states of right-padded ids: (B, T) -> (B, T, H).

        No attention mask is needed: attention is causal, so padding on the right reaches no real token.
        """
        states: Tensor = self._body(input_ids=ids.to(self.weight.device), use_cache=False).last_hidden_state
        return states

    @torch.inference_mode()
    def packed(self, pack: Pack, memory: Memory) -> Tensor:
        """Final hidden states of one packed row of N tokens, (N, H).

        Args:
            pack: the tokens and their layout.
            memory: holds a trunk's keys and values from one pass to the next.
        """
        return run_packed(self._body, pack, memory, self.weight.device)

    @property
    def logits_dtype(self) -> torch.dtype:
        """Precision of the logits: float32, or float64 where the weights are."""
        return torch.float64 if self.weight.dtype == torch.float64 else torch.float32

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits of hidden states, before temperature: (n, H) -> (n, V), float32 or float64.

        Args:
            hidden: final hidden states.
            out: where they go, (n, V); None makes an array.
        """
        logits = self._product(hidden, out)
        if self._bias is not None:
            logits += self._bias
        if self._multiplier != 1.0:
            logits *= self._multiplier
        if self._softcap is not None:
            logits = torch.tanh_(logits.div_(self._softcap)).mul_(self._softcap)
        return logits

    def _product(self, hidden: Tensor, out: Tensor | None) -> Tensor:
        """hidden @ weight.T with a float32 result (float64 for float64 weights)."""
        if self.weight.dtype in (torch.float32, torch.float64):
            return torch.mm(hidden, self.weight.T, out=out)
        if self.weight.is_cuda and _MM_WIDENS:
            if out is None:
                return torch.mm(hidden, self.weight.T, out_dtype=torch.float32)
            return torch.mm(hidden, self.weight.T, out_dtype=torch.float32, out=out)
        if self._wide_weight is None:
            self._wide_weight = self.weight.float()
        return torch.mm(hidden.float(), self._wide_weight.T, out=out)

    @torch.inference_mode()
    def _check_head(self) -> None:
        """Refuse architectures whose logits are not what body and head give: a wrong score must not pass silently."""
        ids = torch.arange(min(4, self.vocab_size), device=self.weight.device)[None]
        expected = self._model(input_ids=ids, use_cache=False).logits[0].float()
        found = self.logits(self.hidden(ids)[0]).float()
        if not bool(torch.isfinite(expected).all()):
            raise CheckpointError(
                f"{self.path}: its logits are not finite: the weights hold NaN or infinity, or overflow"
            )
        wide = self.weight.dtype in (torch.float32, torch.float64)
        tolerance = (1e-4 if wide else 3e-2) * float(expected.abs().max().clamp_min(1.0))
        if expected.shape != found.shape or not bool(((expected - found).abs() <= tolerance).all()):
            raise CheckpointError(
                f"{self.path}: the logits of {type(self._model).__name__} are not those of its hidden states and "
                "output head (a scale or cap that is not known here). Please report the architecture"
            )


def _logit_multiplier(config: Any) -> float:
    """Constant that some architectures put on their logits: Cohere multiplies by one, Granite divides by one."""
    scale = getattr(config, "logit_scale", None)
    scaling = getattr(config, "logits_scaling", None)
    return float(1.0 if scale is None else scale) / float(1.0 if scaling is None else scaling)
