"""verl's rollout dumps, written by its skip manager: ``tq_batch.pt`` (V1), ``gen_batch.dp`` (V0) and older layouts.

    GBS{b}_N{n}_in{p}_out{r}/{step}/{inner}/tq_batch.pt       V1, since 2026-07-14 (before: without inner)
    GBS{b}_N{n}_in{p}_out{r}/{step}/gen_batch.dp              V0, since 2026-06-04
    GBS{b}_N{n}_in{p}_out{r}/genstep_{g:06d}/gen_batch.dp     2026-03-27; meta.json names the training step
    {experiment}_{project}_GBS{b}__N{n}                       2025-08-04, one file a run

Versions: a version is the number of training steps done (of weight syncs, in the fully asynchronous trainer). verl
counts steps from 1, loads the weights of ``global_step_{k}`` into the sampler after step k and stamps what is sampled
from then on with k (``min_global_steps``, ``max_global_steps``). Step k therefore trains version k - 1, and a sample of
version k - 1 is fresh. Where the two stamps of a response differ, its tokens' versions are null.

The dump is taken before verl's own pass over the batch: it holds no trainer log-probs and no advantages. The text dump
(``trainer.rollout_data_dir``) is recognised, and answered with what it lacks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import partial
from pathlib import Path

from mismatch_probe.errors import InputError, NothingToJudgeError
from mismatch_probe.readers.options import ReadOptions
from mismatch_probe.readers.settings import settle
from mismatch_probe.readers.verl_archive import is_dp, is_tq
from mismatch_probe.readers.verl_layout import dump_folders, dumps_in, text_files
from mismatch_probe.readers.verl_rows import Dump, load
from mismatch_probe.readers.verl_run import checkpoint_pattern, initial_model, saved_config
from mismatch_probe.run import Run, Step

FORMAT = "verl"
LOOKS_FOR = "GBS*_N*/STEP/ with tq_batch.pt or gen_batch.dp, or STEP.jsonl of trainer.rollout_data_dir"

_SNIFFED = 3
"""Files of a folder that are looked into: the newest may be torn, and one that is whole tells the format."""


def matches(path: Path) -> bool:
    """True when a dump below the directory is verl's by its content, or its text files are."""
    return any(_is_verl(folder) for folder in dump_folders(path)) or bool(text_files(path))


def read(path: Path, options: ReadOptions) -> Run:
    """Read the dump directory, or a directory above it.

    Raises:
        InputError: several dumps lie below the directory.
        NothingToJudgeError: there is only a text dump.
    """
    folders = [folder for folder in dump_folders(path) if _is_verl(folder)]
    texts = text_files(path)
    if not folders:
        raise NothingToJudgeError(_text_answer(path, texts))
    if len(folders) > 1:
        names = ", ".join(folder.relative_to(path).as_posix() or "." for folder in folders)
        raise InputError(f"{path}: holds {len(folders)} dumps: {names}. Give one of them")
    dumps = dumps_in(folders[0])
    found, notices = saved_config(path, folders[0])
    settings = settle(path, options, found)
    if settings.group_size is not None:
        dumps = [_with_group_size(dump, settings.group_size) for dump in dumps]
    by_step: dict[int, list[Dump]] = defaultdict(list)
    for dump in dumps:
        by_step[dump.step].append(dump)
    steps = tuple(
        Step(
            index, tuple(d.file for d in group), partial(load, index, tuple(group), path, settings.vocab_size, options)
        )
        for index, group in sorted(by_step.items())
    )
    unknown = _steps_unknown(folders[0], dumps)
    pattern, where = checkpoint_pattern(path, settings.checkpoints)
    said = [
        "verl dumps a batch before it computes log-probs and advantages: trainer log-probs come from checkpoints, "
        "advantages are null",
        *notices,
        *unknown,
        *where,
    ]
    if texts:
        said.append(f"{texts[0].parent}: a text dump of the run, left unread; {folders[0]} holds the token ids")
    sampler, _ = checkpoint_pattern(path, settings.sampler_checkpoints, search=False)
    return Run(
        path,
        FORMAT,
        settings,
        steps,
        pattern,
        sampler,
        versions_known=not unknown,
        first_version=-1,
        initial=initial_model(settings.model),
        notices=tuple(said),
    )


def _is_verl(folder: Path) -> bool:
    sniffed = dumps_in(folder)[:_SNIFFED]
    return any(is_tq(dump.file) if dump.kind == "tq" else is_dp(dump.file) for dump in sniffed)


def _with_group_size(dump: Dump, size: int) -> Dump:
    return Dump(dump.step, dump.file, dump.kind, dump.part, size, dump.whole)


def _steps_unknown(folder: Path, dumps: list[Dump]) -> list[str]:
    """Why the dump's numbers are not training steps, where they are not."""
    if dumps[0].file.parent == folder:
        return [
            f"{dumps[0].file.name}: names no training step; verl wrote it at the first generation of the run that had "
            "none. If that was a run from its start, --set sampler_lag=0 says so: step 1, version 0"
        ]
    if re.match(r"GBS1_", folder.name) and dumps[0].kind == "dp":
        return [
            f"{folder.name}: one prompt a directory, as the fully asynchronous trainer dumps (skip.async_rollout). The "
            "directories count prompts, not training steps, so which weights were trained on them is not known: the "
            "lag is not identifiable"
        ]
    return []


def _text_answer(path: Path, texts: list[Path]) -> str:
    where = texts[0].parent if texts else path
    return (
        f"{where}: verl's text dump (trainer.rollout_data_dir). It holds no token ids, log-probs, masks or weight "
        "versions, and its text is decoded without special tokens, so the tokens cannot be recovered: neither "
        "discrepancy nor lag can be computed. Record the run with skip.rollout_tq.enable=True "
        "'skip.rollout_tq.steps=[1,2,...]' skip.rollout_tq.dump_dir=NEW_DIR and "
        "actor_rollout_ref.rollout.calculate_log_probs=True (V0 trainer: skip.rollout in place of skip.rollout_tq). "
        "Give a fresh dump_dir: with action: cache verl replays what it finds there in place of sampling"
    )
