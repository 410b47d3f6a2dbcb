"""ModelPruning with Lightning's arguments, on torch.nn.utils.prune."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from lockstep.callbacks._support.parameter_state import ParameterState, is_held
from lockstep.callbacks.base import Callback
from lockstep.callbacks.training.weight_averaging import WeightAveraging
from lockstep.trainer.lightning.callbacks.masks import Masks, Places, compute, count_pruned, is_pruned, whole
from lockstep.trainer.lightning.utilities import MisconfigurationException, isolate_rng, rank_zero_info
from lockstep.trainer.module import Module
from lockstep.trainer.seeding import derive, seed_everything

if TYPE_CHECKING:
    from lockstep.trainer.trainer import Trainer

_METHODS: dict[str, tuple[Callable[..., Any], Any, tuple[str, ...]]] = {
    "ln_structured": (prune.ln_structured, prune.LnStructured, ("dim", "n")),
    "l1_unstructured": (prune.l1_unstructured, prune.L1Unstructured, ()),
    "random_structured": (prune.random_structured, prune.RandomStructured, ("dim",)),
    "random_unstructured": (prune.random_unstructured, prune.RandomUnstructured, ()),
}
_CONTAINERS = (Module, nn.Sequential, nn.ModuleList, nn.ModuleDict)


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
        if not callable(amount):
            _check_amount(amount)
        if verbose not in (0, 1, 2):
            raise MisconfigurationException(f"verbose must be 0, 1 or 2, got {verbose!r}")
        self._use_global_unstructured = use_global_unstructured
        self._dim = pruning_dim
        self.pruning_fn, self._method_name = self._method(pruning_fn, pruning_dim, pruning_norm)
        self.amount = amount
        self._given = self._parameters_to_prune = parameters_to_prune
        self._apply_pruning = apply_pruning
        self._make_pruning_permanent = make_pruning_permanent
        self._use_lottery_ticket_hypothesis = use_lottery_ticket_hypothesis
        self._resample_parameters = resample_parameters
        self._verbose = verbose
        self._prune_on_train_epoch_end = prune_on_train_epoch_end
        self._originals: list[Tensor] = []
        self._masks: Masks | None = None
        self._seed: int | None = None
        self._seen_at: int | None = None  # batches up to the last end of an epoch or validation that this has seen

    def _method(self, given: Any, dim: int | None, norm: int | None) -> tuple[Any, str]:
        """What prunes, and its name."""
        if inspect.isclass(given) and issubclass(given, prune.BasePruningMethod):
            if not self._use_global_unstructured:
                raise MisconfigurationException(
                    f"pruning_fn={given.__name__} is a class, which prunes over all parameters; give "
                    "use_global_unstructured=True"
                )
            method: Any = given
        elif isinstance(given, str) and given.lower() in _METHODS:
            function, method, arguments = _METHODS[given.lower()]
            options = {name: value for name, value in (("dim", dim), ("n", norm)) if name in arguments}
            if None in options.values():
                raise MisconfigurationException(
                    f"pruning_fn={given!r} needs pruning_dim{' and pruning_norm' if 'n' in options else ''}"
                )
            if not self._use_global_unstructured:
                return partial(function, **options), function.__name__
        else:
            raise MisconfigurationException(
                f"pruning_fn must be {', '.join(map(repr, _METHODS))}, or a class derived from "
                f"torch.nn.utils.prune.BasePruningMethod, got {given!r}"
            )
        if method.PRUNING_TYPE != "unstructured":
            raise MisconfigurationException(
                f"{method.__name__} prunes within each parameter; give use_global_unstructured=False"
            )
        return method, method.__name__

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
                if isinstance(whole(layer, name), nn.Parameter)
            ]
        for place in parameters_to_prune:
            if not (isinstance(place, tuple | list) and len(place) == 2 and isinstance(place[0], nn.Module)):
                raise MisconfigurationException(
                    f"parameters_to_prune must be a list of (layer, name of its parameter), but has {place!r}"
                )
            if place[0] not in layers or not isinstance(whole(*place), nn.Parameter):
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
        places = self.sanitize_parameters_to_prune(module, self._given, self._parameter_names)
        self._parameters_to_prune = self.filter_parameters_to_prune(places)
        if not self._parameters_to_prune:
            names = " or ".join(map(repr, self._parameter_names))
            raise MisconfigurationException(
                f"ModelPruning found nothing to prune: no layer of {type(module).__name__} has a parameter called "
                f"{names} that filter_parameters_to_prune keeps; give others in parameter_names"
            )
        self._check_dimensions()
        if trainer.world_size > 1 and not self._make_pruning_permanent:
            raise ValueError(
                "ModelPruning(make_pruning_permanent=False) leaves masks in the module, which "
                f"{trainer.strategy.name} cannot bring back from its ranks; give make_pruning_permanent=True"
            )
        if any(isinstance(callback, WeightAveraging) for callback in trainer.callbacks):
            raise ValueError(
                "ModelPruning and WeightAveraging both change the weights that are saved; give one of them"
            )
        rewound = self._parameters_to_prune if self._use_lottery_ticket_hypothesis else ()
        self._originals = [whole(*place).detach().clone() for place in rewound]
        self._seen_at = None

    def _check_dimensions(self) -> None:
        if self._use_global_unstructured or not self._method_name.endswith("_structured") or self._dim is None:
            return
        for layer, name in self._parameters_to_prune:
            has = whole(layer, name).dim()
            if has < 2 or not -has <= self._dim < has:
                raise MisconfigurationException(
                    f"{self._method_name} with pruning_dim={self._dim} cannot prune {name} of {layer}, which has {has} "
                    "dimensions; give parameter_names=['weight'], or choose in parameters_to_prune"
                )

    def parameter_state(self, trainer: Trainer, module: Module) -> ParameterState:
        names: dict[Tensor, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        for place in self._parameters_to_prune:
            parameter = whole(*place)
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
        self._masks = Masks(self._parameters_to_prune, self._originals)
        return self._masks

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self._seed, "seen_at": self._seen_at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seed, self._seen_at = state_dict["seed"], state_dict.get("seen_at")
        if self._masks is not None:
            self._masks.apply_saved()

    def on_load_checkpoint(self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]) -> None:
        for layer, name in self._parameters_to_prune:
            if is_pruned(layer, name):  # the checkpoint has the names of the module as it was built
                prune.remove(layer, name)

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        if self._seed is None:
            self._seed = trainer.strategy.broadcast(torch.initial_seed() % 2**63)
        progress = trainer._run.progress
        if self._seen_at is None:
            self._seen_at = progress.total_batches if progress.epoch_closed else -1
        if progress.epoch_closed and self._seen_at < progress.total_batches and self._prune_on_train_epoch_end:
            self._run_pruning(trainer)  # a callback before this saved at that end

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        if self._prune_on_train_epoch_end:
            self._run_pruning(trainer)

    def on_validation_epoch_end(self, trainer: Trainer, module: Module) -> None:
        if self._masks is None or trainer.sanity_checking or self._prune_on_train_epoch_end:
            return
        if self._seen_at != trainer._run.progress.total_batches:  # else a callback after this saved at this end
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
        self._seen_at = trainer._run.progress.total_batches
        epoch, chosen, rewinds = trainer.current_epoch, self._apply_pruning, self._use_lottery_ticket_hypothesis
        amount = self.amount(epoch) if callable(self.amount) else self.amount
        if not (chosen(epoch) if callable(chosen) else chosen) or not amount:
            return
        _check_amount(amount)
        assert self._seed is not None
        with isolate_rng():
            seed_everything(derive(self._seed, self.state_key, trainer.global_step))
            self.apply_pruning(amount)
            if rewinds(epoch) if callable(rewinds) else rewinds:
                self.apply_lottery_ticket_hypothesis()

    @torch.no_grad()
    def apply_pruning(self, amount: int | float) -> None:
        """Prune what is to be pruned, by its weights of now."""
        before = [count_pruned(*place) for place in self._parameters_to_prune] if self._verbose else []
        for place in self._parameters_to_prune:
            compute(*place)
        if self._use_global_unstructured:
            options = {"amount": amount} if "amount" in inspect.signature(self.pruning_fn).parameters else {}
            prune.global_unstructured(self._parameters_to_prune, pruning_method=self.pruning_fn, **options)
        else:
            for layer, name in self._parameters_to_prune:
                self.pruning_fn(layer, name=name, amount=amount)
        if self._verbose:
            self._report(before, [count_pruned(*place) for place in self._parameters_to_prune])

    def _report(self, before: list[tuple[int, int]], now: list[tuple[int, int]]) -> None:
        def line(what: str, was: int, zeros: int, size: int) -> None:
            rank_zero_info(
                f"{self._method_name} pruned {what}: {was} of {size} before ({was / size:.2%}), {zeros} now "
                f"({zeros / size:.2%})"
            )

        line("all", sum(was for was, _ in before), *map(sum, zip(*now, strict=True)))
        if self._verbose == 2:
            for (layer, name), (was, _), (zeros, size) in zip(self._parameters_to_prune, before, now, strict=True):
                line(f"{name} of {layer}", was, zeros, size)

    @torch.no_grad()
    def apply_lottery_ticket_hypothesis(self) -> None:
        """Set what is left of the weights back to what they were at the start, or to new ones that their layers draw
        with `resample_parameters` (Frankle and Carbin 2019, arXiv:1803.03635)."""
        drawn: dict[nn.Module, nn.Module] = {}
        for (layer, name), original in zip(self._parameters_to_prune, self._originals, strict=True):
            if self._resample_parameters and callable(getattr(layer, "reset_parameters", None)):
                if layer not in drawn:
                    drawn[layer] = _drawn(layer)
                original = getattr(drawn[layer], name)
            whole(layer, name).copy_(original)
            compute(layer, name)

    def make_pruning_permanent(self, module: nn.Module) -> None:
        """Take the masks out of a module, whose weights stay pruned."""
        for layer in module.modules():
            for name in [name.removesuffix("_orig") for name, _ in layer.named_parameters(recurse=False)]:
                if is_pruned(layer, name):
                    prune.remove(layer, name)


def _check_amount(amount: Any) -> None:
    if not isinstance(amount, Real):
        raise MisconfigurationException(f"amount must be a number or a function of the epoch, got {amount!r}")
    if not 0 <= float(amount) <= (float("inf") if isinstance(amount, Integral) else 1):
        raise MisconfigurationException(f"amount must be a share from 0.0 to 1.0 or a whole number, got {amount!r}")


def _drawn(layer: Any) -> nn.Module:
    """A copy of a pruned layer, whose weights are new."""
    computed = [value for value in vars(layer).values() if isinstance(value, Tensor)]
    copied = copy.deepcopy(layer, {id(value): value.detach().clone() for value in computed})  # they may be no leaves
    copied.reset_parameters()
    return copied
