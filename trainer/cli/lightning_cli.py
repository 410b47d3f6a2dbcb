"""`LightningCLI` of `lockstep.lightning`: Trainer, model and datamodule from YAML files and the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from lockstep.callbacks._support.printing import safe_print
from lockstep.callbacks.base import Callback
from lockstep.trainer.cli.config.build import make
from lockstep.trainer.cli.config.check import Call, check_class, fit_arguments
from lockstep.trainer.cli.config.load import assign, interpolate, merge, parse_override, read
from lockstep.trainer.cli.config.signatures import arguments_of, trainer_arguments
from lockstep.trainer.cli.errors import ConfigError, Key, Resolved, error_at
from lockstep.trainer.datamodule import DataModule
from lockstep.trainer.lightning.install import places
from lockstep.trainer.lightning.trainer import Trainer
from lockstep.trainer.lightning.utilities import AttributeDict
from lockstep.trainer.lightning_names import nearest
from lockstep.trainer.module import Module
from lockstep.trainer.seeding import seed_everything

ArgsType = list[str] | dict[str, Any] | None
OptimizerCallable = Callable[[Iterable], Optimizer]
LRSchedulerCallable = Callable[[Optimizer], LRScheduler]
SUBCOMMANDS = ("fit", "validate", "test", "predict")
_SECTIONS = ("seed_everything", "trainer", "model", "data", "optimizer", "lr_scheduler", "ckpt_path")
_ROOTS = ("lightning.pytorch.", "pytorch_lightning.")
_ACCEPTED: Mapping[str, Any] = {
    "save_config_callback": None,
    "save_config_kwargs": ...,
    "parser_kwargs": None,
    "load_from_checkpoint_support": ...,
}
"""Arguments that change nothing here, with the value that they may have; ... for any."""


class ReduceLROnPlateau(lr_scheduler.ReduceLROnPlateau):
    """torch's, with the name of the metric that it monitors."""

    def __init__(self, optimizer: Optimizer, monitor: str, *args: Any, **options: Any) -> None:
        super().__init__(optimizer, *args, **options)
        self.monitor = monitor


class LightningCLI:
    """Builds `trainer`, `model` and `datamodule` from YAML files and the command line, and runs a subcommand.

    The words are Lightning's: `fit --config run.yaml --trainer.max_epochs=3 --model.width 32`, in files
    `class_path` and `init_args`, and the sections seed_everything, trainer, model, data, optimizer, lr_scheduler and
    ckpt_path. `config` has what was given and the defaults of model and data. With `run=False` there is no
    subcommand: call `cli.trainer.fit(cli.model, cli.datamodule)`. `args` is a list of words or a nested dict; None
    takes those of the program, whose mistakes end it with one line and exit code 2. Other mistakes raise ConfigError.
    """

    def __init__(
        self,
        model_class: type[Module] | None = None,
        datamodule_class: type[DataModule] | None = None,
        *,
        trainer_class: Any = Trainer,
        trainer_defaults: dict[str, Any] | None = None,
        seed_everything_default: bool | int = True,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        args: ArgsType = None,
        run: bool = True,
        auto_configure_optimizers: bool = True,
        **options: Any,
    ) -> None:
        self.trainer_class, self.trainer_defaults = trainer_class, trainer_defaults or {}
        self._classes = {
            "model": (model_class or Module, Module, model_class is None or subclass_mode_model),
            "data": (datamodule_class or DataModule, DataModule, datamodule_class is None or subclass_mode_data),
        }
        self._refuse(options)
        self._seed, self._optimizes = seed_everything_default, auto_configure_optimizers
        words: Any = sys.argv[1:] if args is None else args
        if args is None and not {"-h", "--help"}.isdisjoint(words):
            safe_print(self._help(run))
            raise SystemExit(0)
        try:
            self._set_up(words, run)
        except ConfigError as error:
            if args is not None:
                raise
            safe_print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        if self.subcommand is not None:
            self._run(self.subcommand)

    # ---- what a subclass may override ------------------------------------------------------------------

    def add_arguments_to_parser(self, parser: Any) -> None:
        """Never called, and refused where a subclass overrides it: no argument parser is built."""

    def before_instantiate_classes(self) -> None:
        """Called when `config` is there."""

    def after_instantiate_classes(self) -> None:
        """Called when `trainer`, `model` and `datamodule` are there."""

    @staticmethod
    def configure_optimizers(lightning_module: Module, optimizer: Optimizer, lr_scheduler: Any = None) -> Any:
        """What the model's `configure_optimizers` returns if the config has an optimizer."""
        if isinstance(lr_scheduler, ReduceLROnPlateau):
            scheduler = {"scheduler": lr_scheduler, "monitor": lr_scheduler.monitor}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}
        return optimizer if lr_scheduler is None else ([optimizer], [lr_scheduler])

    # ---- reading -----------------------------------------------------------------------------------------

    def _help(self, run: bool) -> str:
        """A page that lists what may be given for model and data."""
        name = Path(sys.argv[0]).name
        lines = [
            f"usage: {name} {'|'.join(SUBCOMMANDS) + ' ' if run else ''}[--config FILE] [--section.argument=value]"
        ]
        lines += ["", f"sections: {', '.join(_SECTIONS)}", "--print_config prints the config and ends", ""]
        for section, (target, base, by_name) in self._classes.items():
            if by_name:
                lines.append(f"  --{section}=package.file.Class")
                continue
            for argument, (parameter, _) in arguments_of(target, base)[0].items():
                default = "" if parameter.default is parameter.empty else repr(parameter.default)
                lines.append(f"  --{section}.{argument}={default}")
        return "\n".join([*lines, "  --trainer.…: the arguments that `lockstep fit --help` lists"])

    def _refuse(self, options: dict[str, Any]) -> None:
        for name, value in options.items():
            if name not in _ACCEPTED or (_ACCEPTED[name] is not ... and value != _ACCEPTED[name]):
                known = "the run's folder has its config" if name == "save_config_callback" else "remove it"
                raise TypeError(f"LightningCLI of lockstep.lightning takes no {name}={value!r}; {known}")
        for name, (target, base, _) in self._classes.items():
            if not isinstance(target, type) or not issubclass(target, base):
                argument = "datamodule_class" if name == "data" else "model_class"
                raise TypeError(f"{argument} must be a subclass of {base.__name__}, but it is {target!r}")
        if type(self).add_arguments_to_parser is not LightningCLI.add_arguments_to_parser:
            raise TypeError(
                f"{type(self).__name__} overrides add_arguments_to_parser, but lockstep.lightning has no parser; link "
                "arguments by interpolation in YAML (width: ${model.width}), and give defaults as trainer_defaults"
            )

    def _set_up(self, args: Sequence[str] | dict[str, Any], run: bool) -> None:
        self.subcommand, words = None, args
        if run:
            self.subcommand, words = _subcommand(args)
        prints = not isinstance(words, Mapping) and "--print_config" in words
        resolved = _resolve([word for word in words if word != "--print_config"] if prints else words)
        values = resolved.values
        seed = values.get("seed_everything", self._seed)
        calls = {name: self._call(resolved, name) for name in self._classes}
        trainer_call = self._trainer_call(resolved)
        calls |= {
            name: check_class(resolved, (name,), values[name], base, as_factory=True)
            for name, base in (("optimizer", Optimizer), ("lr_scheduler", LRScheduler))
            if values.get(name)
        }
        if prints:
            safe_print(resolved.text, end="")
            raise SystemExit(0)
        given: dict[str, Any] = {**values, "seed_everything": seed}
        for name in self._classes:
            if (call := calls[name]) is not None:
                given[name] = _with_defaults(call.target, values.get(name) or {}, self._classes[name])
        inner = _attributes(given)
        self.config = (
            AttributeDict(subcommand=self.subcommand, **{self.subcommand: inner}) if self.subcommand else inner
        )
        self.before_instantiate_classes()
        if seed is not False and seed is not None:
            seed_everything(None if seed is True else seed)
        self.datamodule, self.model = make(calls["data"]), make(calls["model"])
        if "optimizer" in calls and self._optimizes:
            make_both = partial(_optimizers, self.configure_optimizers, make(calls["optimizer"]))
            scheduler = make(calls["lr_scheduler"]) if "lr_scheduler" in calls else None
            self.model.configure_optimizers = partial(make_both, self.model, scheduler)
        self.trainer = self._trainer(trainer_call)
        self.trainer._run.config = resolved.text
        self.after_instantiate_classes()

    def _call(self, resolved: Resolved, name: str) -> Call | None:
        target, base, by_name = self._classes[name]
        given: Any = resolved.values.get(name)
        if by_name and not given:
            if name == "data":
                return None
            raise resolved.error((name,), "missing; name the class to train, as in --model=package.file.Class")
        if by_name:
            return check_class(resolved, (name,), given, target)
        arguments, open_ended = arguments_of(target, base)
        if not isinstance(given or {}, dict) or "class" in (given or {}):
            raise resolved.error((name,), f"must be the arguments of {target.__name__}, but it is {given!r}")
        return Call(target, fit_arguments(resolved, (name,), target.__name__, given or {}, arguments, open_ended))

    def _trainer_call(self, resolved: Resolved) -> Call:
        given = {name: value for name, value in (resolved.values.get("trainer") or {}).items() if value is not None}
        arguments = fit_arguments(resolved, ("trainer",), "Trainer", given, trainer_arguments(), open_ended=True)
        return Call(self.trainer_class, arguments)

    def _trainer(self, call: Call) -> Any:
        defaults = dict(self.trainer_defaults)
        always = _as_list(defaults.pop("callbacks", None))
        given = {name: make(value) for name, value in call.arguments.items()}
        callbacks: list[Callback] = [*_as_list(given.pop("callbacks", None)), *always]
        try:
            return call.target(**(defaults | given), callbacks=callbacks)
        except (TypeError, ValueError) as error:
            if call.target.__init__ is not Trainer.__init__:  # the mistake may be the subclass's
                raise
            raise ConfigError(f"trainer: {error}") from error

    def _run(self, subcommand: str) -> None:
        for name in (f"before_{subcommand}", subcommand, f"after_{subcommand}"):
            if name == subcommand:
                run = getattr(self, name, None) or getattr(self.trainer, name)
                path = self.config[subcommand].get("ckpt_path")
                run(model=self.model, datamodule=self.datamodule, ckpt_path=path)
            elif callable(hook := getattr(self, name, None)):
                hook()


def _subcommand(args: Sequence[str] | dict[str, Any]) -> tuple[str, Any]:
    if isinstance(args, Mapping):
        name = args.get("subcommand")
        words = args.get(str(name), {k: v for k, v in args.items() if k != "subcommand"})
    else:
        name, words = (args[0] if args else None), args[1:]
    if name not in SUBCOMMANDS:
        said = "there is none" if name is None else f"it is {name!r}{nearest(str(name), SUBCOMMANDS)}"
        raise ConfigError(
            f"the first word must be one of {', '.join(SUBCOMMANDS)}, but {said}; LightningCLI(run=False) takes none"
        )
    return name, words


def _resolve(words: Sequence[str] | dict[str, Any]) -> Resolved:
    """The sections that files and words give, in order."""
    values: dict[str, Any] = {}
    origins: dict[Key, str] = {}
    if isinstance(words, Mapping):
        values = _plain(dict(words))
    for name, value in _pairs([] if isinstance(words, Mapping) else list(words)):
        if name == "config":
            tree, lines = read(Path(value))
            values = merge(values, _plain(tree))
            origins |= {_place(key): line for key, line in lines.items()}
            continue
        key, parsed = parse_override(f"{name}={value}")
        key = _place(key)
        at_class = len(key) == 1 and key[0] in ("model", "data", "optimizer", "lr_scheduler")
        if at_class and isinstance(parsed, str):
            key = (*key, "class")
        parsed = _ours(parsed, key[:-1]) if key[-1] == "class" else _plain(parsed, key)
        _open_classes(values, key)
        assign(values, key, parsed, "command line")
        origins[key] = "command line"
    for name in values:
        if name not in _SECTIONS:
            said = f"no such section{nearest(name, _SECTIONS) or '; there are ' + ', '.join(_SECTIONS)}"
            raise error_at((name,), next((at for key, at in origins.items() if key[0] == name), None), said)
    return Resolved(interpolate(Resolved(values, origins)), origins, values)


def _open_classes(values: dict[str, Any], key: Key) -> None:
    """Let a class that was given by its name, as in `--model.optimizer=SGD`, take arguments below it."""
    node: Any = values
    for depth, name in enumerate(key[:-1]):
        if not isinstance(node, dict):
            return
        if isinstance(node.get(name), str):
            node[name] = {"class": _ours(node[name], key[: depth + 1])}
        node = node.get(name)


def _pairs(words: list[str]) -> list[tuple[str, str]]:
    """`--name=value` and `--name value` as (name, value)."""
    pairs = []
    while words:
        name, equals, value = words.pop(0).partition("=")
        name = "config" if name == "-c" else name
        if name in ("-h", "--help") or not (name.startswith("--") or name == "config") or name.endswith("+"):
            raise ConfigError(
                f"'{name}{equals}{value}' (command line): words are --config FILE and --section.argument=value, with "
                f"the sections {', '.join(_SECTIONS)}; lists are written in a file or as --trainer.callbacks=[…]"
            )
        if not equals:
            if not words:
                raise ConfigError(f"'{name}' (command line): its value is missing; write {name}=value")
            value = words.pop(0)
        pairs.append((name.removeprefix("--"), value))
    return pairs


def _place(key: Key) -> Key:
    """A key without Lightning's `init_args`, and with our word for `class_path`."""
    return tuple("class" if name == "class_path" else name for name in key if name not in ("init_args", "dict_kwargs"))


def _plain(tree: Any, key: Key = ()) -> Any:
    """A tree of Lightning's with our mappings for classes: {class_path: C, init_args: {a: 1}} as {class: C, a: 1}."""
    if isinstance(tree, list):
        return [_plain(value, key) for value in tree]
    if not isinstance(tree, dict):
        return tree
    flat = {name: value for name, value in tree.items() if name not in ("class_path", "init_args", "dict_kwargs")}
    for name in ("init_args", "dict_kwargs"):
        flat |= tree.get(name) or {}
    plain = {name: _plain(value, (*key, str(name))) for name, value in flat.items()}
    return {"class": _ours(tree["class_path"], key), **plain} if "class_path" in tree else plain


def _ours(path: Any, key: Key) -> Any:
    """The import path in `lockstep.lightning` of a class of Lightning's."""
    if not isinstance(path, str):
        return path
    for root in _ROOTS:
        if path.startswith(root):
            return f"lockstep.lightning.pytorch.{path.removeprefix(root)}"
    if key[:1] == ("lr_scheduler",) and path == "ReduceLROnPlateau":
        return "lockstep.lightning.pytorch.cli.ReduceLROnPlateau"
    known = {"callbacks": "callbacks", "logger": "loggers", "strategy": "strategies"}
    package = known.get(key[1]) if len(key) > 1 and key[0] == "trainer" else None
    if package and path in places()[f"pytorch.{package}"]:
        return f"lockstep.lightning.pytorch.{package}.{path}"
    return path


def _with_defaults(target: type, given: dict[str, Any] | str, cls: tuple[Any, type, bool]) -> dict[str, Any]:
    """The arguments of a model or datamodule: those given, and the defaults of the others."""
    arguments, _ = arguments_of(target, cls[1])
    values = {name: p.default for name, (p, _) in arguments.items() if p.default is not p.empty}
    values |= {} if isinstance(given, str) else {name: value for name, value in given.items() if name != "class"}
    return {"class_path": f"{target.__module__}.{target.__qualname__}", "init_args": values} if cls[2] else values


def _attributes(tree: Any) -> Any:
    if isinstance(tree, dict):
        return AttributeDict(**{str(name): _attributes(value) for name, value in tree.items()})
    return [_attributes(value) for value in tree] if isinstance(tree, list) else tree


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else [*value] if isinstance(value, list | tuple) else [value]


def _optimizers(configure: Any, optimizer: Any, model: Module, scheduler: Any) -> Any:
    made = optimizer(model.parameters())
    return configure(model, made, None if scheduler is None else scheduler(made))
