"""`on_fit_start` and `on_train_start` in a run that is resumed, which calls them too.

They draw the random numbers that they drew as the run was new, and what they set as they did then gives way to what the
run has made of it since: options of optimizers, `requires_grad`, and attributes of the module (`kept.changes.Changes`).
What they set otherwise than then holds, as the user's code has changed. Weights and buffers that they write to are
loaded once more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.callbacks.training.weight_averaging import WeightAveraging
from lockstep.trainer.checkpoint import snapshot
from lockstep.trainer.checkpoint.manifest import refused
from lockstep.trainer.run.hooks import is_users, of_package
from lockstep.trainer.seeding import rng_state, set_rng_state
from lockstep.trainer.setup import resume

if TYPE_CHECKING:
    from lockstep.trainer.checkpoint.store import Checkpoint
    from lockstep.trainer.module import Module
    from lockstep.trainer.run.hooks import Calls
    from lockstep.trainer.run.state import RunState

_log = logging.getLogger("lockstep")

_CHUNK = 2**22
"""Numbers of a weight that are added at once, so that no copy of a large one is made."""

Options = dict[tuple[str, ...], Any]
"""By (parameter,) or (number of the optimizer, number of the group, name): `requires_grad`, or a plain option."""


class StartHooks:
    """What the user's hooks of a run's start set."""

    def __init__(self) -> None:
        self.aside: dict[str, Any] | None = None
        """The random streams of a resumed run, while these hooks draw from others."""
        self._streams: dict[str, Any] | None = None
        """The random streams for these hooks; None in a new run, where they are the run's."""
        self._left: Options = {}
        """The options as these hooks have left them in this run; before that, those of the run that is resumed which it
        has changed since."""
        self._before: Options = {}
        self._optimizers: list[Optimizer] | None = None

    def resume(self, run: RunState, saved: list[Mapping[str, Any]]) -> None:
        """Take up what all ranks had saved, before the random streams of the run are."""
        self._streams = rng_state(run.streams)
        for state in saved:
            self._left |= {tuple(key): _plain(value) for key, value in state.get("left", ())}

    def state_dict(self, run: RunState, module: Module) -> dict[str, Any]:
        """The options that these hooks left and that have changed since."""
        now = _options(module, list(run.optimizers.values()))
        left = [[list(key), value] for key, value in self._left.items() if _plain(now.get(key, value)) != value]
        return {"left": left} if left else {}

    def call(self, run: RunState, module: Module, hooks: Calls) -> None:
        """Call hooks of the start. Every rank calls it."""
        if self._optimizers is None:
            self._optimizers = list(run.optimizers.values())
            self._before = _options(module, self._optimizers)
        for hook in hooks:
            if self._streams is None or not _is_theirs(hook):
                hook()
                continue
            before, self.aside = _marks(module), rng_state(run.streams)
            set_rng_state(self._streams, run.streams)
            hook()
            self._streams = rng_state(run.streams)
            set_rng_state(self.aside, run.streams)
            self.aside = None
            self._load_again(run, module, [n for n, mark in _marks(module).items() if before.get(n, mark) != mark])

    def _load_again(self, run: RunState, module: Module, written: list[str]) -> None:
        """Load the weights if a hook has `written` to some on any rank. Every rank calls it."""
        if not run.strategy.all_reduce(torch.tensor(int(bool(written))), "max"):
            return
        assert run.resumed is not None
        if written and run.strategy.topology.data_rank == 0:
            _log.info(
                f"{', '.join(written[:5])}: a hook of the start has written to these weights of a run that is "
                "resumed; those of its checkpoint are trained on"
            )
        now = _options(module, list(run.optimizers.values()))
        if resume.are_assigned(run.resumed.state.get("configured")):  # to optimizers that are there after the last hook
            snapshot.restore_weights(run, run.resumed.path, run.resumed)
        else:
            restore_again(run, run.resumed)
        _take(module, run.optimizers, now)

    @contextmanager
    def as_it_will_be(self, run: RunState, module: Module) -> Iterator[None]:
        """While it lasts, for a save, the options that will give way have."""
        if self._streams is None or self._optimizers is None:
            yield
            return
        now, as_then = self._as_then(run, module)
        _take(module, run.optimizers, {key: self._before[key] for key in as_then})
        try:
            yield
        finally:
            _take(module, run.optimizers, now)

    def _as_then(self, run: RunState, module: Module) -> tuple[Options, set[tuple[str, ...]]]:
        """The options of now; those that hooks have left as when the run was new, and that others were before."""
        now, before = _options(module, list(run.optimizers.values())), self._before
        if self._optimizers != list(run.optimizers.values()):  # others, which continue with what was saved
            before = {key: value for key, value in before.items() if len(key) == 1}
        return now, {
            key for key in now.keys() & before.keys() & self._left.keys() if self._left[key] == _plain(now[key])
        }

    def end(self, run: RunState, module: Module) -> list[str]:
        """Called once the last ones have been. Every rank calls it. Returns the names of the options that hooks have
        changed otherwise than when the run was new."""
        now, as_then = self._as_then(run, module)
        otherwise = sorted(key for key in now if now[key] != self._before.get(key, now[key]) and key not in as_then)
        if self._streams is None:
            otherwise = []
        elif _take(module, run.optimizers, {key: self._before[key] for key in as_then}):
            run.strategy.adopt_changes(run.wrapped)
        self._left = {key: _plain(value) for key, value in now.items()}
        self._before, self._optimizers = {}, None
        return [f"{name} of group {of[1]}" if of else f"requires_grad of {name}" for *of, name in otherwise]


def end(run: RunState, module: Module) -> None:
    """Called once the hooks of the start have been. Every rank calls it."""
    if run.attributes is None:
        return
    otherwise = [] if run.start_hooks is None else run.start_hooks.end(run, module)
    otherwise += run.numbers.note_begun() if run.numbers is not None else []
    of_run = [*run.optimizers.values(), *(config.scheduler for config in run.schedulers)]
    with nullcontext() if run.resumed is None else refused(run.resumed.path):
        otherwise += run.attributes.note_begun(of_run, run.start_hooks is not None)
    if otherwise and run.is_global_zero:
        _log.info(
            f"hooks of the start have set {', '.join(otherwise[:5])} of a run that is resumed otherwise than as it was "
            "new: what they set holds"
        )


def restore_again(run: RunState, checkpoint: Checkpoint) -> None:
    """Load weights and the state of optimizers once more, and the averages of weights, with what these had made up for
    since they were loaded first. Every rank calls it."""
    snapshot.restore_optimizers(run, checkpoint)
    for callback in run.callbacks:
        if isinstance(callback, WeightAveraging):
            snapshot.restore_callbacks(run, checkpoint, [callback])
            callback.catch_up(run.trainer)


def is_needed(run: RunState) -> bool:
    """Whether the user has such hooks; Lockstep's own do in a resumed run what is right there."""
    return any(map(_is_theirs, (*run.hooks.on_fit_start, *run.hooks.on_train_start)))


def _is_theirs(hook: Any) -> bool:
    """Whether it is the user's, and not that of a callback of Lockstep's which changes the model."""
    owner = getattr(hook.func if isinstance(hook, partial) else hook, "__self__", None)
    return is_users(hook) and not of_package(owner)


def _options(module: Module, optimizers: list[Optimizer]) -> Options:
    found: Options = {(name,): parameter.requires_grad for name, parameter in module.named_parameters()}
    for i, optimizer in enumerate(optimizers):
        for j, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if isinstance(value, Tensor) and value.numel() == 1:
                    value = value.item()
                parts = value if isinstance(value, list | tuple) and name != "params" else [value]
                if all(part is None or isinstance(part, (bool, int, float, str)) for part in parts):
                    found[str(i), str(j), name] = [*value] if isinstance(value, list) else value
    return found


def _plain(value: Any) -> Any:
    """As it is after a checkpoint, which makes lists of tuples."""
    return list(value) if isinstance(value, tuple) else value


def _take(module: Module, optimizers: Mapping[str, Optimizer], wanted: Options) -> bool:
    """Set what is not yet `wanted`; whether a parameter is trained that was not, or the reverse."""
    has_changed = False
    for name, parameter in module.named_parameters():
        if wanted.get((name,), parameter.requires_grad) != parameter.requires_grad:
            parameter.requires_grad_(wanted[name,])
            has_changed = True
    for i, optimizer in enumerate(optimizers.values()):
        for j, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                key = str(i), str(j), name
                if key in wanted and isinstance(value, Tensor):
                    value.fill_(wanted[key])
                elif key in wanted:
                    group[name] = wanted[key]
    return has_changed


@torch.no_grad()
def _marks(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    """What tells of each parameter and persistent buffer whether it was written to. Waits for the device."""
    transient = {
        f"{path}.{name}" if path else name
        for path, layer in module.named_modules()
        for name in layer._non_persistent_buffers_set
    }
    found = dict[str, tuple[Any, ...]]()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name not in transient:
            held = getattr(tensor, "ds_tensor", getattr(tensor, "_local_tensor", tensor))
            found[name] = (held._version, tensor._version, *map(repr, _sums(held)))  # NaN is NaN
    return found


def _sums(tensor: Tensor) -> list[float]:
    """Of the values, and of them weighted by their places: writes by way of `.data` leave no other trace."""
    if tensor.layout != torch.strided or tensor.is_meta:
        return []
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten()
    places = torch.linspace(1, 2, min(flat.numel(), _CHUNK), device=flat.device, dtype=torch.float64)
    sums = torch.zeros(2, device=flat.device, dtype=torch.float64)
    for i, chunk in enumerate(flat.split(_CHUNK)):
        values = chunk.double()
        sums += torch.stack([values.sum(), (values * places[: len(values)]).sum() * (i + 1)])
    return sums.tolist()
