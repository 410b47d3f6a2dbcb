"""Finding, once before a run, which hooks the module and the callbacks override, and calling user code by its own
signature."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lockstep.callbacks.base import Callback, Logger
from lockstep.callbacks.lambda_callback import LambdaCallback
from lockstep.callbacks.model_checkpoint import ModelCheckpoint
from lockstep.callbacks.tuning.batch_size_finder import BatchSizeFinder
from lockstep.callbacks.tuning.lr_finder import LRFinder
from lockstep.strategies.launch.phase import current_phase, set_phase
from lockstep.strategies.modules.side_effect_free import metrics_uncounted
from lockstep.trainer import lightning_names
from lockstep.trainer.datamodule import DataModule
from lockstep.trainer.kept.owners import modules_of
from lockstep.trainer.module import Module
from lockstep.trainer.run import publish

if TYPE_CHECKING:
    from lockstep.trainer.run.state import RunState

NAMES = [name for name in vars(Callback) if name.startswith("on_")]
TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")

UNWATCHED = {"on_before_backward", "on_after_backward", "on_exception", "on_save_checkpoint", "on_load_checkpoint"}
"""Hooks after which the strategy does not look for what they changed in the model: a window is under way, or none
follows."""
OF_BATCH = {"on_train_batch_start", "on_before_backward", "on_train_batch_end"}

Calls = tuple[Callable[..., Any], ...]


@dataclass
class Hooks:
    """What to call at each hook: the module's own first, then the callbacks' in their order."""

    on_exception: Calls = ()
    on_fit_start: Calls = ()
    on_fit_end: Calls = ()
    on_sanity_check_start: Calls = ()
    on_sanity_check_end: Calls = ()
    on_train_start: Calls = ()
    on_train_end: Calls = ()
    on_train_epoch_start: Calls = ()
    on_train_epoch_end: Calls = ()
    on_train_batch_start: Calls = ()
    on_train_batch_end: Calls = ()
    on_before_backward: Calls = ()
    on_after_backward: Calls = ()
    on_before_optimizer_step: Calls = ()
    on_before_zero_grad: Calls = ()
    on_validation_start: Calls = ()
    on_validation_end: Calls = ()
    on_validation_epoch_start: Calls = ()
    on_validation_epoch_end: Calls = ()
    on_validation_batch_start: Calls = ()
    on_validation_batch_end: Calls = ()
    on_test_start: Calls = ()
    on_test_end: Calls = ()
    on_test_epoch_start: Calls = ()
    on_test_epoch_end: Calls = ()
    on_test_batch_start: Calls = ()
    on_test_batch_end: Calls = ()
    on_predict_start: Calls = ()
    on_predict_end: Calls = ()
    on_predict_epoch_start: Calls = ()
    on_predict_epoch_end: Calls = ()
    on_predict_batch_start: Calls = ()
    on_predict_batch_end: Calls = ()
    on_save_checkpoint: Calls = ()
    on_load_checkpoint: Calls = ()
    module_train_epoch_end: Calls = ()
    """The module's `on_train_epoch_end`; metrics are reduced between it and the callbacks'."""

    def before_step_again(self) -> Calls:
        """The user's `on_before_optimizer_step`, for an optimizer that computes gradients again."""
        return tuple(filter(is_users, self.on_before_optimizer_step))

    @classmethod
    def find(cls, run: RunState, module: Module) -> Hooks:
        """The hooks that the module, the DataModule and the callbacks override."""
        found = cls()
        for name in NAMES:
            own = [accept(getattr(module, name))] if overrides(module, name, Module) else []
            others = _of_callbacks(run, module, name)
            if name == "on_exception" and run.datamodule is not None and overrides(run.datamodule, name, DataModule):
                others.insert(0, run.datamodule.on_exception)
            if name in OF_BATCH:
                own, others = ([partial(_uncounted, run, h) if is_users(h) else h for h in hs] for hs in (own, others))
            around = partial(_watched, run, name)
            if name == "on_train_epoch_end":
                found.module_train_epoch_end = around(own)
                own = []
            setattr(found, name, around([*own, *others]))
        return found


def check_exchanged(run: RunState, module: Module) -> None:
    """Raise RuntimeError for callbacks, hooks and a `training_step` that user code has exchanged since the run was set
    up: it would continue with those before, and one that is resumed does not know them."""
    before, now = run.at_setup, exchangeable(run, module) | {"training_step": training_step_of(module)}
    if changed := sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name)):
        raise RuntimeError(
            f"{', '.join(changed)} changed after the run was set up, which would have no effect; give callbacks to the "
            "Trainer or return them from configure_callbacks, set methods in __init__ or setup, and let a method "
            "choose when it is called, such as by self.current_epoch"
        )


def exchangeable(run: RunState, module: Module) -> dict[str, Any]:
    """The callbacks, and the hooks that are attributes of objects, by name."""
    found: dict[str, Any] = {"trainer.callbacks": [*map(id, run.callbacks)]}
    for at, owner in (("", module), *((f"{type(item).__name__}.", item) for item in run.callbacks)):
        for name in vars(owner).keys() & NAMES:
            found.setdefault(f"{at}{name}", []).append(vars(owner)[name])
    return found


def _of_callbacks(run: RunState, module: Module, name: str) -> list[Callable[..., Any]]:
    """The hook `name` of the callbacks that override it; those of loggers behind their error boundary."""
    calls: list[Callable[..., Any]] = []
    for callback in run.callbacks:
        if not overrides(callback, name, Callback):
            continue
        if isinstance(callback, Logger) and getattr(type(callback), name) is getattr(Logger, name):
            continue
        method = getattr(callback, name)
        if positional(method) != positional(getattr(Callback, name).__get__(callback)):
            method = accept(method)
        call = partial(method, run.trainer, module)
        calls.append(partial(publish.guarded, run, callback, call) if isinstance(callback, Logger) else call)
    return calls


def is_users(hook: Callable) -> bool:
    """Whether a hook is the module's or a callback's of the user; those of the package change no model."""
    if isinstance(hook, partial) and hook.func is publish.guarded:
        return False  # a logger's
    owner = getattr(hook.func if isinstance(hook, partial) else hook, "__self__", None)
    if isinstance(owner, Callback) and owner.changes_model:
        return True
    return owner is None or not of_package(owner)


def of_package(owner: Any) -> bool:
    """Whether a callback is one of this package, and calls no functions of the user's."""
    inside = type(owner).__module__.startswith(("lockstep.callbacks.", "lockstep.trainer."))
    return inside and not isinstance(owner, LambdaCallback)


def _uncounted(run: RunState, hook: Callable[..., Any], *args: Any) -> Any:
    """Call a hook of a batch, where torchmetrics objects count nothing of padding."""
    assert run.module is not None
    if not run.metrics.is_padding:
        return hook(*args)
    with metrics_uncounted(nn.ModuleList([run.module, *modules_of(run.callbacks, run.module).values()])):
        return hook(*args)


def _watched(run: RunState, name: str, calls: list[Callable[..., Any]]) -> Calls:
    """The hooks, between looks of the strategy at the model if user code is among them."""
    if name in UNWATCHED or not any(map(is_users, calls)):
        return tuple(calls)
    return partial(_watch_model, run, False), *calls, partial(_watch_model, run, True)


def _watch_model(run: RunState, after: bool, *_: Any) -> None:
    if run.wrapped is not None:
        run.strategy.adopt_changes(run.wrapped, after)


def check_names(owner: Any, base: type) -> None:
    """Raise TypeError for a method of a Module, Callback or DataModule that looks like a hook and would never be
    called."""
    kind = type(owner).__name__
    if base is Module:
        for name, instead in lightning_names.METHODS.items():
            if callable(getattr(type(owner), name, None)):
                raise TypeError(f"{kind}.{name} is not called by Lockstep, so it would have no effect; {instead}")
    known = [name for name in dir(base) if name.startswith("on_")]
    for name in dir(type(owner)):
        is_hook = name.startswith("on_") or name in lightning_names.HOOKS
        if is_hook and name not in known and callable(getattr(type(owner), name)):
            near = difflib.get_close_matches(name, known, 1, 0.0)[0]
            instead = lightning_names.HOOKS.get(name, "")
            if not instead:
                instead = f"the nearest hook is {near}. Rename it without 'on_' if it is a method of your own"
            raise TypeError(f"{kind}.{name} is not a hook, so it would never be called; {instead}")


SHAPES = {
    "lr_scheduler_step": ("scheduler", "metric"),
    "optimizer_step": ("epoch", "batch_idx", "optimizer", "optimizer_closure"),
    "configure_gradient_clipping": ("optimizer", "gradient_clip_val", "gradient_clip_algorithm"),
}
"""What the loop gives to methods that it calls by position."""


def check_shapes(module: Module) -> None:
    """Raise TypeError for an overridden method that needs an argument which the loop does not give."""
    for name, given in SHAPES.items():
        method = getattr(module, name)
        if method is None or not overrides(module, name, Module):
            continue
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        takes = [p for p in inspect.signature(method).parameters.values() if p.kind in kinds]
        own = [p.name for p in takes if p.default is p.empty]
        extra = next((found for found in own if found not in given), None)
        if extra is not None and len(own) > len(given):
            raise TypeError(
                f"{type(module).__name__}.{name} has the argument {extra!r}, which the loop does not give; it gives "
                f"({', '.join(given)})"
            )


def with_those_of(module: Module, callbacks: list[Callback]) -> list[Callback]:
    """`callbacks` and what the module's `configure_callbacks` returns, which replaces callbacks of its classes and of
    their bases."""
    found = module.configure_callbacks() if overrides(module, "configure_callbacks", Module) else []
    own = [found] if isinstance(found, Callback) else list(found or [])
    wrong = next((item for item in own if not isinstance(item, Callback)), None)
    if wrong is not None:
        raise TypeError(f"configure_callbacks must return Callback objects, but one is {wrong!r}")
    finder = next((item for item in own if isinstance(item, (BatchSizeFinder, LRFinder))), None)
    if finder is not None:
        raise TypeError(
            f"configure_callbacks returned {type(finder).__name__}, whose search comes before the run that calls it; "
            "give it to the Trainer"
        )
    merged = [item for item in callbacks if not any(isinstance(new, type(item)) for new in own)] + own
    return sorted(merged, key=lambda item: (isinstance(item, ModelCheckpoint), not isinstance(item, Logger)))


def transfer_of(
    module: Module, datamodule: DataModule | None, to_device: Callable[[Any], Any], device: torch.device
) -> Callable[[Any, int], Any] | None:
    """What brings a batch of the loader with an index to the device, if a module or DataModule has its own way; else
    None.

    Where both override one of the three methods, the DataModule's is called.
    """
    own: list[Any] = []
    for name in TRANSFERS:
        if datamodule is not None and overrides(datamodule, name, DataModule):
            own.append(accept(getattr(datamodule, name)))
        else:
            own.append(accept(getattr(module, name)) if overrides(module, name, Module) else None)
    if not any(own):
        return None
    before, move, after = own

    def transfer(batch: Any, dataloader_idx: int) -> Any:
        if before is not None:
            batch = before(batch, dataloader_idx)
        batch = to_device(batch) if move is None else move(batch, device, dataloader_idx)
        return batch if after is None else after(batch, dataloader_idx)

    return transfer


def overrides(owner: Any, name: str, base: type) -> bool:
    """Whether `owner` has its own `name`, in its class or as an attribute of the object; None stands for none."""
    if name not in vars(owner) and getattr(type(owner), name, None) is getattr(base, name):
        return False
    return getattr(owner, name) is not None


def accept(fn: Callable) -> Callable:
    """`fn` as a hook: given only as many of the arguments as it takes."""
    takes = positional(fn)
    return fn if takes is None else lambda *args: fn(*args[:takes])


@dataclass(frozen=True)
class Adapted:
    """A step called with fewer arguments than the loop gives, or with the last one by name."""

    method: Callable
    takes: int
    keyword: str | None = None

    def __call__(self, *args: Any) -> Any:
        options = {} if self.keyword is None else {self.keyword: args[-1]}
        return self.method(*args[: self.takes], **options)


@dataclass(frozen=True)
class InDict:
    """A step that returns {"loss": loss} where `step` returns a loss alone, which hooks get as `outputs`."""

    step: Callable

    def __call__(self, *args: Any) -> Any:
        output = self.step(*args)
        return {"loss": output} if isinstance(output, Tensor) else output


def training_step_of(module: Module) -> Callable:
    step = step_function(module.training_step, 2)
    return InDict(step) if module.hooks_get_dicts else step


def step_function(fn: Callable, num_args: int) -> Callable:
    """`fn` itself where it takes the `num_args` positional arguments that the loop gives, else `Adapted`."""
    if inspect.isgeneratorfunction(fn):
        raise TypeError(
            f"{getattr(fn, '__qualname__', fn)} yields, so a call of it runs none of its lines; let it return what it "
            "yields, as a list"
        )
    takes = positional(fn)
    parameters = inspect.signature(fn).parameters
    kinds = inspect.Parameter
    by_name = "dataloader_idx" in parameters and parameters["dataloader_idx"].kind is kinds.KEYWORD_ONLY
    if num_args == 3 and (
        by_name or (takes is not None and takes < 3 and any(p.kind is kinds.VAR_KEYWORD for p in parameters.values()))
    ):
        return Adapted(fn, 2 if takes is None else takes, "dataloader_idx")
    if takes is None or takes == num_args:
        return fn
    if "dataloader_iter" in parameters:
        raise TypeError(
            f"{getattr(fn, '__qualname__', fn)} takes dataloader_iter, but the loop gives it batches; let it take "
            "(batch, batch_idx)"
        )
    if takes == 0:
        raise TypeError(
            f"{getattr(fn, '__qualname__', fn)} must take the batch as its first argument, but it takes none"
        )
    if takes < num_args:
        return Adapted(fn, takes)
    required = [p for p in list(parameters.values())[num_args:takes] if p.default is inspect.Parameter.empty]
    if required:
        given = "(batch, batch_idx, dataloader_idx)" if num_args == 3 else "(batch, batch_idx)"
        raise TypeError(
            f"{getattr(fn, '__qualname__', fn)} has the argument {required[0].name!r}, which the loop does not give; "
            f"it gives {given}"
        )
    return fn


def refuse_skip(returned: Any) -> None:
    """Raise RuntimeError if `on_train_batch_start` has returned -1, which skips the rest of an epoch in Lightning."""
    if type(returned) is int and returned == -1:
        raise RuntimeError(
            "on_train_batch_start returned -1, which cannot skip the rest of an epoch; give limit_train_batches, or "
            "set trainer.should_stop = True to end training"
        )


def positional(fn: Callable) -> int | None:
    """How many positional arguments `fn` takes; None for any number."""
    parameters = inspect.signature(fn).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return None
    return sum(
        p.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for p in parameters
    )


def all_of(hooks: Calls) -> Callable[..., None] | None:
    """One call for all hooks; None for none."""
    if len(hooks) < 2:
        return hooks[0] if hooks else None

    def call(*args: Any) -> None:
        for hook in hooks:
            hook(*args)

    return call


def in_phase(phase: str, call: Callable[[], None] | None) -> Callable[[], None] | None:
    """`call` in a phase of its own (`set_phase`); None for None."""
    if call is None:
        return None

    def within() -> None:
        step, before = current_phase()
        set_phase(step, phase)
        call()
        set_phase(step, before)

    return within
