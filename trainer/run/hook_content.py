"""What `on_save_checkpoint` and `on_load_checkpoint` get: a dict that refuses what would have no effect.

Its weights, `checkpoint["state_dict"]`, are gathered or read when a hook asks. While a checkpoint is saved a hook may
take weights out of it that no optimizer trains. While one is loaded for its weights alone it may change what is loaded;
a run that is resumed loads what was saved.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.strategies.checkpoint_state import (
    Reader,
    State,
    TensorShard,
    Whole,
    gather_whole,
    is_packed_tensor,
    pack,
    unpack,
)
from lockstep.strategies.modules.model_changes import shortened
from lockstep.strategies.sync.contents import same_bits
from lockstep.trainer.setup import frozen

if TYPE_CHECKING:
    from lockstep.strategies.base import Strategy

_WRITTEN = {
    "optimizer_states": "the state of optimizers is saved by the strategy; read it from trainer.optimizers, and save "
    "weights alone with save_weights_only",
    "lr_schedulers": "schedulers are saved by themselves; read them with module.lr_schedulers()",
    "callbacks": "callbacks are saved by their state_dict",
    "loops": "progress is saved by itself; read trainer.global_step and trainer.current_epoch",
}
_WEIGHTS = "state_dict"
_FACTS = ("epoch", "global_step", "hyper_parameters")
_ASKS = 0
"""What a rank says that gathers weights; one that has called its hooks says a number of the weights they removed."""


def facts_of(progress: dict[str, Any], hyperparameters: dict[str, Any]) -> dict[str, Any]:
    """The counters and hyperparameters of a checkpoint under Lightning's names."""
    return {
        "epoch": progress["current_epoch"],
        "global_step": progress["global_step"],
        "hyper_parameters": hyperparameters,
    }


class HookContent(dict[str, Any]):
    """Entries that hooks add, or that they added when the checkpoint was saved.

    `facts` returns "epoch", "global_step" and "hyper_parameters", which can be read but are not among the entries, and
    `read` the weights that "state_dict" is: whole tensors of the hook's own on the CPU, read or gathered when it asks
    for them. What Lightning has here besides is refused: under most strategies no rank holds it whole.
    """

    def __init__(
        self,
        entries: dict[str, Any],
        facts: Callable[[], dict[str, Any]],
        read: Callable[[], dict[str, Any]],
    ) -> None:
        super().__init__(entries)
        self._facts, self._read = facts, read
        self.weights: dict[str, Any] | None = None
        """What "state_dict" is now; None where no hook has asked for it."""

    def __missing__(self, key: str) -> Any:
        if key in _WRITTEN:
            raise KeyError(f"checkpoint[{key!r}] is not in what hooks get: {_WRITTEN[key]}")
        if key != _WEIGHTS:
            return self._facts()[key]
        if self.weights is None:
            self.weights = self._read()
        return self.weights

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key == _WEIGHTS or key in _FACTS

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 - this is `get`

    def __setitem__(self, key: str, value: Any) -> None:
        if key == _WEIGHTS:
            self._set_weights(value)
        elif key in _WRITTEN:
            raise KeyError(f"checkpoint[{key!r}] cannot be set by a hook: {_WRITTEN[key]}")
        else:
            super().__setitem__(key, value)

    def update(self, *args: Any, **entries: Any) -> None:
        for key, value in dict(*args, **entries).items():
            self[key] = value

    def __ior__(self, other: Any) -> HookContent:  # type: ignore[override, misc]
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def __delitem__(self, key: str) -> None:
        self.pop(key)

    def pop(self, key: str, *default: Any) -> Any:
        if key in _WRITTEN:
            raise KeyError(f"checkpoint[{key!r}] cannot be removed by a hook: {_WRITTEN[key]}")
        if key == _WEIGHTS:
            raise KeyError("checkpoint['state_dict'] cannot be removed by a hook; remove names of weights from it")
        return super().pop(key, *default)

    def clear(self) -> None:
        self.pop(_WEIGHTS)  # refused, as it is not to be removed

    def _set_weights(self, value: Any) -> None:
        if not isinstance(value, Mapping):
            kind = type(value).__name__
            raise TypeError(f"checkpoint['state_dict'] must be a dict of weights by name, but is {kind}")
        self[_WEIGHTS]  # every rank asks for it together
        self.weights = dict(value)


class SavedWeights:
    """Weights of a checkpoint that is being saved, for its hooks; without `strategy` by one process alone."""

    def __init__(self, state: State, strategy: Strategy | None) -> None:
        self._state, self._strategy = state, strategy

    def gather(self) -> dict[str, Any]:
        """Weights by name, whole. Every rank calls it: raises RuntimeError on all where some do not."""
        self._meet(_ASKS)
        mine = {name: shard for name, shard in self._state.tensors.items() if name.startswith("model/")}
        if self._strategy is None:
            whole = Whole({name: shard.tensor.cpu().clone() for name, shard in mine.items()}, {})
        else:
            whole = gather_whole(self._strategy, State(mine, {}))
        return _unpacked(self._state.meta["model"], whole.read)

    def take_out_removed(self, weights: dict[str, Any] | None, trained: Iterable[str], resumable: bool) -> None:
        """Take the names out that hooks have removed from `weights`, what `gather` returned; None if it was not called.

        `trained` are the names that an optimizer trains. Every rank calls it after its hooks. Raises ValueError where
        hooks did more than remove, or where the run could not be `resumable` any more.
        """
        saved = self._state.meta["model"]
        removed = [] if weights is None else [name for name in saved if name not in weights]
        if weights is not None:
            self._check_values(weights)
        if lost := [name for name in removed if saved[name] is not None or (resumable and name in set(trained))]:
            raise ValueError(
                f"a hook removes {shortened(lost, 3)} from checkpoint['state_dict'], without which the run could not "
                "be resumed; remove only weights that no optimizer trains, or save with weights_only=True"
            )
        self._meet(zlib.crc32("\n".join(removed).encode()) + 1)
        if removed:
            frozen.omit_alike(self._state, set(removed), set(trained), self._strategy)

    def _check_values(self, weights: Mapping[str, Any]) -> None:
        """Raise ValueError where hooks gave weights other values; each rank checks what it writes."""
        saved = self._state.meta["model"]
        mine = self._state.tensors
        other = [name for name in weights if name not in saved or not _holds(weights[name], name, saved[name], mine)]
        if other:
            raise ValueError(
                f"a hook changes {shortened(other, 3)} in checkpoint['state_dict'], which holds the weights as they "
                "train, so that a resumed run continues with them; save others under a key of their own, or let "
                "WeightAveraging validate and save averaged ones"
            )

    def _meet(self, code: int) -> None:
        if self._strategy is None:
            return
        if len(self._strategy.all_gather(torch.tensor([code])).unique()) > 1:
            raise RuntimeError(
                "on_save_checkpoint reads or changes checkpoint['state_dict'] on some ranks only, but the weights are "
                "gathered from all of them; do the same on every rank"
            )


def read(checkpoint: Reader) -> dict[str, Any]:
    """The saved weights by name, whole."""
    return _unpacked(checkpoint.meta["model"], checkpoint.read)


def check_unchanged(checkpoint: Reader, weights: dict[str, Any] | None) -> None:
    """Raise ValueError where hooks have changed `weights`, what `read` returned; None if it was not called."""
    if weights is None:
        return
    saved = checkpoint.meta["model"]
    omitted = checkpoint.meta.get("frozen", {})  # compared with the module's own, whatever hooks add here
    other = [name for name in saved if name not in weights]
    other += [name for name in weights if name not in saved and name not in omitted]
    whole: dict[str, TensorShard] = {}
    for name, value in read(checkpoint).items():
        pack(value, f"model/{name}", whole)
    other += [name for name in saved if name in weights and not _holds(weights[name], name, saved[name], whole)]
    if other:
        raise ValueError(
            f"a hook changes {shortened(other, 3)} in checkpoint['state_dict'], with which the run would not be the "
            "one that was saved; change weights in load_from_checkpoint, and fit without ckpt_path"
        )


def edited(checkpoint: Reader, weights: dict[str, Any] | None, strategy: Strategy | None) -> Reader:
    """The checkpoint with `weights`, which hooks may have changed, in place of its own; without them as it is.

    With `strategy` every rank calls it and gets those of rank 0: a hook may change them there only, and fill in weights
    of a module that other ranks have built without values.
    """
    together = strategy if strategy is not None and strategy.topology.world_size > 1 else None
    shards: dict[str, TensorShard] = {}
    model = None
    if weights is not None and (together is None or together.topology.rank == 0):
        packed = {name: pack(value, f"model/{name}", shards) for name, value in weights.items()}
        model = {name: None if is_packed_tensor(value) else value for name, value in packed.items()}
    if together is not None:
        model = together.broadcast(model)
    if model is None:
        return checkpoint
    meta = checkpoint.meta | {
        "model": model,
        "frozen": {name: n for name, n in checkpoint.meta.get("frozen", {}).items() if name not in model},
    }
    if together is not None:
        return _Edited(checkpoint, gather_whole(together, State(shards, meta)))
    return _Edited(checkpoint, Whole({name: shard.tensor.cpu() for name, shard in shards.items()}, meta))


@dataclass
class _Edited:
    """A `Reader` of a checkpoint whose weights are other ones."""

    saved: Reader
    model: Whole

    @property
    def meta(self) -> dict[str, Any]:
        return self.model.meta

    def names(self, prefix: str = "") -> list[str]:
        beside = [name for name in self.saved.names(prefix) if not name.startswith("model/")]
        return sorted([*beside, *self.model.names(prefix)])

    def shape(self, name: str) -> tuple[int, ...]:
        return self._of(name).shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._of(name).dtype(name)

    def read(self, name: str, offsets: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        return self._of(name).read(name, offsets, shape)

    def _of(self, name: str) -> Reader:
        return self.model if name.startswith("model/") else self.saved


def _unpacked(meta: dict[str, Any], read: Callable[[str], Tensor]) -> dict[str, Any]:
    return {name: read(f"model/{name}") if value is None else unpack(value, read) for name, value in meta.items()}


def _holds(value: Any, name: str, saved: Any, tensors: Mapping[str, TensorShard]) -> bool:
    """Whether a weight that a hook leaves is what is `saved` under its name, JSON data or None for a tensor. Only the
    parts in `tensors` are compared."""
    key = f"model/{name}"
    if saved is None:
        return key not in tensors or _is(value, tensors[key])
    found: dict[str, TensorShard] = {}
    if json.dumps(pack(value, key, found)) != json.dumps(saved):
        return False
    return all(_is(shard.tensor, tensors[key]) for key, shard in found.items() if key in tensors)


def _is(value: Any, shard: TensorShard) -> bool:
    """Whether a whole tensor has the bits of a shard at its place."""
    if not isinstance(value, Tensor) or value.is_meta or value.dtype != shard.tensor.dtype:
        return False
    if tuple(value.shape) != shard.global_shape:
        return False
    sizes = zip(shard.offsets, shard.tensor.shape, strict=True)
    there = value.detach()[tuple(slice(start, start + size) for start, size in sizes)]
    return same_bits(there, shard.tensor)
