"""Printing that ends no training: a closed terminal, `| head` and a full disk cost the text, never the run."""

from __future__ import annotations

import builtins
import contextlib
import os
import sys
from typing import Any


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
