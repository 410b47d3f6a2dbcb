"""The command line: `lockstep fit|validate|test|predict|config|plan CONFIG... [key=value...]`.

Exit codes: 0 only if the requested work is done; 2 for a config or command that cannot be run; 1 for a
run that failed; 143 after SIGTERM and 130 after SIGINT, each after a committed checkpoint. What a user
can mend in the config is one line on stderr; an error in the user's own code comes with its traceback.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib.metadata
import math
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from lockstep.callbacks._support.files import replacing
from lockstep.callbacks._support.printing import safe_print
from lockstep.callbacks._support.tables import columns
from lockstep.strategies.launch.failure import RankTraceback
from lockstep.trainer.arguments import TrainerArguments
from lockstep.trainer.cli import config
from lockstep.trainer.cli.config import ConfigError, Resolved, Run
from lockstep.trainer.lightning_names import ARGUMENTS
from lockstep.trainer.trainer import Trainer

COMMANDS = {
    "fit": "train, then print the metrics and the run's folder",
    "validate": "run the validation data through a checkpoint",
    "test": "run the test data through a checkpoint",
    "predict": (
        "write what predict_step returns (tensors) to output=FILE, by default predictions.safetensors in the run's "
        "folder"
    ),
    "config": "print the resolved config",
    "plan": "show the stages of a pipeline, its schedule and its bubble",
    "checkpoint": "show, verify, compare, export or import a checkpoint (lockstep checkpoint --help)",
    "compare": "train under several strategies and show where the numbers differ (lockstep compare --help)",
}

USAGE = "lockstep fit|validate|test|predict|config|plan|compare CONFIG... [key=value...]"

EXAMPLES = """
examples:
  lockstep fit examples/digits.yaml
  lockstep fit examples/digits.yaml strategy=ddp devices=2 trainer.max_epochs=3
  lockstep fit examples/digits.yaml ckpt_path=auto
  lockstep validate examples/digits.yaml ckpt_path=runs/digits/version_0/checkpoints/last

YAML files are merged in order, then the overrides in order. Every argument of the Trainer may be given
at the top level. ckpt_path is a checkpoint, last, best or auto; null runs on the initial weights.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (`sys.argv[1:]` by default) and return its exit code."""
    run: Run | None = None
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # classes of the working folder, as `python -m` finds them
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words[:1] == ["compare"]:
            return _compare(words[1:])
        if words[:1] == ["checkpoint"]:
            from lockstep.trainer.cli import checkpoint  # one command needs it

            return checkpoint.main(words[1:], _Parser)
        command, files, overrides = _parse(words)
        resolved = config.resolve(files, overrides)
        if command == "config":
            config.check(resolved)
            print(resolved.text, end="")
            return 0
        if command == "plan":
            _plan(config.build(resolved))
            return 0
        _refuse_untrained(command, resolved)
        run = config.build(resolved)
        if command == "fit":
            _fit(run)
        elif command == "predict":
            _predict(run, resolved.values.get("output"))
        else:
            _evaluate(run, command)
        return 0
    except KeyboardInterrupt:
        safe_print("lockstep: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if not isinstance(error, ConfigError) and not _is_framework_error(error):
            traceback.print_exception(error)
            return 1
        safe_print(f"lockstep: error: {error}", file=sys.stderr)
        begun = words[:1] in (["checkpoint"], ["compare"])  # of which an error is an answer
        begun = begun or isinstance(error.__cause__, RankTraceback) or (run is not None and run.trainer._run.begun)
        return 1 if begun and not isinstance(error, ConfigError) else 2


# ---- commands ----------------------------------------------------------------------------------------


def _fit(run: Run) -> None:
    trainer = run.trainer
    trainer.fit(run.module, datamodule=run.datamodule, ckpt_path=run.ckpt_path)
    rows = _metric_rows(trainer.callback_metrics)
    best = getattr(trainer.checkpoint_callback, "best_model_path", None)
    if best:
        rows.append(("best", str(best)))
    if trainer.log_dir is not None:
        rows += [("run", str(trainer.log_dir)), ("view", f"tensorboard --logdir {trainer.log_dir}")]
    _print_block(trainer, f"fit: {_count(trainer.current_epoch, 'epoch')}, {_count(trainer.global_step, 'step')}", rows)


def _evaluate(run: Run, command: str) -> None:
    verb = run.trainer.validate if command == "validate" else run.trainer.test
    verb(run.module, datamodule=run.datamodule, ckpt_path=run.ckpt_path, verbose=False)
    _print_block(
        run.trainer, f"{command}: {run.ckpt_path or 'initial weights'}", _metric_rows(run.trainer.callback_metrics)
    )


def _predict(run: Run, output: str | None) -> None:
    from safetensors.torch import save_file

    trainer = run.trainer
    predictions = trainer.predict(run.module, datamodule=run.datamodule, ckpt_path=run.ckpt_path)
    if not trainer.is_global_zero:
        return
    tensors = _join(predictions or [])
    file = Path(output or Path(trainer.log_dir or ".") / "predictions.safetensors")
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file, "wb") as out:
        save_file(tensors, out.name)  # tensor by tensor: `save` would hold all of them a second time
    rows = [(name, str(list(tensor.shape))) for name, tensor in tensors.items()]
    _print_block(trainer, f"predict: {run.ckpt_path or 'initial weights'}", [*rows, ("output", str(file))])


def _parse_compare(words: Sequence[str]) -> argparse.Namespace:
    from lockstep.trainer.testing import compare  # one command needs it

    parser = _Parser(prog="lockstep compare", usage="lockstep compare CONFIG... [key=value...] [options]")
    parser.add_argument("words", nargs="+", metavar="CONFIG | key=value", help="a YAML file, or an override of one key")
    parser.add_argument(
        "--strategies",
        default="single,ddp",
        help="names with commas between; a mesh as in ddp=2+tensor=2 (default: single,ddp)",
    )
    parser.add_argument(
        "--devices", type=int, default=2, help="devices of every strategy but single and meshes (default: 2)"
    )
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: 20)")
    parser.add_argument(
        "--precision",
        default="64-true",
        help="the Trainer's precision; deepspeed takes 32-true in place of 64-true (default: 64-true)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        help="relative difference that is allowed (default: 1e-12 in 64-true, 1e-5 in 32-true)",
    )
    parser.add_argument(
        "--ignore", default=compare.IGNORED_METRICS, help="pattern of metric names to skip (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every difference by name")
    given = parser.parse_intermixed_args(words)  # overrides may follow options
    given.strategies = [name.replace("+", ",") for name in given.strategies.split(",")]
    given.files = [word for word in given.words if "=" not in word]
    given.overrides = [word for word in given.words if "=" in word]
    if given.steps < 1:
        parser.error(f"--steps must be at least 1, but --steps {given.steps}")
    if given.tolerance is not None and not 0 <= given.tolerance < math.inf:
        parser.error(f"--tolerance must be a number of at least 0, but --tolerance {given.tolerance}")
    if given.json is not None and not given.json.absolute().parent.is_dir():
        parser.error(f"--json {given.json}: there is no folder {given.json.absolute().parent}; make it first")
    try:
        re.compile(given.ignore)
    except re.error as error:
        parser.error(f"--ignore must be a regular expression, but --ignore {given.ignore}: {error}")
    return given


def _compare(words: Sequence[str]) -> int:
    """0 where every strategy gives the numbers of the first, else 1."""
    from lockstep.trainer.testing import compare

    given = _parse_compare(words)
    fixed = {"max_steps": given.steps, "split_batches": "true", "log_every_n_steps": 1, "logger": "false"}
    fixed |= {"enable_progress_bar": "false", "enable_checkpointing": "false", "num_sanity_val_steps": 0}
    settings = config.resolve(given.files, given.overrides).values.get("trainer") or {}
    fixed |= {} if isinstance(settings, dict) and settings.get("seed") is not None else {"seed": 0}

    def resolve(**layout: Any) -> Resolved:
        layout["strategy"] = f"'{layout['strategy']}'"
        resolved = config.resolve(
            given.files, [*given.overrides, *(f"trainer.{name}={value}" for name, value in {**fixed, **layout}.items())]
        )
        kept = [
            item
            for item in resolved.values["trainer"].get("callbacks") or []
            if not str(_class_of(item)).endswith(("ModelCheckpoint", "Logger"))
        ]
        resolved.values["trainer"]["callbacks"] = kept
        return resolved

    def fit(recorder: Any, **layout: Any) -> None:
        run = config.build(resolve(**layout))
        compare.without_noise(run.module)
        run.trainer.callbacks.insert(0, recorder)
        run.trainer.fit(run.module, datamodule=run.datamodule)

    config.check(resolve(strategy="auto"))
    accelerator = settings.get("accelerator") or "auto"
    try:
        compare.layouts(given.strategies, given.devices, given.precision, accelerator)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    results = compare.compare(
        fit,
        given.strategies,
        devices=given.devices,
        precision=given.precision,
        tolerance=given.tolerance,
        accelerator=accelerator,
        ignore=given.ignore,
    )
    print(compare.table(results))
    if given.json:
        given.json.write_text(compare.to_json(results) + "\n")
    return 0 if all(found.same for found in results.values()) else 1


def _class_of(item: Any) -> Any:
    return item.get("class") if isinstance(item, dict) else item


def _plan(run: Run) -> None:
    from lockstep.strategies.pipeline.timeline import plan  # one command needs it

    run.module.configure_model()
    print(plan(run.trainer.strategy, run.module))


def _refuse_untrained(command: str, resolved: Resolved) -> None:
    if command != "fit" and "ckpt_path" not in resolved.values:
        raise ConfigError(
            f"ckpt_path: missing; {command} needs ckpt_path=CHECKPOINT, or ckpt_path=null to run on the initial weights"
        )


# ---- output ------------------------------------------------------------------------------------------


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _metric_rows(metrics: dict[str, Tensor]) -> list[tuple[str, str]]:
    return [(name, f"{float(metrics[name]):.6g}") for name in sorted(metrics)]


def _print_block(trainer: Trainer, title: str, rows: list[tuple[str, str]]) -> None:
    if trainer.is_global_zero:
        safe_print("\n".join(["", title, *(f"  {line}" for line in columns(rows))]))


def _join(predictions: list[Any]) -> dict[str, Tensor]:
    """Predictions batch by batch as named tensors; batches are joined along dim 0 where their shapes allow it."""
    parts: dict[str, list[Tensor]] = {}
    for batch in predictions:
        named = {"predictions": batch} if isinstance(batch, Tensor) else batch
        named = dict(enumerate(named)) if isinstance(named, tuple | list) else named
        if not isinstance(named, dict) or not all(isinstance(tensor, Tensor) for tensor in named.values()):
            raise TypeError(
                f"`lockstep predict` writes tensors, but predict_step returned {type(batch).__name__}: return a "
                "tensor, or a dict or tuple of tensors, "
                "or call Trainer.predict from Python"
            )
        for name, tensor in named.items():
            parts.setdefault(str(name), []).append(tensor.detach().cpu())
    joined = {}
    for name, tensors in parts.items():
        if all(tensor.dim() > 0 and tensor.shape[1:] == tensors[0].shape[1:] for tensor in tensors):
            joined[name] = torch.cat(tensors)
        else:
            joined |= {f"{name}.{i:06d}": tensor.contiguous() for i, tensor in enumerate(tensors)}
    return joined


# ---- command line and errors -------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (usage: {self.usage})")


def _parse(arguments: Sequence[str]) -> tuple[str, list[str], list[str]]:
    parser = _Parser(
        prog="lockstep",
        usage=USAGE,
        description="\n".join(["commands:", *(f"  {name:<10}{text}" for name, text in COMMANDS.items())]),
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lockstep {_version()}")
    parser.add_argument("command", choices=list(COMMANDS), metavar="command", help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="+", metavar="CONFIG | key=value", help="a YAML file, or an override of one key")
    given, unknown = parser.parse_known_args(arguments)
    option = next((word for word in unknown if word.startswith("--")), None)
    if option is not None:
        name = option[2:].partition("=")[0].replace("-", "_")
        known = [field.name for field in dataclasses.fields(TrainerArguments)]
        near = name if name in known else next(iter(difflib.get_close_matches(name, known, 1)), "KEY")
        parser.error(f"{option} is not an option; {ARGUMENTS.get(name, f'write {near}=VALUE, without --')}")
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    files = [word for word in given.words if "=" not in word]
    return given.command, files, [word for word in given.words if "=" in word]


def _version() -> str:
    try:
        return importlib.metadata.version("lockstep-trainer")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


LIBRARIES = tuple(
    {os.path.realpath(sysconfig.get_paths()[name]) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {"<frozen"}
)
FRAMEWORK = tuple(
    str(Path(__file__).resolve().parents[2] / name) + os.sep for name in ("trainer", "strategies", "callbacks")
)


def _is_framework_error(error: Exception) -> bool:
    """Whether Lockstep itself raised this about the user's input, outside their code: then the message says all."""
    if not isinstance(error, ValueError | TypeError | RuntimeError | ImportError | OSError | FloatingPointError):
        return False
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error.__cause__, RankTraceback):
        files += re.findall(r'^  File "(.+?)", line', str(error.__cause__), flags=re.MULTILINE)
    files = [os.path.realpath(file) if os.path.exists(file) else file for file in files]
    if not all(file.startswith((*FRAMEWORK, *LIBRARIES)) for file in files):
        return False
    # An OSError is raised in the standard library, the others where the rule is.
    return isinstance(error, OSError) or (bool(files) and files[-1].startswith(FRAMEWORK))
