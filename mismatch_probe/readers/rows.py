"""Rows in native field names -> Rollouts: what fits is kept, what does not is set aside with its reason."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_probe.errors import BadFileError
from mismatch_probe.readers.options import ReadOptions
from mismatch_probe.readers.values import Misfit, floats, integers, mask_of, name_of, reward_of, versions_of
from mismatch_probe.run import UNKNOWN_VERSION, Floats, Ints, Ragged, Rejected, Rollouts

REQUIRED = ("sequence_id", "group_id", "prompt_ids", "response_ids")
OPTIONAL = (
    *("sampler_logprobs", "loss_mask", "sampler_version", "trainer_logprobs"),
    *("advantages", "reward", "finish_reason"),
)
POSITIVE_TOLERANCE = 1e-4
"""A log-prob above this is impossible; float32 rounding stays below it."""
LOWEST_LOGPROB = -700.0
"""A token this improbable is never sampled (e^-700 is 1e-304): what is below is a stand-in, such as -9999."""
_STRICT_REMEDY = "Mend the row, or drop --strict to set it aside"


class RowBuilder:
    """Collects the rows of one step.

    Args:
        step: step number, for the reasons.
        root: run directory; files are named relative to it.
        vocab_size: ids at or above it are refused; None accepts any id >= 0.
        options: ``strict`` turns a set-aside row into a BadFileError.
        ids_known: False where the format logs no token ids and its reader gives UNKNOWN_TOKEN for each.
    """

    def __init__(
        self, step: int, root: Path, vocab_size: int | None, options: ReadOptions, ids_known: bool = True
    ) -> None:
        self._ids_known = ids_known
        self._step, self._root, self._vocab_size, self._options = step, root, vocab_size, options
        self._rows: list[dict[str, Any]] = []
        self._rejected: list[Rejected] = []
        self._notices: list[str] = []
        self._copies = 0
        self._odd_values: dict[str, list[str]] = {}
        self._seen: dict[str, dict[str, Any]] = {}
        self._names: dict[Path, str] = {}

    def add(self, row: Mapping[str, Any], file: Path, number: int) -> None:
        """Check one row and keep it, or set it aside."""
        sequence_id = row.get("sequence_id")
        try:
            fitted = self._fit(row)
        except Misfit as misfit:
            self.reject(file, number, None if sequence_id is None else str(sequence_id), str(misfit))
            return
        earlier = self._seen.setdefault(fitted["sequence_id"], fitted)
        if earlier is not fitted:
            if _same(earlier, fitted):
                self._copies += 1
            else:
                reason = "sequence_id was used before in this step, with other content"
                self.reject(file, number, fitted["sequence_id"], reason)
            return
        name = self._name(file)
        self._rows.append({**fitted, **self._without_odd_values(fitted, name, number), "origin": (name, number)})

    def misfit(self, row: Mapping[str, Any]) -> str | None:
        """Why a row would be set aside, None when it fits; nothing is kept."""
        try:
            self._fit(row)
        except Misfit as misfit:
            return str(misfit)
        return None

    def reject(self, file: Path, number: int, sequence_id: str | None, reason: str) -> None:
        """Set a row aside (row 0: the whole file)."""
        if self._options.strict:
            raise BadFileError(self._name(file), number or None, reason, _STRICT_REMEDY)
        self._rejected.append(Rejected(self._step, self._name(file), number, sequence_id, reason))

    def torn(self, file: Path, number: int, reason: str) -> None:
        """Note a last line that was cut short; it is dropped."""
        if self._options.strict:
            raise BadFileError(self._name(file), number, f"torn last line: {reason}", "Drop --strict to pass over it")
        self.notice(f"{self._name(file)}, row {number}: torn last line dropped ({reason})")

    def notice(self, text: str) -> None:
        """Something the user must know about this step."""
        self._notices.append(text)

    def build(self) -> Rollouts:
        """The columns of all rows that fitted."""
        rows = self._rows
        if self._copies:
            self.notice(f"step {self._step}: {self._copies} rows are exact copies of others and count once")
        for what, places in self._odd_values.items():
            more = "" if len(places) == 1 else f" and {len(places) - 1} more rows"
            self.notice(f"{places[0]}{more}: {what}")

        def flat(key: str, dtype: Any, absent: Any) -> Any:
            """Rows keep the dtype they came in: they are cast here, in the one pass that joins them; None is absent."""
            cells = [row[key] for row in rows]
            if all(cell is None for cell in cells):
                return np.full(sum(len(row["response"]) for row in rows), absent, dtype=dtype)
            whole = (
                np.full(len(row["response"]), absent) if cell is None else cell
                for row, cell in zip(rows, cells, strict=True)
            )
            return np.concatenate(list(whole), dtype=dtype)

        def column(key: str) -> Any:
            cells = np.empty(len(rows), dtype=object)
            for at, row in enumerate(rows):
                cells[at] = row[key]
            return cells

        return Rollouts(
            sequence_id=column("sequence_id"),
            group_id=column("group_id"),
            origin=column("origin"),
            prompt=Ragged.of([row["prompt"] for row in rows]),
            response=Ragged.of([row["response"] for row in rows]),
            sampler_logprob=flat("sampler_logprob", np.float64, np.nan),
            trainer_logprob=flat("trainer_logprob", np.float64, np.nan),
            loss_mask=flat("loss_mask", np.bool_, True),
            sampler_version=flat("sampler_version", np.int64, UNKNOWN_VERSION),
            advantage=flat("advantage", np.float64, np.nan),
            reward=np.array([row["reward"] for row in rows], dtype=np.float64),
            finish_reason=column("finish_reason"),
            rejected=tuple(self._rejected),
            notices=tuple(self._notices),
        )

    def _fit(self, row: Mapping[str, Any]) -> dict[str, Any]:
        for key in REQUIRED:
            if row.get(key) is None:
                near = difflib.get_close_matches(key, [name for name in row if name not in OPTIONAL], 1)
                hint = f" (is {near[0]!r} meant?)" if near and near[0] not in REQUIRED else ""
                raise Misfit(f"{key} is missing{hint}")
        prompt = self._token_ids(row["prompt_ids"], "prompt_ids")
        response = self._token_ids(row["response_ids"], "response_ids")
        if not len(prompt):
            raise Misfit("prompt_ids is empty, so the first response token has no prefix to be scored on")
        if not len(response):
            raise Misfit("response_ids is empty")
        n = len(response)
        return {
            "sequence_id": name_of(row["sequence_id"], "sequence_id"),
            "group_id": name_of(row["group_id"], "group_id"),
            "prompt": prompt,
            "response": response,
            "sampler_logprob": floats(row.get("sampler_logprobs"), "sampler_logprobs", n),
            "trainer_logprob": floats(row.get("trainer_logprobs"), "trainer_logprobs", n),
            "loss_mask": mask_of(row.get("loss_mask"), n),
            "sampler_version": versions_of(row.get("sampler_version"), n),
            "advantage": floats(row.get("advantages"), "advantages", n, scalar=True),
            "reward": reward_of(row.get("reward")),
            "finish_reason": None if row.get("finish_reason") is None else str(row["finish_reason"]),
        }

    def _token_ids(self, value: Any, key: str) -> Ints:
        ids = integers(value, key)
        if len(ids) and ids.min() < 0 and self._ids_known:
            raise Misfit(f"{key} holds the negative id {ids.min()}")
        if len(ids) and self._vocab_size is not None and ids.max() >= self._vocab_size:
            raise Misfit(f"{key} holds id {ids.max()}, outside the vocabulary of {self._vocab_size}")
        return ids

    def _without_odd_values(self, row: dict[str, Any], file: str, number: int) -> dict[str, Floats]:
        """The log-prob columns with null for what no distribution gives; every kind of it is noted."""
        cleaned = {}
        for key, name in (("sampler_logprob", "sampler_logprobs"), ("trainer_logprob", "trainer_logprobs")):
            values = row[key]
            if values is None:
                continue
            # The minimum is NaN or infinite where any value is, and the comparison with it False.
            if len(values) and values.min() >= LOWEST_LOGPROB and values.max() <= POSITIVE_TOLERANCE:
                continue
            if np.isnan(values).all():
                continue  # absent as a whole: said once for the step, not row by row
            counted = np.ones(len(values), dtype=np.bool_) if row["loss_mask"] is None else row["loss_mask"]
            kinds = Counter(
                {
                    "null or NaN": int((np.isnan(values) & counted).sum()),
                    "infinite": int((np.isinf(values) & counted).sum()),
                    "below -700 (a stand-in)": int((np.isfinite(values) & (values < LOWEST_LOGPROB) & counted).sum()),
                }
            )
            cleaned[key] = np.where(np.isfinite(values) & (values >= LOWEST_LOGPROB), values, np.nan)
            place = f"{file}, row {number}"
            for kind, count in kinds.items():
                if count:
                    what = f"{name} {kind} at loss tokens; they are left out, not filled. Find out why they were logged"
                    self._odd_values.setdefault(what, []).append(place)
            if bool(((values > POSITIVE_TOLERANCE) & np.isfinite(values) & counted).any()):
                what = f"{name} above 0, which no probability gives; kept as logged. Check how they were computed"
                self._odd_values.setdefault(what, []).append(place)
        return cleaned

    def _name(self, file: Path) -> str:
        if file not in self._names:
            inside = file.is_relative_to(self._root)
            self._names[file] = (file.relative_to(self._root) if inside else file).as_posix()
        return self._names[file]


def _same(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True where every field is equal, byte by byte: NaN is equal to itself."""

    def plain(value: Any) -> Any:
        return (value.dtype.str, value.tobytes()) if isinstance(value, np.ndarray) else repr(value)

    return all(plain(row[key]) == plain(other[key]) for key in row)
