"""Command line: arguments to calls to exit codes. The only package that prints.

Nothing heavy is imported before the command that needs it runs.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from titan_tune.errors import InputError, InterruptedSearchError, ProbesFailedError, TitanTuneError

DEBUG_FLAG = "--debug"
CLOSED_PIPE = 128 + signal.SIGPIPE
"""Exit code where the reader of our output went away, as a shell reports of a program that SIGPIPE ended."""
PROBE_PACKAGES = ("optuna", "torch", "torchao", "torchtitan", "numpy", "sqlalchemy")
"""What the ``probe`` extra brings."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with the contract's code."""
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    """Run one command; returns the exit code."""
    arguments = [a for a in argv if a != DEBUG_FLAG]
    debug = len(arguments) != len(argv) or bool(os.environ.get("TITAN_TUNE_DEBUG"))
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except TitanTuneError as error:
        if debug:
            raise
        return fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return fail("interrupted", InterruptedSearchError.exit_code)
    except BrokenPipeError:
        _forget_output()
        return CLOSED_PIPE
    except OSError as error:
        if debug:
            raise
        return fail(_os_error(error), ProbesFailedError.exit_code if error.errno == errno.ENOSPC else 2)
    except Exception as error:
        if debug:
            raise
        missing = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
        if missing.partition(".")[0] in PROBE_PACKAGES:
            return fail(f"this needs {missing}: pip install 'titan-tune[probe]'", InputError.exit_code)
        text = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        return fail(f"internal error: {text} ({DEBUG_FLAG} shows where)", 1)


def fail(message: str, code: int) -> int:
    """Print one line on stderr; what a terminal would obey instead of show is escaped."""
    from titan_tune.catalog.typed import printable

    print(f"titan-tune: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code


def _forget_output() -> None:
    """The reader of our output went away: nothing more is written, not even what is still buffered."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        with suppress(OSError):
            if stat.S_ISFIFO(os.fstat(number).st_mode) or stat.S_ISSOCK(os.fstat(number).st_mode):
                os.dup2(nowhere, number)
    os.close(nowhere)


def _os_error(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    hint = (
        "; what was measured is saved: free space and run the same command"
        if error.errno == errno.ENOSPC
        else ""
    )
    return f"{where}{error.strerror or error}{hint}"


def _dispatch(arguments: Sequence[str]) -> int:
    from titan_tune.cli.app import invoke

    return invoke(arguments)


def interrupt_on_terminate() -> None:
    """Let SIGTERM and SIGHUP end a search the way Ctrl-C does: probes stopped, state saved."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
