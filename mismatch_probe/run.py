"""Run, Step, Rollouts: what every reader returns and all else takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mismatch_probe.pattern import CheckpointPattern as CheckpointPattern

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Strings = npt.NDArray[np.object_]

UNKNOWN_VERSION = -1
"""A version that the run does not state; null in the tables."""


UNKNOWN_TOKEN = -1
"""A token id that the run does not state; null in the tables."""


@dataclass(frozen=True)
class Rejected:
    """A row that was read but set aside: it is named and counted, never analysed."""

    step: int
    file: str
    row: int
    sequence_id: str | None
    reason: str


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of unequal length: ``values`` (total,) cut at ``offsets`` (rows + 1,)."""

    values: Ints
    offsets: Ints

    @classmethod
    def of(cls, rows: list[Ints]) -> Ragged:
        """Concatenate one array a row."""
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        values = np.concatenate(rows, dtype=np.int64) if rows else np.zeros(0, dtype=np.int64)
        return cls(values, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Ints:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> Ints:
        """Length of each row, (rows,)."""
        return np.diff(self.offsets)

    @property
    def row_of_value(self) -> Ints:
        """Row of each value, (total,)."""
        return np.repeat(np.arange(len(self), dtype=np.int64), self.lengths)

    def places(self, rows: Ints) -> Ints:
        """Where the values of the given rows lie, row after row."""
        spans = [np.arange(self.offsets[row], self.offsets[row + 1]) for row in rows]
        return np.concatenate(spans).astype(np.int64) if spans else np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Rollouts:
    """The sequences of one step, column by column.

    Per sequence (n,): ``sequence_id``, ``group_id``, ``origin`` (file, row), ``reward`` (NaN = null),
    ``finish_reason`` (None = null).
    Per response token, in the order of ``response.values`` (tokens,): log-probs in nats and advantages (NaN = null),
    ``loss_mask`` (True = counted), ``sampler_version`` (UNKNOWN_VERSION = null).
    ``rejected`` lists the rows set aside and ``notices`` what else the user must know, in words.
    """

    sequence_id: Strings
    group_id: Strings
    origin: Strings
    prompt: Ragged
    response: Ragged
    sampler_logprob: Floats
    trainer_logprob: Floats
    loss_mask: Bools
    sampler_version: Ints
    advantage: Floats
    reward: Floats
    finish_reason: Strings
    rejected: tuple[Rejected, ...] = ()
    notices: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.sequence_id)

    @property
    def sequence_of_token(self) -> Ints:
        """Row index of each response token, (tokens,)."""
        return self.response.row_of_value

    @property
    def group_of_sequence(self) -> Ints:
        """Prompt group of each row, numbered 0, 1, ... in the order of their ids, (n,)."""
        _, group = np.unique(self.group_id.astype(str), return_inverse=True)
        return group.astype(np.int64)

    @property
    def position_of_token(self) -> Ints:
        """0-based place of each token in its response, masked tokens counted, (tokens,)."""
        starts = np.repeat(self.response.offsets[:-1], self.response.lengths)
        return np.arange(len(self.response.values), dtype=np.int64) - starts

    def take(self, rows: Ints) -> Rollouts:
        """The given rows, in the given order; what was set aside stays listed."""
        if len(rows) == len(self) and bool((rows == np.arange(len(self))).all()):
            return self
        tokens = self.response.places(rows)
        return replace(
            self,
            sequence_id=self.sequence_id[rows],
            group_id=self.group_id[rows],
            origin=self.origin[rows],
            prompt=Ragged.of([self.prompt[r] for r in rows]),
            response=Ragged.of([self.response[r] for r in rows]),
            sampler_logprob=self.sampler_logprob[tokens],
            trainer_logprob=self.trainer_logprob[tokens],
            loss_mask=self.loss_mask[tokens],
            sampler_version=self.sampler_version[tokens],
            advantage=self.advantage[tokens],
            reward=self.reward[rows],
            finish_reason=self.finish_reason[rows],
        )


@dataclass(frozen=True, eq=False)
class Step:
    """One training step: the files that hold its rollouts, and how to load them (cheap until ``load`` is called)."""

    index: int
    files: tuple[Path, ...]
    load: Callable[[], Rollouts]


CLAIMS = ("temperature", "top_p", "top_k", "logprobs_mode", "trainer_dtype")
"""Settings whose default is a claim about the run: it is said wherever nobody made it."""


@dataclass(frozen=True)
class Settings:
    """What the run declares of itself (``run.toml`` keys); ``sources`` says where each declared one was found.

    ``sampler_lag`` is how many updates the sampler's weights are behind the trainer's where the dump names no version,
    ``group_size`` how many consecutive rows share a prompt where it names no group. ``sampler_dtype`` is the engine's
    precision, weights or cache, whichever is coarser; ``about`` holds facts as "key=value" that are only compared
    between runs, such as the engine and its topology.
    """

    name: str = ""
    model: str = ""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    logprobs_mode: str = "processed"
    trainer_dtype: str = "float32"
    vocab_size: int | None = None
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None
    max_response_length: int | None = None
    adapter_base: str | None = None
    filtered: str | None = None
    checkpoints: str | None = None
    sampler_checkpoints: str | None = None
    sampler_lag: int | None = None
    group_size: int | None = None
    sampler_dtype: str | None = None
    about: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def assumed(self) -> frozenset[str]:
        """Keys whose default is a claim about the run that nobody made."""
        return frozenset(key for key in CLAIMS if key not in self.sources)

    @property
    def scoring_temperature(self) -> float:
        """Temperature at which log-probs are comparable with the logged ones: raw log-probs precede it."""
        return 1.0 if self.logprobs_mode == "raw" else self.temperature

    @property
    def truncated_sampling(self) -> bool:
        """True when top-p or top-k cut the distribution that was sampled."""
        return self.top_p < 1.0 or self.top_k > 0


@dataclass(frozen=True, eq=False)
class Run:
    """A run directory, as a reader understood it.

    ``trainer_checkpoints`` finds the trainer's weights by version and ``sampler_checkpoints`` the sampler's; both are
    None when the format has none. Step k updates version k + ``first_version``: frameworks that count steps from 1 have
    -1 there. Version 0 may lie elsewhere, at ``initial``: the model that training began with.
    ``adapter_base`` is the model over which checkpoints that are adapters were trained.
    """

    path: Path
    format: str
    settings: Settings
    steps: tuple[Step, ...]
    trainer_checkpoints: CheckpointPattern | None = None
    sampler_checkpoints: CheckpointPattern | None = None
    versions_known: bool = True
    first_version: int = 0
    initial: Path | None = None
    adapter_base: Path | None = None
    notices: tuple[str, ...] = ()

    def trainer_version(self, step: int) -> int:
        """Version of the weights that the step updates, or UNKNOWN_VERSION."""
        return step + self.first_version if self.versions_known else UNKNOWN_VERSION

    def trainer_checkpoint(self, version: int) -> Path | None:
        """Directory (or GGUF file) of the trainer's weights, None when the run holds none."""
        return self._existing(self.trainer_checkpoints, version)

    def sampler_checkpoint(self, version: int) -> Path | None:
        """Directory of the weights that the sampler was given at ``version``."""
        return self._existing(self.sampler_checkpoints or self.trainer_checkpoints, version)

    def nearest_checkpoint(self, version: int, sampler: bool = False) -> tuple[int, Path] | None:
        """The (version, directory) closest to ``version``, the older of two; None when there are no checkpoints at all.

        Args:
            version: the version that is wanted.
            sampler: look among the weights that the sampler was given.
        """
        pattern = (self.sampler_checkpoints if sampler else None) or self.trainer_checkpoints
        if pattern is None or version < 0:
            return None
        there = {v: pattern.path(v) for v in pattern.versions()}
        if self.initial is not None:
            there.setdefault(0, self.initial)
        if not there:
            return None
        best = min(there, key=lambda held: (abs(held - version), held))
        return best, there[best]

    def _existing(self, pattern: CheckpointPattern | None, version: int) -> Path | None:
        if pattern is None or version < 0:
            return None
        path = pattern.path(version)
        if path.exists():
            return path
        return self.initial if version == 0 else None
