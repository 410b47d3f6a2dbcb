"""What the commands of `lockstep` do, once their words are parsed."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.callbacks._support.files import replacing
from lockstep.callbacks._support.printing import safe_print
from lockstep.callbacks._support.tables import columns, count
from lockstep.trainer.cli import config
from lockstep.trainer.cli.config import Resolved, Run
from lockstep.trainer.cli.errors import ConfigError
from lockstep.trainer.cli.parser import Parser
from lockstep.trainer.setup.start import remove_unused
from lockstep.trainer.trainer import Trainer


def fit(run: Run) -> None:
    trainer = run.trainer
    trainer.fit(run.module, datamodule=run.datamodule, ckpt_path=run.ckpt_path)
    rows = _metric_rows(trainer.callback_metrics)
    best = getattr(trainer.checkpoint_callback, "best_model_path", None)
    if best:
        rows.append(("best", str(best)))
    if trainer.log_dir is not None:
        rows += [("run", str(trainer.log_dir)), ("view", f"tensorboard --logdir {trainer.log_dir}")]
    _print_block(trainer, f"fit: {count(trainer.current_epoch, 'epoch')}, {count(trainer.global_step, 'step')}", rows)


def evaluate(run: Run, command: str) -> None:
    verb = run.trainer.validate if command == "validate" else run.trainer.test
    verb(run.module, datamodule=run.datamodule, ckpt_path=run.ckpt_path, verbose=False)
    _print_block(
        run.trainer, f"{command}: {run.ckpt_path or 'initial weights'}", _metric_rows(run.trainer.callback_metrics)
    )


def predict(run: Run, output: str | None) -> None:
    from safetensors.torch import save_file

    trainer = run.trainer
    if output is not None:
        _check_output(Path(output))
    predictions = trainer.predict(run.module, datamodule=run.datamodule, ckpt_path=run.ckpt_path)
    if not trainer.is_global_zero:
        return
    file = Path(output or Path(trainer.log_dir or ".") / "predictions.safetensors")
    try:
        tensors = _join_loaders(predictions or [], len(trainer._run.evaluation_batches["predict"]))
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file, "wb") as out:
            save_file(tensors, out.name)  # tensor by tensor: `save` would hold all of them a second time
    finally:
        if trainer.log_dir is not None:
            remove_unused(trainer._run, trainer.log_dir, locked=False)
    rows = [(name, str(list(tensor.shape))) for name, tensor in tensors.items()]
    _print_block(trainer, f"predict: {run.ckpt_path or 'initial weights'}", [*rows, ("output", str(file))])


def _check_output(file: Path) -> None:
    """Make the folder of a file to write. Raises ConfigError if it cannot be made, or something else is there."""
    if file.is_dir() or (file.exists() and file.suffix != ".safetensors"):
        raise ConfigError(
            f"output={file} would replace {'a folder' if file.is_dir() else 'a file of another kind'}; give a path "
            "that ends in .safetensors"
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output={file} cannot be written: {error.strerror}; give another path") from error


def parse_compare(words: Sequence[str]) -> argparse.Namespace:
    from lockstep.trainer.testing import compare  # one command needs it

    parser = Parser(prog="lockstep compare", usage="lockstep compare CONFIG... [key=value...] [options]")
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
        help="the Trainer's precision; deepspeed takes 32-true for 64-true (default: 64-true, or with --bitwise "
        "the config's)",
    )
    parser.add_argument(
        "--bitwise",
        action="store_true",
        help="ask for the same bits, with dropout as it is, by the config's virtual_ranks (default: 8)",
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
    if given.bitwise and given.tolerance:
        parser.error(f"--bitwise allows no difference, but --tolerance {given.tolerance}; remove one")
    if given.json is not None and not given.json.absolute().parent.is_dir():
        parser.error(f"--json {given.json}: there is no folder {given.json.absolute().parent}; make it first")
    try:
        re.compile(given.ignore)
    except re.error as error:
        parser.error(f"--ignore must be a regular expression, but --ignore {given.ignore}: {error}")
    return given


def compare_strategies(words: Sequence[str]) -> int:
    """0 where every strategy gives the numbers of the first, else 1."""
    from lockstep.trainer.testing import compare

    given = parse_compare(words)
    fixed = {"max_steps": given.steps, "split_batches": "true", "log_every_n_steps": 1, "logger": "false"}
    fixed |= {"enable_progress_bar": "false", "enable_checkpointing": "false", "num_sanity_val_steps": 0}
    settings = config.resolve(given.files, given.overrides).values.get("trainer") or {}
    settings = settings if isinstance(settings, dict) else {}
    fixed |= {} if settings.get("seed") is not None else {"seed": 0}
    shares = (settings.get("virtual_ranks") or 8) if given.bitwise else None
    precision = given.precision or (str(settings.get("precision", "32-true")) if given.bitwise else "64-true")

    def resolve(**layout: Any) -> Resolved:
        layout["strategy"] = f"'{layout['strategy']}'"
        resolved = config.resolve(
            given.files, [*given.overrides, *(f"trainer.{name}={value}" for name, value in {**fixed, **layout}.items())]
        )
        given_callbacks = resolved.values["trainer"].get("callbacks") or []
        kept = [
            item
            for item in (given_callbacks if isinstance(given_callbacks, list) else [given_callbacks])
            if not str(_class_of(item)).endswith(("ModelCheckpoint", "Logger"))
        ]
        resolved.values["trainer"]["callbacks"] = kept
        return resolved

    def fit(recorder: Any, **layout: Any) -> None:
        run = config.build(resolve(**layout))
        run.trainer.callbacks.insert(0, recorder)
        run.trainer.fit(run.module, datamodule=run.datamodule)

    config.check(resolve(strategy="auto"))
    accelerator = settings.get("accelerator") or "auto"
    try:
        compare.layouts(given.strategies, given.devices, precision, accelerator, shares)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    results = compare.compare(
        fit,
        given.strategies,
        devices=given.devices,
        precision=precision,
        tolerance=given.tolerance,
        accelerator=accelerator,
        ignore=given.ignore,
        virtual_ranks=shares,
    )
    print(compare.table(results))
    if given.json:
        given.json.write_text(compare.to_json(results) + "\n")
    return 0 if all(found.same for found in results.values()) else 1


def _class_of(item: Any) -> Any:
    return item.get("class") if isinstance(item, dict) else item


def refuse_untrained(command: str, resolved: Resolved) -> None:
    if command != "fit" and "ckpt_path" not in resolved.values:
        raise ConfigError(
            f"ckpt_path: missing; {command} needs ckpt_path=CHECKPOINT, or ckpt_path=null to run on the initial weights"
        )


# ---- output ------------------------------------------------------------------------------------------


def _metric_rows(metrics: dict[str, Tensor]) -> list[tuple[str, str]]:
    return [(name, f"{float(metrics[name]):.6g}") for name in sorted(metrics)]


def _print_block(trainer: Trainer, title: str, rows: list[tuple[str, str]]) -> None:
    if trainer.is_global_zero:
        safe_print("\n".join(["", title, *(f"  {line}" for line in columns(rows))]))


def _join_loaders(predictions: list[Any], num_loaders: int) -> dict[str, Tensor]:
    """`_join` for what `Trainer.predict` returns; of several loaders the names end as those of their metrics do."""
    if num_loaders == 1:
        return _join(predictions)
    return {
        f"{name}/dataloader_idx_{i}": tensor
        for i, of_loader in enumerate(predictions)
        for name, tensor in _join(of_loader).items()
    }


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
    if any(len(tensors) != len(predictions) for tensors in parts.values()):
        raise TypeError(
            f"`lockstep predict` joins batches, but predict_step returned {', '.join(map(repr, sorted(parts)))} for "
            "some and not for others: return the same names for every batch"
        )
    joined = {}
    for name, tensors in parts.items():
        if all(tensor.dim() > 0 and tensor.shape[1:] == tensors[0].shape[1:] for tensor in tensors):
            joined[name] = torch.cat(tensors).contiguous()  # which in channels_last it is not
        else:
            apart = [
                tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors
            ]  # which may share memory
            joined |= {f"{name}.{i:06d}": tensor for i, tensor in enumerate(apart)}
    return joined
