"""All that happens on a rank before the loop: from what the user gave to what a step needs."""

from __future__ import annotations

import functools
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lockstep.callbacks._support.printing import safe_print
from lockstep.callbacks.base import Logger
from lockstep.callbacks.guard import fingerprint
from lockstep.strategies.base import split_loss
from lockstep.strategies.data.combined import CombinedLoader, is_nested, is_several
from lockstep.strategies.data.sharded_loader import ShardedLoader, Window
from lockstep.strategies.launch.launcher import current_phase, ends_well, set_phase, shortened
from lockstep.strategies.launch.watchdog import SETTING_UP, where
from lockstep.strategies.mesh.mixed_tensors import explanation
from lockstep.strategies.modules.absent import is_here
from lockstep.strategies.modules.closures import needs_closure
from lockstep.trainer.checkpoint import snapshot
from lockstep.trainer.metrics.store import MetricStore
from lockstep.trainer.metrics.sync import synced_metrics
from lockstep.trainer.module import Module, attach
from lockstep.trainer.run import optimizers as configured
from lockstep.trainer.run import resume as resume_checks
from lockstep.trainer.run.compilation import Compiled
from lockstep.trainer.run.folder import conclude
from lockstep.trainer.run.guards import Guards, check_ownership
from lockstep.trainer.run.hooks import Hooks, overrides, step_function, transfer_of
from lockstep.trainer.run.manual import AutomaticOptimizer, ManualOptimizer
from lockstep.trainer.seeding import derive, seed_everything

if TYPE_CHECKING:
    from lockstep.trainer.datamodule import DataModule
    from lockstep.trainer.progress import Progress
    from lockstep.trainer.trainer import Trainer


@dataclass(frozen=True)
class Sources:
    """Where the loaders of a run come from: what the caller gave, else the DataModule, else the module."""

    loaders: Mapping[str, Any] = field(default_factory=dict)
    """By kind: "train", "val", "test", "predict"."""
    datamodule: DataModule | None = None

    def get(self, module: Module, kind: str) -> Any:
        """The loader, the list or dict of loaders, or None."""
        given = self.loaders.get(kind)
        if given is not None:
            return given
        name = f"{kind}_dataloader"
        found = None
        for owner in (self.datamodule, module):
            method = getattr(owner, name, None)  # None where a user has set it so
            if found is None and method is not None:
                found = method()
        return found


@dataclass
class FitRun:
    """What the loop needs besides the Trainer's own state; made once."""

    train_loader: ShardedLoader
    limit: int | None
    """Batches of each rank in an epoch, where limited."""
    num_batches: int | None
    """Batches of each rank in an epoch, where known."""
    val_loaders: list[ShardedLoader]
    val_every: int | None
    """Batches between validations; None: at the end of epochs."""
    check_val_every_n_epoch: int
    optimizers: dict[str, Optimizer]
    training_step: Callable[[Any, int], Any]
    transfer: Callable[[Any], Any]
    clip: Callable[[Optimizer], Any] | None
    own_step: Callable[[Optimizer, Window], bool] | None
    """How optimizers step where the strategy alone does not know: the module's `optimizer_step`, or a closure."""
    parameters: dict[str, list[nn.Parameter]] | None
    before_backward: Callable[[Tensor], None] | None
    after_backward: Callable[[], None] | None
    reevaluates: bool
    counts_manually: bool
    """Whether ranks first tell each other how many samples a window holds: in manual optimization, if batches may be filtered."""
    guards: Guards
    validated_at: int = -1
    """`global_step` of the last validation."""

    def validates_in(self, epoch: int) -> bool:
        return (epoch + 1) % self.check_val_every_n_epoch == 0

    def epoch_is_over(self, progress: Progress) -> bool:
        return self.num_batches is not None and progress.batches_seen >= self.num_batches


class attached:
    """The life of a run on this rank: processes joined, module and callbacks attached, and all of it undone. Every rank enters it.

    Raises what user code raises, as itself, but for a `sys.exit` that would end the program with code 0: that is a
    RuntimeError. Raises SystemExit(143) or KeyboardInterrupt after a signal.
    """

    def __init__(self, trainer: Trainer, module: Module, sources: Sources, stage: str, ckpt_path: str | None) -> None:
        self._life = _life(trainer, module, sources, stage, ckpt_path)

    def __enter__(self) -> None:
        try:
            self._life.__enter__()
        except RuntimeError as error:
            self._raise(error)

    def __exit__(self, *raised: Any) -> None:
        try:
            self._life.__exit__(*raised)
        except RuntimeError as error:
            self._raise(error)

    def _raise(self, error: RuntimeError) -> NoReturn:
        own = _of_the_user(error)
        raise error if own is error else own from None


@contextmanager
def _life(trainer: Trainer, module: Module, sources: Sources, stage: str, ckpt_path: str | None) -> Iterator[None]:
    trainer.running = True
    process = os.getpid()
    vars(trainer).pop("hooks", None)  # those of an earlier run must not hear of this one's failure
    attach(module, trainer)
    datamodule = sources.datamodule
    compiled: Compiled | None = None
    trainer.signals.catch()
    try:
        trainer.strategy.setup()
        trainer.start_run(module, stage)
        trainer.resumed = trainer.open_checkpoint(ckpt_path)
        for callback in trainer.callbacks:
            callback._module = module
        if datamodule is not None:
            datamodule.trainer = trainer
        trainer.datamodule = datamodule
        owners = [owner for owner in (datamodule, module) if owner is not None]
        if trainer.local_rank == 0:
            for owner in owners:
                owner.prepare_data()
            set_phase(None, SETTING_UP)  # a sign: what took long is over
        trainer.strategy.barrier()
        for owner in owners:
            owner.setup(stage)
        on_meta = trainer.strategy.capabilities.builds_on_meta and trainer.global_rank > 0
        with torch.device("meta") if on_meta else nullcontext():
            module.configure_model()
        attach(module, trainer)  # with what was built just now
        if trainer.compile is not None:
            compiled = Compiled(module, trainer.compile)
        trainer.hooks = Hooks(trainer, module)
        for callback in trainer.callbacks:
            if isinstance(callback, Logger):
                trainer.guarded(callback, callback.setup, trainer, module, stage)
            else:
                callback.setup(trainer, module, stage)
        with synced_metrics(module, trainer.strategy):
            yield
        trainer.finish_saving()
        for owner in owners:
            owner.teardown(stage)
        for callback in trainer.callbacks:
            if isinstance(callback, Logger):
                trainer.guarded(callback, callback.teardown, trainer, module, stage)
            else:
                callback.teardown(trainer, module, stage)
        trainer.strategy.teardown_module(trainer.wrapped)
        if trainer.signals.number:
            raise trainer.signals.error()
        trainer.end_run("success")
    except BaseException as caught:
        if os.getpid() != process:  # a process that user code forked: the run is its parent's
            raise
        if trainer.signals.number and not trainer.signals.deferred and trainer.is_global_zero:
            name = signal.Signals(trainer.signals.number).name
            safe_print(f"stopped by {name}" + (" before the first step" if stage == "fit" else ""), file=sys.stderr)
        trainer.signals.defer()  # another one must not cut short what follows
        error = _early_exit(trainer, caught) or explanation(caught, _entered(caught)) or _of_the_user(caught)
        if not trainer.signals.launched:  # the launcher does it for its ranks
            shortened(error)
        trainer.settle_saving(error)
        hooks = getattr(trainer, "hooks", None)
        for hook in hooks.on_exception if hooks is not None else ():
            try:
                hook(error)
            except Exception as later:  # the first error is the one to show
                error.add_note(f"on_exception failed too: {type(later).__name__}: {str(later)[:500]}") if hasattr(
                    error, "add_note"
                ) else None
        trainer.end_run("interrupted" if isinstance(error, (KeyboardInterrupt, SystemExit)) else "failed", error)
        if error is not caught:
            raise error from (None if error is caught.__cause__ else caught)
        raise
    finally:
        if os.getpid() == process:
            try:
                trainer.running = False
                if compiled is not None:
                    compiled.undo()
                for handle in trainer.user_optimizers:
                    handle.close()
                for callback in trainer.callbacks:
                    callback._module = None
                trainer.strategy.teardown()
            finally:
                trainer.signals.give_back()
    if trainer.signals.number:  # since the account of the run was closed
        late = trainer.signals.error()
        if trainer.log_dir is not None and trainer.is_global_zero:
            conclude(Path(trainer.log_dir), late)
        raise late


def _of_the_user(error: BaseException) -> BaseException:
    """The StopIteration of user code, if `error` is what Python made of it where it left a generator of ours; else `error`."""
    cause = error.__cause__
    if not isinstance(error, RuntimeError) or not isinstance(cause, StopIteration) or cause.__traceback__ is None:
        return error
    ours = Path(__file__).parents[2] in Path(cause.__traceback__.tb_frame.f_code.co_filename).parents
    return cause if ours and str(error) == "generator raised StopIteration" else error


def _entered(error: BaseException) -> str:
    """The first function outside of this package that an error came through, such as a hook."""
    root, trace = Path(__file__).parents[2], error.__traceback__
    while trace is not None:
        code, owner = trace.tb_frame.f_code, trace.tb_frame.f_locals.get("self")
        if root not in Path(code.co_filename).parents:
            name = code.co_name.strip("<>")
            return name if owner is None else f"{type(owner).__name__}.{name}"
        trace = trace.tb_next
    return "a hook"


def _early_exit(trainer: Trainer, error: BaseException) -> RuntimeError | None:
    """What to raise in place of a `sys.exit` within the run that would end the program with code 0; None for anything else."""
    if not isinstance(error, SystemExit) or not ends_well(error):
        return None
    place = where(trainer.global_rank, *current_phase())
    return RuntimeError(
        f"sys.exit({'' if error.code is None else error.code}) was called on {place} before the run was done, and exit code 0 "
        "says that it is; set trainer.should_stop = True to end training early, or exit with another code"
    )


def fit(trainer: Trainer, module: Module, sources: Sources) -> FitRun:
    """Place the model, build loaders and optimizers, restore what is to be resumed. Every rank calls it."""
    strategy, arguments = trainer.strategy, trainer.arguments
    seed = trainer.run_seed
    checkpoint = trainer.resumed
    if checkpoint is not None:
        seed = trainer.run_seed = checkpoint.state["seed"]

    overfit = arguments.overfit_batches
    source = combined(sources.get(module, "train"))
    if source is None:
        raise ValueError(
            "fit needs training data: give train_dataloaders, or a DataModule or Module with train_dataloader"
        )
    train_loader = strategy.shard_loader(
        source,
        seed=derive(seed, "train"),
        shuffle=False if overfit else None,
        accumulate=trainer.accumulate_grad_batches,
        split=arguments.split_batches,
    )
    trainer.train_dataloader = train_loader
    if checkpoint is not None:
        progress = checkpoint.state["progress"]
        done = train_loader.resume_windows(
            checkpoint.state["windows"], progress["samples_seen"], whole=not module.automatic_optimization
        )
        if done is not None and trainer.is_global_zero:
            safe_print(done, file=sys.stderr)
    total = _length(train_loader)
    limit = limit_of(
        overfit or arguments.limit_train_batches, total, "overfit_batches" if overfit else "limit_train_batches"
    )
    num_batches = total if limit is None else limit if total is None else min(limit, total)
    if num_batches == 0:
        raise ValueError("the training loader has no batch: its dataset is empty, or drop_last drops its only batch")
    trainer.num_training_batches = math.inf if num_batches is None else num_batches
    has_step = overrides(module, "validation_step", Module)
    val_sources = (
        (source if overfit else sources.get(module, "val")) if has_step and arguments.limit_val_batches != 0 else None
    )
    val_loaders = evaluation_loaders(trainer, val_sources, "val", overfit)
    trainer.val_dataloaders = val_loaders
    windows = train_loader.num_windows(limit)
    trainer.windows_per_epoch = windows

    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError(
            f"{type(module).__name__} has no trainable parameter; give it layers, or set requires_grad on what is to be trained"
        )
    if checkpoint is not None:
        snapshot.load_extra(trainer, checkpoint)
    trainer.trainable_at_start = resume_checks.trainability(module)
    trainer.wrapped = strategy.setup_module(module)
    named, schedulers = configured.parse(module.configure_optimizers())
    if module.automatic_optimization and not named:
        raise ValueError(
            f"{type(module).__name__}.configure_optimizers returned no optimizer; return one, or set automatic_optimization = False"
        )
    for config in schedulers:
        if not callable(getattr(config.scheduler, "step", None)) and not overrides(module, "lr_scheduler_step", Module):
            name, scheduler = type(module).__name__, type(config.scheduler).__name__
            raise TypeError(
                f"{scheduler} is no scheduler of torch: it has no step, so {name} needs lr_scheduler_step; define it"
            )
    for config in schedulers:
        driven = getattr(config.scheduler, "optimizer", None)
        if isinstance(driven, Optimizer) and not any(driven is optimizer for optimizer in named.values()):
            raise ValueError(
                f"{type(config.scheduler).__name__} drives a {type(driven).__name__} that {type(module).__name__}.configure_optimizers "
                "did not return, so its rates would change nothing; build the scheduler on an optimizer that is returned"
            )
    if module.automatic_optimization:
        check_ownership(module, named)
    trainer.configured = resume_checks.configured(named, schedulers)
    if checkpoint is not None:
        snapshot.check_configured(trainer, checkpoint)
    closing = {name for name, optimizer in named.items() if module.automatic_optimization and needs_closure(optimizer)}
    for name in sorted(closing):
        if not isinstance(named[name], LBFGS) and any(hasattr(p, "device_mesh") for p in module.parameters()):
            raise ValueError(
                f"{type(named[name]).__name__} needs a closure and moves parameters within its step, and {type(strategy).__name__} cuts "
                "these over ranks, where its norms would be those of pieces; use strategy='ddp', or another optimizer"
            )
    named = strategy.setup_optimizers(trainer.wrapped, named)
    trainer.named_optimizers, trainer.lr_scheduler_configs = named, schedulers
    trainer.user_optimizers = [
        (AutomaticOptimizer if module.automatic_optimization else ManualOptimizer)(optimizer, trainer)
        for optimizer in named.values()
    ]
    trainer.metrics = MetricStore(module)
    trainer.metrics.noticed = trainer.noticed_names
    if strategy.topology.data_rank > 0:  # noise of its own; data rank 0 goes on with the process's stream
        seed_everything(derive(seed, "noise", strategy.topology.data_rank))
    if checkpoint is not None:
        snapshot.restore_trainability(trainer, module, checkpoint)
        snapshot.restore(trainer, module, checkpoint)
    frozen = [child for child in module.modules() if not child.training] if module.training else []
    module.train(True)  # as an override without a default expects
    for child in frozen:  # by the user, in a module that trains
        child.training = False

    strategy.adopt_changes(trainer.wrapped)  # what configure_optimizers and on_load_checkpoint did
    hooks, parameters = trainer.hooks, None
    if len(named) > 1 and module.automatic_optimization:
        parameters = {
            name: [p for group in optimizer.param_groups for p in group["params"]] for name, optimizer in named.items()
        }
    reevaluates = overrides(module, "optimizer_step", Module) or bool(closing)
    training_step = step_function(module.training_step, 2)
    transfer = transfer_of(module, trainer.datamodule, strategy.to_device, strategy.topology.device)
    return FitRun(
        train_loader=train_loader,
        limit=limit,
        num_batches=num_batches,
        val_loaders=val_loaders,
        val_every=_validation_interval(trainer, num_batches) if val_loaders else None,
        check_val_every_n_epoch=arguments.check_val_every_n_epoch or 1,
        optimizers=named,
        training_step=training_step,
        transfer=strategy.to_device if transfer is None else lambda batch: transfer(batch, 0),
        clip=_clip(trainer, module),
        own_step=_own_step(trainer, module, training_step, closing),
        parameters=parameters,
        before_backward=_all_of(hooks.on_before_backward),
        after_backward=_all_of(hooks.on_after_backward),
        reevaluates=reevaluates,
        counts_manually=not module.automatic_optimization and train_loader.may_filter,
        guards=Guards(
            trainer, module, watches=module.automatic_optimization and not overrides(module, "optimizer_step", Module)
        ),
    )


def evaluation_loaders(trainer: Trainer, sources: Any, kind: str, overfit: float | int = 0) -> list[ShardedLoader]:
    """The sharded loaders of an evaluation, in order; sets the Trainer's number of batches of each."""
    arguments = trainer.arguments
    loaders = loaders_of(sources)
    shuffle = False if overfit else None
    sharded = [
        _shared_out(trainer, loader, derive(trainer.run_seed, kind, i), shuffle) for i, loader in enumerate(loaders)
    ]
    limits = {
        "val": arguments.limit_val_batches,
        "test": arguments.limit_test_batches,
        "predict": arguments.fast_dev_run or None,
    }
    wanted = overfit or limits[kind]
    name = "overfit_batches" if overfit else f"limit_{kind}_batches"
    trainer.evaluation_limits[kind] = [limit_of(wanted, _length(loader), name) for loader in sharded]
    size = trainer.strategy.topology.data_size
    for i, (loader, limit) in enumerate(zip(sharded, trainer.evaluation_limits[kind], strict=True)):
        if arguments.split_batches and not loader.splits and limit is not None and size > 1 and kind != "predict":
            if limit % size:
                raise ValueError(
                    f"{name}={wanted} is {limit} batches in all with split_batches=True, but those of loader {i} cannot be cut and "
                    f"do not share out over {size} ranks; give a multiple of {size} or a DataLoader with a batch_size"
                )
            trainer.evaluation_limits[kind][i] = limit // size
    counts = [math.inf if (n := _length(loader)) is None else n for loader in sharded]
    trainer.evaluation_batches[kind] = [
        n if limit is None else min(n, limit) for n, limit in zip(counts, trainer.evaluation_limits[kind], strict=True)
    ]
    return sharded


def _shared_out(trainer: Trainer, loader: Any, seed: int, shuffle: bool | None) -> ShardedLoader:
    """A loader to evaluate; with `split_batches` its batches are cut over ranks where they can be, as in training."""
    if trainer.arguments.split_batches and trainer.strategy.topology.data_size > 1:
        with suppress(ValueError):  # its batches are not ours to cut
            return trainer.strategy.shard_loader(loader, seed=seed, shuffle=shuffle, split=True)
    return trainer.strategy.shard_loader(loader, seed=seed, shuffle=shuffle)


def loaders_of(source: Any) -> list[Any]:
    """The loaders in what a user gives: None, a loader, or a list or dict of loaders, nested or not."""
    if source is None:
        return []
    if is_several(source):
        return [
            loader
            for item in (source.values() if isinstance(source, Mapping) else source)
            for loader in (loaders_of(item) if is_nested(item) else [item])
        ]
    return [] if isinstance(source, (list, tuple)) and not source else [source]


def combined(source: Any) -> Any:
    """A dict or list of training loaders as one loader; anything else as it is."""
    return CombinedLoader(source) if is_several(source) else source


def limit_of(wanted: float | int | None, total: int | None, name: str) -> int | None:
    """Batches that a limit allows: a whole number as it is, a fraction of the total; None for no limit."""
    if wanted is None or (isinstance(wanted, float) and wanted == 1.0):
        return None
    if isinstance(wanted, int):
        return wanted
    if total is None:
        raise ValueError(
            f"{name}={wanted} is a fraction, which needs a loader of known length; give a number of batches"
        )
    limit = int(total * wanted)
    if limit == 0 and wanted > 0:
        raise ValueError(
            f"{name}={wanted} of {total} batches is less than one; give at least {1 / total:.4f} or a number of batches"
        )
    return limit


def _validation_interval(trainer: Trainer, num_batches: int | None) -> int | None:
    wanted = trainer.arguments.val_check_interval
    if wanted is None or (isinstance(wanted, float) and wanted == 1.0):
        return None
    if isinstance(wanted, int):
        if trainer.arguments.check_val_every_n_epoch is not None and num_batches is not None and wanted > num_batches:
            raise ValueError(
                f"val_check_interval={wanted} is more than the {num_batches} batches of an epoch; "
                "lower it, or set check_val_every_n_epoch=None to count across epochs"
            )
        return wanted
    if num_batches is None:
        raise ValueError(
            f"val_check_interval={wanted} is a fraction, which needs a training loader of known length; give a number of batches"
        )
    return max(1, int(num_batches * wanted))


def _clip(trainer: Trainer, module: Module) -> Callable[[Optimizer], Any] | None:
    value, algorithm = trainer.arguments.gradient_clip_val, trainer.arguments.gradient_clip_algorithm
    if overrides(module, "configure_gradient_clipping", Module):
        return functools.partial(
            module.configure_gradient_clipping, gradient_clip_val=value, gradient_clip_algorithm=algorithm
        )
    if value is None:
        return None
    strategy, wrapped = trainer.strategy, trainer.wrapped
    return lambda optimizer: strategy.clip_gradients(wrapped, optimizer, value, algorithm)


def _own_step(
    trainer: Trainer, module: Module, training_step: Callable, closing: set[str]
) -> Callable[[Optimizer, Window], bool] | None:
    """How to step optimizers where the module has its own way, or those in `closing` need a closure."""
    strategy = trainer.strategy
    own = overrides(module, "optimizer_step", Module)
    if not own and not closing:
        return None

    names = {id(optimizer): name for name, optimizer in trainer.named_optimizers.items()}
    handles = dict(zip(names, trainer.user_optimizers, strict=True))

    def step(optimizer: Optimizer, window: Window) -> bool:
        name = names[id(optimizer)]
        looks = name in closing and not isinstance(optimizer, LBFGS)
        before = (
            _state_of(optimizer) if looks else []
        )  # reads all parameters, for optimizers that move them within a step
        calls = 0

        def closure() -> Tensor:
            nonlocal calls
            calls += 1
            again = calls > 1 or all(p.grad is None for group in optimizer.param_groups for p in group["params"])
            if looks:
                changed = torch.tensor(float(again or _state_of(optimizer) != before))
                again = bool(strategy.all_reduce(changed, "max"))
            with torch.enable_grad():
                return window_loss(trainer, window, training_step, name, again)

        if own:
            handles[id(optimizer)].is_open = True
            try:
                module.optimizer_step(
                    trainer.current_epoch, window.micro_batches[-1].batch_idx, handles[id(optimizer)], closure
                )
            finally:
                handles[id(optimizer)].is_open = False
            return trainer.manually_stepped
        return handles[id(optimizer)].take(closure if name in closing else None)

    return step


def _state_of(optimizer: Optimizer) -> list[int]:
    """A number for each parameter and gradient of this rank, which changes with its bits."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if is_here(p)]
    tensors = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
    return [fingerprint(t) for t in tensors if getattr(t, "_local_tensor", t).numel()]


def window_loss(trainer: Trainer, window: Window, training_step: Callable, name: str, again: bool) -> Tensor:
    """The loss of a window for the optimizer `name` that asks for it, equal on all ranks; `again` computes it and its gradient anew."""
    if again:
        logged, trainer.metrics = trainer.metrics, MetricStore()
        logged_weight = logged.weight
        try:
            for optimizer in trainer.optimizers:
                optimizer.zero_grad()
            trainer.strategy.forward_backward(trainer.wrapped, training_step, window)
        finally:
            trainer.metrics, trainer.metrics.weight = logged, logged_weight
    total = torch.zeros((), dtype=torch.float64)
    count = 0.0
    for micro_batch in window.micro_batches:
        output = micro_batch.output
        own = output[name] if isinstance(output, Mapping) and "loss" not in output else output
        value, numerator, counted = split_loss(own, micro_batch.num_samples)
        if value is not None:
            total = total + value.detach().double().cpu() * numerator
            count += float(counted)
    both = trainer.strategy.all_reduce(torch.stack([total, torch.tensor(count, dtype=torch.float64)]))
    return both[0] / both[1]


def _all_of(hooks: tuple[Callable, ...]) -> Callable | None:
    if len(hooks) < 2:
        return hooks[0] if hooks else None

    def call(*args: Any) -> None:
        for hook in hooks:
            hook(*args)

    return call


def _length(loader: ShardedLoader) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None
