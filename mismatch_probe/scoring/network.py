"""A checkpoint ready to score: the body gives hidden states, the head turns some of them into logits."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mismatch_probe.checkpoints.huggingface import load_model
from mismatch_probe.errors import CheckpointError, UsageError
from mismatch_probe.scoring.attention import Memory, run_packed
from mismatch_probe.scoring.devices import attention_implementation, cuda_max_tokens
from mismatch_probe.scoring.packing import Pack
from mismatch_probe.scoring.plan import CPU_MAX_TOKENS, PASSES_IN_UNIT
from mismatch_probe.scoring.proof import looks_ahead, positions_vary, reset_positions, why_not_packed

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
    vocabulary; the head pass takes some five of them. ``temperature``: logits are divided by it, as the sampler did.
    ``attention`` and ``head`` are names of ``devices.ATTENTIONS`` and ``heads.HEADS``. ``tensor_parallel`` processes
    each hold a slice of every network. ``for_device`` gives the bounds that suit a CPU's caches or a GPU's memory.
    """

    device: str = "auto"
    dtype: str = "float32"
    temperature: float = 1.0
    max_tokens: int = CPU_MAX_TOKENS
    chunk_elements: int = 1 << 24
    trust_remote_code: bool = False
    attention: str = "auto"
    head: str = "auto"
    tensor_parallel: int = 1

    def for_device(self) -> ScoringOptions:
        """These options with the bounds of a GPU, where the device is one.

        Raises:
            UsageError: the device, or what is asked of it, is not there.
        """
        device = self.torch_device()
        attention_implementation(self.attention, device, DTYPES.get(self.dtype))
        return replace(self, max_tokens=cuda_max_tokens(device)) if device.type == "cuda" else self

    @property
    def unit_tokens(self) -> int:
        """Counted tokens of one unit."""
        return PASSES_IN_UNIT * self.max_tokens

    def torch_device(self) -> torch.device:
        """The device meant by ``device``; auto takes CUDA where there is one.

        Raises:
            UsageError: CUDA is asked for and absent, or the name is unknown.
        """
        if self.tensor_parallel > 1 and self.device in ("auto", "cuda") and torch.cuda.is_available():
            return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
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
    ``no_packing`` says why sequences cannot be packed and share their prompts; empty where they can. ``one_at_a_time``:
    nor can they share a batch. ``fused`` says that the head pass goes through Triton.
    """

    def __init__(self, path: Path, options: ScoringOptions, base: Path | None = None) -> None:
        self.path = path
        self.fused = False
        device, dtype = options.torch_device(), DTYPES[options.dtype]
        attention = attention_implementation(options.attention, device, dtype)
        self._model = load_model(
            path, device, dtype, options.trust_remote_code, base, attention, options.tensor_parallel
        )
        if options.dtype == "float64" and self._model._can_set_experts_implementation():
            self._model.set_experts_implementation("eager")  # its grouped products know no float64
        self._body = self._model.base_model
        head = self._model.get_output_embeddings()
        if head is None or self._body is self._model:
            raise CheckpointError(f"{path}: {type(self._model).__name__} has no body and output head to score with")
        self.weight = _whole(head.weight)  # (V, H)
        bias = getattr(head, "bias", None)
        self.bias = None if bias is None else _whole(bias)
        config = self._model.config.get_text_config()
        if options.tensor_parallel > 1:
            check_shares(path, config, options.tensor_parallel)
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.multiplier = _logit_multiplier(config)
        self._wide_weight: Tensor | None = None
        self.one_at_a_time = positions_vary(self._model)
        self._check_head()
        self.no_packing = (
            why_not_packed(self._model) if attention is None else f"--attn {options.attention} was asked for"
        )
        if self.no_packing and looks_ahead(self._model):
            raise CheckpointError(
                f"{path}: {self.architecture} looks at tokens that follow, so its log-probs are not a sampler's. "
                "Name the checkpoint of a causal model"
            )

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
        return self.softcap is not None

    @torch.inference_mode()
    def hidden(self, ids: Tensor) -> Tensor:
        """Final hidden states of right-padded ids: (B, T) -> (B, T, H).

        No attention mask is needed: attention is causal, so padding on the right reaches no real token.
        """
        if self.one_at_a_time:
            reset_positions(self._model)
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
        if self.bias is not None:
            logits += self.bias
        if self.multiplier != 1.0:
            logits *= self.multiplier
        if self.softcap is not None:
            logits = torch.tanh_(logits.div_(self.softcap)).mul_(self.softcap)
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


def check_shares(path: Path, config: Any, processes: int) -> None:
    """Refuse a number of processes that does not divide the attention heads of a model.

    Raises:
        UsageError: it does not.
    """
    heads: Any = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", processes)
    if heads % processes:
        raise UsageError(
            f"--tensor-parallel {processes}: {path} has {heads} key-value heads. Use a number that divides them"
        )


def _whole(parameter: Tensor) -> Tensor:
    """A parameter of which each process holds a part, gathered from all of them; another one as it is."""
    gather = getattr(parameter, "full_tensor", None)
    whole: Tensor = parameter if gather is None else gather().detach()
    return whole


def _logit_multiplier(config: Any) -> float:
    """Constant that some architectures put on their logits: Cohere multiplies by one, Granite divides by one."""
    scale = getattr(config, "logit_scale", None)
    scaling = getattr(config, "logits_scaling", None)
    return float(1.0 if scale is None else scale) / float(1.0 if scaling is None else scaling)
