"""Searches before a run: each trains the module in processes of its own, and sets what it has found."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from lockstep.callbacks.base import Callback
from lockstep.callbacks.guard import Guard
from lockstep.callbacks.tuning.batch_size_finder import BatchSizeFinder
from lockstep.callbacks.tuning.lr_finder import LRFinder, LRSweep, RisingRate
from lockstep.strategies.checkpoint_state import unpack
from lockstep.strategies.launch import environment
from lockstep.strategies.launch.launcher import RankFailure
from lockstep.strategies.launch.payload import CannotSend
from lockstep.strategies.modules.parameter_hooks import ATTRIBUTES, copy_attributes
from lockstep.trainer.checkpoint.manifest import refused
from lockstep.trainer.seeding import rng_state, set_rng_state
from lockstep.trainer.setup import start

if TYPE_CHECKING:
    from lockstep.trainer.module import Module
    from lockstep.trainer.run.state import RunState
    from lockstep.trainer.setup.loaders import Sources
    from lockstep.trainer.trainer import Trainer

_log = logging.getLogger("lockstep")


def prepare(run: RunState, module: Module, sources: Sources, ckpt_path: str | None) -> None:
    """Run the finders among the callbacks, or give a run that will be resumed what they had found for it. Every process
    that called `fit` calls it, before ranks are launched."""
    finders = [each for each in run.callbacks if isinstance(each, BatchSizeFinder | LRFinder)]
    checkpoint = start.will_begin_with(run, module, ckpt_path) if finders else None
    if checkpoint is None:
        if ckpt_path != "last":  # which is refused where there is none
            search(run, module, sources)
        return
    for finder in finders:
        finder.result = None
        with refused(checkpoint.path):
            saved = checkpoint.state.get("callbacks", {}).get(finder.state_key)
            if saved:
                finder.load_state_dict(unpack(saved, checkpoint.read))
        if finder.result is None:
            _log.warning(
                f"checkpoint {checkpoint.path} does not hold what {type(finder).__name__} found for its run, which "
                "continues with what module and DataModule have now"
            )
        elif isinstance(finder, BatchSizeFinder):
            _write(*_place_of_size(finder, module, sources), finder.result)
        elif finder.update_attr and (rate := finder.result.suggestion()) is not None:
            _write(*_place_of_rate(finder, module), rate)


def search(run: RunState, module: Module, sources: Sources) -> None:
    """Run the finders among the callbacks: batch sizes first, as rates depend on them. Every process that called
    `fit` calls it, before ranks are launched."""
    for callback in run.callbacks:
        if isinstance(callback, BatchSizeFinder):
            callback.result = _find_batch_size(run, callback, module, sources)
    for callback in run.callbacks:
        if isinstance(callback, LRFinder):
            callback.result = _find_rate(run, callback, module, sources)


def _find_rate(run: RunState, finder: LRFinder, module: Module, sources: Sources) -> LRSweep:
    owner, name = _place_of_rate(finder, module) if finder.update_attr else (None, "")
    recorded = RisingRate(finder)
    if not run.strategy.capabilities.synchronous:
        raise ValueError(
            f"LRFinder needs the loss of each step over all ranks, and those of {run.strategy.name} do not "
            "meet in every step; search with strategy='ddp', and give the rate"
        )
    _trial(run, module, sources, finder.num_training_steps, [recorded, Guard(non_finite="skip", max_in_a_row=1)])
    sweep = recorded.sweep
    suggestion = sweep.suggestion()
    if finder.plot is not None:
        sweep.plot(finder.plot)
    if suggestion is None:
        kept = f", so {name} stays {_read(owner, name)!r}" if finder.update_attr else ""
        _log.warning(
            f"LRFinder found no learning rate in {len(sweep.lrs)} steps{kept}; raise num_training_steps or lower max_lr"
        )
    elif finder.update_attr:
        _log.info(f"LRFinder: {name} {_read(owner, name)!r} → {suggestion!r}")
        _write(owner, name, suggestion)
    return sweep


def _find_batch_size(run: RunState, finder: BatchSizeFinder, module: Module, sources: Sources) -> int:
    if sources.loaders.get("train") is not None:
        raise ValueError(
            "BatchSizeFinder cannot change the batch size of a loader that was given to fit; define train_dataloader "
            f"on the module or a DataModule, with {finder.batch_arg_name} as an attribute"
        )
    world = environment.detect()
    if world is not None and world.world_size > 1:
        raise ValueError(
            "BatchSizeFinder cannot search under a launcher that has started several ranks, as a rank that runs out "
            "of memory ends the job; find the size with devices=1, and set it"
        )
    owner, name = _place_of_size(finder, module, sources)
    size, fits, fails = finder.init_val, 0, None
    for _ in range(finder.max_trials):
        batches = _batches_that_fit(run, finder, module, sources, owner is module, name, size)
        if batches is None:
            fails = size
        else:
            fits = size
        if batches is not None and batches <= 1:
            break  # the whole dataset is one batch
        if fails is None:
            size = fits * 2
        elif finder.mode == "power" or fails - fits <= 1:
            break
        else:
            size = (fits + fails) // 2
    if not fits:
        raise ValueError(f"a batch of init_val={finder.init_val} does not fit into memory; set a lower init_val")
    found = max(1, int(fits * (1 - finder.margin)))
    _log.info(f"BatchSizeFinder: {name} {_read(owner, name)!r} → {found}")
    _write(owner, name, found)
    return found


def _batches_that_fit(
    run: RunState,
    finder: BatchSizeFinder,
    module: Module,
    sources: Sources,
    on_module: bool,
    name: str,
    size: int,
) -> float | None:
    """The batches of an epoch at batch size `size`, whatever number limits them; None if it does not fit into memory.

    A limit that is a fraction holds: a larger batch must leave it one.
    """
    whole = {"limit_train_batches": None, "overfit_batches": 0}
    unlimited = {name: value for name, value in whole.items() if isinstance(getattr(run.arguments, name), int)}
    owner = module if on_module else sources.datamodule
    before = _read(owner, name)
    _write(owner, name, size)
    try:
        trainer = _trial(run, module, sources, finder.steps_per_trial, [], **unlimited)
    except BaseException as error:
        if not is_out_of_memory(error):
            raise
        del error
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return None
    finally:
        _write(owner, name, before)
    return trainer._run.num_training_batches


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of a device, of the host or of a rank ran out."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, RankFailure):
        return error.signal == "SIGKILL"  # most likely of the kernel's out-of-memory killer
    words = ("out of memory", "not enough memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def _trial(
    run: RunState, module: Module, sources: Sources, steps: int, callbacks: list[Callback], **limits: Any
) -> Trainer:
    """Fit `module` for `steps` optimizer steps, in processes of its own, in a run that writes and shows nothing; return
    its Trainer. Nothing of this process is moved; on ranks that a launcher has started copies are trained."""
    loaders, datamodule = sources.loaders.get("train"), sources.datamodule
    if not (is_apart := environment.detect() is None):
        module, datamodule, loaders = _copied(module), _copied(datamodule), _copied_loaders(loaders)
    given = {field.name: getattr(run.arguments, field.name) for field in fields(run.arguments)}
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    unused = dict.fromkeys(("min_epochs", "min_steps", "max_time", "profiler"))
    ours = next(kind for kind in type(run.trainer).__mro__ if kind.__module__.startswith("lockstep."))
    trainer = ours(  # as the user's class may take other arguments
        **given
        | quiet
        | unused
        | {
            "max_steps": steps,
            "max_epochs": steps,
            "limit_val_batches": 0,
            "num_sanity_val_steps": 0,
            "max_restarts": 0,
        }
        | {
            "callbacks": [*callbacks, _Unvalidated()],
            "log_every_n_steps": 1,
            "accumulate_grad_batches": run.accumulate_grad_batches,
        }
        | limits
    )
    trainer._run.apart = is_apart
    random, own = rng_state(), vars(module).get("configure_callbacks")
    vars(module)["configure_callbacks"] = list  # none, as those of the Trainer have no part in it either
    try:
        trainer.fit(module, loaders, datamodule=datamodule)
    except CannotSend as error:
        raise TypeError(f"LRFinder and BatchSizeFinder search in processes of their own. {error}") from error
    finally:
        if own is None:
            del vars(module)["configure_callbacks"]
        else:
            vars(module)["configure_callbacks"] = own
        set_rng_state(random)
    return trainer


class _Unvalidated(Callback):
    """Lets schedulers that monitor what validation logs stay as they are, as a trial does not validate."""

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        run = trainer._run
        run.schedulers = [replace(config, strict=False) for config in run.schedulers]


def _copied(owner: Any) -> Any:
    """A deep copy of a module or DataModule, but for the Trainer that it belongs to."""
    trainer = getattr(owner, "__dict__", {}).get("_trainer") or getattr(owner, "__dict__", {}).get("trainer")
    memo: dict[int, Any] = {} if trainer is None else {id(trainer): trainer}
    copied = _deep_copy(owner, memo)
    of_parameters = zip(owner.parameters(), copied.parameters(), strict=True) if isinstance(owner, nn.Module) else ()
    for original, other in of_parameters:  # torch's copy of a parameter has neither
        copy_attributes(original, other)
        for name in ATTRIBUTES:
            if hooks := getattr(original, name):
                setattr(other, name, _deep_copy(hooks, memo))
    return copied


def _copied_loaders(loaders: Any) -> Any:
    """Loaders for a trial, which moves no position, sampler or stream of the run's. Map-style datasets are shared."""
    shared: dict[int, Any] = {}
    for loader in _each(loaders):
        dataset = getattr(loader, "dataset", None)
        if dataset is not None and not isinstance(dataset, IterableDataset):
            shared[id(dataset)] = dataset
    return _deep_copy(loaders, shared)


def _each(loaders: Any) -> Iterator[Any]:
    """The loaders in lists and dicts of them."""
    if isinstance(loaders, (list, tuple, dict)):
        for inner in loaders.values() if isinstance(loaders, dict) else loaders:
            yield from _each(inner)
    else:
        yield loaders


def _deep_copy(value: Any, shared: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, shared)
    except Exception as error:
        raise ValueError(
            f"LRFinder and BatchSizeFinder train copies, but {type(value).__name__} cannot be copied ({error}); "
            "make it copyable, or search in a program of its own"
        ) from error


def _place_of_rate(finder: LRFinder, module: Module) -> tuple[Any, str]:
    return _holder(finder, [module], (finder.attr_name,) if finder.attr_name else ("lr", "learning_rate"))


def _place_of_size(finder: BatchSizeFinder, module: Module, sources: Sources) -> tuple[Any, str]:
    owners = [module] if sources.datamodule is None else [sources.datamodule, module]
    return _holder(finder, owners, (finder.batch_arg_name,))


def _holder(finder: Callback, owners: Sequence[Any], names: Sequence[str]) -> tuple[Any, str]:
    """Which of `owners` has an attribute or hyperparameter of one of `names`, and which."""
    for owner in owners:
        for name in names:
            if hasattr(owner, name) or name in owner.hparams:
                return owner, name
    raise ValueError(
        f"{type(finder).__name__} found no attribute or hyperparameter {' or '.join(names)} on "
        f"{' or '.join(type(owner).__name__ for owner in owners)} to set; add one that the code uses, or name it"
    )


def _read(owner: Any, name: str) -> Any:
    return getattr(owner, name) if hasattr(owner, name) else owner.hparams[name]


def _write(owner: Any, name: str, value: Any) -> None:
    if name in owner.hparams:
        owner.hparams[name] = value
    if hasattr(owner, name):
        setattr(owner, name, value)
