"""ModelPruning with Lightning's arguments, on torch.nn.utils.prune."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from lockstep.callbacks._support.parameter_state import ParameterState, is_held
from lockstep.callbacks.base import Callback
from lockstep.callbacks.training.weight_averaging import WeightAveraging
from lockstep.trainer.lightning.utilities import MisconfigurationException, isolate_rng, rank_zero_info
from lockstep.trainer.module import Module
from lockstep.trainer.seeding import derive, seed_everything

if TYPE_CHECKING:
    from lockstep.trainer.trainer import Trainer

_METHODS: dict[str, tuple[Callable[..., Any], Any]] = {
    "ln_structured": (prune.ln_structured, prune.LnStructured),
    "l1_unstructured": (prune.l1_unstructured, prune.L1Unstructured),
    "random_structured": (prune.random_structured, prune.RandomStructured),
    "random_unstructured": (prune.random_unstructured, prune.RandomUnstructured),
}
_CONTAINERS = (Module, nn.Sequential, nn.ModuleList, nn.ModuleDict)
Places = Sequence[tuple[nn.Module, str]]
"""Modules and the names of their parameters."""
_Tensors = dict[nn.Parameter, dict[str, Tensor]]


class ModelPruning(Callback):
    """Prune weights at the end of epochs with `torch.nn.utils.prune`; the arguments are Lightning's.

    From its first pruning a layer has `weight_orig` and `weight_mask`, and computes `weight` of them. Masks and whole
    weights are beside the weights in every checkpoint, whose weights are pruned and have the names of the module as it
    was built: a resumed run is the run that was never stopped, and `load_from_checkpoint` needs no pruning. What is
    random is a function of the run's seed and step, on every rank.

    Raises ValueError at `fit` under a strategy that shards weights, for a parameter that layers share, beside
    WeightAveraging, and with `make_pruning_permanent=False` on several ranks.
    """

    changes_model = True
    PARAMETER_NAMES = ("weight", "bias")

    def __init__(
        self,
        pruning_fn: Callable[..., Any] | str,
        parameters_to_prune: Places = (),
        parameter_names: list[str] | None = None,
        use_global_unstructured: bool = True,
        amount: int | float | Callable[[int], int | float] = 0.5,
        apply_pruning: bool | Callable[[int], bool] = True,
        make_pruning_permanent: bool = True,
        use_lottery_ticket_hypothesis: bool | Callable[[int], bool] = True,
        resample_parameters: bool = False,
        pruning_dim: int | None = None,
        pruning_norm: int | None = None,
        verbose: int = 0,
        prune_on_train_epoch_end: bool = True,
    ) -> None:
        self._parameter_names = parameter_names or self.PARAMETER_NAMES
        if unknown := [name for name in self._parameter_names if name not in self.PARAMETER_NAMES]:
            raise MisconfigurationException(f"parameter_names must be 'weight' and 'bias', got {unknown[0]!r}")
        if not callable(amount) and not isinstance(amount, int | float):
            raise MisconfigurationException(f"amount must be a number or a function of the epoch, got {amount!r}")
        if verbose not in (0, 1, 2):
            raise MisconfigurationException(f"verbose must be 0, 1 or 2, got {verbose!r}")
        self._use_global_unstructured = use_global_unstructured
        self.pruning_fn, self._method_name = self._method(pruning_fn, pruning_dim, pruning_norm)
        self.amount = amount
        self._parameters_to_prune = parameters_to_prune
        self._apply_pruning = apply_pruning
        self._make_pruning_permanent = make_pruning_permanent
        self._use_lottery_ticket_hypothesis = use_lottery_ticket_hypothesis
        self._resample_parameters = resample_parameters
        self._verbose = verbose
        self._prune_on_train_epoch_end = prune_on_train_epoch_end
        self._originals: dict[nn.Module, nn.Module] = {}
        self._masks: _Masks | None = None
        self._seed: int | None = None

    def _method(self, given: Any, dim: int | None, norm: int | None) -> tuple[Any, str]:
        """What prunes, and its name."""
        options: dict[str, Any] = {}
        if self._is_pruning_method(given):
            method, function = given, None
            if not self._use_global_unstructured:
                raise MisconfigurationException(
                    f"pruning_fn={given.__name__} is a class, which prunes over all parameters; give "
                    "use_global_unstructured=True"
                )
        elif isinstance(given, str) and given.lower() in _METHODS:
            name = given.lower()
            function, method = _METHODS[name]
            if name.endswith("_structured"):
                options["dim"] = dim
            if name == "ln_structured":
                options["n"] = norm
            if None in options.values():
                raise MisconfigurationException(
                    f"pruning_fn={name!r} needs pruning_dim{' and pruning_norm' if 'n' in options else ''}"
                )
        else:
            raise MisconfigurationException(
                f"pruning_fn must be {', '.join(map(repr, _METHODS))}, or a class derived from "
                f"torch.nn.utils.prune.BasePruningMethod, got {given!r}"
            )
        if not self._use_global_unstructured:
            assert function is not None
            return partial(function, **options), function.__name__
        if method.PRUNING_TYPE != "unstructured":
            raise MisconfigurationException(
                f"{method.__name__} prunes within each parameter; give use_global_unstructured=False"
            )
        return method, method.__name__

    @staticmethod
    def _is_pruning_method(given: Any) -> bool:
        return inspect.isclass(given) and issubclass(given, prune.BasePruningMethod)

    @staticmethod
    def sanitize_parameters_to_prune(
        pl_module: nn.Module, parameters_to_prune: Places = (), parameter_names: Sequence[str] = ()
    ) -> Places:
        """The given layers and names, or all of `pl_module`. Raises MisconfigurationException for what it lacks."""
        layers = [layer for layer in pl_module.modules() if not isinstance(layer, _CONTAINERS)]
        if not parameters_to_prune:
            return [
                (layer, name)
                for name in parameter_names or ModelPruning.PARAMETER_NAMES
                for layer in layers
                if isinstance(_whole(layer, name), nn.Parameter)
            ]
        for place in parameters_to_prune:
            if not (isinstance(place, tuple | list) and len(place) == 2 and isinstance(place[0], nn.Module)):
                raise MisconfigurationException(
                    f"parameters_to_prune must be a list of (layer, name of its parameter), but has {place!r}"
                )
            if place[0] not in layers or not isinstance(_whole(*place), nn.Parameter):
                raise MisconfigurationException(
                    f"parameters_to_prune has {place[1]!r} of {place[0]!r}, which is not a parameter in the model"
                )
        return parameters_to_prune

    def filter_parameters_to_prune(self, parameters_to_prune: Places = ()) -> Places:
        """Override to choose what to prune."""
        return parameters_to_prune

    @property
    def state_key(self) -> str:
        return f"{super().state_key}({self._method_name}, {self.amount if not callable(self.amount) else 'amount'})"

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        if stage != "fit":
            return
        places = self.sanitize_parameters_to_prune(module, self._parameters_to_prune, self._parameter_names)
        self._parameters_to_prune = self.filter_parameters_to_prune(places)
        if trainer.world_size > 1 and not self._make_pruning_permanent:
            raise ValueError(
                "ModelPruning(make_pruning_permanent=False) leaves masks in the module, which "
                f"{trainer.strategy.name} cannot bring back from its ranks; give make_pruning_permanent=True"
            )
        if any(isinstance(callback, WeightAveraging) for callback in trainer.callbacks):
            raise ValueError(
                "ModelPruning and WeightAveraging both change the weights that are saved; give one of them"
            )
        self._originals = {}
        if self._use_lottery_ticket_hypothesis:
            self._originals = {layer: copy.deepcopy(layer) for layer, _ in self._parameters_to_prune}

    def parameter_state(self, trainer: Trainer, module: Module) -> ParameterState:
        names: dict[Tensor, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        for place in self._parameters_to_prune:
            parameter = _whole(*place)
            if not is_held(parameter) or hasattr(parameter, "to_local"):
                raise ValueError(
                    f"ModelPruning ranks whole weights, and {trainer.strategy.name} shards them over ranks; use "
                    "strategy='ddp'"
                )
            if len(names.get(parameter, ())) > 1:
                raise ValueError(
                    f"ModelPruning cannot prune {' and '.join(names[parameter])}, which are one parameter; name others "
                    "in parameters_to_prune"
                )
        self._masks = _Masks(self._parameters_to_prune, self._originals)
        return self._masks

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self._seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seed = state_dict["seed"]
        if self._masks is not None:
            self._masks.apply_saved()

    def on_load_checkpoint(self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]) -> None:
        for layer, name in self._parameters_to_prune:
            if _is_pruned(layer, name):  # the checkpoint has the names of the module as it was built
                prune.remove(layer, name)

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        if self._seed is None:
            self._seed = trainer.strategy.broadcast(torch.initial_seed() % 2**63)

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        if self._prune_on_train_epoch_end:
            self._run_pruning(trainer)

    def on_validation_epoch_end(self, trainer: Trainer, module: Module) -> None:
        if self._masks is not None and not trainer.sanity_checking and not self._prune_on_train_epoch_end:
            self._run_pruning(trainer)

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        if self._make_pruning_permanent and self._masks is not None:
            self._masks.keep()  # the last checkpoint is still to come
            self.make_pruning_permanent(module)

    def on_fit_end(self, trainer: Trainer, module: Module) -> None:
        self._masks, self._seed = None, None

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        self._masks, self._seed = None, None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_masks": None}

    def _run_pruning(self, trainer: Trainer) -> None:
        epoch, chosen, rewinds = trainer.current_epoch, self._apply_pruning, self._use_lottery_ticket_hypothesis
        amount = self.amount(epoch) if callable(self.amount) else self.amount
        if not (chosen(epoch) if callable(chosen) else chosen) or not amount:
            return
        assert self._seed is not None
        with isolate_rng():
            seed_everything(derive(self._seed, self.state_key, trainer.global_step))
            self.apply_pruning(amount)
            if rewinds(epoch) if callable(rewinds) else rewinds:
                self.apply_lottery_ticket_hypothesis()

    @torch.no_grad()
    def apply_pruning(self, amount: int | float) -> None:
        """Prune what is to be pruned, by its weights of now."""
        before = [_pruned(*place) for place in self._parameters_to_prune] if self._verbose else []
        for place in self._parameters_to_prune:
            _compute(*place)
        if self._use_global_unstructured:
            options = {"amount": amount} if "amount" in inspect.signature(self.pruning_fn).parameters else {}
            prune.global_unstructured(self._parameters_to_prune, pruning_method=self.pruning_fn, **options)
        else:
            for layer, name in self._parameters_to_prune:
                self.pruning_fn(layer, name=name, amount=amount)
        if self._verbose:
            self._report(before, [_pruned(*place) for place in self._parameters_to_prune])

    def _report(self, before: list[tuple[int, int]], now: list[tuple[int, int]]) -> None:
        total = sum(size for _, size in now)
        lines = [("all", sum(zeros for zeros, _ in before), total, sum(zeros for zeros, _ in now))]
        if self._verbose == 2:
            places = zip(self._parameters_to_prune, before, now, strict=True)
            lines += [(f"{name} of {layer}", *was, zeros) for (layer, name), was, (zeros, _) in places]
        for what, zeros, total, pruned in lines:
            rank_zero_info(
                f"{self._method_name} pruned {what}: {zeros} of {total} before ({zeros / total:.2%}), {pruned} now "
                f"({pruned / total:.2%})"
            )

    @torch.no_grad()
    def apply_lottery_ticket_hypothesis(self) -> None:
        """Set what is left of the weights back to what they were at the start, or to new ones that their layers draw
        with `resample_parameters` (Frankle and Carbin 2019, arXiv:1803.03635)."""
        drawn = {}
        for layer, original in self._originals.items():
            drawn[layer] = copy.deepcopy(original) if self._resample_parameters else original
            reset = getattr(drawn[layer], "reset_parameters", None)
            if self._resample_parameters and callable(reset):
                reset()
        for layer, name in self._parameters_to_prune:
            _whole(layer, name).copy_(_whole(drawn[layer], name))
            _compute(layer, name)

    def make_pruning_permanent(self, module: nn.Module) -> None:
        """Take the masks out of a module, whose weights stay pruned."""
        for layer in module.modules():
            for name in [name.removesuffix("_orig") for name, _ in layer.named_parameters(recurse=False)]:
                if _is_pruned(layer, name):
                    prune.remove(layer, name)


class _Masks(ParameterState):
    """Masks and whole weights of pruned parameters, and the weights that they had at the start."""

    def __init__(self, places: Places, originals: dict[nn.Module, nn.Module]) -> None:
        self._places: dict[nn.Parameter, tuple[nn.Module, str]] = {_whole(*place): place for place in places}
        self._originals = originals
        self._kept: _Tensors = {}  # while the parameters have the places and values that are saved
        self._saved: _Tensors = {}
        super().__init__(self._places)

    def reset(self) -> None:
        self._kept.clear()
        self._saved.clear()

    def keep(self) -> None:
        """Note what pruning that is made permanent would lose."""
        for parameter, place in self._places.items():
            if _is_pruned(*place):
                self._kept[parameter] = {"whole": parameter.detach().clone(), "mask": _mask(*place)}

    @contextmanager
    def saving(self) -> Iterator[None]:
        with torch.no_grad():
            pruned = {parameter: place for parameter, place in self._places.items() if _is_pruned(*place)}
            self.keep()
            for parameter, (layer, name) in pruned.items():
                for each in (name, *_names(name)):
                    delattr(layer, each)
                layer.register_parameter(name, parameter)
                parameter.mul_(self._kept[parameter]["mask"])
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, (layer, name) in pruned.items():
                    kept = self._kept.pop(parameter)
                    delattr(layer, name)
                    key, mask_key = _names(name)
                    layer.register_parameter(key, parameter)
                    layer.register_buffer(mask_key, kept["mask"])
                    parameter.copy_(kept["whole"])
                    _compute(layer, name)

    def tensors(self) -> dict[Tensor, dict[str, Tensor]]:
        state: dict[Tensor, dict[str, Tensor]] = {}
        for parameter, (layer, name) in self._places.items():
            found = dict(self._kept.get(parameter, {}))
            if layer in self._originals:
                found["original"] = _whole(self._originals[layer], name).detach()
            if found:
                state[parameter] = found
        return state

    @torch.no_grad()
    def take(self, parameter: Tensor, saved: dict[str, Tensor]) -> None:
        assert isinstance(parameter, nn.Parameter)
        layer, name = self._places[parameter]
        if layer in self._originals and "original" in saved:
            _whole(self._originals[layer], name).copy_(saved["original"])
        if "mask" in saved:
            self._saved[parameter] = saved

    @torch.no_grad()
    def apply_saved(self) -> None:
        """Prune what was pruned when the checkpoint was saved."""
        for parameter, saved in self._saved.items():
            layer, name = self._places[parameter]
            prune.custom_from_mask(layer, name, saved["mask"].to(parameter.device))
            parameter.copy_(saved["whole"])
            _compute(layer, name)
        self._saved.clear()


def _names(name: str) -> tuple[str, str]:
    """Under which a pruned layer has the whole parameter and its mask."""
    return f"{name}_orig", f"{name}_mask"


def _mask(layer: nn.Module, name: str) -> Tensor:
    _, mask = _names(name)
    return layer.get_buffer(mask)


def _is_pruned(layer: nn.Module, name: str) -> bool:
    return all(hasattr(layer, each) for each in _names(name))


def _whole(layer: nn.Module, name: str) -> Any:
    """The parameter without its mask; None if the layer has none."""
    whole, _ = _names(name)
    return getattr(layer, whole if _is_pruned(layer, name) else name, None)


def _compute(layer: nn.Module, name: str) -> None:
    """Let a pruned layer have the weight of now, as its next forward computes it."""
    if _is_pruned(layer, name):
        setattr(layer, name, _mask(layer, name) * _whole(layer, name))


def _pruned(layer: nn.Module, name: str) -> tuple[int, int]:
    """How many values of a parameter are pruned, and how many it has."""
    zeros = int((_mask(layer, name) == 0).sum()) if _is_pruned(layer, name) else 0
    return zeros, _whole(layer, name).numel()
