"""The inference engine: vLLM in a process of its own, so that stopping it surely frees it."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from task import EOS, MAX_RESPONSE_LENGTH, PROMPT_LENGTH

LOGPROBS_MODE = "processed"


@dataclass(frozen=True)
class Completion:
    """One sampled continuation; ``logprobs`` are the engine's own, of the tokens it drew."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


class Engine:
    """One engine process. Use it as a context manager, or call :meth:`stop`."""

    def __init__(self, checkpoint: Path) -> None:
        # Spawn: vLLM must not inherit the trainer's threads.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, str(checkpoint)))
        self._process.start()
        theirs.close()
        self._receive()  # wait until the engine is up

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], max_tokens: int) -> list[Completion]:
        """Sample one continuation a prompt, at temperature 1 with no truncation of the distribution."""
        self._connection.send(("generate", (list(map(list, prompts)), list(seeds), max_tokens)))
        return self._receive()

    def reload(self, checkpoint: Path) -> None:
        """Ask the running engine to put other weights in place of its own."""
        self._connection.send(("reload", (str(checkpoint),)))
        self._receive()

    def stop(self) -> None:
        """End the process; safe to call twice."""
        if self._process.is_alive():
            self._connection.send(("stop", ()))
            self._process.join(timeout=60)
            if self._process.is_alive():
                self._process.kill()

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:
            raise RuntimeError("The engine process ended; its error is printed above") from None


def _serve(connection: Connection, checkpoint: str) -> None:
    """The engine process: answer calls until told to stop."""
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
    )
    from vllm import LLM

    llm = LLM(
        model=checkpoint,
        dtype="bfloat16",
        skip_tokenizer_init=True,  # ids go in, ids come out
        max_model_len=PROMPT_LENGTH + MAX_RESPONSE_LENGTH + 2,
        max_num_seqs=128,
        logprobs_mode=f"{LOGPROBS_MODE}_logprobs",
        enforce_eager=True,  # compiling takes longer than the whole recording
        # A cached prefix would outlive the weights that made it: a second fault beside the one being recorded.
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    connection.send(None)
    while True:
        call, arguments = connection.recv()
        if call == "stop":
            return
        if call == "generate":
            connection.send(_generate(llm, *arguments))
        elif call == "reload":
            llm.collective_rpc("reload_weights", kwargs={"weights_path": arguments[0]})
            connection.send(None)


def _generate(llm: Any, prompts: list[list[int]], seeds: list[int], max_tokens: int) -> list[Completion]:
    from vllm import SamplingParams, TokensPrompt

    params = [
        SamplingParams(
            temperature=1.0,
            top_p=1.0,
            top_k=-1,
            min_p=0.0,
            seed=seed,  # one a request: the draw does not depend on the order of the batch
            max_tokens=max_tokens,
            stop_token_ids=[EOS],
            logprobs=0,  # the sampled token's only
            detokenize=False,
        )
        for seed in seeds
    ]
    outputs = llm.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], params, use_tqdm=False)
    completions = []
    for request in outputs:
        output = request.outputs[0]
        token_ids = list(output.token_ids)
        logprobs = [entry[token].logprob for token, entry in zip(token_ids, output.logprobs, strict=True)]
        completions.append(Completion(token_ids, logprobs, str(output.finish_reason)))
    return completions
