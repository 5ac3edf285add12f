"""The process around the command line: exit codes, one-line errors, signals."""

from __future__ import annotations

import errno
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import typer

from mismatch_probe.cli import app
from mismatch_probe.errors import ExitCode, MismatchProbeError


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; user errors are one line on stderr."""
    with _signals_as_interrupts():
        try:
            result = app(args=list(args) if args is not None else None, standalone_mode=False)
            sys.stdout.flush()
        except MismatchProbeError as error:
            print_error(str(error))
            return int(error.exit_code)
        except (typer.Abort, KeyboardInterrupt):
            result = ExitCode.INTERRUPTED
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EIO) and error.filename is None:
                print_error(f"the output cannot be written ({error.strerror})")
                return int(ExitCode.USAGE)
            if hasattr(error, "show") and hasattr(error, "exit_code"):
                error.show()  # the option parser's own usage errors
                return int(error.exit_code)
            traceback.print_exc()
            print_error("internal error (above); please report it with the command and the output of --version")
            return int(ExitCode.INTERNAL)
    if result == ExitCode.INTERRUPTED:
        # The option parser turns Ctrl-C into this exit code without a word.
        print_error("interrupted; earlier results are as they were")
    return int(result) if isinstance(result, int) else int(ExitCode.OK)


@contextmanager
def _signals_as_interrupts() -> Iterator[None]:
    """SIGTERM and SIGHUP (a scheduler's, a closed terminal's) end a command as Ctrl-C does: tidily.

    SIGPIPE ends it at once, as any command whose reader went away (``| head``); only printing writes to pipes.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGPIPE] = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def print_error(text: str) -> None:
    """One line on stderr."""
    sys.stderr.write(f"error: {' '.join(text.split())}\n")
