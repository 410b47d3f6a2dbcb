"""`on_fit_start` and `on_train_start` in a run that is resumed, which calls them too.

They draw the random numbers that they drew as the run was new, and what they set as they did then gives way to what the
run has made of it since: weights and buffers, options of optimizers, `requires_grad`, and attributes of the module
(see `attributes.Changes`). What they set otherwise than then holds, as the user's code has changed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.trainer.checkpoint import snapshot
from lockstep.trainer.run.hooks import is_users
from lockstep.trainer.seeding import rng_state, set_rng_state

if TYPE_CHECKING:
    from lockstep.trainer.module import Module
    from lockstep.trainer.run.state import RunState

_log = logging.getLogger("lockstep")

Options = dict[tuple[str, ...], Any]
"""By (parameter,) or (number of the optimizer, number of the group, name): `requires_grad`, or a plain option."""


class StartHooks:
    """What the hooks of a run's start set."""

    def __init__(self) -> None:
        self._streams: dict[str, Any] | None = None
        """The random streams for these hooks; None in a new run, where they are the run's."""
        self._set: Options = {}
        """What they have set as the run was new."""
        self._written: set[str] = set()
        """The weights and buffers that they wrote to as the run was new."""
        self._now_written: set[str] = set()
        self._before: Options = {}
        self._optimizers: list[Optimizer] | None = None

    def resume(self, run: RunState, saved: list[Mapping[str, Any]]) -> None:
        """Take up what all ranks had saved, before the random streams of the run are."""
        self._streams = rng_state(run.streams)
        for state in saved:
            self._set |= {tuple(key): value for key, value in state.get("set", ())}
            self._written |= {*state.get("written", ())}

    def state_dict(self) -> dict[str, Any]:
        if not self._set and not self._written:
            return {}
        return {"set": [[list(key), value] for key, value in self._set.items()], "written": sorted(self._written)}

    @contextmanager
    def called(self, run: RunState, module: Module) -> Iterator[None]:
        """While it lasts the hooks are called. Every rank calls it."""
        if self._optimizers is None:
            self._optimizers = list(run.optimizers.values())
            self._before = _options(module, self._optimizers)
        resumed = None if self._streams is None else rng_state(run.streams)
        if self._streams is not None:
            set_rng_state(self._streams, run.streams)
        before = _marks(module)
        yield
        after = _marks(module)
        self._now_written |= {name for name, mark in after.items() if before.get(name, mark) != mark}
        if resumed is not None:
            self._streams = rng_state(run.streams)
            set_rng_state(resumed, run.streams)

    def end(self, run: RunState, module: Module) -> None:
        """Called once the last ones have been. Every rank calls it."""
        if self._optimizers is None:
            return
        are_the_same = self._optimizers == list(run.optimizers.values())
        now = _options(module, self._optimizers if are_the_same else [])
        before, self._before, self._optimizers = self._before, {}, None
        if self._streams is None:
            self._set = {key: value for key, value in now.items() if value != before.get(key, value)}
            self._written = self._now_written
            return
        self._report(run)
        if self._written:
            assert run.resumed is not None
            snapshot.restore_optimizers(run, run.resumed)
        as_before = {key for key, value in now.items() if key in self._set and self._set[key] == value}
        self._set |= {key: now[key] for key in self._set.keys() & now.keys()}
        if _take(module, run.optimizers, now | {key: before[key] for key in as_before & before.keys()}):
            run.strategy.adopt_changes(run.wrapped)

    def _report(self, run: RunState) -> None:
        changed = sorted(self._now_written - self._written)
        if changed and run.strategy.topology.data_rank == 0:
            holds = "the checkpoint holds over it" if self._written else "that holds over the checkpoint"
            _log.warning(
                "on_fit_start or on_train_start has changed weights of a run that is resumed, and not as the run was "
                f"new: {', '.join(changed[:5])}; {holds}"
            )


def is_needed(run: RunState) -> bool:
    """Whether the user has such hooks; Lockstep's own do in a resumed run what is right there."""
    return any(map(is_users, (*run.hooks.on_fit_start, *run.hooks.on_train_start)))


def _options(module: Module, optimizers: list[Optimizer]) -> Options:
    found: Options = {(name,): parameter.requires_grad for name, parameter in module.named_parameters()}
    for i, optimizer in enumerate(optimizers):
        for j, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if isinstance(value, Tensor) and value.numel() == 1:
                    value = value.item()
                if value is None or isinstance(value, (bool, int, float, str)):
                    found[str(i), str(j), name] = value
    return found


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


def _marks(module: nn.Module) -> dict[str, tuple[int, int, int]]:
    """What tells of each parameter and persistent buffer whether it was written to or replaced."""
    transient = {
        f"{path}.{name}" if path else name
        for path, layer in module.named_modules()
        for name in layer._non_persistent_buffers_set
    }
    found = dict[str, tuple[int, int, int]]()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        held = getattr(tensor, "ds_tensor", getattr(tensor, "_local_tensor", tensor))
        if name not in transient:
            found[name] = (_pointer(held), held._version, tensor._version)
    return found


def _pointer(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # of another layout
        return id(tensor)
