"""prime-rl's run directory: token exports, ``traces.jsonl`` and transport files, whichever of them are there.

A step is read from the file that holds most: the token export (both log-probs), else the rank files, else the
orchestrator's batch (sampler log-probs), else the traces (sampler log-probs, versions, groups, rewards). What only the
traces or the batch name is joined by step and token ids.

Steps count from 1 since 2026-07-03 (v0.7): step N trains version N-1 into version N. Before, they counted from 0: step
N trained version N. ``broadcasts/step_N``, ``weights/step_N`` and ``checkpoints/step_N`` hold version N in both.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from mismatch_probe.errors import BadFileError, InputError, NothingToJudgeError
from mismatch_probe.readers import prime_rl_export as exports
from mismatch_probe.readers import prime_rl_layout as places
from mismatch_probe.readers import prime_rl_traces as traces
from mismatch_probe.readers import prime_rl_transport as transport
from mismatch_probe.readers.options import ReadOptions
from mismatch_probe.readers.prime_rl_layout import Layout
from mismatch_probe.readers.prime_rl_samples import Sample, join, name_groups, zeros
from mismatch_probe.readers.rows import RowBuilder
from mismatch_probe.readers.settings import settle
from mismatch_probe.run import Rollouts, Run, Settings, Step

FORMAT = "prime-rl"
LOOKS_FOR = "token_exports/step_*/rank_*.jsonl, or rollouts/step_*/ with train/*/traces.jsonl or rank_*.bin"

_EXPORT_SWITCH = "trainer.enable_token_export = true"


def matches(path: Path) -> bool:
    """True when the first file of some kind holds what prime-rl writes there."""
    return bool(_recognised(places.find(path)))


def read(path: Path, options: ReadOptions) -> Run:
    """Read the output directory of a run, or its ``token_exports`` or ``rollouts`` directory.

    Raises:
        BadFileError: a config file is wrong.
        InputError: nothing of prime-rl's is there, or several runs are.
        NothingToJudgeError: only text was written.
    """
    layout, kinds = _open(path)
    found, several_temperatures = places.found_settings(layout.root)
    if "temperature" not in found:
        found |= _temperature(layout, kinds)
    settings = settle(layout.root, options, found)
    first_version = 0 if _from_zero(layout, kinds) else -1
    try:
        pattern, said = places.checkpoints(layout, settings.checkpoints)
        sampler = places.checkpoints(layout, settings.sampler_checkpoints)[0] if settings.sampler_checkpoints else None
    except ValueError as error:
        raise BadFileError(layout.root / "run.toml", None, str(error), "Mend the pattern") from None
    steps, files, notices = _plan(layout, kinds)
    notices += [*said, *([several_temperatures] if several_temperatures else [])]
    counting = "from 0: step N trains version N" if first_version == 0 else "from 1: step N trains version N-1"
    load = partial(_load, layout, kinds, settings, first_version, options)
    return Run(
        path,
        FORMAT,
        settings,
        tuple(Step(step, files[step], partial(load, step)) for step in steps),
        pattern,
        sampler,
        versions_known="traces" in kinds or pattern is not None,
        first_version=first_version,
        initial=Path(settings.model) if settings.model and Path(settings.model).is_dir() else None,
        notices=(f"steps count {counting}", *notices),
    )


def _open(path: Path) -> tuple[Layout, set[str]]:
    """What lies there and which kinds of it hold tokens, or why nothing can be done with it."""
    layout = places.find(path)
    kinds = _recognised(layout)
    several = places.runs_below(layout.root)
    if len(several) > 1:
        raise InputError(f"{path}: holds several runs ({', '.join(several)}). Give the directory of one of them")
    if kinds == {"text"}:
        raise NothingToJudgeError(
            f"{path}: prime-rl v0.6 wrote train_rollouts.jsonl without token ids and log-probs, so nothing can be "
            f'compared. Record the run with {_EXPORT_SWITCH}, with rollout_transport.type = "filesystem", or with v0.7 '
            "or later"
        )
    if not kinds:
        raise InputError(f"{path}: no prime-rl run found. Looked for {LOOKS_FOR}")
    return layout, kinds


def _recognised(layout: Layout) -> set[str]:
    """Kinds of files whose first one holds what its name says."""
    kinds = set()
    for kind, file in layout.firsts().items():
        if kind in ("ranks", "batches"):
            known = transport.start_of(file) is not None
        else:
            row = places.first_line(file)
            if kind == "exports":
                known = exports.is_export(row)
            elif kind == "traces":
                known = traces.traces_in(row) is not None
            else:
                known = "example_id" in row and "reward" in row
        if known:
            kinds.add(kind)
    return kinds


def _temperature(layout: Layout, kinds: set[str]) -> dict[str, tuple[float, str]]:
    firsts = layout.firsts()
    for kind in ("ranks", "batches", "traces"):
        if kind in kinds:
            start = None if kind == "traces" else transport.start_of(firsts[kind])
            value = traces.temperature_in(places.first_line(firsts[kind])) if start is None else start.temperature
            if value is not None and value > 0:
                return {"temperature": (value, firsts[kind].relative_to(layout.root).as_posix())}
    return {}


def _from_zero(layout: Layout, kinds: set[str]) -> bool:
    firsts = layout.firsts()
    if any(0 in files for files in (layout.exports, layout.effective, layout.ranks, layout.batches)):
        return True
    if "exports" in kinds and exports.counts_from_zero(places.first_line(firsts["exports"])):
        return True
    starts = [transport.start_of(firsts[kind]) for kind in ("ranks", "batches") if kind in kinds]
    return any(start is not None and start.counts_from_zero for start in starts)


def _plan(layout: Layout, kinds: set[str]) -> tuple[list[int], dict[int, tuple[Path, ...]], list[str]]:
    """Steps, the files of each, and what to say of the choice."""
    notices = []
    if "exports" in kinds:
        for file in layout.flat:
            for step in exports.steps_in(file):
                layout.exports[step].append(file)
    chosen = {"exports": layout.exports, "ranks": layout.ranks, "batches": layout.batches, "traces": layout.effective}
    if "traces" in kinds and not layout.effective:
        layout.effective = layout.arrived
        chosen["traces"] = layout.arrived
        notices.append(
            "only train/all/traces.jsonl is there: it holds whatever had arrived by each step, not what was trained"
        )
    files: dict[int, tuple[Path, ...]] = {}
    for kind, by_step in chosen.items():
        for step in by_step if kind in kinds else ():
            files[step] = (*files.get(step, ()), *by_step[step])
    named = {"exports": "token exports", "ranks": "rank files", "batches": "orchestrator batches", "traces": "traces"}
    counts = [f"{named[kind]} of {len(by_step)} steps" for kind, by_step in chosen.items() if kind in kinds and by_step]
    notices.insert(0, f"read: {', '.join(counts)}, each step from the first of them that has it")
    if "traces" not in kinds:
        notices.append(
            "only traces.jsonl names the sampler's weight version, and none is there: the total ratio is exact, its "
            "split is not identifiable. Keep monitors.file on, or pass --set sampler_lag=N where it is known"
        )
    unfinished = sorted(set(layout.arrived) - set(files)) if "traces" in kinds else []
    if unfinished:
        notices.append(f"steps {', '.join(map(str, unfinished))} have train/all/traces.jsonl alone: not trained yet")
    if layout.evaluation:
        notices.append(f"{len(layout.evaluation)} evaluation traces.jsonl are no training data, left unread")
    stable = [step for step in layout.exports if layout.exports[step] and not _stable(layout.exports[step])]
    if stable and "exports" in kinds:
        notices.append(f"token exports of steps {', '.join(map(str, sorted(stable)))} have no STABLE file: unfinished")
    return sorted(files), files, notices


def _stable(files: list[Path]) -> bool:
    return all(file.parent.name == "token_exports" or (file.parent / "STABLE").is_file() for file in files)


def _load(
    layout: Layout, kinds: set[str], settings: Settings, first_version: int, options: ReadOptions, step: int
) -> Rollouts:
    builder = RowBuilder(step, layout.root, settings.vocab_size, options)
    skip = options.skip_bad_rows
    batch = tuple(layout.batches.get(step, ())) if "batches" in kinds else ()
    context = tuple(layout.effective.get(step, ())) if "traces" in kinds else ()
    newest = step + first_version
    if "exports" in kinds and layout.exports.get(step):
        samples = exports.read_exports(tuple(layout.exports[step]), step, builder, skip)
    elif "ranks" in kinds and layout.ranks.get(step):
        samples = transport.read_ranks(tuple(layout.ranks[step]), step, builder, skip)
    elif batch:
        samples = [one for file in batch for one in transport.read_batch(file, step, builder, skip)]
        batch = ()
    else:
        samples, context = traces.read_traces(context, step, newest, builder, skip), ()
    if context:
        said = join(samples, traces.read_traces(context, step, newest, builder, skip, context=True), "traces.jsonl")
    elif batch:
        said = join(
            samples, [one for file in batch for one in transport.read_batch(file, step, builder, skip)], batch[0].name
        )
    else:
        said = []
    for text in said:
        builder.notice(f"step {step}: {text}")
    _check(samples, step, settings, builder)
    for one in samples:
        builder.add(one.row, one.file, one.number)
    return builder.build()


def _check(samples: list[Sample], step: int, settings: Settings, builder: RowBuilder) -> None:
    """Fill in groups; say what is filler, and which temperatures differ from the run's."""
    unnamed = name_groups(samples, step)
    if unnamed:
        builder.notice(
            f"step {step}: {unnamed} sequences have no group: those with the same prompt tokens form one"
            + (". group_size is not applied: packing reorders the rows" if settings.group_size else "")
        )
    for key in ("sampler_logprobs", "trainer_logprobs"):
        exact = zeros(samples, key)
        if exact < 0:
            builder.notice(f"step {step}: {key} are 0.0 at every loss token: never computed, taken as absent")
        elif exact and key == "sampler_logprobs":
            builder.notice(
                f"step {step}: {key} are exactly 0.0 at {exact} loss tokens: a probability that rounds to 1, or "
                "prime-rl's filler where the engine returned none; kept as logged"
            )
    if all(one.row.get("trainer_logprobs") is None for one in samples):
        builder.notice(f"step {step}: no trainer log-probs were written. {_EXPORT_SWITCH} writes them")
    others = sorted({one.temperature for one in samples if one.temperature is not None} - {settings.temperature})
    if others:
        values = ", ".join(f"{value:g}" for value in others)
        builder.notice(
            f"step {step}: sequences were sampled at temperature {values}, the run's settings say "
            f"{settings.temperature:g}: re-scored log-probs of those do not compare"
        )
