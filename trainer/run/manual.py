"""What `Module.optimizers()` and `Module.optimizer_step` get, to step by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

if TYPE_CHECKING:
    from lockstep.trainer.run.state import RunState


class HeldOptimizer:
    """An optimizer with a `step` that keeps ranks together; in all else it is that optimizer, also for `isinstance`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    __class__: Any = property(lambda self: type(self.optimizer))

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # of one that is being copied
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_own = name in ("optimizer", "_run", "hooks") or hasattr(type(self), name)
        if is_own or not hasattr(self.optimizer, name):
            object.__setattr__(self, name, value)
        else:  # which reads it
            setattr(self.optimizer, name, value)


class ManualOptimizer(HeldOptimizer):
    """An optimizer that `training_step` steps."""

    def __init__(self, optimizer: Optimizer, run: RunState) -> None:
        super().__init__(optimizer)
        self._run = run

    def close(self) -> None: ...

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Step with the gradients that `manual_backward` has accumulated. Every rank calls it."""
        run = self._run
        if run.world_size > 1 and closure is None and not run.called_backward:
            raise RuntimeError(
                "optimizer.step() was called, but manual_backward was not, so the ranks have not summed their "
                "gradients; call self.manual_backward(loss) in place of loss.backward()"
            )
        from lockstep.strategies.sync.collective_fingerprint import counting_once

        device, scaler = run.strategy.topology.device.type, run.strategy.precision.scaler
        # off as around an automatic step, but for a closure, whose forward needs it
        without_casts = torch.autocast(device, enabled=False) if closure is None else nullcontext()
        with counting_once() as refused, without_casts:
            if scaler is not None:
                scaler.unscale_once(self.optimizer)
            if closure is None:
                for hook in run.hooks.on_before_optimizer_step:
                    hook(self.optimizer)
            else:
                closure = self._with_hooks(self._agreed(closure, refused) if run.world_size > 1 else closure)
            if run.strategy.optimizer_step(run.wrapped, self.optimizer, closure):
                run.manually_stepped = True

    def _with_hooks(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """`closure` with `on_before_optimizer_step` after it, which sees the gradients that it computes: all hooks at
        first, and the user's when the optimizer calls it again, as in automatic optimization."""
        hooks, device = self._run.hooks.on_before_optimizer_step, self._run.strategy.topology.device.type

        def call() -> Any:
            nonlocal hooks
            loss = closure()
            with torch.autocast(device, enabled=False):
                for hook in hooks:
                    hook(self.optimizer)
            hooks = self._run.hooks.before_step_again()
            return loss

        return call

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for hook in self._run.hooks.on_before_zero_grad:
            hook(self.optimizer)
        self.optimizer.zero_grad(*(() if set_to_none else (False,)))  # an own one may take no argument
        if (scaler := self._run.strategy.precision.scaler) is not None:
            scaler.note_dropped()

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """While it lasts only the parameters of this optimizer get gradients. `sync_grad` is accepted for Lightning's
        sake: gradients are summed over ranks in `manual_backward`."""
        module = self._run.module
        assert module is not None
        module.toggle_optimizer(self)
        try:
            yield
        finally:
            module.untoggle_optimizer(self)

    def _agreed(self, closure: Callable[[], Any], refused: Any) -> Callable[[], Any]:
        """`closure` with the same loss on all ranks: a line search must end on all of them at once. What is `refused`
        in the step is in the closure too."""
        from lockstep.strategies.sync.collective_fingerprint import restored

        run = self._run

        def call() -> Any:
            with restored(refused):
                loss = closure()
            if not isinstance(loss, Tensor):
                return loss
            return run.strategy.all_reduce(loss * run.batch_share, "mean") * run.strategy.topology.data_size

        return call


class AutomaticOptimizer(HeldOptimizer):
    """What `Module.optimizer_step` gets: its `step` is the strategy's, so that ranks and loss scaling are seen to.

    Until `close` a step of the optimizer that the loop has not begun is refused.
    """

    closure: Callable[[], Any] | None = None
    """The loop's, while `Module.optimizer_step` runs, where alone the optimizer may be stepped."""
    is_watched = False
    """Whether user code of `Module.optimizer_step` runs now, and not the strategy for it."""

    def __init__(self, optimizer: Optimizer, run: RunState) -> None:
        super().__init__(optimizer)
        self._run, self.is_watched = run, False
        self.hooks = optimizer._optimizer_step_pre_hooks
        """Where `refuse` is under `id(self)` while nobody may step."""
        self.hooks[id(self)] = self.refuse

    def close(self) -> None:
        """The run is over: the optimizer is the user's again."""
        self.hooks.pop(id(self), None)

    def refuse(self, *_: Any) -> NoReturn:
        """Raise RuntimeError for a step that the loop has not begun."""
        raise RuntimeError(
            f"{type(self.optimizer).__name__}.step was called, but with automatic optimization the loop steps it; "
            "remove the call, override optimizer_step, or set automatic_optimization = False and step by hand"
        )

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Step with the gradients that the loop has computed; the loop's `closure` is for optimizers that move and
        compute them again, and one of user code is called by every optimizer that calls closures."""
        if self.closure is None:
            self.refuse()
        if closure is self.closure and not evaluates_again(self.optimizer):
            closure = None  # it would cost a collective, for a value that nobody reads
        if self.take(closure):
            self._run.manually_stepped = True

    def take(self, closure: Callable[[], Any] | None = None) -> bool:
        """Step by the strategy; whether it did."""
        self.hooks.pop(id(self))
        try:
            with self.apart():
                return self._run.strategy.optimizer_step(self._run.wrapped, self.optimizer, closure)
        finally:
            self.hooks[id(self)] = self.refuse

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around `Module.optimizer_step`: what it changes besides is compared over ranks."""
        self._watch(True)
        yield
        self._watch(False)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within it the strategy works, for which the module's `optimizer_step` may have asked."""
        was = self.is_watched
        if was:
            self._watch(False)
        yield
        if was:
            self._watch(True)

    def _watch(self, begins: bool) -> None:
        self.is_watched = begins
        self._run.strategy.adopt_changes(self._run.wrapped, not begins)


def manual_backward(run: RunState, loss: Tensor, retain_graph: bool, options: dict[str, Any]) -> None:
    """`Module.manual_backward`."""
    refused = {name: value for name, value in options.items() if value}
    if refused or isinstance(retain_graph, Tensor):
        given = next(iter(refused), "gradient")
        raise TypeError(
            f"manual_backward takes retain_graph besides the loss, but not {given}; for a loss of gradients call "
            "torch.autograd.grad(…, create_graph=True), and weight a loss before the backward"
        )
    from lockstep.strategies.sync.collective_fingerprint import counting_once

    with counting_once():
        for hook in run.hooks.on_before_backward:
            hook(loss)
        with torch.autocast(run.strategy.topology.device.type, enabled=False):  # as after an automatic step
            run.strategy.backward(run.wrapped, loss, run.batch_share, bool(retain_graph))
        if (scaler := run.strategy.precision.scaler) is not None:
            scaler.note_backward()
        run.called_backward = True
        for hook in run.hooks.on_after_backward:
            hook()


def evaluates_again(optimizer: Optimizer) -> bool:
    """Whether `step` may call its closure after it has moved the parameters; of torch's own optimizers only LBFGS
    does."""
    return isinstance(optimizer, LBFGS) or not type(optimizer).__module__.startswith("torch.")
