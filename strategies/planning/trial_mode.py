"""The mode under which a run is tried: tensors have shapes and no data, and all that operators do is noted."""

from __future__ import annotations

import functools
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._pytree import tree_leaves, tree_map_only

from lockstep.strategies.planning.fake_world import ranks_of
from lockstep.strategies.planning.known import Known, layout, like, mode_of
from lockstep.strategies.planning.memory import (
    BACKWARD,
    FORWARD,
    GATHERED,
    OPTIMIZER,
    OTHER,
    REDUCTION,
    ROUND,
    Allocation,
    Event,
    Offload,
    device_of,
    has_bytes,
)
from lockstep.strategies.planning.modules import Places
from lockstep.strategies.planning.user_code import (
    DEEPSPEED,
    OWN,
    ValueUnknownError,
    is_optimizer,
    nearest_file,
    unknown_value,
    user_line,
)
from lockstep.strategies.planning.work import Tally

REAL_NUMEL = 4096
"""Tensors of at most so many elements that are computed from nothing fake are real: step counters, tables of ranks."""
_PLAIN = frozenset({Tensor, nn.Parameter, FakeTensor, nn.Buffer})

_READS = frozenset({torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default})


class CollectiveCall(NamedTuple):
    """One call that the trial has seen."""

    kind: str
    dtype: str
    num_bytes: int
    phase: str
    ranks: tuple[int, ...]
    """Those that take part."""


class TrialMode(FakeTensorMode):
    """Runs operators on tensors without data; notes storages, collectives and work while `recording`.

    `collective(op, args, result)` says whether an operator is one, as (kind, dtype, bytes).
    """

    def __init__(self, collective: Callable[[Any, tuple[Any, ...], Any], tuple[str, str, int] | None]) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._collective = collective
        self._alive: dict[int, tuple[Allocation, Any]] = {}
        """By address of the storage; with what is called when it is freed."""
        self.at_start: list[tuple[Allocation, int]] = []
        self.events: list[Event] = []
        self.calls: list[CollectiveCall] = []
        self.transfers: list[CollectiveCall] = []
        """Over the host link, where `offloads` says so; between devices of one process, by the one that receives."""
        self.offloads: Callable[[CollectiveCall], torch.dtype | None] = lambda _: None
        """Dtype of the parameters that a call gathers from the host's memory, or whose gradients it sends there."""
        self.offload: Offload | None = None
        """What an engine that copies between the host's memory and the device's has there."""
        self.work: defaultdict[int, Tally] = defaultdict(Tally)
        """By device of the process."""
        self.places = Places()
        self.notes: dict[str, None] = {}
        self.recording = self.optimizing = False
        self.stage = FORWARD
        """The phase outside of backwards and of steps of optimizers."""
        self._depth = self._recorded_depth = self._inside = 0
        self._op = ""
        self._known = Known(self)

    def __deepcopy__(self, memo: Any) -> TrialMode:
        return self  # a tensor's copy is of its mode; of two modes both would free what the weak references hold

    # ---- what happens ------------------------------------------------------------------------------------

    def __enter__(self) -> TrialMode:
        self._depth += 1
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._depth -= 1
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):  # half of all calls
            return args[0].fake_device
        kwargs = kwargs or {}
        if not _PLAIN.issuperset(types) and any(
            kind not in _PLAIN and not issubclass(kind, FakeTensor) for kind in types
        ):
            return NotImplemented  # a DTensor: its local part comes here
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_fake = any(isinstance(leaf, FakeTensor) for leaf in leaves) or bool(
            leaves and getattr(kwargs.get("device"), "index", None)  # a real one goes to where none is
        )
        if is_fake and (other := next((mode for leaf in leaves if (mode := mode_of(leaf)) not in (None, self)), None)):
            args, kwargs = tree_map_only(FakeTensor, lambda leaf: like(leaf, other), (args, kwargs))
            return func(*args, **kwargs)  # a pipeline's shape inference: nothing that the run does
        if is_fake and func in _READS:
            return self._read(leaves[0], func)
        if is_fake and func is torch.ops.aten.is_set_to.default:  # torch would run it on memory
            return layout(leaves[0]) == layout(leaves[1])
        self._op = func.name()
        if is_fake:
            output = self._on_fakes(func, types, args, kwargs)
        elif leaves:
            output = func(*args, **kwargs)
            if self._op == "c10d::recv_":  # what stages of a pipeline vote before their first step: that all is known
                torch._foreach_add_(leaves, 1)
        else:
            output = self._on_fakes(func, types, args, kwargs)
            made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            if not self._inside and _is_real(func, made):  # not what a fake one is to be written to
                output = func(*args, **kwargs)
        if self.recording and self._depth > self._recorded_depth:
            return output  # torch asks for shapes, or runs what an operator is made of: the operator itself is noted
        results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        for leaf in results:
            self._note(leaf)
        if self.recording:
            self._count(func, args, output, leaves, results)
        return output

    def _on_fakes(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        try:
            ask = functools.partial(super().__torch_dispatch__, func, types, args, kwargs)
            self._inside += 1
            return self._known.result(func, args, kwargs, ask)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ValueUnknownError(
                f"{user_line()} calls {func.name().removeprefix('aten::')}, whose result depends on the values of a "
                "tensor, which a plan does not have; write it so that shapes do not depend on values, or measure the "
                "run on a device"
            ) from error
        except RuntimeError as error:
            if "on the same device" not in str(error) and "two different devices" not in str(error):
                raise
            raise ValueError(
                f"{user_line()} gives {func.name().removeprefix('aten::')} tensors of several devices, as a run would; "
                "give a device_map that has what this line joins on one device, or fewer devices"
            ) from error
        finally:
            self._inside -= 1

    def _count(self, func: Any, args: Any, output: Any, inputs: list[Tensor], results: list[Tensor]) -> None:
        call = self._collective(func, tuple(args), output)
        if call is not None:
            ranks = ranks_of(args)
            self.calls.append(CollectiveCall(*call, _shown(self.phase), ranks))
            if call[0] in ("all-gather", "reduce-scatter"):
                self._mark_whole(args, output, call[2])
            self._note_transfer(self.calls[-1])
            if self._op == "c10d::allgather_":  # into a list: Gloo and NCCL gather into one tensor and copy from it
                self._stage(call[2])
        elif func.namespace == "aten":
            device = device_of(results[0] if results else inputs[0]) if results or inputs else 0
            if self.offload is not None and func is torch.ops.aten.copy_.default:
                self._note_copy(inputs[0], inputs[-1])
            elif results and inputs and device != device_of(inputs[-1]) and inputs[-1].dim():
                self._note_send(inputs[-1], results[0])
            self.work[device].add(func, args, output, inputs, results, _shown(self.phase))

    def _note_send(self, source: Tensor, into: Tensor) -> None:
        dtype = str(source.dtype).removeprefix("torch.")
        self.transfers.append(CollectiveCall("copy", dtype, source.nbytes, _shown(self.phase), (device_of(into),)))
        if self._known_as(source) == "parameters":
            self.mark(GATHERED, [into])

    def _note_copy(self, into: Tensor, source: Tensor) -> None:
        to_host, from_host = self._is_on_host(into), self._is_on_host(source)
        if to_host != from_host:
            dtype, num_bytes = str(source.dtype).removeprefix("torch."), source.nbytes
            kind = "to host" if to_host else "to device"
            self.transfers.append(CollectiveCall(kind, dtype, num_bytes, _shown(self.phase), ()))

    def _is_on_host(self, tensor: Tensor) -> bool:
        found = self._alive.get(tensor.untyped_storage()._cdata)
        return found is not None and self.offload is not None and self.offload.holds(found[0])

    def _note_transfer(self, call: CollectiveCall) -> None:
        if (dtype := self.offloads(call)) is None:
            return
        numel = call.num_bytes // getattr(torch, call.dtype).itemsize // max(1, len(call.ranks))
        gathers = call.kind == "all-gather"
        kind, name = "to device" if gathers else "to host", str(dtype).removeprefix("torch.")
        self.transfers.append(CollectiveCall(kind, name, numel * dtype.itemsize, call.phase, ()))
        if gathers:
            self._stage(numel * dtype.itemsize)

    def _stage(self, size: int) -> None:
        """Note bytes that are there for the moment of a call."""
        staged = Allocation(size, GATHERED)
        self._log(staged, size)
        self._log(staged, -size)

    @contextmanager
    def held_beside(self) -> Iterator[Callable[[], None]]:
        """Run what a run does beside its steps: the most that it takes stays noted until the callable that this yields
        is called."""
        start, held = len(self.events), Allocation(0)

        def done() -> None:
            self._free(-id(held))

        yield done
        now = most = 0
        for event in self.events[start:]:
            now += event.change
            most = max(most, now)
        held.size, held.made_in = most - now, self.phase
        self._alive[-id(held)] = held, None
        self._log(held, held.size)

    def _mark_whole(self, args: Any, output: Any, num_bytes: int) -> None:
        for side in (*args, output):
            tensors = [leaf for leaf in tree_leaves(side) if isinstance(leaf, Tensor)]
            if sum(tensor.nbytes for tensor in tensors) == num_bytes:
                self.mark(GATHERED, (tensor for tensor in tensors if not self._known_as(tensor)))

    def _known_as(self, tensor: Tensor) -> str:
        found = self._alive.get(tensor.untyped_storage()._cdata)
        return found[0].kind if found is not None else ""

    def _read(self, tensor: Tensor, func: Any) -> bool | int | float:
        """A value of a tensor. What the strategies themselves read, such as losses and whether ranks agree, is 1.

        Raises ValueUnknownError if user code reads what is not a floating point number, on which its path may depend.
        """
        is_branch = tensor.dtype == torch.bool or func is torch.ops.aten.equal.default
        file = nearest_file()
        if file.startswith(OWN) or (is_optimizer(file) and not is_branch):
            return True if is_branch else 1.0 if tensor.is_floating_point() else 1
        if DEEPSPEED in file and (is_branch or tensor.is_floating_point()):  # has something overflowed? the norm
            return False if is_branch else 1.0
        if is_branch or not tensor.is_floating_point():
            raise unknown_value(file, "branches on" if is_branch else "reads")
        line = user_line()
        self.notes.setdefault(f"{line} reads the value of a tensor: if the step depends on it, the plan is of one path")
        return 1.0

    # ---- memory ------------------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """What runs now; the recompute of activation checkpointing is a part of the backward."""
        if torch._C._current_graph_task_id() != -1:
            return BACKWARD
        return OPTIMIZER if self.optimizing and self.stage != ROUND else self.stage

    def _note(self, tensor: Tensor) -> None:
        if not has_bytes(tensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        size = storage.nbytes()
        if size > 8 * REAL_NUMEL and not isinstance(tensor, FakeTensor):  # the user's data
            return
        block, tail = self.places.block, self.places.is_tail
        allocation = Allocation(size, "", self.phase if self.recording else "", "", block, tail, device_of(tensor))
        self._alive[key] = allocation, weakref.ref(storage, lambda _: self._free(key))
        self._log(allocation, size)

    def _free(self, key: int) -> None:
        found = self._alive.pop(key, None)
        if found is None:
            return
        allocation = found[0]
        if self.recording:
            allocation.freed_in = self.phase
            self._log(allocation, -allocation.size)

    def _log(self, allocation: Allocation, change: int) -> None:
        if self.recording and change:
            module = self.places.name
            if not module and self.phase == BACKWARD:
                module = self.places.of_backward()
            self.events.append(Event(allocation, change, _shown(self.phase), module, self._op))

    def mark(self, kind: str, tensors: Iterable[Tensor]) -> Counter[int]:
        """Say what tensors are for; returns their bytes by device, each storage counted once."""
        seen, total = set(), Counter[int]()
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)
            if not has_bytes(local):
                continue
            key = local.untyped_storage()._cdata
            if key in seen:
                continue
            seen.add(key)
            self._note(local)
            self._alive[key][0].kind = kind
            total[self._alive[key][0].device] += self._alive[key][0].size
        return total

    def unknown(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """Those that were there before the step and of which nothing is said: copies that an engine steps."""
        for tensor in filter(has_bytes, tensors):
            found = self._alive.get(tensor.untyped_storage()._cdata)
            if found is not None and not found[0].kind and not found[0].made_in:
                yield tensor

    def mark_what_stays(self, kind: str) -> Counter[int]:
        """Say what is alive of what was allocated in the phase `kind`; returns the bytes by device of all that is of
        this kind."""
        for allocation, _ in self._alive.values():
            if allocation.made_in == kind and not allocation.kind:
                allocation.kind = kind
        return self._bytes_of(kind)

    def mark_other_state(self) -> Counter[int]:
        """Say that what is alive between two steps and is nothing else is state as well; returns its bytes by
        device."""
        for allocation, _ in self._alive.values():
            allocation.kind = allocation.kind or OTHER
        return self._bytes_of(OTHER)

    def _bytes_of(self, kind: str) -> Counter[int]:
        found = Counter[int]()
        for allocation, _ in self._alive.values():
            if allocation.kind == kind:
                found[allocation.device] += allocation.size
        return found

    @contextmanager
    def watching_resizes(self) -> Iterator[None]:
        """While it lasts storages that engines empty and fill again are noted too."""
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            found = self._alive.get(storage._cdata)
            if found is not None:
                allocation = found[0]
                change, allocation.size = size - allocation.size, size
                allocation.kind = allocation.kind or GATHERED
                self._log(allocation, change)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]

    @contextmanager
    def record(self) -> Iterator[None]:
        """While it lasts everything is noted; what an earlier record has noted is dropped."""
        self.at_start = [(allocation, allocation.size) for allocation, _ in self._alive.values()]
        for allocation, _ in self.at_start:
            allocation.made_in = ""
        self.events, self.calls, self.transfers, self.work = [], [], [], defaultdict(Tally)
        self.recording, self._recorded_depth = True, self._depth
        try:
            yield
        finally:
            self.recording = False


def _shown(phase: str) -> str:
    return OPTIMIZER if phase == REDUCTION else phase


def _is_real(func: Any, made: list[Tensor]) -> bool:
    """Whether what is made from nothing has values: not what an engine is to fill with parameters."""
    is_filled = not func.name().startswith("aten::empty") or not any(leaf.is_floating_point() for leaf in made)
    is_filled &= not any(map(device_of, made))  # real tensors are on the first device
    return is_filled and sum(leaf.numel() for leaf in made) <= REAL_NUMEL
