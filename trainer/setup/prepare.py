"""The set-up of `fit` on a rank: from loaders, a module and a checkpoint to what the loop needs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep._lazy import without_collector
from lockstep.callbacks.base import Callback
from lockstep.strategies.data.sharded_loader import ShardedLoader, Window
from lockstep.strategies.launch.phase import AFTER_BACKWARD
from lockstep.strategies.launch.rng import kept_streams
from lockstep.strategies.optimizers.closures import needs_closure
from lockstep.trainer.checkpoint import rank_state, snapshot
from lockstep.trainer.kept.changes import Changes
from lockstep.trainer.kept.numbers import Numbers, not_in_parts
from lockstep.trainer.kept.outputs import before_backward
from lockstep.trainer.metrics.store import MetricStore
from lockstep.trainer.module import Module
from lockstep.trainer.run import saving
from lockstep.trainer.run.guards import Guards, UsersBackward, check_held, check_ownership
from lockstep.trainer.run.hooks import all_of, in_phase, overrides, training_step_of, transfer_of
from lockstep.trainer.run.manual import AutomaticOptimizer, ManualOptimizer
from lockstep.trainer.seeding import derive, seed_everything
from lockstep.trainer.setup import checks, frozen, held_parameters, optimizers, reload, resume, start_hooks
from lockstep.trainer.setup.loaders import Sources
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
    strategy, can, checkpoint = run.strategy, run.strategy.capabilities, run.resumed
    if checkpoint is not None:
        now = strategy.virtual_ranks if can.exact else 0
        resume.check_virtual_ranks(checkpoint.path, checkpoint.state.get("virtual_ranks", 0), now)
        snapshot.restore_datamodule(run, checkpoint)
    run.accumulation_at_start = run.accumulate_grad_batches
    run.reload = reload.Reload.of(run, module, sources)
    if checkpoint is not None and run.reload is not None:
        rank_state.restore_reload(run, run.reload, checkpoint)
    loaders = reload.make(run, module, sources, resumes=run.reload is None or not run.reload.is_of_later_epoch)
    checks.trainable(run, module)
    run.attributes = Changes(module, run.callbacks, run.datamodule, run.trainer)
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
    exact = run.shares is not None or can.local_steps
    run.metrics = MetricStore(module, exact=exact, several=strategy.topology.data_size > 1)
    run.metrics.noticed = run.noticed_names
    if run.shares is not None:
        run.shares.outside("start")
    elif strategy.topology.data_rank > 0:  # a stream of its own; data rank 0 continues with the process's stream
        seed_everything(derive(run.seed, "noise", strategy.topology.data_rank))
    frozen.note(run, module)
    _train_mode(run, module)
    run.attributes.begin([*named.values(), *(config.scheduler for config in schedulers)])
    run.start_hooks = start_hooks.StartHooks() if start_hooks.is_needed(run) else None
    run.numbers = Numbers(run)
    if checkpoint is None and not run.progress.batches_seen:
        run.progress.epoch_begun = False  # of a fit that failed before its first batch
    if checkpoint is not None:
        loaders |= snapshot.restore(run, module, checkpoint)
        snapshot.recount(run, checkpoint, loaders["val_every"])
        run.windows_per_epoch = loaders["train_loader"].num_windows(loaders["limit"])
    strategy.adopt_changes(run.wrapped)  # what configure_optimizers and on_load_checkpoint did

    training_step = run.at_setup["training_step"] = training_step_of(module)
    transfer = transfer_of(module, run.datamodule, strategy.to_device, strategy.topology.device)
    return FitLoop(
        check_val_every_n_epoch=run.arguments.check_val_every_n_epoch or 1,
        training_step=training_step if can.runs_step_once else not_in_parts(run, training_step),
        transfer=strategy.to_device if transfer is None else lambda batch: transfer(batch, 0),
        clip=_clip(run, module),
        before_backward=before_backward(run),
        backward=UsersBackward(module.backward) if overrides(module, "backward", Module) else None,
        after_backward=in_phase(AFTER_BACKWARD, all_of(run.hooks.on_after_backward)),
        counts_manually=not module.automatic_optimization and run.train_dataloader.may_filter,
        **loaders,
        **of_optimizers(run, module, training_step, closing, unowned),
    )


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
    unowned = check_ownership(module, named)
    check_held(run, module, named.values())
    run.configured = resume.configured(named, schedulers) | {"assigned": assigned}
    if run.resumed is not None and not resume.are_assigned(run.resumed.state.get("configured")):
        snapshot.check_configured(run, run.resumed)
    closing = {name for name, optimizer in named.items() if module.automatic_optimization and needs_closure(optimizer)}
    run.optimizers = named if ready else run.strategy.setup_optimizers(run.wrapped, named)
    run.schedulers = schedulers
    saving.follow_optimizers(run)
    handle = AutomaticOptimizer if module.automatic_optimization else ManualOptimizer
    run.user_optimizers = [handle(optimizer, run) for optimizer in run.optimizers.values()]
    return closing, unowned if module.automatic_optimization else []


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


def _train_mode(run: RunState, module: Module) -> None:
    """Call `train`, which some override to set modes of layers, of a module that is in training mode; what the user
    has put into evaluation mode stays in it."""
    if not module.training:
        if run.is_global_zero:
            _log.warning(
                f"{type(module).__name__} is in evaluation mode, and fit keeps the mode of every submodule; call "
                "train() before fit for dropout and the statistics of BatchNorm"
            )
        return
    frozen = [child for child in module.modules() if not child.training]
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
