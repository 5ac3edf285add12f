"""Which lines of PipelineRL's streams belong to which step, found without keeping what they hold."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mismatch_probe.errors import BadFileError
from mismatch_probe.readers.config_files import lookup
from mismatch_probe.readers.files import parse_json
from mismatch_probe.readers.options import ReadOptions
from mismatch_probe.readers.stored_lines import Line, scan

Steps = dict[int, list[Line]]


class Unplaced(Exception):
    """Why lines cannot be told apart by the update that trained on them."""


class Placed(NamedTuple):
    """A line, its ``versions`` (counts of samples) and how many ``samples`` it holds; None: it cannot be parsed."""

    line: Line
    versions: tuple[int, ...]
    samples: int | None


# In a text inside the JSON the quotes are escaped, so these match keys only.
_VERSION = re.compile(rb'"model_version":\s*(\d{1,15})\b')
_BOUNDARIES = re.compile(rb'"seq_boundaries":\s*\[([\d,\s]*)\]')
_PADDING = re.compile(rb'"padding":\s*(\d+)')
_SENTINEL = re.compile(rb'"sentinel":\s*true')


def actor_index(files: list[Path]) -> list[Placed]:
    """Lines of the actor stream: one group each."""
    return [
        Placed(line, tuple(sorted({int(match) for match in _VERSION.findall(text)})), None)
        for file in files
        for line, text in scan(file)
    ]


def training_index(file: Path, options: ReadOptions) -> list[Placed]:
    """Lines of one partition of the training_data stream: one micro-batch each, a sentinel with no samples.

    Raises:
        BadFileError: a line is no JSON and not torn, unless ``skip_bad_rows`` is set.
    """
    placed = []
    for line, text in scan(file):
        version = _VERSION.findall(text[text.rfind(b'"model_version"') :])
        try:
            samples = None if line.torn else _samples(text)
        except (ValueError, TypeError, AttributeError) as error:
            if not options.skip_bad_rows:
                remedy = "Restore the file, or pass --skip-bad-rows to analyse the rest"
                raise BadFileError(file, line.number, f"not a batch of PipelineRL ({error})", remedy) from None
            samples = None
        placed.append(Placed(line, tuple(map(int, version)), samples))
    return placed


def _samples(text: bytes) -> int:
    """Sequences of a batch: the packed form says it near its end, the padded one has a row for each."""
    end = text[text.rfind(b'"model_version"') :]
    if text.endswith(b"}") and (bounds := _BOUNDARIES.search(end)) and (padding := _PADDING.search(end)):
        if _SENTINEL.search(end):
            return 0
        return bounds.group(1).count(b",") - (int(padding.group(1)) > 0)
    batch = parse_json(text)
    return 0 if batch.get("sentinel") else samples_in(batch)


def samples_in(batch: Mapping[str, Any]) -> int:
    """Sequences of a parsed batch; filler that makes a packed batch divisible is not one."""
    if batch.get("seq_boundaries") is None:
        return len(batch["input_ids"])
    return len(batch["seq_boundaries"]) - 1 - (int(batch.get("padding") or 0) > 0)


def samples_a_step(config: Mapping[str, Any], actor: list[Placed], partitions: int) -> int:
    """Samples of one optimizer step.

    Raises:
        Unplaced: the config does not say, or versions in the stream contradict it.
    """
    values = [lookup(config, f"finetune.{key}") for key in ("train_batch_size", "gradient_accumulation_passes")]
    if not all(isinstance(value, int) and 0 < value < 2**31 for value in values):
        raise Unplaced("conf/exp_config.yaml does not give train_batch_size and gradient_accumulation_passes")
    parallel = lookup(config, "finetune.seq_parallel")
    if parallel not in (None, 1) and partitions:
        raise Unplaced(f"training_data is cut across processes (seq_parallel: {parallel}), which is not put together")
    size = int(values[0] * values[1])
    odd = {version for placed in actor for version in placed.versions if version % size}
    if odd:
        raise Unplaced(f"model_version {min(odd)} is no multiple of the {size} samples that the config gives a step")
    if partitions and values[1] % partitions:
        raise Unplaced(f"{values[1]} gradient_accumulation_passes do not divide among {partitions} partitions")
    return size


def first_sample(messages: list[Path], actor: list[Placed], partitions: list[list[Placed]]) -> int:
    """Samples that were consumed before this launch: the trainer's first message, else the oldest version."""
    for file in messages:
        for _, text in scan(file):
            try:
                message = parse_json(text)
                return int(message["samples_processed" if "samples_processed" in message else "version"])
            except (ValueError, KeyError, TypeError):
                continue
    everything = [*actor, *(placed for partition in partitions for placed in partition)]
    return min((version for placed in everything for version in placed.versions), default=0)


def training_steps(partitions: list[list[Placed]], size: int, start: int) -> Steps:
    """Lines of each step: every partition takes ``size / partitions`` samples for it.

    Raises:
        Unplaced: there is no training_data, or its batches do not end where steps do.
    """
    if not any(partitions):
        raise Unplaced("streams/training_data holds nothing")
    share = size // len(partitions)
    if start % size:
        raise Unplaced(f"the launch began at sample {start}, inside a step of {size}")
    steps: Steps = defaultdict(list)
    for partition in partitions:
        seen = 0
        for line, _, samples in partition:
            if samples is None and not line.torn:
                raise Unplaced(
                    f"{line.file.name}, row {line.number} cannot be parsed, so later samples cannot be counted"
                )
            if samples and (seen % share) + samples > share:
                raise Unplaced(f"{line.file}, row {line.number}: a batch crosses the end of a step of {size} samples")
            if samples or line.torn:
                steps[start // size + seen // share].append(line)
            seen += samples or 0
    return steps


def actor_steps(actor: list[Placed], size: int | None) -> Steps:
    """Lines by latest version, in updates where ``size`` is known; a line without one goes with the line before."""
    steps: Steps = defaultdict(list)
    known = [placed.versions[-1] for placed in actor if placed.versions]
    last = known[0] if known else 0
    for line, versions, _ in actor:
        last = versions[-1] if versions else last
        steps[last // (size or 1)].append(line)
    return steps


def lines_of(placed: Iterable[Placed]) -> list[Line]:
    """The lines alone."""
    return [entry.line for entry in placed]
