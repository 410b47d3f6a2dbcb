"""Functions of `lightning.pytorch.utilities`."""

from __future__ import annotations

import ast
import csv
import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.flop_counter import FlopCounterMode

from lockstep.callbacks._support.files import replacing
from lockstep.callbacks._support.hparams import plain_params, to_yaml
from lockstep.callbacks._support.shadow import call, fitting, restored_rng
from lockstep.callbacks.model_summary import summarize as _summarize
from lockstep.strategies.data.batch_slices import move
from lockstep.strategies.launch import environment
from lockstep.trainer.hparams import Namespace
from lockstep.trainer.seeding import rng_state, set_rng_state

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger("lockstep")


class MisconfigurationException(ValueError):
    """What user code raises for settings that contradict each other; Lockstep raises ValueError and TypeError."""


class AttributeDict(Namespace):
    """A dict whose entries are attributes too."""


def _rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    world = environment.detect()
    return 0 if world is None else world.rank


class _RankZeroOnly:
    """Decorator of functions that only rank 0 runs; `default` is what they return on other ranks."""

    @property
    def rank(self) -> int:
        return _rank()

    def __call__(self, function: Callable[P, R], default: Any = None) -> Callable[P, R | Any]:
        @functools.wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R | Any:
            return function(*args, **kwargs) if _rank() == 0 else default

        return wrapped


rank_zero_only = _RankZeroOnly()


def rank_zero_info(*args: Any, stacklevel: int = 4, **kwargs: Any) -> None:
    """`logging.info` on rank 0."""
    if _rank() == 0:
        _log.info(*args, stacklevel=stacklevel - 2, **kwargs)


def rank_zero_debug(*args: Any, stacklevel: int = 4, **kwargs: Any) -> None:
    """`logging.debug` on rank 0."""
    if _rank() == 0:
        _log.debug(*args, stacklevel=stacklevel - 2, **kwargs)


def rank_zero_warn(message: str, stacklevel: int = 4, category: type[Warning] = UserWarning, **kwargs: Any) -> None:
    """`warnings.warn` on rank 0."""
    if _rank() == 0:
        warnings.warn(message, category, stacklevel=stacklevel - 2)


def rank_zero_deprecation(message: str, stacklevel: int = 5, **kwargs: Any) -> None:
    """A DeprecationWarning on rank 0."""
    rank_zero_warn(message, stacklevel, DeprecationWarning)


def grad_norm(module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, Tensor]:
    """The norm of each parameter's gradient on this rank and their total, by the names that Lightning gives them.

    Under strategies that shard, `self.grad_norm()` of the module gives the norm over all ranks.
    """
    norm_type = float(norm_type)
    if norm_type <= 0:
        raise ValueError(f"norm_type must be above 0, got {norm_type}")
    norms = {
        f"grad_{norm_type}_norm{group_separator}{name}": parameter.grad.detach().norm(norm_type)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    if norms:
        norms[f"grad_{norm_type}_norm_total"] = torch.stack(list(norms.values())).norm(norm_type)
    return norms


def move_data_to_device(batch: Any, device: torch.device | str) -> Any:
    """The batch with its tensors on `device`, and what moves itself by a method `to`."""
    return move(batch, torch.device(device), None)


@contextmanager
def isolate_rng(include_cuda: bool = True) -> Iterator[None]:
    """Restore the state of all random streams afterwards."""
    before = rng_state()
    try:
        yield
    finally:
        set_rng_state(before)


UNKNOWN_SIZE = "?"
"""The size of other things than tensors, and of layers that the example did not reach."""


class ModelSummary:
    """The table of a module's layers, and its sums.

    Where the module has an `example_input_array` (a tensor, arguments in a list or tuple, or a dict of keyword
    arguments), its forward runs once, in evaluation mode and without gradients, which tells sizes and FLOPs.
    """

    def __init__(self, model: nn.Module, max_depth: int = 1) -> None:
        if not isinstance(max_depth, int) or max_depth < -1:
            raise ValueError(f"max_depth must be -1, 0 or above, got {max_depth!r}")
        self.model, self.max_depth = model, max_depth
        self._sizes: dict[nn.Module, tuple[Any, Any]] = {}
        self._flops = 0
        if getattr(model, "example_input_array", None) is not None:
            self._run(model.example_input_array)

    def _run(self, example: Any) -> None:
        layers = [layer for _, layer in self.named_modules if not isinstance(layer, torch.jit.ScriptModule)]
        handles = [layer.register_forward_hook(self._note, with_kwargs=True) for layer in layers]
        modes = {module: module.training for module in self.model.modules()}
        counter = FlopCounterMode(display=False)
        try:
            with restored_rng(), torch.no_grad(), counter:
                call(self.model.eval(), fitting(self.model, tuple(example) if isinstance(example, list) else example))
        finally:
            for handle in handles:
                handle.remove()
            for module, mode in modes.items():
                module.training = mode
        self._flops = counter.get_total_flops()

    def _note(self, layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        inputs = (*args, *kwargs.values())
        self._sizes.setdefault(layer, (_size(inputs[0] if len(inputs) == 1 else inputs), _size(output)))

    @property
    def named_modules(self) -> list[tuple[str, nn.Module]]:
        """The layers of the table, with their names."""
        return [
            (name, layer)
            for name, layer in self.model.named_modules()
            if name and (self.max_depth == -1 or name.count(".") < self.max_depth)
        ]

    @property
    def layer_names(self) -> list[str]:
        return [name for name, _ in self.named_modules]

    @property
    def layer_types(self) -> list[str]:
        return [type(layer).__name__ for _, layer in self.named_modules]

    @property
    def in_sizes(self) -> list[Any]:
        """Of the first call of each layer the size of its argument, a list of sizes for several; `"?"` if unknown."""
        return [self._sizes.get(layer, (UNKNOWN_SIZE, UNKNOWN_SIZE))[0] for _, layer in self.named_modules]

    @property
    def out_sizes(self) -> list[Any]:
        """Of the first call of each layer the size of its output; `"?"` if unknown."""
        return [self._sizes.get(layer, (UNKNOWN_SIZE, UNKNOWN_SIZE))[1] for _, layer in self.named_modules]

    @property
    def training_modes(self) -> list[bool]:
        """Whether each layer is in training mode."""
        return [layer.training for _, layer in self.named_modules]

    @property
    def param_nums(self) -> list[int]:
        """Numbers of parameters of the layers; those without a shape yet count as 0."""
        return [_numel(layer.parameters()) for _, layer in self.named_modules]

    @property
    def total_parameters(self) -> int:
        """Those without a shape yet count as 0."""
        return _numel(self.model.parameters())

    @property
    def trainable_parameters(self) -> int:
        return _numel(p for p in self.model.parameters() if p.requires_grad)

    @property
    def total_layer_params(self) -> int:
        return self.total_parameters

    @property
    def total_flops(self) -> int:
        """Of the forward on the example; 0 without one."""
        return self._flops

    @property
    def model_size(self) -> float:
        """Megabytes of the parameters."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters() if not is_lazy(p)) / 1e6

    def __str__(self) -> str:
        return _summarize(self.model, self.max_depth)


def _numel(parameters: Iterable[nn.Parameter]) -> int:
    return sum(0 if is_lazy(parameter) else parameter.numel() for parameter in parameters)


def _size(value: Any) -> Any:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [_size(item) for item in value] or UNKNOWN_SIZE
    return list(value.shape) or UNKNOWN_SIZE if isinstance(value, Tensor) else UNKNOWN_SIZE


def summarize(lightning_module: nn.Module, max_depth: int = 1) -> ModelSummary:
    """The summary of a module."""
    return ModelSummary(lightning_module, max_depth)


def save_hparams_to_yaml(config_yaml: str | os.PathLike[str], hparams: Any, use_omegaconf: bool = True) -> None:
    """Write a dict, Namespace or config as plain data; of a member of an Enum its name. A warning names what is not
    such data, and is written as text."""
    given = hparams if isinstance(hparams, Mapping) else vars(hparams)
    params = plain_params({key: value.name if isinstance(value, Enum) else value for key, value in given.items()})
    for key, value in given.items():
        if isinstance(params.get(key), str) and not isinstance(value, str | Enum | os.PathLike):
            rank_zero_warn(f"hyperparameter {key!r} is written as text: a {type(value).__name__} is not plain data")
    with replacing(os.fspath(config_yaml)) as file:
        file.write(to_yaml(params))


def load_hparams_from_yaml(config_yaml: str | os.PathLike[str], use_omegaconf: bool = True) -> Any:
    """What a YAML file holds: a config of omegaconf, or a dict of plain data without `use_omegaconf`; an empty one,
    with a RuntimeWarning, if the file does not exist."""
    from omegaconf import OmegaConf

    if not _gives_hparams(config_yaml):
        return {}
    config = OmegaConf.load(os.fspath(config_yaml))
    return config if use_omegaconf else OmegaConf.to_container(config)


def save_hparams_to_tags_csv(tags_csv: str | os.PathLike[str], hparams: Any) -> None:
    """Write a dict or Namespace as a table of keys and values."""
    given = hparams if isinstance(hparams, Mapping) else vars(hparams)
    with replacing(os.fspath(tags_csv)) as file:
        csv.writer(file).writerows([("key", "value"), *((key, str(value)) for key, value in given.items())])


def load_hparams_from_tags_csv(tags_csv: str | os.PathLike[str]) -> dict[str, Any]:
    """What a table of keys and values holds: values that are written as Python writes them, others as text; an
    empty dict, with a RuntimeWarning, if the file does not exist."""
    if not _gives_hparams(tags_csv):
        return {}
    with open(tags_csv, newline="") as file:
        return {key: _literal(value) for key, value in list(csv.reader(file))[1:]}


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _gives_hparams(file: str | os.PathLike[str]) -> bool:
    if not os.path.exists(file):
        rank_zero_warn(f"{file} does not exist, so it gives no hyperparameters", category=RuntimeWarning)
        return False
    return True
