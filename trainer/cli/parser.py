"""The words of a command line and its pages of help, which are read without importing torch."""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib.metadata
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from lockstep.trainer.cli.errors import ConfigError
from lockstep.trainer.lightning_names import ARGUMENTS, nearest

COMMANDS = {
    "fit": "train, then print the metrics and the run's folder",
    "validate": "run the validation data through a checkpoint",
    "test": "run the test data through a checkpoint",
    "predict": (
        "write what predict_step returns (tensors) to output=FILE, by default predictions.safetensors in the run's "
        "folder"
    ),
    "config": "print the resolved config",
    "plan": "show what a run will need: memory, communication, time (lockstep plan --help)",
    "checkpoint": "show, verify, compare, export or import a checkpoint (lockstep checkpoint --help)",
    "compare": "train under several strategies and show where the numbers differ (lockstep compare --help)",
    "migrate": "rewrite imports of Lightning in Python files (lockstep migrate --help)",
    "runs": "list the runs in a folder with their state and best metric (lockstep runs --help)",
    "schema": "print a JSON schema of configs, for editors (lockstep schema --help)",
    "completion": "print a script that completes commands in bash, zsh or fish (lockstep completion --help)",
}

USAGE = "lockstep fit|validate|test|predict|config|plan|compare CONFIG... [key=value...]"

EXAMPLES = """
examples:
  lockstep fit examples/digits.yaml
  lockstep fit examples/digits.yaml strategy=ddp devices=2 trainer.max_epochs=3
  lockstep fit examples/digits.yaml ckpt_path=auto
  lockstep validate examples/digits.yaml ckpt_path=runs/digits/version_0/checkpoints/last

YAML files are merged in order, then the overrides in order. Every argument of the Trainer may be given
at the top level. ckpt_path is a checkpoint, last or auto; null runs on the initial weights.
"""


class Argument(NamedTuple):
    """One of the Trainer's."""

    default: str
    """As it is written in Python."""
    text: str
    """The first sentence of its description."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (usage: {self.usage})")


def page(usage: str, description: str | None, epilog: str) -> Parser:
    """The parser of a command. It raises ConfigError for wrong words, and SystemExit after its page of help."""
    formatter = argparse.RawDescriptionHelpFormatter
    return Parser(usage=usage, description=description, epilog=epilog, formatter_class=formatter)


def parse(arguments: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """Return the command, its files and its overrides. Raises ConfigError, and SystemExit after a page of help."""
    commands = "\n".join(["commands:", *(f"  {name:<11}{text}" for name, text in COMMANDS.items())])
    parser = page(USAGE, commands, EXAMPLES)
    parser.add_argument("--version", action="version", version=f"lockstep {_version()}")
    parser.add_argument("command", choices=list(COMMANDS), metavar="command", help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="+", metavar="CONFIG | key=value", help="a YAML file, or an override of one key")
    if arguments[:1] and arguments[0] in COMMANDS and {"-h", "--help"} & set(arguments[1:]):
        print(command_help(arguments[0]))
        raise SystemExit(0)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        near = nearest(arguments[0], COMMANDS)
        raise ConfigError(f"there is no command {arguments[0]!r}; the commands are {', '.join(COMMANDS)}{near}")
    given, unknown = parser.parse_known_args(arguments)
    option = next((word for word in unknown if word.startswith("--")), None)
    if option is not None:
        name = option[2:].partition("=")[0].replace("-", "_")
        known = list(trainer_arguments())
        near = name if name in known else next(iter(difflib.get_close_matches(name, known, 1)), "KEY")
        parser.error(f"{option} is not an option; {ARGUMENTS.get(name, f'write {near}=VALUE, without --')}")
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    files = [word for word in given.words if "=" not in word]
    keys = {"module", "data", "trainer", "vars", "ckpt_path", "output", "optimizer", "lr_scheduler"}
    for word in files:
        is_file = Path(word).exists() or Path(word).suffix in (".yaml", ".yml")
        if not is_file and word.partition(".")[0] in keys | trainer_arguments().keys():
            parser.error(f"{word} has no value; write {word}=VALUE")
    return given.command, files, [word for word in given.words if "=" in word]


def _version() -> str:
    try:
        return importlib.metadata.version("lockstep-trainer")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def trainer_arguments() -> dict[str, Argument]:
    """The Trainer's arguments by name, read from the source of `TrainerArguments`: importing it would import torch."""
    source = (Path(__file__).parents[1] / "arguments.py").read_text()
    record = next(
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "TrainerArguments"
    )
    described = re.findall(r"^    `(\w+)`: (.*(?:\n {4,}[^`\s].*)*)", ast.get_docstring(record) or "", re.MULTILINE)
    texts = {name: re.split(r"(?<=\w\w)\. ", " ".join(text.split()), maxsplit=1)[0] for name, text in described}
    return {
        ast.unparse(node.target): Argument(ast.unparse(node.value), texts.get(ast.unparse(node.target), ""))
        for node in record.body
        if isinstance(node, ast.AnnAssign) and node.value is not None
    }


def command_help(command: str) -> str:
    """The page of `lockstep COMMAND --help`."""
    lines = [f"usage: lockstep {command} CONFIG... [key=value...]", "", COMMANDS[command], "", *_KEYS]
    if command == "predict":
        lines.append("  output           file for the predictions")
    lines += ["", "arguments of the Trainer, at the top level or as trainer.<name>:"]
    lines += [
        f"  {name}={argument.default}\n      {argument.text.rstrip('.')}"
        for name, argument in trainer_arguments().items()
    ]
    return "\n".join([*lines, EXAMPLES.rstrip()])


_KEYS = (
    "keys of a config or override:",
    "  module           {class: package.file.Class, argument: value, ...}; required",
    "  data             a DataModule, as module",
    "  optimizer        short for module.optimizer; lr_scheduler likewise",
    "  ckpt_path        a checkpoint, last or auto; null for none",
    "  vars             values of your own, for ${vars.name} elsewhere",
)
