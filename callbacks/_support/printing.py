"""Printing and logging that end no training: a closed terminal, `| head` and a full disk cost the text, never the
run."""

from __future__ import annotations

import builtins
import contextlib
import logging
import os
import sys
from typing import Any


class StderrHandler(logging.Handler):
    """Writes records to what `sys.stderr` is when they come."""

    def emit(self, record: logging.LogRecord) -> None:
        safe_print(self.format(record), file=sys.stderr)


def set_up_logging() -> None:
    """Give the logger "lockstep" its handler and level, unless the program has set them."""
    logger = logging.getLogger("lockstep")
    if not logger.handlers:
        logger.addHandler(StderrHandler())
        logger.propagate = False  # the root logger's handlers would write everything twice
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


def safe_print(*values: Any, file: Any = None, flush: bool = True, **options: Any) -> None:
    """The builtin `print`; text that cannot be written is lost, and nothing is raised.

    A stream whose reader has gone is led to the null device, so that neither the user's own `print` nor the end
    of the process fails on it.
    """
    stream = sys.stdout if file is None else file
    try:
        try:
            builtins.print(*values, file=stream, flush=flush, **options)
        except UnicodeEncodeError:  # a stream of ASCII, say
            shown = [str(value).encode("ascii", "backslashreplace").decode() for value in values]
            builtins.print(*shown, file=stream, flush=flush, **options)
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
    except (OSError, ValueError):  # a full disk, or a stream that is closed
        pass
