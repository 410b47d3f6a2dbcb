"""LightningModule and LightningDataModule: ours, with the few methods that Lightning's have more."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lockstep.callbacks.base import Callback
from lockstep.trainer.datamodule import DataModule
from lockstep.trainer.exporting import ready
from lockstep.trainer.hparams import HyperParameters, Namespace
from lockstep.trainer.lightning.utilities import load_hparams_from_tags_csv, load_hparams_from_yaml
from lockstep.trainer.lightning_names import MODULE, missing
from lockstep.trainer.module import Module, attach
from lockstep.trainer.run.hooks import overrides

if TYPE_CHECKING:
    from lockstep.trainer.trainer import Trainer


class _OfClass(classmethod):
    """A class method that builds an object: called on an object it would leave that one as it is."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return super().__get__(instance, owner)

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise TypeError(
                f"{self.__name__} makes a new object and changes nothing of this one; call "
                f"{type(instance).__name__}.{self.__name__}(…)"
            )

        return refuse


def _read(hparams_file: Any, cls: Any) -> dict[str, Any]:
    """What the file, if there is one, holds of the arguments of `cls`."""
    if hparams_file is None:
        return {}
    takes = inspect.signature(cls).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    if str(hparams_file).lower().endswith(".csv"):
        held = load_hparams_from_tags_csv(hparams_file)
    else:
        held = load_hparams_from_yaml(hparams_file, use_omegaconf=False)
    found = {name: value for name, value in held.items() if takes_any or name in takes}
    if held and not found:
        raise TypeError(
            f"hparams_file {hparams_file} holds no argument of {cls.__name__}, which takes {', '.join(takes)}; give "
            "what it holds as keyword arguments"
        )
    return found


class HyperparametersMixin(HyperParameters):
    """`save_hyperparameters` and `hparams`, which keeps what was saved apart from later changes."""

    @property
    def hparams_initial(self) -> Namespace:
        """`hparams` as `save_hyperparameters` has left them; what checkpoints do not hold is not copied."""
        return vars(self).get("_hparams_initial", Namespace())

    def save_hyperparameters(
        self, *names: Any, ignore: Any = None, frame: FrameType | None = None, logger: bool = True
    ) -> None:
        super().save_hyperparameters(*names, ignore=ignore, frame=frame, logger=logger)
        vars(self)["_hparams_initial"] = Namespace(self.hparams | copy.deepcopy(self.saved_hparams))


class LightningModule(HyperparametersMixin, Module):
    """`lockstep.Module`, whose hooks get a loss in a dict."""

    hooks_get_dicts = True
    __jit_unused_properties__: ClassVar[list[str]]
    """Our properties, which torch.jit leaves alone."""
    __jit_ignored_attributes__: ClassVar[list[str]] = ["example_input_array"]
    strict_loading = True
    """What `strict` of `load_from_checkpoint` is unless it is given."""

    @property
    def trainer(self) -> Trainer:
        """As `lockstep.Module.trainer`; one that is set stays until a Trainer runs the module."""
        return super().trainer if self._trainer is None else self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer) -> None:
        attach(self, trainer)

    @_OfClass
    def load_from_checkpoint(
        cls: Any,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **arguments: Any,
    ) -> Any:
        """As that of `lockstep.Module`; what `hparams_file`, a YAML or CSV file, holds of the arguments of `__init__`
        replaces what the checkpoint does. Raises TypeError on an object, and ValueError if `strict` is not the
        `strict_loading` that the module sets."""
        arguments = _read(hparams_file, cls) | arguments
        module = super().load_from_checkpoint(checkpoint_path, map_location, strict, weights_only, **arguments)
        own = vars(module).get("strict_loading")
        if None not in (strict, own) and strict != own:
            raise ValueError(
                f"strict={strict} is in conflict with {cls.__name__}.strict_loading={own}; drop one of them"
            )
        return module

    def to_torchscript(
        self,
        file_path: str | os.PathLike[str] | None = None,
        method: str = "script",
        example_inputs: Any = None,
        **options: Any,
    ) -> torch.jit.ScriptModule:
        """`torch.jit.script` of the module, or with `method="trace"` `torch.jit.trace` of its forward; also written to
        `file_path` if that is given.

        `example_inputs` are those of a trace, by default `example_input_array`; `options` are those of torch's
        function. The graph is in evaluation mode, and the module is unchanged. Raises ValueError for another method
        and for a trace without inputs, RuntimeError while the parameters are sharded or on the meta device.
        """
        if method not in ("script", "trace"):
            raise ValueError(f"method of to_torchscript must be 'script' or 'trace', got {method!r}")
        with ready(self, () if method == "script" else example_inputs) as (module, args, kwargs), torch.no_grad():
            for child in module.modules():
                if "_trainer" in vars(child):
                    vars(child)["_trainer"] = object()  # torch reads all properties, and those of a run would raise
            if method == "trace":
                options = {"example_kwarg_inputs": kwargs} | options if kwargs else options
                made = torch.jit.trace(module, args or None, **options)
            else:
                made = torch.jit.script(module, **options)
        if file_path is not None:
            torch.jit.save(made, os.fspath(file_path))
        return made

    def to_tensorrt(self, *args: Any, **options: Any) -> NoReturn:
        """Raises AttributeError that says what to call."""
        raise AttributeError(missing(f"{type(self).__name__} has no", "to_tensorrt", MODULE))

    @contextmanager
    def toggled_optimizer(self, optimizer: Any) -> Iterator[None]:
        """While it lasts, gradients flow into the parameters of `optimizer` only."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)


LightningModule.__jit_unused_properties__ = [
    name for name, _ in inspect.getmembers(LightningModule, lambda value: isinstance(value, property))
]


class LightningDataModule(HyperparametersMixin, DataModule):
    """`lockstep.DataModule`."""

    @_OfClass
    def load_from_checkpoint(
        cls: Any,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        weights_only: bool | None = None,
        **arguments: Any,
    ) -> Any:
        """As that of `lockstep.DataModule`, with `hparams_file` as a module's."""
        arguments = _read(hparams_file, cls) | arguments
        return super().load_from_checkpoint(checkpoint_path, map_location, weights_only, **arguments)

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Any = None,
        val_dataset: Any = None,
        test_dataset: Any = None,
        predict_dataset: Any = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **arguments: Any,
    ) -> LightningDataModule:
        """A DataModule with a loader for each dataset, or a list or dict of loaders for several. Only the training
        loader shuffles. `arguments` are those of `__init__`, which gets the other two as well if it takes them."""

        def loaders(data: Any, shuffle: bool = False) -> Any:
            if isinstance(data, Mapping):
                return {name: loaders(item, shuffle) for name, item in data.items()}
            if isinstance(data, Sequence) and not isinstance(data, Dataset):
                return [loaders(item, shuffle) for item in data]
            shuffle = shuffle and not isinstance(data, IterableDataset)
            return DataLoader(data, batch_size, shuffle=shuffle, num_workers=num_workers, pin_memory=False)

        takes = inspect.signature(cls).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
        for name, value in {"batch_size": batch_size, "num_workers": num_workers}.items():
            if takes_any or name in takes:
                arguments[name] = value
        module = cls(**arguments)
        given = {
            "train_dataloader": train_dataset,
            "val_dataloader": val_dataset,
            "test_dataloader": test_dataset,
            "predict_dataloader": predict_dataset,
        }
        for name, data in given.items():
            if data is not None:
                made = loaders(data, shuffle=name == "train_dataloader")
                setattr(module, name, lambda made=made: made)
        return module


def is_overridden(method_name: str, instance: Any = None, parent: type | None = None) -> bool:
    """Whether `instance` has its own `method_name`, in its class or as an attribute, unlike `parent`: by default the
    class of Lightning's that it derives from. False for None. Raises ValueError if `parent` has no such method."""
    if instance is None:
        return False
    known = (LightningModule, LightningDataModule, Callback)
    parent = parent or next((kind for kind in known if isinstance(instance, kind)), object)
    if not hasattr(parent, method_name):
        raise ValueError(
            f"is_overridden compares with the method of a parent, but {parent.__name__} has no {method_name!r}; give "
            "parent=…"
        )
    return overrides(instance, method_name, parent)
