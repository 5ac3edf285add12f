"""Damaged files for every reader: a clean error or a correct read, never a crash, a hang or a flood of memory."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mismatch_probe.errors import MismatchProbeError
from mismatch_probe.readers import ReadOptions, open_run

SECONDS = 20
MEMORY = 1 << 30

damage = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), st.integers(0, 10**9), st.integers(1, 255)),
        st.tuples(st.just("cut"), st.integers(0, 10**9), st.just(0)),
        st.tuples(st.just("splice"), st.integers(0, 10**9), st.integers(0, 10**9)),
        st.tuples(st.just("zero"), st.integers(0, 10**9), st.integers(1, 64)),
        st.tuples(st.just("huge"), st.integers(0, 10**9), st.just(0)),
    ),
    min_size=1,
    max_size=4,
)


def damaged(data: bytes, operations: list[tuple[str, int, int]]) -> bytes:
    """Bytes flipped, cut off, overwritten by another part, zeroed, or a length field blown up."""
    out = bytearray(data)
    for kind, at, argument in operations:
        if not out:
            break
        at %= len(out)
        if kind == "flip":
            out[at] ^= argument
        elif kind == "cut":
            del out[at:]
        elif kind == "zero":
            out[at : at + argument] = bytes(len(out[at : at + argument]))
        elif kind == "huge":
            out[at : at + 4] = b"\xff\xff\xff\x7f"[: len(out) - at]
        else:
            start = argument % len(out)
            out[at:at] = out[start : start + 200]
    return bytes(out)


def fuzz(write: Callable[[Path], Path], examples: int = 40, skip_bad_rows: bool = False) -> None:
    """Damage the file that ``write(run_dir)`` returns, again and again, and read the run in a child of its own.

    Raises:
        AssertionError: reading crashed, hung, took more than MEMORY, or raised what is not a MismatchProbeError.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        run_dir.mkdir()
        file = write(run_dir)
        whole = file.read_bytes()
        _read(run_dir, skip_bad_rows)  # undamaged it must read; whatever is imported late is imported now

        @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(damage)
        def once(operations: list[tuple[str, int, int]]) -> None:
            file.write_bytes(damaged(whole, operations))
            failure = _in_child(run_dir, skip_bad_rows)
            if failure:
                shutil.copy(file, Path(tempfile.gettempdir()) / f"damaged-{file.name}")
            assert not failure, failure

        once()


def _read(run_dir: Path, skip_bad_rows: bool) -> None:
    for step in open_run(run_dir, ReadOptions(skip_bad_rows=skip_bad_rows)).steps:
        rollouts = step.load()
        tokens = len(rollouts.response.values)
        columns = (rollouts.sampler_logprob, rollouts.trainer_logprob, rollouts.loss_mask, rollouts.sampler_version)
        assert all(len(column) == tokens for column in columns)
        assert not np.isinf(rollouts.sampler_logprob).any()


def _in_child(run_dir: Path, skip_bad_rows: bool) -> str:
    """What went wrong in a forked child that reads the run, "" when nothing did."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        message = b""
        try:
            os.close(reader)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(SECONDS)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
            _read(run_dir, skip_bad_rows)
        except MismatchProbeError:
            pass
        except BaseException:
            message = traceback.format_exc()[-3000:].encode()
        os.write(writer, message)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        message = stream.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"killed by signal {signal.Signals(os.WTERMSIG(status)).name}"
    return message.decode()
