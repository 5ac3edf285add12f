"""The samples of slime's rollout dump, and which of them a train dump trained."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mismatch_probe.readers.rows import RowBuilder
from mismatch_probe.readers.slime_train import TrainRow

_FINISH = {"completed": "stop", "truncated": "length", "aborted": "abort"}


@dataclass
class Sample:
    """One sample of the rollout file, with its arrays as numpy."""

    fields: Mapping[str, Any]
    tokens: np.ndarray[Any, Any]
    length: int
    index: int | None

    @classmethod
    def of(cls, fields: Any) -> Sample:
        """Take the parts that everything hangs on.

        Raises:
            KeyError, TypeError, ValueError: they do not fit.
        """
        tokens = np.asarray(fields["tokens"])
        length = int(fields["response_length"])
        if tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
            raise ValueError("tokens is not a list of integers")
        if not 0 <= length <= len(tokens):
            raise ValueError(f"response_length is {length} for {len(tokens)} tokens")
        index = fields.get("index")
        return cls(fields, tokens, length, index if isinstance(index, int) else None)

    @property
    def prompt(self) -> np.ndarray[Any, Any]:
        """Ids before the response."""
        return cut(self.tokens, self.length)[0]

    def native(self, train: TrainRow | None, versions: Mapping[int, int], counts: Counter[str]) -> dict[str, Any]:
        """The sample in native field names; ``counts`` gets what the user must be told."""
        prompt, response = cut(self.tokens, self.length)
        mask = self.fields.get("loss_mask")
        if self.fields.get("remove_sample"):
            counts["removed"] += 1
            mask = np.zeros(self.length)
        elif train is not None and train.loss_mask is not None:
            # A hook may have changed it after the rollout file was written: this is the one that was trained with.
            mask = train.loss_mask
        if self.fields.get("rollout_top_p_token_ids") is not None:
            counts["top_p"] += 1
        group, status = self.fields.get("group_index"), self.fields.get("status")
        return {
            "group_id": None if group is None else str(group),
            "prompt_ids": prompt,
            "response_ids": response,
            "sampler_logprobs": self.fields.get("rollout_log_probs"),
            "trainer_logprobs": None if train is None else train.columns.get("log_probs"),
            "advantages": None if train is None else train.columns.get("advantages"),
            "loss_mask": mask,
            "sampler_version": self._version(versions, counts),
            "reward": self.fields.get("reward"),
            "finish_reason": _FINISH.get(str(status), status),
        }

    def _version(self, versions: Mapping[int, int], counts: Counter[str]) -> int | None:
        numbers = version_numbers(self.fields)
        if not numbers:
            counts["unnamed"] += 1
            return None
        if len(numbers) > 1:
            counts["several"] += 1
            return None
        return versions.get(next(iter(numbers)))


def version_numbers(fields: Any) -> set[int] | None:
    """The engine's version numbers of a sample, None when one of them is no number."""
    named = fields.get("weight_versions") if isinstance(fields, dict) else None
    if not isinstance(named, list):
        return set()
    try:
        return {int(name) for name in named}
    except (TypeError, ValueError, OverflowError):
        return None


def match(samples: list[Sample | None], rows: list[TrainRow], step: int, builder: RowBuilder) -> dict[int, TrainRow]:
    """Train rows by place in the rollout file: by position, by sample index, or by tokens, and only where ids agree."""
    by_index: dict[int, list[int]] = {}
    by_tokens: dict[bytes, list[int]] = {}
    for at, sample in enumerate(samples):
        if sample is not None:
            by_tokens.setdefault(_key(sample.tokens, sample.length), []).append(at)
            if sample.index is not None:
                by_index.setdefault(sample.index, []).append(at)
    matched: dict[int, TrainRow] = {}
    strangers = []
    for row in rows:
        alike = by_tokens.get(_key(row.tokens, row.response_length), [])
        free = [at for at in alike if at not in matched]
        named = by_index.get(row.sample_index, []) if row.sample_index is not None else []
        chosen = next((at for at in free if at == row.position), None)
        chosen = next((at for at in free if at in named), None) if chosen is None else chosen
        if chosen is None and row.position is None and row.sample_index is None:
            chosen = next(iter(free), None)
        if chosen is None:
            strangers.append(row)
        else:
            matched[chosen] = row
    if len(strangers) > len(matched):
        # Short answers can be the same in both: what matches by such a chance is no join.
        matched = {}
        builder.notice(
            f"step {step}: {strangers[0].file.name} holds other samples than the rollout file, as after a resume that "
            "sampled this rollout again: it is left out, trainer log-probs are null"
        )
    else:
        for row in strangers:
            builder.reject(row.file, row.number, None, "no sample of the rollout file has its index and its tokens")
    return matched


def _key(tokens: np.ndarray[Any, Any], length: int) -> bytes:
    return hashlib.blake2b(tokens.astype(np.int64).tobytes() + length.to_bytes(8, "little"), digest_size=16).digest()


def cut(tokens: np.ndarray[Any, Any], length: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Prompt and response."""
    ids = tokens.astype(np.int64)
    return ids[: len(ids) - length], ids[len(ids) - length :]


def sequence_names(step: int, indices: list[int | None]) -> list[str]:
    """Sequence ids: rollout and sample index, and the place where a sample has none or shares it with others."""
    counts = Counter(indices)
    return [
        f"rollout{step}-sample{index}" if index is not None and counts[index] == 1 else f"rollout{step}-{index}-at{at}"
        for at, index in enumerate(indices)
    ]
