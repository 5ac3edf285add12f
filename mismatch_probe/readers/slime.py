"""slime's debug dumps: ``rollout_data/{id}.pt`` and ``train_data/{id}.pt``, as ``--dump-details`` writes them.

The rollout file holds ids, masks, the engine's log-probs and its version numbers; the train file holds the trainer's
log-probs and advantages (see ``slime_train``). Each can be read alone. Step k is rollout id k: it turns version k, the
weights after k rollouts, into version k + 1. The engine counts otherwise: see ``slime_versions``.

An engine call has one version: an update first aborts what is running. slime names one version a call, not a token,
and does not record where a call began, so a response sampled under several versions has no version a token.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mismatch_probe.errors import BadFileError
from mismatch_probe.readers import slime_config, slime_files
from mismatch_probe.readers.options import ReadOptions
from mismatch_probe.readers.pickles import REPAIR
from mismatch_probe.readers.rows import RowBuilder
from mismatch_probe.readers.settings import settle
from mismatch_probe.readers.slime_samples import Sample, cut, match, sequence_names, version_numbers
from mismatch_probe.readers.slime_train import TrainData, read_format_1, read_format_2
from mismatch_probe.readers.slime_versions import Numbering
from mismatch_probe.readers.torch_archive import load_torch
from mismatch_probe.run import CheckpointPattern, Rollouts, Run, Settings, Step

T = TypeVar("T")

FORMAT = "slime"
LOOKS_FOR = "rollout_data/*.pt or train_data/*.pt of --dump-details"

# Objects that a sample may carry beside plain values and tensors: images of the prompt, and the like.
_INERT = ("PIL.", "torch.", "slime.", "transformers.", "datetime.", "decimal.", "uuid.", "pathlib.", "collections.")
_BUILTIN = ("builtins.int", "builtins.float", "builtins.str", "builtins.list", "builtins.dict")  # of a defaultdict


def matches(path: Path) -> bool:
    """True when an archive there, or at slime's usual places below, begins with the keys of one of its dumps."""
    return slime_files.has_dumps(path)


def read(path: Path, options: ReadOptions) -> Run:
    """Read the directory that ``--dump-details`` named, or the one above it.

    Raises:
        InputError: no dump is there, or those of several runs are.
        BadFileError: a saved argument or ``run.toml`` is wrong.
    """
    found = slime_files.find(path)
    arguments, unread = slime_config.read_arguments(path, found.root)
    settings = settle(path, options, arguments.settings())
    source = _Source(found, arguments, settings, path, options)
    steps = tuple(Step(index, source.files(index), partial(source.load, index)) for index in source.indices())
    checkpoints, where = slime_config.find_checkpoints(path, found.root, arguments)
    if settings.checkpoints is not None:
        checkpoints, where = _declared(path, settings.checkpoints), ""
    notices = (*found.notices, *(text for text in (unread, where, *source.missing()) if text))
    initial = path / settings.model if settings.sources.get("model") in ("run.toml", "--set") else None
    if initial is not None and not initial.is_dir():
        initial = None
    sampler = _declared(path, settings.sampler_checkpoints) if settings.sampler_checkpoints else None
    return Run(path, FORMAT, settings, steps, checkpoints, sampler, initial=initial, notices=notices)


def _declared(path: Path, pattern: str) -> CheckpointPattern:
    return CheckpointPattern(path, pattern, ahead=1)


class _Source:
    """The files of one run, and what is known of all of them."""

    def __init__(
        self,
        found: slime_files.Found,
        arguments: slime_config.Arguments,
        settings: Settings,
        path: Path,
        options: ReadOptions,
    ) -> None:
        self._rollout, self._train = found.rollout, found.train
        self._arguments, self._settings, self._path, self._options = arguments, settings, path, options
        self._numbers: dict[int, frozenset[int] | None] = {}
        interval = arguments.integer("update_weights_interval")
        synchronous = arguments.get("colocate") is True
        self._numbering = Numbering(sorted(self._rollout), self._numbers_of, self._written, interval, synchronous)

    def indices(self) -> list[int]:
        """Rollout ids that either kind of file holds, ascending."""
        return sorted({*self._rollout, *self._train})

    def files(self, step: int) -> tuple[Path, ...]:
        """The rollout file first, then the train files by rank."""
        rollout = (self._rollout[step],) if step in self._rollout else ()
        return (*rollout, *(dump.path for dump in self._train.get(step, ())))

    def missing(self) -> list[str]:
        """What the run's files lack as a whole, and which switch of slime would give it."""
        notices = []
        if not self._train:
            notices.append(
                "no train_data files: trainer log-probs and advantages are null; --dump-details, or "
                "--save-debug-train-data, writes them"
            )
        if not self._rollout:
            notices.append(
                "no rollout_data files: weight versions, prompt groups and whole statuses are null; --dump-details, or "
                "--save-debug-rollout-data, writes them"
            )
        return notices

    def load(self, step: int) -> Rollouts:
        """Both files of one rollout, joined."""
        builder = RowBuilder(step, self._path, self._settings.vocab_size, self._options)
        samples = train = None
        if step in self._rollout:
            samples = self._guarded(builder, self._rollout[step], partial(self._samples, step))
        if step in self._train:
            file = self._train[step][0].path
            train = self._guarded(builder, file, partial(self._train_data, step, builder))
        if train is not None:
            for text in train.notices:
                builder.notice(f"step {step}: {text}")
            self._judge_trainer(step, train, builder)
        if samples is None:
            self._add_train_only(step, train or TrainData([]), builder)
        else:
            self._add_samples(step, samples, train, builder)
        return builder.build()

    def _guarded(self, builder: RowBuilder, file: Path, read: Callable[[], T]) -> T | None:
        """What ``read`` returns; a file that cannot be read is set aside as a whole under --skip-bad-rows."""
        try:
            return read()
        except BadFileError as error:
            if not self._options.skip_bad_rows:
                raise
            builder.reject(file, 0, None, str(error))
            return None

    def _samples(self, step: int) -> list[Any]:
        file = self._rollout[step]
        payload = _load(file)
        samples = payload.get("samples") if isinstance(payload, dict) else None
        if not isinstance(samples, list):
            raise BadFileError(file, None, "a slime rollout dump without samples", REPAIR)
        self._numbers[step] = frozenset(number for sample in samples for number in version_numbers(sample) or ())
        return samples

    def _numbers_of(self, step: int) -> frozenset[int] | None:
        """The engine's version numbers in a rollout's file, read once; None when it cannot be read."""
        if step not in self._numbers:
            try:
                self._samples(step)
            except BadFileError:
                self._numbers[step] = None
        return self._numbers[step]

    def _written(self, step: int) -> int:
        return slime_files.modified(self._rollout[step])

    def _train_data(self, step: int, builder: RowBuilder) -> TrainData:
        dumps = self._train[step]

        def refuse(file: Path, number: int, reason: str) -> None:
            builder.reject(file, number, None, reason)

        if dumps[0].kind == slime_files.TRAIN_2:
            return read_format_2(dumps[0].path, _load(dumps[0].path), refuse)
        return read_format_1([(dump.path, _load(dump.path)) for dump in dumps], refuse)

    def _judge_trainer(self, step: int, train: TrainData, builder: RowBuilder) -> None:
        """Say what the trainer's log-probs are, and null those that are not of the weights this step updates."""
        get, source = self._arguments.get, self._arguments.source
        if not any(row.columns.get("log_probs") is not None for row in train.rows):
            if train.rows and not train.notices:
                builder.notice(
                    f"step {step}: the train file holds no log_probs: null. Before 2026-08-12 slime left them out with "
                    "--use-rollout-logprobs, and where one optimizer step could reuse them; --get-mismatch-metrics has "
                    "them computed. Files of other pipeline stages than the last never hold them"
                )
            return
        if get("keep_old_actor") is True:
            for row in train.rows:
                row.columns["log_probs"] = None
            builder.notice(
                f"step {step}: --keep-old-actor ({source}): log_probs is of older weights than those that are "
                "updated; taken as absent"
            )
        elif train.steps > 1 and get("use_rollout_logprobs") is not False and get("get_mismatch_metrics") is not True:
            said = f"step {step}: trained in {train.steps} optimizer steps; with --use-rollout-logprobs slime takes "
            said += (
                "log_probs from inside the training pass, so all but the first step's are of weights already updated"
            )
            if get("use_rollout_logprobs") is True:
                late = [row for row in train.rows if row.late]
                for row in late:
                    row.columns["log_probs"] = None
                said += f" ({source}); taken as absent in {len(late)} samples. --get-mismatch-metrics mends it"
            else:
                said += ". No saved arguments say whether it was on; kept as logged"
            builder.notice(said)

    def _add_samples(self, step: int, samples: list[Any], train: TrainData | None, builder: RowBuilder) -> None:
        file = self._rollout[step]
        parsed: list[Sample | None] = []
        for number, sample in enumerate(samples, 1):
            try:
                parsed.append(Sample.of(sample))
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                builder.reject(file, number, None, f"not a sample of slime's rollout dump: {error}")
                parsed.append(None)
        matched = match(parsed, train.rows, step, builder) if train is not None else {}
        versions, remark = self._numbering.versions(step)
        names = sequence_names(step, [None if sample is None else sample.index for sample in parsed])
        counts: Counter[str] = Counter()
        for at, sample in enumerate(parsed):
            if sample is None:
                continue
            row = sample.native(matched.get(at), versions, counts)
            if train is not None and train.complete and matched and at not in matched:
                counts["untrained"] += 1
                row["loss_mask"] = np.zeros(sample.length)
            row["sequence_id"] = names[at]
            if row["group_id"] is None:
                counts["group"] += 1
                row["group_id"] = self._group(step, at, sample.prompt)
            builder.add(row, file, at + 1)
        self._say(step, counts, remark, builder)

    def _add_train_only(self, step: int, train: TrainData, builder: RowBuilder) -> None:
        names = sequence_names(step, [row.sample_index for row in train.rows])
        reward = train.raw_reward or []
        for at, row in enumerate(train.rows):
            prompt, response = cut(row.tokens, row.response_length)
            position = row.position if row.position is not None else -1
            builder.add(
                {
                    "sequence_id": names[at],
                    "group_id": self._group(step, position if position >= 0 else at, prompt),
                    "prompt_ids": prompt,
                    "response_ids": response,
                    "sampler_logprobs": row.columns.get("rollout_log_probs"),
                    "trainer_logprobs": row.columns.get("log_probs"),
                    "advantages": row.columns.get("advantages"),
                    "loss_mask": row.loss_mask,
                    "reward": reward[position] if 0 <= position < len(reward) else None,
                    "finish_reason": "length" if row.truncated else None,
                },
                row.file,
                row.number,
            )
        if train.rows:
            self._say(step, Counter(group=len(train.rows)), "", builder)

    def _group(self, step: int, at: int, prompt: np.ndarray[Any, Any]) -> str:
        if self._settings.group_size is not None:
            return f"step{step}-group{at // self._settings.group_size}"
        return f"step{step}-prompt-{hashlib.blake2b(prompt.astype(np.int64).tobytes(), digest_size=6).hexdigest()}"

    def _say(self, step: int, counts: Counter[str], remark: str, builder: RowBuilder) -> None:
        size, sources = self._settings.group_size, self._settings.sources
        how = "equal prompts" if size is None else f"{size} consecutive rows (group_size, {sources.get('group_size')})"
        texts = {
            "group": f"samples without group_index: grouped by {how}",
            "several": "samples were sampled under several weight versions; slime names one a call, and not where a "
            "call began, so their versions are null",
            "unnamed": "samples name no weight version, or one that is no number: null",
            "removed": "samples have remove_sample set: none of their tokens count",
            "top_p": "samples carry the kept set of top-p: engine and trainer both renormalise their log-probs over it"
            + ("" if "top_p" in sources else ", and the value is not saved; give it with --set top_p=VALUE"),
            "untrained": "samples were sampled and not trained on (slime drops what fills no whole batch): none of "
            "their tokens count",
        }
        for key, text in texts.items():
            if counts[key]:
                builder.notice(f"step {step}: {counts[key]} {text}")
        if remark:
            builder.notice(f"step {step}: weight versions: {remark}")


def _load(file: Path) -> Any:
    # All that is read is flat; routed experts, a value a token, layer and choice, can be gigabytes.
    return load_torch(file, file, lambda name: name.startswith(_INERT) or name in _BUILTIN, most_dimensions=1)
