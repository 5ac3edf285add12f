"""A unit of scoring: what goes to one worker, into one file of the score cache, and is lost at most by a kill."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mismatch_probe.run import Bools, Ints, Ragged


@dataclass(frozen=True, eq=False)
class Unit:
    """Some whole sequences of one step, n of them, with all that scoring them needs.

    Per response token (tokens,): ``place`` in the step's tokens, ``counted``, sampler ``version``, and ``gradient``,
    True where factors of the head's gradient are wanted (None for nowhere). ``half`` is 0 or 1 by prompt group, (n,).
    ``noise`` sequences are scored twice for the noise floor. ``trainer`` and ``samplers`` are the checkpoints, None
    where there is none. ``recurs`` says that other steps hold the same sequences.
    """

    step: int
    number: int
    place: Ints
    prompt: Ragged
    response: Ragged
    counted: Bools
    version: Ints
    half: Ints
    gradient: Bools | None
    noise: int
    trainer: Path | None
    samplers: Mapping[int, Path | None]
    recurs: bool = False

    @property
    def paths(self) -> list[Path]:
        """Checkpoints in use, each once, in the order of use."""
        paths = (self.trainer, *self.samplers.values())
        return list(dict.fromkeys(path for path in paths if path is not None))

    @property
    def sequence_of_token(self) -> Ints:
        """Row of each response token, (tokens,)."""
        return self.response.row_of_value

    def content(self, fingerprints: Mapping[Path, str]) -> bytes:
        """Digest of everything that the scores depend on but the options: tokens, weights, choices.

        Args:
            fingerprints: digest of each checkpoint's content.
        """
        mark = hashlib.blake2b(digest_size=20)
        gradient = self.counted[:0] if self.gradient is None else self.gradient
        for ragged in (self.prompt, self.response):
            mark.update(ragged.offsets.tobytes() + ragged.values.tobytes())
        for array in (self.counted, self.version, self.half, gradient):
            mark.update(f"{array.dtype.str}{array.shape}".encode() + array.tobytes())
        weights = [None if path is None else fingerprints[path] for path in (self.trainer, *self.samplers.values())]
        # Where two roles share a directory the lag is zero by identity.
        same = [path == self.trainer for path in self.samplers.values()]
        mark.update(repr((self.noise, list(self.samplers), weights, same)).encode())
        return mark.digest()
