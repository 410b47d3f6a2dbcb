"""Hooks of users that follow a step, on a rank that stands for several shares or learners: called once for each of
them, after the steps of all, and each sees what it would see on a rank of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.callbacks.guard import fingerprint
from lockstep.strategies.data.sharded_loader import MicroBatch, Window
from lockstep.strategies.methods.federated.copy import RefusedOnClient
from lockstep.strategies.modules.absent import is_here
from lockstep.strategies.modules.model_changes import shortened
from lockstep.trainer.checkpoint.rank_state import torchmetrics_of
from lockstep.trainer.run.hooks import is_users
from lockstep.trainer.seeding import rng_state, set_rng_state

if TYPE_CHECKING:
    from lockstep.trainer.module import Module
    from lockstep.trainer.run.state import RunState

Hooks = Sequence[Callable[..., Any]]
Streams = dict[int, dict[str, Any]]
"""By share its random streams."""
_DEPTH = 3
"""How deep containers within attributes are searched for tensors."""


def turns(run: RunState, window: Window) -> Iterator[Window]:
    """Yield each learner's part of a window; its gradients are cleared after its step unless a hook is to see them."""
    last, keeps = window.micro_batches[-1], any(map(is_users, run.hooks.on_before_zero_grad))
    for part in run.strategy.turns(run.wrapped, run.optimizers, window):
        yield part
        if part is not window and part.micro_batches[-1] is not last and not keeps:
            for optimizer in run.optimizers.values():
                optimizer.zero_grad()


def clear_learners(run: RunState, module: Module, window: Window) -> Streams:
    """Call users' `on_before_zero_grad` for the learners of this rank but the last, and clear their gradients.

    Returns the random streams of each as these leave them, for `end_shares`.
    """
    streams: Streams = {}
    hooks = list(filter(is_users, run.hooks.on_before_zero_grad))
    for micro_batch in _all_but_the_last(run, window) if hooks else ():
        if not _take(run, micro_batch):
            return streams
        run.metrics.weight = micro_batch.num_samples
        stepped = [o for o in run.optimizers.values() if any(p.grad is not None for p in _parameters(o))]
        with _Apart(run, module, hooks, "on_before_zero_grad", streams):
            for optimizer in stepped:
                for hook in hooks:
                    hook(optimizer)
        for optimizer in stepped:
            optimizer.zero_grad()
    if hooks:
        _take(run, window.micro_batches[-1])
        run.metrics.weight = window.micro_batches[-1].num_samples
    return streams


def end_shares(run: RunState, module: Module, window: Window, streams: Streams) -> None:
    """Call users' `on_train_batch_end` for all shares but the last, each with random streams and metrics of its own."""
    hooks = list(filter(is_users, run.hooks.on_train_batch_end))
    if run.shares is None or not hooks:
        return
    for micro_batch in _all_but_the_last(run, window):
        _take(run, micro_batch)
        run.metrics.weight = micro_batch.num_samples
        with _Apart(run, module, hooks, "on_train_batch_end", streams):
            for hook in hooks:
                hook(micro_batch.output, micro_batch.batch, micro_batch.batch_idx)
        micro_batch.batch = micro_batch.output = None
    _take(run, window.micro_batches[-1])


def _all_but_the_last(run: RunState, window: Window) -> list[MicroBatch]:
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

    def __init__(self, run: RunState, module: Module, hooks: Hooks, name: str, streams: Streams) -> None:
        self._run, self._module, self._name = run, module, name
        self._of_shares, self._share = streams, run.shares.current  # type: ignore[union-attr]
        self._callbacks = {id(owner): owner for hook in hooks for owner in _owners(hook) if owner is not module}

    def __enter__(self) -> None:
        self._before, self._streams = self._state(), rng_state(self._run.streams)
        if self._share in self._of_shares:
            set_rng_state(self._of_shares[self._share], self._run.streams)

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._of_shares[self._share] = rng_state(self._run.streams)
        set_rng_state(self._streams, self._run.streams)
        if kind is not None:
            return
        before, now = self._before, self._state()
        changed = sorted(key for key in before.keys() | now.keys() if not _same(before.get(key), now.get(key)))
        if not changed:
            return
        of_what, instead = "its learners", "use as many ranks as learners, or a hook such as on_train_epoch_end"
        if self._run.arguments.virtual_ranks is not None:
            of_what, instead = "its shares", "change it in a hook such as on_before_zero_grad or on_train_epoch_end"
        raise RuntimeError(
            f"{self._name} changed {shortened(changed)}, but this rank calls it once for each of {of_what}; {instead}"
        )

    def _state(self) -> dict[str, Any]:
        """What a hook may not change, by name."""
        run, module = self._run, self._module
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        marks: dict[str, Any] = {}
        for key, optimizer in run.optimizers.items():
            held_here = getattr(optimizer.state, "held", optimizer.state)  # where user code is shown none of it
            for i, (_, state) in enumerate(held_here.items()):
                tensors |= {f"the optimizer's {name} ({i})": v for name, v in state.items() if isinstance(v, Tensor)}
            for i, group in enumerate(optimizer.param_groups):
                held = {f"{name} of group {i} of optimizer {key!r}": value for name, value in group.items()}
                tensors |= {name: value for name, value in held.items() if isinstance(value, Tensor)}
                marks |= {name: value for name, value in held.items() if isinstance(value, (int, float, tuple))}
        for name, part in _users_parts(module):
            marks |= {
                f"{name}.{key}".lstrip("."): value
                for key, value in vars(part).items()
                if key not in _OF_TORCH and isinstance(value, (int, float, complex)) and not key.startswith("_")
            }
        return marks | _marks(tensors | _attributes(module, self._callbacks.values()))


def _users_parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules within `module` that are neither torch's nor torchmetrics', by name."""
    metrics = {part for metric in torchmetrics_of(module).values() for part in metric.modules()}
    for name, part in module.named_modules():
        if part not in metrics and not type(part).__module__.startswith("torch."):
            yield name, part


def _attributes(module: nn.Module, callbacks: Iterable[Any]) -> dict[str, Tensor]:
    """The tensors that users keep in attributes of modules and callbacks, by name; not the model's own."""
    found: dict[str, Tensor] = {}
    for name, part in _users_parts(module):
        found |= _tensors({key: value for key, value in vars(part).items() if key not in _OF_TORCH}, name)
    for callback in callbacks:
        found |= _tensors(vars(callback), type(callback).__name__)
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return {name: tensor for name, tensor in found.items() if id(tensor) not in own}


def _marks(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What tells whether code has changed or replaced one of them, by `.data` too."""
    return {
        name: (tensor._version, tensor.data_ptr(), fingerprint(tensor) if tensor.is_cpu else 0)
        for name, tensor in tensors.items()
        if is_here(tensor) and type(tensor) in (Tensor, nn.Parameter)
    }


@contextmanager
def kept_on_client(run: RunState) -> Iterator[None]:
    """Around the batches of one client: raises RefusedOnClient if user code changes a tensor that a module or callback
    keeps in an attribute, which would depend on the clients that a rank runs."""
    assert run.module is not None
    hooks = [*run.hooks.on_train_batch_start, *run.hooks.on_train_batch_end]
    callbacks = {id(o): o for hook in filter(is_users, hooks) for o in _owners(hook) if o is not run.module}.values()
    before = _marks(_attributes(run.module, callbacks))
    yield
    now = _marks(_attributes(run.module, callbacks))
    if changed := sorted(name for name in before.keys() & now.keys() if before[name] != now[name]):
        raise RefusedOnClient(
            f"training changed {shortened(changed)} on a client, which would depend on the clients that a rank runs; "
            "use self.log, or a registered buffer of floating point, which is averaged"
        )


def _same(one: Any, other: Any) -> bool:
    return bool(one == other or (one != one and other != other))  # nan too


def _owners(hook: Callable[..., Any]) -> Iterator[Any]:
    """The objects whose method a hook is: a callback's is bound to trainer and module as well."""
    owner = getattr(getattr(hook, "func", hook), "__self__", None)
    if owner is not None and hasattr(owner, "__dict__"):
        yield owner


def _tensors(attributes: dict[str, Any], owner: str) -> dict[str, Tensor]:
    """The tensors in attributes, and in lists, dicts and modules of them, by name."""
    found: dict[str, Tensor] = {}

    def search(value: Any, name: str, depth: int) -> None:
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, nn.Module):
            found.update({f"{name}.{key}": tensor for key, tensor in value.state_dict(keep_vars=True).items()})
        elif depth and isinstance(value, dict):
            for key, item in value.items():
                search(item, f"{name}[{key!r}]", depth - 1)
        elif depth and isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                search(item, f"{name}[{i}]", depth - 1)

    for key, value in attributes.items():
        if not key.startswith("__") and key not in ("trainer", "module"):
            search(value, f"{owner}.{key}".lstrip("."), _DEPTH)
    return found


_OF_TORCH = frozenset(vars(nn.Module())) | {"trainer"}
"""Attributes that every module has: parameters and buffers are compared by themselves."""
