"""The server's weights while clients train in the same model, and what optimizers were before a client used them."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.methods.federated.server import LIMIT, ExactSums
from lockstep.strategies.optimizers.attributes import kept, put_back

_NUMBERS = 3
"""What is added beside the model: the weight, the loss, and one a client."""


class RefusedOnClient(RuntimeError):
    """What no client may do: it ends the run, where other errors end the client's part."""


class ServerCopy:
    """The server's parameters and buffers, and the weighted sum of how far clients have moved from them."""

    def __init__(self, model: nn.Module, stepped: Collection[int], device: torch.device) -> None:
        """`stepped`: `id` of the parameters that optimizers hold."""
        self._model = model
        self.named = list(model.named_parameters())
        self.values = [parameter.detach().clone() for _, parameter in self.named]
        self.trained = [i for i, (_, p) in enumerate(self.named) if id(p) in stepped and p.requires_grad]
        """Places of the parameters that clients train."""
        self._buffers = [*_buffers(model)]
        self._places = {
            (module, key): None if tensor is None else (tensor, tensor.detach().clone())
            for module in model.modules()
            for key, tensor in module._buffers.items()
        }
        """Of all buffers, with their values."""
        self._floats = [buffer for buffer in self._buffers if buffer.value.is_floating_point()]
        self._whole = [buffer for buffer in self._buffers if not buffer.value.is_floating_point()]
        self._counts = [buffer.value.clone() for buffer in self._whole]
        self._size = sum(value.numel() for value in (*self.values, *(buffer.value for buffer in self._floats)))
        self._sums = ExactSums(self._size + _NUMBERS, device)
        self._device = device

    @torch.no_grad()
    def put(self) -> None:
        """Let the model be the server's."""
        for (_, parameter), value in zip(self.named, self.values, strict=True):
            parameter.copy_(value)
        for buffer in self._buffers:
            buffer.put()
        for module in self._model.modules():  # each client makes its own caches
            for key in [key for key in module._buffers if (module, key) not in self._places]:
                del module._buffers[key]
        for (module, key), held in self._places.items():
            if held is None:
                module._buffers[key] = None
            elif key in module._non_persistent_buffers_set:
                module._buffers[key], value = held
                held[0].data.copy_(value)

    @torch.no_grad()
    def add(self, weight: float, loss: float) -> str | None:
        """Add what a client has become, with its weight and the sum of its losses; return what is not finite, if
        anything is."""
        if [id(p) for p in self._model.parameters()] != [id(p) for _, p in self.named]:
            raise RefusedOnClient(
                "parameters were added or replaced while a client trained, which the server would not have; create "
                "them in __init__, setup or configure_model"
            )
        self._refuse_new()
        self._refuse_counters()
        moved = [_moved(value, p, weight) for (_, p), value in zip(self.named, self.values, strict=True)]
        moved += [_moved(buffer.value, buffer.now(), weight) for buffer in self._floats]
        numbers = torch.tensor([weight, loss, 1.0], dtype=torch.float64, device=self._device)
        fine = torch.stack([(part.abs() < LIMIT).all() for part in (*moved, numbers)])
        if not bool(fine.all()):
            names = [*(name for name, _ in self.named), *(buffer.name for buffer in self._floats), "the loss"]
            return names[int((~fine).nonzero()[0])]
        start = 0
        for part in (*moved, numbers):
            self._sums.add(start, part)
            start += part.numel()
        for i, buffer in enumerate(self._whole):
            self._counts[i] = torch.maximum(self._counts[i], buffer.now()) if buffer.counts else self._counts[i]
        return None

    def _refuse_new(self) -> None:
        for prefix, module in self._model.named_modules():
            for key, tensor in module._buffers.items():
                is_new = tensor is not None and self._places.get((module, key)) is None
                if is_new and key not in module._non_persistent_buffers_set:
                    raise RefusedOnClient(
                        f"training made the buffer {f'{prefix}.{key}'.lstrip('.')}, of which the server has none; "
                        "register it in __init__ with a tensor, or with persistent=False"
                    )

    def _refuse_counters(self) -> None:
        for buffer in self._whole:
            if not buffer.counts and not torch.equal(buffer.now(), buffer.value):
                raise RefusedOnClient(
                    f"training changed the buffer {buffer.name} of {buffer.value.dtype}, of which clients have no "
                    "average; make it floating point, or use trainer.global_step or self.log"
                )

    def reduce(self) -> tuple[Tensor, float, float, int]:
        """Over all ranks: the sum of how far clients have moved, of their weights, of their losses, and how many they
        are. Every rank calls it."""
        total = self._sums.reduce()
        for counts in self._counts if dist.is_initialized() else ():
            dist.all_reduce(counts, dist.ReduceOp.MAX)
        weight, loss, clients = total[-_NUMBERS:].tolist()
        return total, weight, loss, round(clients)

    @torch.no_grad()
    def finish(self, total: Tensor, weight: float) -> None:
        """Leave the mean of how far clients have moved in the gradients of what they train, and put the mean of all
        else into the model, which is the server's."""
        trained, start = set(self.trained), 0
        for i, ((_, parameter), value) in enumerate(zip(self.named, self.values, strict=True)):
            mean = (total[start : start + value.numel()] / weight).view_as(value)
            start += value.numel()
            if i in trained:
                parameter.grad = mean.to(value.dtype)
            else:
                parameter.copy_(torch.where(mean == 0, value, (value.double() - mean).to(value.dtype)))
        for buffer in self._floats:
            value = buffer.value
            mean = (total[start : start + value.numel()] / weight).view_as(value)
            start += value.numel()
            buffer.tensor.copy_(torch.where(mean == 0, value, (value.double() - mean).to(value.dtype)))
        for buffer, counts in zip(self._whole, self._counts, strict=True):
            buffer.tensor.copy_(counts)

    @property
    def num_bytes(self) -> int:
        """Of parameters and buffers."""
        tensors = [*self.values, *(buffer.value for buffer in self._buffers)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class _Buffer:
    """A buffer of the server's model, which user code may replace."""

    def __init__(self, module: nn.Module, key: str, name: str, tensor: Tensor) -> None:
        self._module, self._key, self.name = module, key, name
        self.tensor, self.value = tensor, tensor.detach().clone()
        self.counts = key == "num_batches_tracked" and isinstance(module, nn.modules.batchnorm._NormBase)
        """Whether it counts batches, of which the largest number holds."""

    def now(self) -> Tensor:
        found = self._module._buffers[self._key]
        if found is None or found.shape != self.value.shape or found.dtype != self.value.dtype:
            raise RefusedOnClient(
                f"training replaced the buffer {self.name} by one of another shape or dtype, of which clients have no "
                "average; change it in place"
            )
        return found.detach()

    def put(self) -> None:
        self._module._buffers[self._key] = self.tensor
        self.tensor.data.copy_(self.value)  # as BatchNorm's kernels do: without a new version


def _buffers(model: nn.Module) -> Iterator[_Buffer]:
    known: set[int] = set()
    for prefix, module in model.named_modules():
        for key, tensor in module._buffers.items():
            if tensor is not None and id(tensor) not in known and key not in module._non_persistent_buffers_set:
                known.add(id(tensor))
                yield _Buffer(module, key, f"{prefix}.{key}".lstrip("."), tensor)


def _moved(value: Tensor, now: Tensor, weight: float) -> Tensor:
    """How far `now` is from the server's `value`, times the weight: float64, flat; 0 where both are infinite or NaN."""
    same = (value == now) | ((value != value) & (now != now))
    return torch.where(same, 0.0, (value.double() - now.double()) * weight).reshape(-1)


class FreshOptimizers:
    """Makes the user's optimizers for each client what they were when they were built, but for what schedulers have
    changed since."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._all = [inner for optimizer in optimizers for inner in _with_inner(optimizer)]
        self._initial = [{p: _copied(state) for p, state in optimizer.state.items()} for optimizer in self._all]
        self._groups: list[list[dict[str, Any]]] = []
        self._attributes: list[dict[str, tuple[Any, Any]]] = []

    def begin(self) -> None:
        """A round begins: note learning rates and all else in parameter groups."""
        self._groups = [
            [{key: copy.deepcopy(value) for key, value in group.items() if key != "params"} for group in o.param_groups]
            for o in self._all
        ]
        self._attributes = [kept(optimizer) for optimizer in self._all]

    def reset(self) -> None:
        """A client begins, or the round is over. Raises RefusedOnClient for what a client has changed for good."""
        for optimizer, initial, groups, attributes in zip(
            self._all, self._initial, self._groups, self._attributes, strict=True
        ):
            optimizer.state.clear()
            for parameter, state in initial.items():
                optimizer.state[parameter] = _copied(state)
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                for key in [key for key in group if key != "params" and key not in saved]:
                    del group[key]
                group.update(copy.deepcopy(saved))
            if lost := put_back(optimizer, attributes):
                raise RefusedOnClient(
                    f"{type(optimizer).__name__} changed its attribute {lost[0]!r} on a client, and the next client "
                    "begins with an optimizer as it was built; keep it in state or param_groups, or as numbers, "
                    "tensors or lists of them"
                )


def _with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """An optimizer and those that it holds as attributes."""
    inner = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    return [optimizer, *(other for value in inner for other in _with_inner(value))]


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
