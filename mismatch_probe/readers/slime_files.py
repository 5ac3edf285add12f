"""Which of slime's dumps lie in a directory: told by the first keys of each archive, without reading the rest."""

from __future__ import annotations

import pickletools
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mismatch_probe.errors import InputError

ROLLOUT, TRAIN_1, TRAIN_2 = "rollout", "train, one file a rank", "train"
_HEAD = 4096
_NUMBERED = re.compile(r"(\d+)(?:_(\d+))?\.pt")


@dataclass(frozen=True)
class Dump:
    """One file: its kind, the rollout id that it says, and for the older train dumps the rank that wrote it."""

    kind: str
    step: int
    rank: int
    path: Path


def sniff(path: Path) -> Dump | None:
    """What a file's first keys say it is; None when it is none of slime's. Reads 4 KiB and never raises."""
    keys, numbers = _first_keys(path)
    step, rank = numbers.get("rollout_id", -1), numbers.get("rank", 0)
    if step < 0:
        return None
    if keys[:2] == ["rollout_id", "samples"]:
        return Dump(ROLLOUT, step, rank, path)
    if keys[:3] == ["rollout_id", "rank", "rollout_data"]:
        return Dump(TRAIN_1, step, rank, path)
    if keys[:4] == ["format_version", "rollout_id", "rank", "samples"]:
        return Dump(TRAIN_2, step, rank, path)
    return None


def _first_keys(path: Path) -> tuple[list[str], dict[str, int]]:
    """The first strings of the archive's pickle, and the integers that follow some of them."""
    keys: list[str] = []
    numbers: dict[str, int] = {}
    try:
        with path.open("rb") as stream:
            head = stream.read(_HEAD)
        # torch.save writes its pickle as the first member, stored as it is: after the zip header of that member.
        signature, _, _, method, *_, name_length, extra_length = struct.unpack("<4sHHHHHIIIHH", head[:30])
        if signature != b"PK\3\4" or method != 0 or not head[30 : 30 + name_length].endswith(b"/data.pkl"):
            return keys, numbers
        for opcode, argument, _ in pickletools.genops(head[30 + name_length + extra_length :]):
            if isinstance(argument, str) and "UNICODE" in opcode.name:
                keys.append(argument)
            elif isinstance(argument, int) and opcode.name.startswith("BININT") and keys:
                numbers.setdefault(keys[-1], argument)
            if len(keys) > 4:
                break
    # The head ends in the middle of an opcode, or is no pickle at all: what was seen until then is the answer.
    except (OSError, struct.error, ValueError, IndexError, EOFError):
        pass
    return keys, numbers


def has_dumps(path: Path) -> bool:
    """True when a file in the directory, or at slime's usual places below it, is one of its dumps."""
    return any(sniff(file) is not None for root in _roots(path) for file in _archives(root))


@dataclass(frozen=True)
class Found:
    """The dumps of a run by rollout id, the folder they lie in, and what else the user must know."""

    rollout: dict[int, Path]
    train: dict[int, tuple[Dump, ...]]
    root: Path
    notices: tuple[str, ...]


def find(path: Path) -> Found:
    """Look in ``path``, its ``rollout_data`` and ``train_data``, and one level below.

    Raises:
        InputError: no dump is there, or several runs' are.
    """
    chosen: list[Path] = []
    dumps: list[Dump] = []
    notices: list[str] = []
    for root in _roots(path):
        held, said = _dumps(root)
        if held and root == path:
            chosen, dumps, notices = [root], held, said
            break
        kinds = {dump.kind == ROLLOUT for dump in held}
        if kinds & {dump.kind == ROLLOUT for dump in dumps}:
            names = ", ".join(folder.name for folder in (*chosen, root))
            raise InputError(f"{path}: holds the dumps of several slime runs ({names}). Give one of them")
        if held:
            chosen, dumps, notices = [*chosen, root], [*dumps, *held], [*notices, *said]
    if not dumps:
        raise InputError(f"{path}: no slime dump found. Give the directory that --dump-details named")
    rollout, train = _by_step(dumps, notices)
    return Found(rollout, train, path if len(chosen) > 1 else chosen[0], tuple(notices))


def _roots(path: Path) -> Iterator[Path]:
    yield path
    yield from sorted(entry for entry in path.iterdir() if entry.is_dir() and entry.name not in _PLACES)


_PLACES = ("rollout_data", "train_data")


def _archives(root: Path) -> list[Path]:
    folders = (root, *(root / place for place in _PLACES))
    return [file for folder in folders if folder.is_dir() for file in sorted(folder.glob("*.pt"))]


def _dumps(root: Path) -> tuple[list[Dump], list[str]]:
    dumps: list[Dump] = []
    evaluations = strangers = 0
    unread: list[Path] = []
    for file in _archives(root):
        dump = sniff(file)
        if file.name.startswith("eval_"):
            evaluations += 1
        elif dump is not None:
            dumps.append(dump)
        else:
            unread.append(file)
    for file in unread:
        # A damaged dump beside whole ones must be said when its step is read, not passed over.
        kinds = [dump.kind for dump in dumps if dump.path.parent == file.parent]
        number = _NUMBERED.fullmatch(file.name)
        if kinds and number:
            dumps.append(Dump(kinds[0], int(number.group(1)), int(number.group(2) or 0), file))
        else:
            strangers += 1
    notices = []
    if evaluations:
        notices.append(f"{evaluations} eval_*.pt files hold evaluation rollouts, which are not trained on: left out")
    if strangers and dumps:
        notices.append(f"{strangers} .pt files are no dumps of slime: left unread")
    return dumps, notices


def _by_step(dumps: list[Dump], notices: list[str]) -> tuple[dict[int, Path], dict[int, tuple[Dump, ...]]]:
    """One rollout file a step, and one train file or the files of its ranks; of several the newest counts."""
    # Newest last; the name settles equal times, so that the choice does not depend on the directory's order.
    ordered = sorted(dumps, key=lambda dump: (modified(dump.path), dump.path.name))
    rollout: dict[int, Path] = {}
    train: dict[int, dict[int, Dump]] = {}
    for dump in ordered:
        if dump.kind == ROLLOUT:
            earlier: Path | None = rollout.get(dump.step)
            rollout[dump.step] = dump.path
        else:
            ranks = train.setdefault(dump.step, {})
            if dump.kind == TRAIN_2 or any(other.kind == TRAIN_2 for other in ranks.values()):
                earlier = next((other.path for other in ranks.values()), None)
                ranks.clear()
            else:
                earlier = ranks[dump.rank].path if dump.rank in ranks else None
            ranks[dump.rank] = dump
        if earlier is not None:
            notices.append(
                f"rollout {dump.step}: {earlier.name} and {dump.path.name} both hold it; the newer, "
                f"{dump.path.name}, counts"
            )
    return rollout, {step: tuple(ranks[rank] for rank in sorted(ranks)) for step, ranks in train.items()}


def modified(path: Path) -> int:
    """When a file was last written, nanoseconds; 0 where that cannot be told."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
