"""The checks of ``gpu_check``: one device, one model in two versions, one precision after another."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.workload import Workload
from mismatch_probe.assemble import halves
from mismatch_probe.errors import UsageError
from mismatch_probe.scoring import head, heads
from mismatch_probe.scoring.network import Network, ScoringOptions
from mismatch_probe.scoring.score import StepScorer
from mismatch_probe.scoring.sketch import HeadSketch
from mismatch_probe.scoring.states import hidden_states

BOUNDS = {"float64": 1e-8, "float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
"""Largest difference of one log-prob, nats, that the order of summation may make."""
HEAD_BOUND = 1e-4
"""The same for the two head passes, on the same states."""
MEMORY_BOUND = 512
"""MiB that the head pass may take beyond weights and states."""


@dataclass(frozen=True)
class Size:
    """Groups of responses, and tokens of prompts and responses."""

    groups: int
    prompt: int
    shortest: int
    longest: int
    head_tokens: int


@dataclass(frozen=True)
class Row:
    """One line of the table; ``passed`` is None where nothing is judged."""

    check: str
    dtype: str
    result: str
    limit: str
    verdict: str
    passed: bool | None = None

    @classmethod
    def gap(cls, check: str, dtype: str, one: np.ndarray, other: np.ndarray, bound: float | None) -> Row:
        """Largest and root mean square difference of two scorings."""
        difference = one - other
        largest = float(np.abs(difference).max())
        result = f"{largest:.1e} nats, rms {np.sqrt(np.mean(difference**2)):.1e}"
        if bound is None:
            return cls(check, dtype, result, "", "")
        passed = largest <= bound
        return cls(check, dtype, result, f"{bound:.0e} nats", "ok" if passed else "FAILED", passed)


class Check:
    """One device, one model in two versions, one workload."""

    def __init__(self, device: str, first: Path, second: Path, size: Size) -> None:
        self.options = ScoringOptions(device=device).for_device()
        self.first, self.second, self.size = first, second, size
        self.device = self.options.torch_device()
        vocab_size = Network(first, self.options).vocab_size
        rng = np.random.default_rng(0)
        lengths = rng.integers(size.shortest, size.longest + 1, (size.groups, 8))
        prompts = [rng.integers(0, vocab_size, size.prompt) for _ in range(size.groups)]
        self.work = Workload(prompts, [[rng.integers(0, vocab_size, n) for n in row] for row in lengths])
        self.rollouts = self.work.rollouts()

    def rows(self, dtype: str) -> Iterator[Row]:
        """Every check in one precision."""
        options = replace(self.options, dtype=dtype)
        packed = self._score(options, self.second)
        alone = self._score(replace(options, max_tokens=1, attention="sdpa"), self.first).stale_logprob
        yield Row.gap("packed, against one by one", dtype, packed.stale_logprob, alone, BOUNDS[dtype])
        for attention in ("sdpa", "eager", "flash"):
            try:
                batched = self._score(replace(options, attention=attention), self.first).stale_logprob
            except UsageError as error:
                yield Row(f"batched, {attention}", dtype, f"not run: {error}", "", "")
                continue
            yield Row.gap(f"batched, {attention}, against one by one", dtype, batched, alone, BOUNDS[dtype])
        if dtype != "float32":
            exact = self._score(replace(options, dtype="float32"), self.first).stale_logprob
            yield Row.gap("packed, against float32", dtype, packed.stale_logprob, exact, None)
        yield Row.gap("noise floor", dtype, packed.noise, np.zeros(len(packed.noise)), BOUNDS[dtype])
        yield from self._heads(options)
        yield from self._speed(options)

    def _score(self, options: ScoringOptions, trainer: Path) -> Any:
        scorer = StepScorer(options)
        found = scorer.score(self.rollouts, halves(self.rollouts), trainer, lambda _: self.first)
        del scorer
        self._forget()
        return found

    def _heads(self, options: ScoringOptions) -> Iterator[Row]:
        """The two head passes on the same states: differences, time, peak memory."""
        networks = [Network(path, options) for path in (self.first, self.second)]
        count = self.size.head_tokens
        few = [self._states(network, count) for network in networks]
        ids = torch.arange(count, device=self.device) % networks[0].vocab_size
        sketch = HeadSketch(networks[1].weight)
        pair = tuple(zip(networks, few, strict=True))
        arguments = (*pair, ids, ids % 2, 1.0, options.chunk_elements)
        expected, seconds, peak = self._measured(lambda: head.compare(*arguments, sketch))
        flops = 4.0 * count * networks[0].weight.numel()
        ceiling = self._head_rate(networks[0], few[0])
        yield self._head_row("head pass, torch", options.dtype, flops, seconds, ceiling, peak)
        why = self._why_not_fused(networks)
        if why:
            yield Row("head pass, Triton", options.dtype, f"not run: {why}", "", "")
            return
        found, seconds, peak = self._measured(lambda: heads.compare(*arguments, sketch))
        yield self._head_row("head pass, Triton", options.dtype, flops, seconds, ceiling, peak)
        for name in ("kl_stale_trainer", "total_variation"):
            one, other = (getattr(scores, name).cpu().numpy() for scores in (found, expected))
            yield Row.gap(f"Triton against torch, {name}", options.dtype, one, other, HEAD_BOUND)
        one, other = (scores.stale.logprob.cpu().numpy() for scores in (found, expected))
        yield Row.gap("Triton against torch, logprob", options.dtype, one, other, HEAD_BOUND)

    def _why_not_fused(self, networks: list[Network]) -> str:
        if find_spec("triton") is None:
            return "the package triton is not installed"
        from mismatch_probe.scoring.head_triton import why_not_supported

        why = why_not_supported(networks[0])
        if not why:
            try:
                for network in networks:
                    heads.choose(network, "triton")
            except UsageError as error:
                return str(error)
        return why

    def _head_row(self, name: str, dtype: str, flops: float, seconds: float, ceiling: float, peak: float) -> Row:
        rate = flops / seconds
        memory = "" if np.isnan(peak) else f", {peak:.0f} MiB at most"
        passed = None if np.isnan(peak) else peak <= MEMORY_BOUND
        verdict = f"{rate / ceiling:.0%} of the ceiling" + ("" if passed in (None, True) else ", memory FAILED")
        result = f"{rate / 1e12:.3g} TFLOP/s, {self.size.head_tokens:,} tokens in {seconds:.3g} s{memory}"
        return Row(name, dtype, result, f"{ceiling / 1e12:.3g} TFLOP/s, {MEMORY_BOUND} MiB", verdict, passed)

    def _speed(self, options: ScoringOptions) -> Iterator[Row]:
        network = Network(self.first, options)
        flops, rate, head_rate = self._flops(network), self._body_rate(network), 0.0
        head_rate = self._head_rate(network, self._states(network, self.size.head_tokens))
        del network
        for name, trainer, passes in (("one version", self.first, 1), ("two versions", self.second, 2)):
            scorer = StepScorer(options)

            def run(scorer: StepScorer = scorer, trainer: Path = trainer) -> Any:
                return scorer.score(self.rollouts, halves(self.rollouts), trainer, lambda _: self.first)

            _, seconds, _ = self._measured(run)
            least = passes * (flops["body"] / rate + flops["head"] / head_rate)
            done = passes * sum(flops.values())
            result = f"{done / seconds / 1e12:.3g} TFLOP/s, {self.work.tokens / seconds:,.0f} response tokens/s"
            ceiling = f"{done / least / 1e12:.3g} TFLOP/s"
            yield Row(f"scoring, {name}", options.dtype, result, ceiling, f"{least / seconds:.0%} of the ceiling")
            del scorer, run
            self._forget()

    def _flops(self, network: Network) -> dict[str, float]:
        """Of the unique tokens: every prompt once."""
        config = network._model.config.get_text_config()
        layers = sum(weight.numel() for weight in _matrices(network))
        seen = sum(
            len(prompt) ** 2 / 2 + sum(len(r) * len(prompt) + len(r) ** 2 / 2 for r in rows)
            for prompt, rows in zip(self.work.prompts, self.work.responses, strict=True)
        )
        each = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        attention = 4.0 * config.num_hidden_layers * config.num_attention_heads * each * seen
        head_flops = 2.0 * network.weight.numel() * self.work.tokens
        return {"body": 2.0 * layers * self.work.unique + attention, "head": head_flops}

    def _body_rate(self, network: Network) -> float:
        matrices = _matrices(network)
        count = min(self.options.max_tokens, self.work.unique)
        inputs = {w.shape[1]: torch.randn(count, w.shape[1], dtype=w.dtype, device=w.device) for w in matrices}
        _, seconds, _ = self._measured(lambda: [torch.matmul(inputs[w.shape[1]], w.T) for w in matrices][:0])
        return 2.0 * count * sum(w.numel() for w in matrices) / seconds

    def _head_rate(self, network: Network, states: torch.Tensor) -> float:
        """The head's product alone, in the precision that its logits need."""
        rows = states[: max(1, self.options.chunk_elements // network.vocab_size)]
        out = torch.empty(len(rows), network.vocab_size, dtype=network.logits_dtype, device=self.device)
        _, seconds, _ = self._measured(lambda: network._product(rows, out))
        return 2.0 * len(rows) * network.weight.numel() / seconds

    def _states(self, network: Network, count: int) -> torch.Tensor:
        """So many hidden states, the workload's over and over."""
        rollouts = self.rollouts
        states = hidden_states(
            network, rollouts.prompt, rollouts.response, rollouts.loss_mask, self.options.max_tokens, lambda _: None
        )
        return states.repeat(-(-count // len(states)), 1)[:count]

    def _measured(self, run: Callable[[], Any]) -> tuple[Any, float, float]:
        """Result, best seconds of three after one to warm up, and peak MiB over what was there (NaN on a CPU)."""
        found, peak, best = run(), float("nan"), float("inf")
        for _ in range(3):
            del found
            before = self._settle()
            started = time.perf_counter()
            found = run()
            self._settle(reset=False)
            best = min(best, time.perf_counter() - started)
            if self.device.type == "cuda":
                peak = (torch.cuda.max_memory_allocated(self.device) - before) / 2**20
        return found, best, peak

    def _settle(self, reset: bool = True) -> int:
        if self.device.type != "cuda":
            return 0
        torch.cuda.synchronize(self.device)
        if reset:
            torch.cuda.reset_peak_memory_stats(self.device)
        return int(torch.cuda.memory_allocated(self.device))

    def _forget(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _matrices(network: Network) -> list[torch.Tensor]:
    """Weights of the linear layers."""
    names = network._model.named_parameters()
    return [w for name, w in names if w.dim() == 2 and "embed" not in name and "lm_head" not in name]
