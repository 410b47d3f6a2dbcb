"""The set-up of `fit` on a rank: from loaders, a module and a checkpoint to what the loop needs."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep._lazy import without_collector
from lockstep.callbacks.base import Callback
from lockstep.strategies.data.randomness import Randomness
from lockstep.strategies.data.sharded_loader import ShardedLoader, Window
from lockstep.strategies.launch.phase import AFTER_BACKWARD
from lockstep.strategies.launch.rng import kept_streams
from lockstep.strategies.optimizers.closures import needs_closure
from lockstep.trainer.checkpoint import snapshot
from lockstep.trainer.metrics.store import MetricStore
from lockstep.trainer.module import Module
from lockstep.trainer.run import saving
from lockstep.trainer.run.attributes import Changes
from lockstep.trainer.run.guards import Guards, UsersBackward, check_ownership
from lockstep.trainer.run.hooks import all_of, in_phase, overrides, training_step_of, transfer_of
from lockstep.trainer.run.manual import AutomaticOptimizer, ManualOptimizer
from lockstep.trainer.seeding import derive, seed_everything
from lockstep.trainer.setup import checks, frozen, held_parameters, optimizers, resume, start_hooks
from lockstep.trainer.setup.loaders import Sources, combined, evaluation_loaders, length_of, limit_of
from lockstep.trainer.setup.optimizers import SchedulerConfig
from lockstep.trainer.setup.own_steps import own_step

if TYPE_CHECKING:
    from lockstep.callbacks._support.parameter_state import ParameterState
    from lockstep.trainer.progress import Progress
    from lockstep.trainer.run.state import RunState

_log = logging.getLogger("lockstep")


@dataclass
class FitLoop:
    """What the loop of one fit needs besides the RunState; made once."""

    train_loader: ShardedLoader
    limit: int | None
    """Batches of each rank in an epoch, where limited."""
    num_batches: int | None
    """Batches of each rank in an epoch, where known."""
    val_loaders: list[ShardedLoader]
    val_every: int | None
    """Batches between validations; None: at the end of epochs."""
    check_val_every_n_epoch: int
    training_step: Callable[[Any, int], Any]
    transfer: Callable[[Any], Any]
    clip: Callable[[Optimizer], Any] | None
    own_step: Callable[[Optimizer, Window], bool] | None
    """How optimizers step where the strategy alone does not know: the module's `optimizer_step`, or a closure."""
    parameters: dict[str, list[nn.Parameter]] | None
    before_backward: Callable[[Tensor], None] | None
    backward: UsersBackward | None
    after_backward: Callable[[], None] | None
    reevaluates: bool
    counts_manually: bool
    """Whether ranks first tell each other how many samples a window holds: in manual optimization, if batches may be
    filtered."""
    guards: Guards
    reload: Callable[[FitLoop], None] | None
    """Makes the loaders again if that is due in this epoch."""
    windows_seen: int = 0
    """Accumulation windows of this fit."""
    learned: bool = False
    """Whether any of them had a loss."""

    def validates_in(self, epoch: int) -> bool:
        return (epoch + 1) % self.check_val_every_n_epoch == 0

    def epoch_is_over(self, progress: Progress) -> bool:
        return self.num_batches is not None and progress.batches_seen >= self.num_batches


def fit(run: RunState, module: Module, sources: Sources) -> FitLoop:
    """Wrap the model, build loaders and optimizers, restore what is resumed. Every rank calls it."""
    strategy, checkpoint = run.strategy, run.resumed
    if checkpoint is not None:
        now = strategy.virtual_ranks if strategy.capabilities.exact else 0
        resume.check_virtual_ranks(checkpoint.path, checkpoint.state.get("virtual_ranks", 0), now)
        snapshot.restore_datamodule(run, checkpoint)
    reload = Reload.of(run, module, sources)
    with nullcontext() if reload is None else reload.at_its_epoch():
        source = combined(sources.get(module, "train"))
        loader, limit, num_batches = train_loader(run, module, source)
        val_loaders = _val_loaders(run, module, sources, source)
    checks.trainable(run, module)
    run.attributes = Changes(module, run.callbacks)
    if checkpoint is not None:
        with kept_streams():  # of which a new run, which does not call it, draws nothing
            snapshot.load_extra(run, checkpoint)
    held_parameters.set_up(run, module)
    with without_collector():  # the first optimizer of a process imports torch's compiler
        named, schedulers = optimizers.parse(module.configure_optimizers())
    run.trainable_at_start = resume.trainability(module)
    resume.check_ranks(strategy, module, named, schedulers, "in configure_optimizers return the same")
    strategy.of_run = run.trainer
    closing, unowned = set_up_optimizers(run, module, named, schedulers)
    run.parameter_states = _parameter_states(run, module)
    run.had_parameter_states = bool(run.parameter_states)
    exact = run.shares is not None or strategy.capabilities.local_steps
    run.metrics = MetricStore(module, exact=exact, several=strategy.topology.data_size > 1)
    run.metrics.noticed = run.noticed_names
    if run.shares is not None:
        run.shares.outside("start")
    elif strategy.topology.data_rank > 0:  # a stream of its own; data rank 0 continues with the process's stream
        seed_everything(derive(run.seed, "noise", strategy.topology.data_rank))
    frozen.note(run, module)
    run.attributes.begin([*named.values(), *(config.scheduler for config in schedulers)])
    run.start_hooks = start_hooks.StartHooks() if start_hooks.is_needed(run) else None
    if checkpoint is not None:
        snapshot.restore(run, module, checkpoint)
    _train_mode(module)
    strategy.adopt_changes(run.wrapped)  # what configure_optimizers and on_load_checkpoint did

    training_step = training_step_of(module)
    transfer = transfer_of(module, run.datamodule, strategy.to_device, strategy.topology.device)
    return FitLoop(
        train_loader=loader,
        limit=limit,
        num_batches=num_batches,
        val_loaders=val_loaders,
        val_every=validation_interval(run, num_batches) if val_loaders else None,
        check_val_every_n_epoch=run.arguments.check_val_every_n_epoch or 1,
        training_step=training_step,
        transfer=strategy.to_device if transfer is None else lambda batch: transfer(batch, 0),
        clip=_clip(run, module),
        before_backward=all_of(run.hooks.on_before_backward),
        backward=UsersBackward(module.backward) if overrides(module, "backward", Module) else None,
        after_backward=in_phase(AFTER_BACKWARD, all_of(run.hooks.on_after_backward)),
        counts_manually=not module.automatic_optimization and loader.may_filter,
        reload=reload,
        **of_optimizers(run, module, training_step, closing, unowned),
    )


@dataclass
class Reload:
    """`reload_dataloaders_every_n_epochs`."""

    run: RunState
    module: Module
    sources: Sources
    every: int
    made_for: int
    """The epoch in which the loaders were due."""

    @classmethod
    def of(cls, run: RunState, module: Module, sources: Sources) -> Reload | None:
        every, progress = run.arguments.reload_dataloaders_every_n_epochs, run.progress
        if not every:
            return None
        if sources.loaders.get("train") is not None and sources.loaders.get("val") is not None:
            raise ValueError(
                f"reload_dataloaders_every_n_epochs={every} calls train_dataloader and val_dataloader again, but "
                "loaders were given to fit; define these methods in the Module or a DataModule"
            )
        epoch = progress.current_epoch if run.resumed is None else run.resumed.state["progress"]["current_epoch"]
        return cls(run, module, sources, every, epoch - epoch % every)

    @contextmanager
    def at_its_epoch(self) -> Iterator[None]:
        """While it lasts `trainer.current_epoch` is the epoch in which the loaders of a resumed run were due."""
        progress = self.run.progress
        now = progress.current_epoch
        progress.current_epoch = now if self.run.resumed is None else self.made_for
        with self._drawing():
            yield
        progress.current_epoch = now

    def _drawing(self) -> AbstractContextManager[None]:
        """What loader methods draw within is the same on all ranks and in a resumed run; at the beginning of a run the
        streams of its `setup` are."""
        return Randomness(derive(self.run.seed, "loaders", self.made_for)) if self.made_for else nullcontext()

    def __call__(self, loop: FitLoop) -> None:
        run, epoch = self.run, self.run.progress.current_epoch
        if epoch - epoch % self.every == self.made_for:
            return
        self.made_for = epoch - epoch % self.every
        plan = run.train_dataloader.plan
        with self._drawing():
            source = combined(self.sources.get(self.module, "train"))
            loop.train_loader, loop.limit, loop.num_batches = train_loader(run, self.module, source, plan)
            loop.val_loaders = _val_loaders(run, self.module, self.sources, source)
        loop.val_every = validation_interval(run, loop.num_batches) if loop.val_loaders else None


def train_loader(
    run: RunState, module: Module, source: Any, plan: Mapping[str, Any] | None = None
) -> tuple[ShardedLoader, int | None, int | None]:
    """The sharded training loader, the limit of its batches in an epoch, and their number, if known.

    `plan` is that of the loader whose place it takes in this run.
    """
    arguments, checkpoint = run.arguments, run.resumed
    if source is None:
        raise ValueError(
            "fit needs training data: give train_dataloaders, or a DataModule or Module with train_dataloader"
        )
    overfit = arguments.overfit_batches
    accumulate = run.accumulate_grad_batches
    if plan is None:
        run.accumulation_at_start = accumulate
        saved = None if checkpoint is None else checkpoint.state.get("accumulation")
        if checkpoint is not None and saved is not None and saved["at_start"] == accumulate:  # hooks had changed it
            accumulate, run.accumulate_grad_batches = checkpoint.state["windows"]["accumulate"], saved["now"]
    loader = run.strategy.shard_loader(
        source,
        seed=derive(run.seed, "train"),
        shuffle=False if overfit else None,
        accumulate=accumulate,
        split=arguments.split_batches,
    )
    run.train_dataloader = loader
    if plan is not None:
        loader.resume_windows(plan, 0, whole=not module.automatic_optimization)
    elif checkpoint is not None:
        seen = checkpoint.state["progress"]["samples_seen"]
        done = loader.resume_windows(checkpoint.state["windows"], seen, whole=not module.automatic_optimization)
        if done is not None and run.is_global_zero:
            _log.info(done)
    return loader, *_measured(run, loader)


def _measured(run: RunState, loader: ShardedLoader) -> tuple[int | None, int | None]:
    """The limit of the batches in an epoch, and their number, if known."""
    total, overfit = length_of(loader), run.arguments.overfit_batches
    name = "overfit_batches" if overfit else "limit_train_batches"
    limit = limit_of(overfit or run.arguments.limit_train_batches, total, name)
    num_batches = total if limit is None else limit if total is None else min(limit, total)
    if num_batches == 0:
        raise ValueError("the training loader has no batch: its dataset is empty, or drop_last drops its only batch")
    run.num_training_batches = math.inf if num_batches is None else num_batches
    run.windows_per_epoch = loader.num_windows(limit)
    return limit, num_batches


def change_accumulation(run: RunState, loop: FitLoop) -> None:
    """Make the windows that follow of `run.accumulate_grad_batches`. Every rank calls it at the start of an epoch.

    Raises ValueError in manual optimization, and if the strategy cannot change it during a run.
    """
    assert run.module is not None
    number = run.accumulate_grad_batches
    refused = run.strategy.capabilities.refuses.get("accumulation_schedule")
    if not run.module.automatic_optimization:
        refused = f"{type(run.module).__name__} optimizes manually, so accumulate in its training_step"
    if refused is not None:
        raise ValueError(f"accumulate_grad_batches was set to {number} during the run, but {refused}")
    loop.train_loader.set_accumulation(number)
    measure_again(run, loop)  # fractions are of other numbers, where it splits


def measure_again(run: RunState, loop: FitLoop) -> None:
    """Measure an epoch of data of which another length is known."""
    loop.limit, loop.num_batches = _measured(run, loop.train_loader)
    loop.val_every = validation_interval(run, loop.num_batches) if loop.val_loaders else None


def validates(run: RunState, module: Module) -> bool:
    """Whether validation runs if there is data for it."""
    return overrides(module, "validation_step", Module) and run.arguments.limit_val_batches != 0


def _val_loaders(run: RunState, module: Module, sources: Sources, training: Any) -> list[ShardedLoader]:
    overfit = run.arguments.overfit_batches
    given = None
    if validates(run, module):
        given = training if overfit else sources.get(module, "val")
    run.given_loaders["val"] = given
    return evaluation_loaders(run, given, "val", overfit)


def set_up_optimizers(
    run: RunState,
    module: Module,
    named: dict[str, Optimizer],
    schedulers: list[SchedulerConfig],
    assigned: bool = False,
    ready: bool = False,
) -> tuple[set[str], list[str]]:
    """Check and set up optimizers and schedulers, of `configure_optimizers` or `assigned` by a hook; return the names
    of those that need a closure, and of the trainable parameters that none of them steps. `ready`: the optimizers are
    set up, and only the schedulers are others."""
    if module.automatic_optimization and not named:
        raise ValueError(
            f"{type(module).__name__}.configure_optimizers returned no optimizer; return one, or set "
            "automatic_optimization = False"
        )
    checks.refuse_differentiable(named)
    checks.check_schedulers(module, named, schedulers)
    if not run.strategy.capabilities.synchronous:
        checks.refuse_monitor_in_step(run.strategy, schedulers)
    unowned = check_ownership(module, named) if module.automatic_optimization else []
    run.configured = resume.configured(named, schedulers) | {"assigned": assigned}
    if run.resumed is not None and not resume.are_assigned(run.resumed.state.get("configured")):
        snapshot.check_configured(run, run.resumed)
    closing = {name for name, optimizer in named.items() if module.automatic_optimization and needs_closure(optimizer)}
    run.optimizers = named if ready else run.strategy.setup_optimizers(run.wrapped, named)
    run.schedulers = schedulers
    saving.follow_optimizers(run)
    handle = AutomaticOptimizer if module.automatic_optimization else ManualOptimizer
    run.user_optimizers = [handle(optimizer, run) for optimizer in run.optimizers.values()]
    return closing, unowned


def of_optimizers(
    run: RunState, module: Module, training_step: Callable[[Any, int], Any], closing: set[str], unowned: list[str]
) -> dict[str, Any]:
    """What of a `FitLoop` follows the optimizers."""
    steps_itself = overrides(module, "optimizer_step", Module)
    return {
        "own_step": own_step(run, module, training_step, closing),
        "parameters": _parameters_by_optimizer(run, module),
        "reevaluates": steps_itself or bool(closing),
        "guards": Guards(run, module, module.automatic_optimization and not steps_itself, unowned),
    }


def _parameter_states(run: RunState, module: Module) -> dict[str, ParameterState]:
    """What callbacks keep beside the parameters, by name. Raises ValueError if the strategy cannot save it."""
    states = {}
    refused = run.strategy.capabilities.refuses.get("parameter_state")
    for callback in run.callbacks:
        if refused is not None and overrides(callback, "parameter_state", Callback):  # which may find no parameters
            raise ValueError(f"{type(callback).__name__} keeps state beside the parameters: {refused}")
        state = callback.parameter_state(run.trainer, module)
        if state is not None:
            states[f"callbacks.{callback.state_key}"] = state
    return states


def _train_mode(module: Module) -> None:
    """Put the module into training mode, but not what the user has put into evaluation mode within a module that
    trains."""
    frozen = [child for child in module.modules() if not child.training] if module.training else []
    module.train(True)  # as an override without a default expects
    for child in frozen:
        child.training = False


def _parameters_by_optimizer(run: RunState, module: Module) -> dict[str, list[nn.Parameter]] | None:
    if len(run.optimizers) < 2 or not module.automatic_optimization:
        return None
    return {
        name: [p for group in optimizer.param_groups for p in group["params"]]
        for name, optimizer in run.optimizers.items()
    }


def validation_interval(run: RunState, num_batches: int | None) -> int | None:
    wanted = run.arguments.val_check_interval
    if wanted is None or (isinstance(wanted, float) and wanted == 1.0):
        return None
    if isinstance(wanted, int):
        if run.arguments.check_val_every_n_epoch is not None and num_batches is not None and wanted > num_batches:
            raise ValueError(
                f"val_check_interval={wanted} is more than the {num_batches} batches of an epoch; "
                "lower it, or set check_val_every_n_epoch=None to count across epochs"
            )
        return wanted
    if num_batches is None:
        raise ValueError(
            f"val_check_interval={wanted} is a fraction, which needs a training loader of known length; give a number "
            "of batches"
        )
    return max(1, int(num_batches * wanted))


def _clip(run: RunState, module: Module) -> Callable[[Optimizer], Any] | None:
    value, algorithm = run.arguments.gradient_clip_val, run.arguments.gradient_clip_algorithm
    if overrides(module, "configure_gradient_clipping", Module):
        return functools.partial(
            module.configure_gradient_clipping, gradient_clip_val=value, gradient_clip_algorithm=algorithm
        )
    if value is None:
        return None
    strategy, wrapped = run.strategy, run.wrapped
    return lambda optimizer: strategy.clip_gradients(wrapped, optimizer, value, algorithm)
