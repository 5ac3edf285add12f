"""The task: write the running sums of six digits, then ``#``, the last sum and the end token.

A prompt is six digits. A response writes the running sum modulo 10 after each digit, with none to two filler words
behind each sum, then ``#``, the answer and ``<eos>``. The fillers carry no information: they give the policy entropy
that reward does not remove at once, as wording does in a language model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

PAD, EOS, MARK = 0, 1, 2
FIRST_DIGIT, FIRST_FILLER, VOCAB_SIZE = 3, 13, 32
PROMPT_LENGTH = 6
MAX_RESPONSE_LENGTH = 24

_FILLER_COUNT_ODDS = (0.45, 0.40, 0.15)  # none, one or two fillers behind a sum
_FILLERS = "so then now next add plus gives makes ok well yes and hence thus we get have it is"


def sample_prompt(rng: np.random.Generator) -> list[int]:
    """Six digit tokens, uniform."""
    return [FIRST_DIGIT + int(digit) for digit in rng.integers(0, 10, PROMPT_LENGTH)]


def demonstration(prompt: Sequence[int], error_rate: float, rng: np.random.Generator) -> list[int]:
    """A response as supervised training shows it; each running sum is wrong with probability ``error_rate``.

    A wrong sum is carried on, so an answer is right about ``(1 - error_rate) ** 6`` of the time: reward has room to
    rise, and a response that fails does so at one token.
    """
    response: list[int] = []
    total = 0
    for token in prompt:
        total = (total + token - FIRST_DIGIT) % 10
        if rng.random() < error_rate:
            total = (total + int(rng.integers(1, 10))) % 10
        response.append(FIRST_DIGIT + total)
        fillers = rng.choice(len(_FILLER_COUNT_ODDS), p=_FILLER_COUNT_ODDS)
        response.extend(int(token) for token in rng.integers(FIRST_FILLER, VOCAB_SIZE, fillers))
    return [*response, MARK, FIRST_DIGIT + total, EOS]


def reward(prompt: Sequence[int], response: Sequence[int]) -> float:
    """1.0 if the response ends in ``#``, the sum of the prompt's digits modulo 10 and ``<eos>``; else 0.0.

    Only the first ``#`` counts: guessing again does not help.
    """
    answer = sum(token - FIRST_DIGIT for token in prompt) % 10
    ending = list(response[list(response).index(MARK) :]) if MARK in response else []
    return float(ending == [MARK, FIRST_DIGIT + answer, EOS])


def save_tokenizer(folder: Path) -> None:
    """Write the word-level tokenizer that turns the ids above into text and back."""
    words = ["<pad>", "<eos>", "#", *"0123456789", *_FILLERS.split()]
    assert len(words) == VOCAB_SIZE
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
