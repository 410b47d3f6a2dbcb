"""Hooks of users that follow a step, on a rank that stands for several shares or learners: called once for each of
them, after the steps of all, and each sees what it would see on a rank of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.callbacks.guard import fingerprint
from lockstep.strategies.data.sharded_loader import MicroBatch, Window
from lockstep.strategies.launch.program.functions import is_users_class
from lockstep.strategies.methods.federated.copy import RefusedOnClient
from lockstep.strategies.modules.absent import is_here
from lockstep.strategies.modules.model_changes import shortened
from lockstep.strategies.modules.side_effect_free import differ
from lockstep.trainer.metrics.gathering import gather_values
from lockstep.trainer.run.hooks import is_users
from lockstep.trainer.seeding import rng_state, set_rng_state
from lockstep.trainer.shares.search import Marks
from lockstep.trainer.shares.user_state import UserState

if TYPE_CHECKING:
    from lockstep.trainer.module import Module
    from lockstep.trainer.run.state import RunState

Hooks = Sequence[Callable[..., Any]]
Streams = dict[int, dict[str, Any]]
"""By share its random streams."""


def turns(run: RunState, window: Window) -> Iterator[Window]:
    """Yield each learner's part of a window; its gradients are cleared after its step unless a hook is to see them.

    Raises RuntimeError for what a step leaves in Python, which the learners of this rank have in common.
    """
    last, keeps = window.micro_batches[-1], any(map(is_users, run.hooks.on_before_zero_grad))
    for part in run.strategy.turns(run.wrapped, run.optimizers, window):
        apart = part is not window and window.num_shares > 1
        if apart:
            run.shares.state.begin(part.micro_batches[0].share)  # type: ignore[union-attr]
        yield part
        if apart and (names := run.shares.state.end()):  # type: ignore[union-attr]
            raise RuntimeError(
                f"a step changed {shortened(names)}, which the learners on this rank have in common; use self.log, a "
                "registered buffer, or as many ranks as learners"
            )
        if part is not window and part.micro_batches[-1] is not last and not keeps:
            for optimizer in run.optimizers.values():
                optimizer.zero_grad()


def clear_learners(run: RunState, module: Module, window: Window) -> Streams:
    """Call users' `on_before_zero_grad` for the learners of this rank but the last, and clear their gradients.

    Returns the random streams of each as these leave them, for `end_shares`.
    """
    streams: Streams = {}
    hooks = list(filter(is_users, run.hooks.on_before_zero_grad))
    for micro_batch in _all_but_the_last(window) if hooks else ():
        if not _take(run, micro_batch):
            return streams
        run.metrics.weight = micro_batch.num_samples
        stepped = [o for o in run.optimizers.values() if any(p.grad is not None for p in _parameters(o))]
        with _Apart(run, module, "on_before_zero_grad", streams):
            for optimizer in stepped:
                for hook in hooks:
                    hook(optimizer)
        for optimizer in stepped:
            optimizer.zero_grad()
    if hooks:
        _take(run, window.micro_batches[-1])
        run.metrics.weight = window.micro_batches[-1].num_samples
    return streams


def end_shares(run: RunState, module: Module, window: Window, streams: Streams) -> Hooks:
    """Call users' `on_train_batch_end` for all shares but the last, each with random streams and metrics of its own.

    Returns what is to be called for the last share: all hooks, of which users' may change as little.
    """
    hooks = list(filter(is_users, run.hooks.on_train_batch_end))
    if run.shares is None or not hooks:
        return run.hooks.on_train_batch_end
    for micro_batch in _all_but_the_last(window):
        _take(run, micro_batch)
        run.metrics.weight = micro_batch.num_samples
        with _Apart(run, module, "on_train_batch_end", streams):
            for hook in hooks:
                hook(micro_batch.output, micro_batch.batch, micro_batch.batch_idx)
        micro_batch.batch = micro_batch.output = None
    _take(run, window.micro_batches[-1])
    return [
        partial(_watched, run, module, hook, hook is not hooks[-1]) if is_users(hook) else hook
        for hook in run.hooks.on_train_batch_end
    ]


def compare_counts(run: RunState) -> None:
    """After an epoch or an evaluation, raise RuntimeError for a number of a callback that is not the same in all
    shares: ranks would read another one each. Every rank calls it."""
    shares = run.shares
    if shares is not None:
        shares.evaluated.end()
    several = shares is not None and len(shares.own) < (run.arguments.virtual_ranks or 1)
    if shares is None or not several or not any(is_users_class(type(callback)) for callback in run.callbacks):
        return
    ranks = gather_values(run.strategy, shares.state.counted())
    held = {name: values for rank in ranks for name, values in rank.items()}
    if names := sorted(name for name, values in held.items() if any(rank.get(name) != values for rank in ranks)):
        raise RuntimeError(
            f"hooks of a batch changed {shortened(names)} by another number in one share than in another, so that what "
            "reads it would depend on the rank; use self.log"
        )


def _watched(run: RunState, module: Module, hook: Callable[..., Any], more: bool, *arguments: Any) -> None:
    with _Apart(run, module, "on_train_batch_end", None, more):
        hook(*arguments)


def _all_but_the_last(window: Window) -> list[MicroBatch]:
    """The last micro-batch of each share but the last."""
    num = len(window.micro_batches) // window.num_shares
    return window.micro_batches[num - 1 : -1 : num]


def _take(run: RunState, micro_batch: MicroBatch) -> bool:
    """Let model, optimizers and torchmetrics be those of the share; whether learners have their own of the former."""
    assert run.shares is not None
    run.shares.turn_to(micro_batch.share)
    return bool(run.strategy.take_share(run.wrapped, run.optimizers, micro_batch.share))  # type: ignore[attr-defined]


def _parameters(optimizer: Optimizer) -> Iterable[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


class _Apart:
    """Hooks for one share: with random streams of its own, which continue those in `streams`, and are kept there.

    Raises RuntimeError if they have changed what they may not: they are called once for each share, and on as many
    ranks once on each of them.
    """

    def __init__(self, run: RunState, module: Module, name: str, streams: Streams | None, more: bool = False) -> None:
        self._run, self._module, self._name, self._more = run, module, name, more
        self._of_shares, self._share = streams, run.shares.current  # type: ignore[union-attr]

    def __enter__(self) -> None:
        self._run.shares.state.begin(self._share)  # type: ignore[union-attr]
        self._before = self._state()
        if self._of_shares is None:
            return
        self._streams = rng_state(self._run.streams)
        if self._share in self._of_shares:
            set_rng_state(self._of_shares[self._share], self._run.streams)

    def __exit__(self, kind: Any, *_: Any) -> None:
        if self._of_shares is not None:
            self._of_shares[self._share] = rng_state(self._run.streams)
            set_rng_state(self._streams, self._run.streams)
        if kind is not None:
            return
        before, now = self._before, self._state()
        names = [
            *self._run.shares.state.end(self._more),  # type: ignore[union-attr]
            *sorted(name for name in before.keys() | now.keys() if differ(before.get(name), now.get(name))),
        ]
        if not names:
            return
        of_what, instead = "its learners", "use as many ranks as learners, or a hook such as on_train_epoch_end"
        if self._run.arguments.virtual_ranks is not None:
            of_what, instead = "its shares", "change it in a hook such as on_before_zero_grad or on_train_epoch_end"
        raise RuntimeError(
            f"{self._name} changed {shortened(names)}, but this rank calls it once for each of {of_what}; {instead}"
        )

    def _state(self) -> Marks:
        """What a hook may not change, by name."""
        run, module = self._run, self._module
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        marks: Marks = {}
        for key, optimizer in run.optimizers.items():
            held_here = getattr(optimizer.state, "held", optimizer.state)  # where user code is shown none of it
            for i, (_, state) in enumerate(held_here.items()):
                tensors |= {f"the optimizer's {name} ({i})": v for name, v in state.items() if isinstance(v, Tensor)}
            for i, group in enumerate(optimizer.param_groups):
                held = {f"{name} of group {i} of optimizer {key!r}": value for name, value in group.items()}
                tensors |= {name: value for name, value in held.items() if isinstance(value, Tensor)}
                marks |= {name: value for name, value in held.items() if isinstance(value, (int, float, tuple))}
        return marks | {name: _of_model(tensor) for name, tensor in tensors.items() if is_here(tensor)}


def _of_model(tensor: Tensor) -> Any:
    """What tells whether code has changed or replaced a tensor of the model, by `.data` too."""
    if type(tensor) not in (Tensor, nn.Parameter):
        return None
    return tensor._version, tensor.data_ptr(), fingerprint(tensor) if tensor.is_cpu else 0


@contextmanager
def kept_on_client(state: UserState) -> Iterator[None]:
    """Around the batches of one client: raises RefusedOnClient if user code changes what it remembers in Python, which
    would depend on the clients that a rank runs."""
    state.begin(None)
    try:
        yield
    finally:
        if (names := state.end()) and not isinstance(sys.exc_info()[1], (KeyboardInterrupt, SystemExit)):
            raise RefusedOnClient(
                f"training changed {shortened(names)} on a client, which would depend on the clients that a rank runs; "
                "use self.log, or a registered buffer of floating point, which is averaged"
            )
