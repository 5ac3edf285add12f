"""PipelineRL's streams: ``OUT/streams/actor/*/*/0.jsonl`` and ``OUT/streams/training_data/*/PARTITION/0.jsonl``.

Versions. ``model_version`` is not a step: it is the number of samples the trainer had consumed at the weight update
which had reached the engine when the request began. ``OUT/conf/exp_config.yaml``, which the launcher saves, gives the
samples of one step, S = train_batch_size x gradient_accumulation_passes; with it version v is the weights after v / S
updates, saved at ``OUT/finetune/intermediate/{v / S}``. Without it, or where a version is no multiple of S, versions
stay counts of samples and no checkpoint belongs to them. The engine's weights may change inside a response; the dump
keeps the version at its start only.

Steps. The actor stream holds what was sampled, the training_data stream what was trained on, in order: each partition (
a trainer process) takes its share of the S samples of a step. So step k, the update of version k, is cut out of
training_data, and group, version and finish reason are joined from the actor stream by tokens and log-probs. Without
training_data or S a step is all groups with the same latest ``model_version``; which update trained on them is then not
known. A relaunch clears the streams: they hold one launch, whose first sample is in the trainer's own messages.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from mismatch_probe.errors import NothingToJudgeError
from mismatch_probe.readers.config_files import lookup, read_config, settings_in
from mismatch_probe.readers.options import ReadOptions
from mismatch_probe.readers.pipeline_rl_rows import Actors, load_actor, load_training
from mismatch_probe.readers.pipeline_rl_steps import (
    Unplaced,
    actor_index,
    actor_steps,
    first_sample,
    samples_a_step,
    training_index,
    training_steps,
)
from mismatch_probe.readers.settings import Found, declared_checkpoints, settle
from mismatch_probe.readers.sniff import TEXT_ENDINGS, first_json
from mismatch_probe.run import CheckpointPattern, Run, Settings, Step

FORMAT = "pipeline-rl"
LOOKS_FOR = "streams/actor or streams/training_data with lines of PipelineRL"

_MODES = {"processed_logprobs": "processed", "raw_logprobs": "raw"}
_CONFIG = "conf/exp_config.yaml"
_KEYS = (
    ("model", "model_path"),
    ("temperature", "llm.parameters.temperature"),
    ("top_p", "llm.parameters.top_p"),
    ("top_k", "llm.parameters.top_k"),
    ("max_response_length", "llm.parameters.max_tokens"),
)
_AT_START = (
    "sampler_version is the version when a request began: PipelineRL updates the engine's weights inside a response "
    "and does not log where, so the end of a long response may come from later versions"
)


def matches(path: Path) -> bool:
    """True when a stream's first line is PipelineRL's: a list of texts with labels, or a batch with old_logprobs."""
    actor = any(_is_actor(first_json(file)) for file in _topic(path, "actor")[:1])
    return actor or any(_is_training(first_json(file)) for file in _topic(path, "training_data")[:1])


def read(path: Path, options: ReadOptions) -> Run:
    """Read the run's output directory, or its ``streams``.

    Raises:
        BadFileError: a line, or the saved config, cannot be parsed.
        NothingToJudgeError: the streams hold no step that can be told from the next.
    """
    home = path.parent if path.name == "streams" else path
    config = read_config(home / _CONFIG) if (home / _CONFIG).is_file() else {}
    settings = settle(path, options, _found(config))
    actor = actor_index(_topic(path, "actor"))
    partitions = [training_index(file, options) for file in _topic(path, "training_data")]
    notices = [_AT_START]
    size, unplaced = None, ""
    try:
        size = samples_a_step(config, actor, len(partitions))
        start = first_sample(_topic(path, "weight_update_request"), actor, partitions)
        steps = training_steps(partitions, size, start)
        load: Any = partial(load_training, actors=Actors(actor, options))
    except Unplaced as error:
        unplaced = str(error)
        steps, load = actor_steps(actor, size), load_actor
        unit = "sampler version" if size else "model_version, a count of samples,"
        notices.append(f"{unplaced}: steps are named by {unit} and the update that trained on them is not known")
    if not steps:
        raise NothingToJudgeError(f"{path}: {unplaced or 'the streams hold no complete line'}")
    files = {index: tuple(dict.fromkeys(line.file for line in lines)) for index, lines in steps.items()}
    made = tuple(
        Step(index, files[index], partial(load, index, lines, path, settings, options, size or 1))
        for index, lines in sorted(steps.items())
    )
    local = Path(settings.model) if settings.model else None
    return Run(
        path,
        FORMAT,
        settings,
        made,
        trainer_checkpoints=_checkpoints(path, home, settings, size, notices),
        versions_known=not unplaced,
        initial=local if size and local and local.is_dir() else None,
        notices=tuple(notices),
    )


def _found(config: dict[str, Any]) -> Found:
    """Settings in the launcher's config; values still written as ``${...}`` are not settled there and say nothing."""
    found = settings_in(config, _CONFIG, _KEYS)
    engine = lookup(config, "vllm_config.vllm_kwargs") or {}
    mode = _MODES.get(str(engine.get("logprobs-mode")))
    if mode:
        found["logprobs_mode"] = (mode, f"{_CONFIG}: vllm_config.vllm_kwargs.logprobs-mode")
    if "top_p" not in found and engine.get("generation-config") == "vllm":
        where = f"{_CONFIG}: llm.parameters has none, and generation-config: vllm adds none"
        found["top_p"] = (1.0, where)
        found.setdefault("top_k", (-1, where))
    if lookup(config, "finetune.load_as_bf16") is True:
        found["trainer_dtype"] = ("bfloat16", f"{_CONFIG}: finetune.load_as_bf16")
    return {key: value for key, value in found.items() if not str(value[0]).startswith("${")}


def _checkpoints(
    path: Path, home: Path, settings: Settings, size: int | None, notices: list[str]
) -> CheckpointPattern | None:
    declared = declared_checkpoints(path, settings)
    if declared is not None:
        return declared
    if size is None:
        return None
    if (home / "finetune" / "intermediate").is_dir():
        notices.append("checkpoints: finetune/intermediate/N, the weights after N updates")
    return CheckpointPattern(home, "finetune/intermediate/{version}")


def _topic(path: Path, topic: str) -> list[Path]:
    """Shard files of a topic, in the order of instance and partition."""
    for folder in (path / "streams" / topic, path / topic):
        shards = [
            file
            for ending in TEXT_ENDINGS
            for file in folder.glob(f"*/*/0.jsonl{ending}")
            if file.parent.name.isdecimal() and file.parent.parent.name.isdecimal()
        ]
        if shards:
            return sorted(shards, key=lambda file: (int(file.parent.parent.name), int(file.parent.name), file.name))
    return []


def _is_actor(value: Any) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and {"input_ids", "labels", "logprobs"} <= set(first)


def _is_training(value: Any) -> bool:
    return isinstance(value, dict) and {"input_ids", "labels", "old_logprobs", "model_version"} <= set(value)
