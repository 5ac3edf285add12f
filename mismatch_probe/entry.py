"""The process around the command line: exit codes, one-line errors, signals."""

from __future__ import annotations

import os
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
        except BrokenPipeError:
            # The reader of our output went away (| head): nothing is wrong, and nothing more can be said.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return int(ExitCode.OK)
        except OSError as error:
            print_error(f"{error.filename or 'output'}: {error.strerror or error}")
            return int(ExitCode.USAGE)
        except Exception as error:
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
    """SIGTERM and SIGHUP (a scheduler's, a closed terminal's) end a command as Ctrl-C does: tidily."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def print_error(text: str) -> None:
    """One line on stderr."""
    sys.stderr.write(f"error: {' '.join(text.split())}\n")
