"""State as it is saved: pieces of named global tensors, and JSON.

Names are canonical: `model/<fqn>` for parameters and buffers, `optimizer/<optimizer>/<fqn>/<key>` for optimizer state,
whatever wrapped or sharded the model. So any strategy and world size can read what any other has written.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.modules.absent import is_here
from lockstep.strategies.modules.model_changes import shortened
from lockstep.strategies.optimizers.hidden_state import check_held, others_of

if TYPE_CHECKING:
    from lockstep.strategies.base import Strategy


@dataclass(frozen=True)
class TensorShard:
    """A rectangular part of a global tensor."""

    tensor: Tensor
    """The part that this rank holds, detached."""
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Where it begins in the global tensor, one number a dimension."""

    @classmethod
    def whole(cls, tensor: Tensor) -> TensorShard:
        if hasattr(tensor, "full_tensor"):  # sharded over ranks, all of which are here
            tensor = tensor.full_tensor()
        return cls(tensor.detach(), tuple(tensor.shape), (0,) * tensor.dim())


LocalShard = Callable[[Tensor], TensorShard | None]
"""What this rank writes of a tensor, None where another rank writes it."""


@dataclass
class State:
    """What one rank contributes to a checkpoint."""

    tensors: dict[str, TensorShard] = field(default_factory=dict)
    """The pieces that this rank writes; over all ranks each element of each name exactly once."""
    meta: dict[str, Any] = field(default_factory=dict)
    """JSON data, equal on all ranks (param groups, scaler)."""


class Reader(Protocol):
    """A saved state, however many files and pieces it is in (`trainer.checkpoint.Checkpoint` is one)."""

    @property
    def meta(self) -> dict[str, Any]: ...

    def names(self, prefix: str = "") -> list[str]:
        """Sorted names of the tensors that begin with `prefix`."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The global shape. Raises KeyError for an unknown name."""

    def dtype(self, name: str) -> torch.dtype:
        """The dtype. Raises KeyError for an unknown name."""

    def read(self, name: str, offsets: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """The whole tensor, or the rectangle of `shape` that begins at `offsets`, on CPU."""


def pack(value: Any, name: str, tensors: dict[str, TensorShard], shard: LocalShard = TensorShard.whole) -> Any:
    """Turn a nested structure into JSON data, moving its tensors into `tensors` under `name`.

    Tuples, paths, arrays of numpy, configs of omegaconf and dicts with keys that are not strings are kept as what they
    are. A number of numpy and a member of an Enum that is a str or an int too become the plain number or string.
    Everything else that JSON does not know raises TypeError with its key path. `shard` is what this rank writes of a
    tensor, None where another rank writes it.
    """
    if isinstance(value, np.generic) and value.dtype.kind in "biufcSU":
        value = value.item()  # a float64 of numpy is a float of Python as well, yet not of that very type
    if isinstance(value, Tensor):
        mine = shard(value)
        if mine is not None:
            tensors[name] = mine
        order = _memory_order(value)
        return {"$tensor": name} if order is None else {"$tensor": name, "order": order}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and not isinstance(value, np.ma.MaskedArray):
        native = np.array(value, dtype=value.dtype.newbyteorder("="), order="C")
        return {"$array": pack(torch.from_numpy(native), name, tensors, shard)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (str, int, float)):  # of a class of its own, such as a member of an Enum
        return str.__str__(value) if isinstance(value, str) else int(value) if isinstance(value, int) else float(value)
    if isinstance(value, PurePath):
        return {"$path": os.fspath(value)}
    plain = plain_config(value)
    if plain is not value:
        return {"$config": pack(plain, name, tensors, shard)}
    if isinstance(value, (list, tuple)):
        items = [pack(item, f"{name}.{i}", tensors, shard) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: pack(item, f"{name}.{_escaped(key)}", tensors, shard) for key, item in value.items()}
        pairs = enumerate(value.items())
        return {
            "$items": [
                [pack(key, f"{name}.{i}.key", tensors, shard), pack(item, f"{name}.{i}.value", tensors, shard)]
                for i, (key, item) in pairs
            ]
        }
    raise TypeError(
        "state must be tensors, arrays, numbers, strings, paths, lists, tuples and dicts, but "
        f"{name} is {type(value).__module__}.{type(value).__qualname__}"
    )


def _escaped(key: str) -> str:
    """A key in the name of a tensor, so that "a.b" is not "b" in "a"."""
    return key.replace("\\", "\\\\").replace(".", "\\.") if "." in key or "\\" in key else key


def unpack(value: Any, read: Callable[[str], Tensor]) -> Any:
    """Undo `pack`; `read(name)` returns the tensors."""
    if isinstance(value, list):
        return [unpack(item, read) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return _in_order(read(value["$tensor"]), value.get("order"))
    if "$array" in value:
        return unpack(value["$array"], read).numpy()
    if "$value" in value:
        return unpack(value["$value"], read)
    if "$path" in value:
        return Path(value["$path"])
    if "$config" in value:
        from omegaconf import OmegaConf

        return OmegaConf.create(unpack(value["$config"], read))
    if "$tuple" in value:
        return tuple(unpack(item, read) for item in value["$tuple"])
    if "$items" in value:
        return {unpack(key, read): unpack(item, read) for key, item in value["$items"]}
    return {key: unpack(item, read) for key, item in value.items()}


def is_packed_tensor(value: Any) -> bool:
    return isinstance(value, dict) and "$tensor" in value


def _memory_order(tensor: Tensor) -> list[int] | None:
    """The dimensions of a dense tensor from the outermost in memory to the innermost, None where they come so: a matrix
    product rounds otherwise in another order."""
    if hasattr(tensor, "to_local") or tensor.layout != torch.strided or tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda i: -strides[i])
    return order if tensor.permute(order).is_contiguous() else None


def _in_order(tensor: Tensor, order: list[int] | None) -> Tensor:
    if order is None or hasattr(tensor, "to_local"):
        return tensor
    return tensor.permute(order).contiguous().permute(sorted(range(len(order)), key=order.__getitem__))


def plain_config(value: Any) -> Any:
    """A config of omegaconf as dicts and lists, with its interpolations resolved; anything else as it is."""
    if not type(value).__module__.startswith("omegaconf."):
        return value
    from omegaconf import OmegaConf

    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def configs_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[Any]:
    """The keys by which configs of omegaconf are reached in dicts and lists: a list of them, or the only one."""
    if plain_config(value) is not value:
        yield path[0] if len(path) == 1 else [*path]
    elif isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from configs_in(item, (*path, key))


def put_config(held: Any, path: Any) -> None:
    """Let a dict or list that `configs_in` has found be a config of omegaconf again, unless it is not there."""
    path = path if isinstance(path, list) else [path]
    with suppress(LookupError, TypeError):
        for key in path[:-1]:
            held = held[key]
        if isinstance(held[path[-1]], (dict, list)):
            from omegaconf import OmegaConf

            held[path[-1]] = OmegaConf.create(held[path[-1]])


def gather_state(
    model: nn.Module,
    optimizers: dict[str, Optimizer],
    shard: LocalShard = TensorShard.whole,
    owned: Mapping[int, str] | None = None,
    writes_owned: bool = True,
) -> State:
    """The state of a model and its optimizers; `shard` is what this rank writes of a tensor, None if another does.

    `owned`: names by `id` of parameters that optimizers hold beside those of the model; this rank writes their state if
    `writes_owned`.
    """
    state = State()
    values = {name: pack(value, f"model/{name}", state.tensors, shard) for name, value in model.state_dict().items()}
    state.meta["model"] = {name: None if is_packed_tensor(value) else value for name, value in values.items()}
    owned = owned or {}
    names = {**parameter_names(model), **owned}
    state.meta["optimizers"] = {}
    for key, optimizer in optimizers.items():
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        order = [names_of(parameter, names, key) for parameter in held]
        try:
            saved = optimizer.state_dict()
        except KeyError:
            check_held(key, optimizer, names)
            raise
        is_spread = any(id(parameter) in owned or not is_here(parameter) for parameter in held)
        others = others_of(key, optimizer, saved, is_spread)
        of_owned: LocalShard = TensorShard.whole if writes_owned else lambda tensor: None
        shards = [of_owned if id(parameter) in owned else shard for parameter in held]
        state.meta["optimizers"][key] = {
            "param_groups": [
                pack(
                    {k: v if k != "params" else [order[i] for i in v] for k, v in group.items()},
                    f"optimizer/{key}/group{i}",
                    state.tensors,
                    shard,
                )
                for i, group in enumerate(saved["param_groups"])
            ],
            "state": {
                order[i]: _pack_entry(entry, f"optimizer/{key}/{order[i]}", state.tensors, shards[i])
                for i, entry in saved["state"].items()
                if isinstance(i, int)
            },
            **({"others": pack(others, f"attributes/{key}", state.tensors, shard)} if others else {}),
        }
    return state


def _pack_entry(entry: Any, name: str, tensors: dict[str, TensorShard], shard: LocalShard) -> dict[str, Any]:
    """An optimizer's state of one parameter as JSON data: by key, as almost all have it, or one value."""
    if isinstance(entry, dict) and all(type(key) is str for key in entry):
        return {key: pack(value, f"{name}/{key}", tensors, shard) for key, value in entry.items()}
    return {"$value": pack(entry, f"{name}/$value", tensors, shard)}


class Take(Protocol):
    """Reads a saved tensor, laid out as `like`, this run's own tensor of that meaning."""

    def __call__(self, reader: Reader, name: str, like: Tensor | None) -> Tensor: ...


def check_names(own: Iterable[str], reader: Reader) -> None:
    """Raise KeyError where parameters and buffers of the module are other ones than those saved."""
    have, saved = set(own).difference(reader.meta.get("frozen", ())), set(reader.meta["model"])
    if have != saved:
        missing, unexpected = sorted(have - saved), sorted(saved - have)
        differs = [f"it lacks {shortened(missing, 5)}"] if missing else []
        differs += [f"the module lacks {shortened(unexpected, 5)}"] if unexpected else []
        raise KeyError(
            f"the checkpoint is of another module: {' and '.join(differs)}; build the module it was saved of"
        )


def check_shape(name: str, shape: Iterable[int], reader: Reader) -> None:
    """Raise ValueError where a parameter or buffer was saved with another global shape."""
    saved = list(reader.shape(f"model/{name}"))
    if saved != list(shape):
        raise ValueError(
            f"the checkpoint's {name} has shape {saved}, but the module's has {list(shape)}; "
            "build the module with the arguments that it was saved with"
        )


@dataclass
class Whole:
    """A state in memory, each tensor whole on the CPU; a `Reader`."""

    tensors: dict[str, Tensor]
    meta: dict[str, Any]

    def names(self, prefix: str = "") -> list[str]:
        return sorted(name for name in self.tensors if name.startswith(prefix))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def read(self, name: str, offsets: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        tensor = self.tensors[name]
        if offsets is None or shape is None:
            return tensor
        return tensor[tuple(slice(start, start + length) for start, length in zip(offsets, shape, strict=True))]


def gather_whole(strategy: Strategy, state: State, keep: bool = True) -> Whole:
    """Put the pieces of all ranks together, on each rank with `keep`; others get no tensors. Every rank calls it.

    `gather_whole(strategy, strategy.state_dict(wrapped, {}))` are the weights of any strategy;
    `strategy.load_state_dict(wrapped, {}, whole)` puts such weights back. Moves each byte of the state to every
    rank once and needs the memory of the largest rank's pieces beside the result.
    """
    whole = Whole({}, state.meta)
    for source in range(strategy.topology.world_size):
        mine = dict(sorted(state.tensors.items())) if source == strategy.topology.rank else {}
        described = [
            [name, str(s.tensor.dtype)[6:], list(s.tensor.shape), list(s.offsets), list(s.global_shape)]
            for name, s in mine.items()
        ]
        layout = strategy.broadcast(described, source)
        for kind in sorted({row[1] for row in layout}):
            rows = [row for row in layout if row[1] == kind]
            dtype = getattr(torch, kind)
            sizes = [math.prod(row[2]) for row in rows]
            flat = (
                torch.cat([mine[row[0]].tensor.detach().cpu().reshape(-1) for row in rows])
                if mine
                else torch.empty(sum(sizes), dtype=dtype)
            )
            flat = strategy.broadcast(flat, source)
            parts = flat.split(sizes) if keep else ()
            for (name, _, shape, offsets, global_shape), part in zip(rows, parts, strict=keep):
                target = whole.tensors.setdefault(name, torch.empty(global_shape, dtype=dtype))
                place = tuple(slice(start, start + length) for start, length in zip(offsets, shape, strict=True))
                target[place] = part.view(shape)
    return whole


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Canonical name of each parameter by `id`; a tied parameter has its first name."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def names_of(parameter: Tensor, names: dict[int, str], optimizer: str) -> str:
    """The name of a parameter that `optimizer` holds."""
    try:
        return names[id(parameter)]
    except KeyError:
        raise ValueError(
            f"optimizer {optimizer!r} holds a parameter of shape {list(parameter.shape)} that is not in the module; "
            "add it, or it would not be saved"
        ) from None
