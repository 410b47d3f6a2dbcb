"""The command line: `lockstep fit|validate|test|predict|config|plan CONFIG... [key=value...]`.

Exit codes: 0 only if the requested work is done; 2 for a config or command that cannot be run; 1 for a
run that failed; 143 after SIGTERM and 130 after SIGINT, each after a committed checkpoint. What a user
can mend in the config is one line on stderr; an error in the user's own code comes with its traceback.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep._lazy import without_collector
from lockstep.callbacks._support.printing import safe_print
from lockstep.trainer.cli.errors import ConfigError
from lockstep.trainer.cli.parser import parse

if TYPE_CHECKING:
    from lockstep.trainer.cli.config import Run


OWN_WORDS = ("checkpoint", "migrate", "plan", "runs", "schema", "completion")
"""Commands that take other words than the Trainer's; each has a module of its name with a `main` and a `parse`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (`sys.argv[1:]` by default) and return its exit code."""
    run: Run | None = None
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # classes of the working folder, as `python -m` finds them
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words and words[0] in OWN_WORDS:
            return importlib.import_module(f"lockstep.trainer.cli.{words[0]}").main(words[1:])
        if words[:1] == ["compare"]:
            from lockstep.trainer.cli import commands

            return commands.compare_strategies(words[1:])
        command, files, overrides = parse(words)
        with without_collector():
            from lockstep.trainer.cli import commands, config  # and torch, which a page of help does not need

        resolved = config.resolve(files, overrides)
        if command == "config":
            config.check(resolved)
            print(resolved.text, end="")
            return 0
        commands.refuse_untrained(command, resolved)
        run = config.build(resolved)
        if command == "fit":
            commands.fit(run)
        elif command == "predict":
            commands.predict(run, resolved.values.get("output"))
        else:
            commands.evaluate(run, command)
        return 0
    except KeyboardInterrupt:
        safe_print("lockstep: interrupted", file=sys.stderr)
        return 130
    except ConfigError as error:
        safe_print(f"lockstep: error: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        if isinstance(error, BrokenPipeError) and run is None:  # the reader of a page has gone, as with `| head`
            safe_print()
            return 0
        if not _is_framework_error(error):
            traceback.print_exception(error)
            return 1
        safe_print(f"lockstep: error: {error}", file=sys.stderr)
        begun = words[:1] in (["checkpoint"], ["compare"])  # of which an error is an answer
        begun = begun or _is_of_a_rank(error) or (run is not None and run.trainer._run.begun)
        return 1 if begun else 2


def _is_framework_error(error: Exception) -> bool:
    """Whether Lockstep itself raised this about the user's input, outside their code: then the message says all."""
    from lockstep.strategies.launch.failure import FRAMEWORK, libraries

    if not isinstance(error, ValueError | TypeError | RuntimeError | ImportError | OSError | FloatingPointError):
        return False
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    if _is_of_a_rank(error):
        files += re.findall(r'^  File "(.+?)", line', str(error.__cause__), flags=re.MULTILINE)
    files = [os.path.realpath(file) if os.path.exists(file) else file for file in files]
    if not all(file.startswith((*libraries(), "<frozen", "<string>")) for file in files):  # an __init__ of a dataclass
        return False
    # An OSError is raised in the standard library, the others where the rule is.
    return isinstance(error, OSError) or (bool(files) and files[-1].startswith(FRAMEWORK))


def _is_of_a_rank(error: Exception) -> bool:
    from lockstep.strategies.launch.failure import RankTraceback

    return isinstance(error.__cause__, RankTraceback)
