"""What a run will need, found on one process: its real set-up and one real step, on tensors without data."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep.callbacks._support.collectives import collective
from lockstep.callbacks.base import Callback, Logger
from lockstep.strategies.base import StepVote, Strategy
from lockstep.strategies.data.sharded_loader import Window
from lockstep.strategies.launch.rng import kept_streams
from lockstep.strategies.modules.absent import is_here
from lockstep.strategies.modules.blocks import find_blocks
from lockstep.strategies.pipeline.schedules import Schedule
from lockstep.strategies.planning.fake_model import (
    converting_in_place,
    fake_batch,
    fake_copy,
    make_fake,
    metrics_without_values,
    without_memory,
)
from lockstep.strategies.planning.fake_world import answering_stages, fake_world
from lockstep.strategies.planning.measure import (
    axes_of,
    axis_of_devices,
    copied_by,
    device_plans,
    gradients_of,
    host_buffers_of,
    mark_parameters,
    offload_of,
    rank_plan,
    refuse_unplanned,
)
from lockstep.strategies.planning.memory import FORWARD, HOST, REDUCTION, ROUND
from lockstep.strategies.planning.plan import PipelineSchedule, Plan, RankPlan
from lockstep.strategies.planning.rounds import (
    first_with_batches,
    learners_by_rank,
    notes_of,
    round_overlap,
    round_steps,
    shorten_round,
    tried,
)
from lockstep.strategies.planning.servers import own_batches, ranks_with_servers, without_threads
from lockstep.strategies.planning.trial_mode import CollectiveCall, TrialMode
from lockstep.trainer.kept.values import tensors_in
from lockstep.trainer.module import Module, attach
from lockstep.trainer.run import fit as loop_of_fit
from lockstep.trainer.run import lifecycle
from lockstep.trainer.run.hooks import Hooks
from lockstep.trainer.setup import checks, prepare
from lockstep.trainer.setup.loaders import Sources
from lockstep.trainer.shares.ends import turns
from lockstep.trainer.trainer import Trainer

if TYPE_CHECKING:
    from lockstep.trainer.datamodule import DataModule
    from lockstep.trainer.run.state import RunState
    from lockstep.trainer.setup.prepare import FitLoop

__all__ = ["plan", "without_memory"]

Held = dict[str, Mapping[int, int]]
"""Bytes of each kind, by device of the process."""

NOTES = (
    "memory that compiled code saves or takes is not known: the plan is of the code as it is written",
    "the allocator's reserve, the CUDA context and workspaces of kernels are not in the figures",
)
OFFLOADED = (
    "what is offloaded is in the host's memory: whether a node has that much for each of its devices is not checked"
)


def plan(
    trainer: Trainer,
    module: Module,
    train_dataloaders: Any = None,
    datamodule: DataModule | None = None,
    *,
    world_size: int | None = None,
) -> Plan:
    """Try one optimizer step of `trainer.fit(module, ...)` without its devices, and return what it needs.

    The strategy's own set-up and step run in this process, in a process group that communicates nothing, on tensors
    that have no data; the data is read as far as the first batch of a rank. `module` is not changed. It may have been
    built in memory, on the meta device, or within `without_memory()`.

    `world_size`: ranks of the run, or devices where one process runs them; None takes the devices of the Trainer.
    Raises what the strategy raises about the layout, and ValueError for a strategy or step that cannot be planned.
    """
    refuse_unplanned(trainer.strategy)
    size = trainer.strategy.num_devices if world_size is None else world_size
    ranks, found = [0], []
    with kept_streams():
        while ranks:
            trial = _Trial(trainer, ranks.pop(), size)
            world = fake_world(trial.rank, size // trial.devices)
            with world, answering_stages(), metrics_without_values(trial.mode), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what the run warns of, it says itself
                found += trial.run(module, train_dataloaders, datamodule)
            if trial.rank == 0:
                ranks = trial.other_ranks
    found.sort(key=lambda rank: -rank.peak)
    return trial.plan(tuple(found))


class _Trial:
    """The trial of one rank."""

    def __init__(self, trainer: Trainer, rank: int, world_size: int) -> None:
        self.original, self.rank, self.world_size = trainer, rank, world_size
        self.devices = world_size if axis_of_devices(trainer.strategy) else 1
        """Of a process."""
        self.mode = TrialMode(collective)
        self.axes: dict[str, int] = {}
        self.samples, self.num_parameters, self.times = 0, 0, 1.0
        self.tokens: int | None = None
        self.other_ranks: list[int] = []

    def run(self, module: Module, train_dataloaders: Any, datamodule: DataModule | None) -> list[RankPlan]:
        trainer = Trainer(**_arguments_of(self.original, self.devices))
        run, copied = trainer._run, fake_copy(module, self.mode)
        sources = Sources({"train": train_dataloaders, "val": None}, datamodule)
        trainer._take_callbacks(copied)
        checks.fit(run, copied, sources)
        self.axes = axes_of(run.strategy, self.world_size)
        offload = offload_of(run.strategy)
        stages = self.axes.get("pipeline", 1)
        learners = learners_by_rank(run.strategy, self.world_size)
        self.other_ranks = [self.world_size // stages * stage for stage in range(stages - 1, 0, -1)]
        self.other_ranks += [learners.index(number) for number in set(learners) - set(learners[:1])]
        run.hooks = Hooks()
        run.begun = run.active = True
        attach(copied, trainer)
        try:
            lifecycle.open_run(run, copied, datamodule, "fit", None, lambda: self.mode)
            make_fake(copied, self.mode)
            self.num_parameters = sum(p.numel() for p in copied.parameters())
            if offload is not None:
                self.mode.offload = offload if HOST in offload.kinds else None
                self.mode.offloads = copied_by(run.strategy, copied, self.axes, self.world_size)
            blocks = list(find_blocks(copied, "auto"))
            with (
                self.mode.watching_resizes(),
                converting_in_place(),
                lifecycle.metrics_of_all(run, copied),
            ):
                steps = shorten_round(run.strategy, self.mode)
                with self.mode:
                    loop = prepare.fit(run, copied, sources)
                without_threads(run.strategy, run.wrapped, run.optimizers, self.mode)
                with _noting_optimizers(self.mode):  # by hooks on all optimizers, which a set-up refuses
                    held = self._steps(run, copied, loop, blocks, steps)
            role, num_ranks = self._role(run, stages, learners)
            if self.devices > 1:
                each = partial(rank_plan, self.mode, held=held, axes=self.axes, steps=steps, num_ranks=1, role="")
                return device_plans(lambda index: each(rank=index, device=index), *next(iter(self.axes.items())))
            return [rank_plan(self.mode, self.rank, role, num_ranks, held, self.axes, steps, offload, self.times)]
        finally:
            lifecycle.undo_run(run)

    def _role(self, run: RunState, stages: int, learners: Sequence[int]) -> tuple[str, int]:
        """Which ranks this one stands for, and how many they are."""
        if (holders := ranks_with_servers(run.strategy)) not in (0, self.world_size):
            self.other_ranks = [self.world_size - 1]
            return ("ranks with servers", holders) if self.rank < holders else ("others", self.world_size - holders)
        if stages > 1:
            return f"pipeline rank {self.rank * stages // self.world_size}", self.world_size // stages
        if len(set(learners)) < 2:
            return "all ranks", self.world_size
        own = learners[self.rank]
        return f"ranks of {own} learner{'s' * (own > 1)}", learners.count(own)

    def _steps(self, run: RunState, module: Module, loop: FitLoop, blocks: Sequence[str], steps: int) -> Held:
        epochs = (loop.train_loader.windows(epoch, 0, loop.limit) for epoch in itertools.count())
        window = first_with_batches(own_batches(run.strategy, next(iter(windows))) for windows in epochs)
        self.samples = window.num_samples
        shown = tried(window, partial(fake_batch, mode=self.mode))
        self.tokens, self.times = _tokens(shown.first, window), shown.times
        held: Held = {}
        loop.windows_seen = 1  # the first is shown
        with self.mode, self.mode.places.following(module, blocks):
            held["parameters"] = mark_parameters(self.mode, run.strategy, module)
            held["buffers"] = self.mode.mark("buffers", filter(is_here, module.buffers()))
            seen: list[Counter[CollectiveCall]] = []
            while not _is_steady(seen, run.strategy):
                with self.mode.record():
                    for _ in range(steps):
                        _step(run, module, loop, shown.filled(), self.mode, held)
                self.mode.mark("optimizer", _states(run))
                self.mode.mark(HOST, self.mode.unknown(host_buffers_of(run.strategy, run.wrapped)))
                held["optimizer"] = self.mode.mark_what_stays("optimizer")
                held["other_state"] = self.mode.mark_other_state()
                seen.append(Counter(self.mode.calls))
        return held

    def plan(self, ranks: tuple[RankPlan, ...]) -> Plan:
        arguments = self.original.arguments
        return Plan(
            strategy=arguments.strategy if isinstance(arguments.strategy, str) else type(arguments.strategy).__name__,
            world_size=self.world_size,
            axes=tuple(self.axes.items()),
            precision=self.original.precision,
            samples=self.samples,
            tokens=self.tokens,
            num_parameters=self.num_parameters,
            ranks=ranks,
            accumulate_grad_batches=arguments.accumulate_grad_batches,
            pipeline=_schedule(self.original.strategy, self.axes.get("pipeline", 1)),
            round_steps=round_steps(self.original.strategy),
            round_overlap=round_overlap(self.original.strategy),
            notes=(
                *self.mode.notes,
                *notes_of(self.original.strategy),
                *[OFFLOADED] * any(r.host for r in ranks),
                *NOTES,
            ),
        )


def _schedule(strategy: Strategy, num_ranks: int) -> PipelineSchedule | None:
    schedule = getattr(strategy, "schedule", None)
    if num_ranks == 1 or not isinstance(schedule, Schedule):
        return None
    num_parts = getattr(strategy, "num_micro_batches", None) or num_ranks * schedule.stages_per_rank
    return PipelineSchedule(schedule.name, num_ranks * schedule.stages_per_rank, num_parts)


def _is_steady(seen: Sequence[Counter[CollectiveCall]], strategy: Strategy) -> bool:
    """Whether the last of the steps stands for all that follow: engines set themselves up in the first two, and
    communicate more in these; ranks of a parameter server meet in them."""
    return len(seen) == 3 or (len(seen) == 2 and seen[1] <= seen[0] and not ranks_with_servers(strategy))


def _step(run: RunState, module: Module, loop: FitLoop, window: Window, mode: TrialMode, held: Held) -> None:
    """One optimizer step, as `trainer/run/fit.py` makes it."""
    strategy, wrapped, automatic = run.strategy, run.wrapped, module.automatic_optimization
    optimizers = list(run.optimizers.values())
    held["inputs"] = mode.mark("inputs", tensors_in([micro_batch.batch for micro_batch in window.micro_batches]))
    hooks = loop_of_fit.step_hooks_of(run, loop, automatic)

    def vote() -> StepVote:  # after the last forward
        mode.stage = REDUCTION
        return hooks.vote()

    step_fn = _Noted(loop.training_step, mode, mode.places.begin_micro_batch)
    for part in _parts(run, window, mode):
        result = strategy.forward_backward(wrapped, step_fn, part, hooks._replace(vote=vote))
        held["gradients"] = mode.mark("gradients", gradients_of(strategy, wrapped))
        stepped = run.manually_stepped
        for optimizer, handle in zip(optimizers if automatic else [], run.user_optimizers, strict=False):
            for hook in run.hooks.on_before_optimizer_step:
                hook(optimizer)
            if loop.clip is not None:
                loop.clip(optimizer)
            if loop.own_step is None:
                refuse = handle.hooks.pop(id(handle))
                stepped |= strategy.optimizer_step(wrapped, optimizer)
                handle.hooks[id(handle)] = refuse
            else:
                stepped |= loop.own_step(optimizer, part)
    mode.stage = FORWARD
    loop_of_fit.finish_window(run, module, loop, window, result, optimizers if automatic else [], stepped)


class _Noted:
    """A step that says where micro-batches begin, and slices of them."""

    def __init__(self, step: Callable[..., Any], mode: TrialMode, begin: Callable[[], None]) -> None:
        self._step, self._mode, self._begin = step, mode, begin

    def __call__(self, batch: Any, batch_idx: int) -> Any:
        self._mode.stage = FORWARD
        self._begin()
        return self._step(batch, batch_idx)

    def of_slice(self) -> _Noted:
        """The step for slices of a micro-batch after the first."""
        step = self._step.of_slice() if hasattr(self._step, "of_slice") else self._step
        return _Noted(step, self._mode, self._mode.places.begin_slice)


def _parts(run: RunState, window: Window, mode: TrialMode) -> Iterator[Window]:
    """The window, or that of each learner; what happens between these is of the round."""
    if run.strategy.capabilities.synchronous:
        mode.stage = FORWARD
        yield window
        return
    parts = turns(run, window)
    while True:
        mode.stage = ROUND
        part = next(parts, None)
        if part is None:
            return
        mode.stage = FORWARD
        yield part


def _arguments_of(trainer: Trainer, devices: int) -> dict[str, Any]:
    """What the Trainer of a trial is built from: nothing shown, saved or validated, on the CPU."""
    given = {field.name: getattr(trainer.arguments, field.name) for field in fields(trainer.arguments)}
    callbacks: Any = trainer.arguments.callbacks or ()
    kept = [item for item in callbacks if _changes_the_step(item)]
    return given | {
        "strategy": copy.deepcopy(trainer.arguments.strategy),  # which the trial changes
        "devices": devices if devices > 1 else "auto",
        "num_nodes": 1,
        "accelerator": "cpu",
        "callbacks": kept,
        "logger": False,
        "max_steps": 10**9,
        "max_epochs": None,
        "max_time": None,
        "log_every_n_steps": 10**9,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "val_check_interval": None,
        "check_val_every_n_epoch": 1,
        "fast_dev_run": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "compile": False,
        "profiler": None,
        "max_restarts": 0,
        "detect_anomaly": False,
    }


def _changes_the_step(callback: Callback) -> bool:
    """Whether a callback may add to what a step needs; those that show, save or stop do not."""
    home = type(callback).__module__
    shows = not home.startswith(("lockstep.callbacks.training", "lockstep.callbacks.guard"))
    return not isinstance(callback, Logger) and not (home.startswith("lockstep.callbacks.") and shows)


@contextmanager
def _noting_optimizers(mode: TrialMode) -> Iterator[None]:
    def begin(optimizer: Optimizer, *_: Any) -> None:
        mode.optimizing = True
        if mode.stage != ROUND:  # an outer optimizer steps what learners have in common
            mode.mark("optimizer", mode.unknown(p for group in optimizer.param_groups for p in group["params"]))

    def end(*_: Any) -> None:
        mode.optimizing = False

    handles = [register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _states(run: RunState) -> list[Tensor]:
    """The state of all optimizers, also where a strategy shows user code none of it."""
    states = [getattr(optimizer.state, "held", optimizer.state) for optimizer in run.optimizers.values()]
    return tensors_in([list(state.values()) for state in states])


def _tokens(batch: Any, window: Window) -> int | None:
    """Tokens of the global batch, if a batch begins with sequences of integers."""
    first = next(iter(tensors_in(batch)), None)
    if first is None or first.dim() != 2 or first.is_floating_point() or first.dtype == torch.bool:
        return None
    return window.num_samples * first.shape[1]
