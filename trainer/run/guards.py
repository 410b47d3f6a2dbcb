"""What keeps a run from training on in silence: numbers that are not finite, parameters that nobody trains, steps that
move nothing."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.callbacks.guard import check_replicas, fingerprint
from lockstep.strategies.base import Loss
from lockstep.strategies.modules.absent import is_here
from lockstep.strategies.modules.model_changes import shortened
from lockstep.strategies.modules.unused_parameters import refuse_unstepped
from lockstep.strategies.optimizers.hidden_state import held_by
from lockstep.trainer.checkpoint import snapshot
from lockstep.trainer.metrics.counts import watch_training
from lockstep.trainer.run import saving
from lockstep.trainer.setup.loaders import check_orders, check_rows

if TYPE_CHECKING:
    from lockstep.strategies.base import StepResult
    from lockstep.strategies.data.sharded_loader import MicroBatch, ShardedLoader, Window
    from lockstep.trainer.module import Module
    from lockstep.trainer.run.state import RunState

_log = logging.getLogger("lockstep")


class Guards:
    """The guards of one fit; the loop asks them only where something is to be decided."""

    def __init__(self, run: RunState, module: Module, watches: bool, unowned: Collection[str]) -> None:
        self.run = run
        self.module = module
        self.options = run.guard
        self._weighs = False
        """Whether a loss or a logged mean was weighted by the samples of its batch."""
        synchronous = run.strategy.capabilities.synchronous
        self.compares_every = self.options.check_replicas_every_n_steps if run.world_size > 1 and synchronous else None
        """Optimizer steps between comparisons of the ranks' parameters, None for none."""
        self.remembers = self.options.non_finite != "raise"
        """Whether what a window logs may have to be forgotten."""
        self._of_others = saving.of_others(run) if self.options.non_finite == "roll_back" else set()
        self.watches = watches
        """Whether no step has been seen yet to move a parameter."""
        self.unowned = {name: p for name, p in module.named_parameters() if name in unowned}
        """The trainable parameters that no optimizer steps."""
        self.data_checks = (1, 5) if run.world_size > 1 else (1,)
        """The steps after which `check_data` is called."""
        self._counts = watch_training(run, module)
        self._noted = False
        self._logged: list[Any] = []
        self._before: list[int] | None = None
        self._still: str = ""
        """The error of a first step that moved nothing, unless the next one does: some optimizers only measure in
        their first."""
        self._still_in = -1
        """That step, which several learners of a rank may take."""
        self._still_rate = 0.0
        """Its learning rate: one that rises, in a warmup, may move them yet."""
        self._warned = self._skipped = False
        self._later: tuple[Callable[[], str | None], int, int] | None = None
        """How to read whether the last step was skipped on the device, the step, and its epoch."""

    def remember(self) -> None:
        """Before a window: note what has been logged so far."""
        if not self._skipped:
            self.options.in_a_row = 0
        self._skipped = False
        self._logged = self.run.metrics.mark()

    def skips(self, result: StepResult) -> bool:
        """Whether to skip the step of this window because something in it is not finite; the same on every rank.

        Raises FloatingPointError if the run must end.
        """
        if (
            result.later is not None and not self.remembers
        ):  # read once the next step is under way, so that the host does not wait
            before, progress = self._later, self.run.progress
            self._later = result.later, progress.global_step, progress.current_epoch
            self._raise_if_bad(before)
            return False
        bad = result.non_finite if result.later is None else result.later()
        if bad is None:
            return False
        options, run, step = self.options, self.run, self.run.progress.global_step
        if options.non_finite == "raise" or options.in_a_row >= options.max_in_a_row:
            raise self._error(bad, step)
        run.metrics.back_to(self._logged)
        if options.non_finite == "roll_back":
            checkpoint = saving.newest(run, self._of_others)
            if checkpoint is None:
                error = self._error(bad, step)
                error.args = (
                    f"{error}; Guard(non_finite='roll_back') has no checkpoint to go back to yet: let ModelCheckpoint "
                    "save by steps",
                )
                raise error
            snapshot.rewind(run, checkpoint)
        self._skipped = True
        options.skipped_steps += 1
        options.in_a_row += 1
        if run.is_global_zero:
            then = f"; back to step {run.progress.global_step}" if options.non_finite == "roll_back" else ""
            _log.warning(
                f"{bad} is NaN or infinite in step {step} of epoch {run.progress.current_epoch}: this step is "
                f"skipped{then} "
                f"({options.in_a_row} in a row, at most {options.max_in_a_row})"
            )
        return True

    def finish(self) -> None:
        """After the last step: raise FloatingPointError if it was skipped on the device, RuntimeError if replicas
        differ or no step has moved a parameter."""
        self.compare_replicas()
        if self._still:
            self._name_still()
        self._raise_if_bad(self._later)

    def compare_replicas(self) -> None:
        """Raise RuntimeError if a parameter that several ranks hold differs on them. Every rank calls it."""
        if self.compares_every is not None and not check_replicas(self.run.trainer, self.module):
            self.compares_every = None  # no rank holds what another holds

    def check_weights(self, optimizers: Sequence[Optimizer]) -> None:
        """At the end of training: raise FloatingPointError, on all ranks, where a step has left a parameter NaN or
        infinite.

        The gradient of each step was finite, and a loss would have shown it in a later step. Every rank calls it; one
        host synchronization a device.
        """
        strategy = self.run.strategy
        mine = _not_finite(self.module, optimizers)
        first = int(
            strategy.all_reduce(
                torch.tensor(strategy.topology.world_size if mine is None else strategy.topology.rank), "min"
            )
        )
        if first < strategy.topology.world_size:
            name = strategy.broadcast(mine, first)
            raise FloatingPointError(
                f"{name} is NaN or infinite at the end of training, after step {self.run.progress.global_step - 1}, "
                "though every gradient "
                "was finite: check the learning rate and the optimizer's other numbers in that step, or go back to "
                "an older checkpoint"
            )

    def check_data(self, loader: ShardedLoader, output: Any = None, samples: int = 0) -> None:
        """Raise RuntimeError or ValueError, on all ranks, if they read in other orders where no step compares these, or
        batches that were not weighted alike; warn of what user code computes of a rank's samples. Every rank calls it
        after the first step and the fifth, with what that returned for how many samples, and at the end of epochs."""
        run = self.run
        self._weighs |= not self.module.automatic_optimization or _is_mean(output) or run.metrics.weighs
        check_orders(run, [] if run.strategy.capabilities.synchronous else [loader], "training")
        check_rows(run, [loader], self._weighs)
        self._counts.compare()
        self._counts.compare_read(samples)

    def check_unowned(self, optimizers: Sequence[Optimizer]) -> None:
        """After a backward: raise ValueError if a gradient has reached a parameter that no optimizer steps.

        Without one it is used without gradients, as a target network is, which is logged once.
        """
        if not self._noted:
            self._noted = True
            if self.run.is_global_zero and all(p.grad is None for p in self.unowned.values()):
                names = shortened([*self.unowned], 5)
                _log.info(f"no optimizer steps {names}, and no gradient reaches them: training leaves them as they are")
        reached = [name for name, p in self.unowned.items() if p.grad is not None]
        if reached:  # perhaps after an optimizer got them
            owned = _owned(optimizers)
            self.unowned = {name: p for name, p in self.unowned.items() if id(p) not in owned}
            if reached := [name for name in reached if name in self.unowned]:
                if not any(callback.changes_model for callback in self.run.callbacks):
                    refuse_unstepped(reached)
                for name in reached:  # such a callback may add it later, and then with a gradient of that step only
                    self.unowned[name].grad = None

    def before_step(self, optimizers: Sequence[Optimizer]) -> bool:
        """Record the parameters before they move for the first time; whether a gradient on this rank is not
        zero."""
        if not any(_rates(optimizers)):
            self._before = None  # nothing is to move
            return False
        self._before = fingerprints(optimizers)
        gradients = [p.grad for p in held_by(optimizers) if is_here(p) and p.grad is not None]
        return any(bool(getattr(gradient, "_local_tensor", gradient).any()) for gradient in gradients)

    def after_step(self, optimizers: Sequence[Optimizer], moving: bool) -> None:
        """Raise RuntimeError if two steps with a gradient and a learning rate that does not rise have moved nothing on
        this rank; a run that is resumed continues, as it had moved them before its rate fell."""
        if self._before is None:
            return
        rates = _rates(optimizers)
        if not self._before or self._before != fingerprints(optimizers):
            self.watches, self._still = False, ""
        elif moving and all(rate > 0 for rate in rates):
            rate = max(rates)
            if self._still and self._still_in != self.run.progress.global_step and rate <= self._still_rate:
                self._name_still()
                return
            self._still_in, self._still_rate = self.run.progress.global_step, rate
            self._still = (
                f"optimizer.step moved no parameter in step {self.run.progress.global_step}, though there is a "
                f"gradient and the learning rate is {rate:g}; is the rate too small for the parameters' dtype, "
                f"{next(iter(held_by(optimizers))).dtype}?"
            )
        elif not moving and not self._warned:
            self._warned = True
            warnings.warn(
                "every gradient of the first step is zero, so nothing was learned from it", RuntimeWarning, stacklevel=2
            )

    def _name_still(self) -> None:
        if self.run.resumed is None:
            raise RuntimeError(self._still)
        warnings.warn(self._still, RuntimeWarning, stacklevel=2)
        self.watches, self._still = False, ""

    def _raise_if_bad(self, found: tuple[Callable[[], str | None], int, int] | None) -> None:
        """Raise FloatingPointError if a step of before was skipped on the device."""
        if found is not None and (bad := found[0]()) is not None:
            raise self._error(bad, *found[1:])

    def _error(self, bad: str, step: int, epoch: int | None = None) -> FloatingPointError:
        epoch = self.run.progress.current_epoch if epoch is None else epoch
        return FloatingPointError(
            f"{bad} is NaN or infinite in step {step} of epoch {epoch}; no parameter was changed by it"
        )


def fingerprints(optimizers: Sequence[Optimizer]) -> list[int]:
    """Of each tensor that the optimizers step on this rank."""
    return [fingerprint(p) for p in held_by(optimizers) if p.requires_grad and getattr(p, "_local_tensor", p).numel()]


def _not_finite(module: Module, optimizers: Sequence[Optimizer]) -> str | None:
    """The first parameter, of those that the optimizers hold on this rank, that is NaN or infinite."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for optimizer in optimizers:
        for parameter in held_by([optimizer]):
            local = getattr(parameter, "_local_tensor", parameter).detach()
            if not local.is_meta and (local.is_floating_point() or local.is_complex()):
                name = names.get(id(parameter), f"a parameter of {type(optimizer).__name__}")
                by_device.setdefault(local.device, []).append((name, local.isfinite().all()))
    for found in by_device.values():
        for (name, _), fine in zip(found, torch.stack([fine for _, fine in found]).tolist(), strict=True):
            if not fine:
                return name
    return None


def check_ownership(module: Module, optimizers: Mapping[str, Optimizer]) -> list[str]:
    """Return the trainable parameters of the wrapped module that no optimizer holds; raise ValueError if one holds a
    tensor that is not a parameter of the module."""
    names = {id(p): name for name, p in module.named_parameters()}
    for key, optimizer in optimizers.items():
        for i, group in enumerate(optimizer.param_groups):
            for j, parameter in enumerate(group["params"]):
                if id(parameter) not in names:
                    raise ValueError(
                        f"optimizer {key!r} ({type(optimizer).__name__}) steps a tensor that is not a parameter of "
                        f"{type(module).__name__} "
                        f"(number {j} of group {i}, shape {list(parameter.shape)}): make it an nn.Parameter in "
                        "__init__, and build optimizers in configure_optimizers, of self.parameters()"
                    )
    owned = _owned(optimizers.values())
    return [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in owned]


def check_held(run: RunState, module: Module, optimizers: Iterable[Optimizer]) -> None:
    """Raise ValueError if a layer has an optimizer besides these that steps tensors of its own, where each rank, or
    part of a batch, would step them by its samples."""
    can = run.strategy.capabilities
    if not can.steps_together or (run.strategy.topology.data_size == 1 and can.runs_step_once):
        return
    names, configured = {id(p) for p in module.parameters()}, {*map(id, optimizers)}
    for path, layer in module.named_modules():
        held = [(f"{path}.{key}".lstrip("."), leaf) for key, value in vars(layer).items() for leaf in _leaves(value)]
        for name, optimizer in held:
            if isinstance(optimizer, Optimizer) and id(optimizer) not in configured and _owned([optimizer]) - names:
                raise ValueError(
                    f"the optimizer in {name} ({type(optimizer).__name__}) steps a tensor that is not a parameter of "
                    f"{type(module).__name__}, so under strategy {run.strategy.name} there would be another of it for "
                    "each part of a batch; make it an nn.Parameter in __init__, and return its optimizer from "
                    "configure_optimizers"
                )


def _leaves(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else (value,)


def _owned(optimizers: Iterable[Optimizer]) -> set[int]:
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def _is_mean(output: Any) -> bool:
    """Whether what a step returned is weighted by the samples of its batch: a loss alone, in a dict, or a dict of one
    for each optimizer."""
    loss = output["loss"] if isinstance(output, Mapping) and "loss" in output else output
    return not isinstance(loss, Loss | None)


def _rates(optimizers: Iterable[Optimizer]) -> list[float]:
    """The learning rates of all groups; 1 for a group of an optimizer that finds its own."""
    rates = [group.get("lr") for optimizer in optimizers for group in optimizer.param_groups]
    return [1.0 if rate is None else float(rate) for rate in rates]


class UsersBackward:
    """The `backward` of the user's module, and whether the strategy has called it."""

    def __init__(self, method: Callable[[Tensor], Any]) -> None:
        self._method, self._called = method, False

    def __call__(self, loss: Tensor) -> Any:
        self._called = True
        return self._method(loss)

    def check_called(self, run: RunState, window: Window) -> None:
        """After the first window with a loss: raise RuntimeError if the strategy has run backward in its place."""
        has_loss = any(batch.num_samples and batch.output is not None for batch in window.micro_batches)
        groups = [group for optimizer in run.optimizers.values() for group in optimizer.param_groups]
        if has_loss and not self._called and any(p.requires_grad for group in groups for p in group["params"]):
            raise RuntimeError(
                f"the module overrides backward, but strategy {run.strategy.name} has not called it; let its "
                "forward_backward call StepHooks.backward(loss) with each loss, or its capabilities refuse 'backward'"
            )


def check_weight(run: RunState, window: Window, micro_batch: MicroBatch) -> None:
    """Raise ValueError for the mean over a batch that does not show its number of samples, where that matters."""
    module, output = run.module, micro_batch.output
    automatic = module is None or module.automatic_optimization
    if run.strategy.topology.data_size == 1 and run.shares is None and len(window.micro_batches) == 1:
        return
    if automatic and not _is_mean(output):
        return
    raise ValueError(
        f"the loader's collate function was given {micro_batch.num_samples} samples, and batch {micro_batch.batch_idx} "
        "does not "
        "show how many of them it holds, so the mean over it cannot be weighted among other micro-batches and ranks; "
        + (
            "return Loss(total, count) from training_step"
            if automatic
            else "give each batch a tensor with one row for each sample"
        )
    )


def on_any_rank(run: RunState, learned: bool) -> bool:
    """Whether any rank has `learned`, where their steps do not tell. Every rank calls it."""
    if run.strategy.capabilities.synchronous:
        return learned
    return bool(run.strategy.all_reduce(torch.tensor(int(learned)), "max"))
