"""Memory of a rank and bytes moved in a step are those of each ZeRO stage."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Module, Trainer
from lockstep.callbacks import Callback
from lockstep.strategies import DeepSpeed, Strategy
from tests.trainer.toy import quiet

pytestmark = pytest.mark.ranks


class Allocated(TorchDispatchMode):
    """Bytes of all tensors of this process: now, and the most since it was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.most = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for item in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(item, Tensor):
                self.add(item)
        return out

    def add(self, tensor: Tensor) -> None:
        if tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if size and key not in self._known:
            self._known[key] = weakref.finalize(storage, self._forget, key, size)
            self.bytes += size
            self.most = max(self.most, self.bytes)

    def _forget(self, key: int, size: int) -> None:
        del self._known[key]
        self.bytes -= size

    def add_all(self) -> None:
        for item in gc.get_objects():
            if isinstance(item, Tensor):
                self.add(item)


class Wide(Module):
    """Two million parameters, in layers that ZeRO-3 cuts by default, and next to no activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)  # steps in place, without temporary tensors


class Memory(Callback):
    """Bytes of tensors for each parameter on rank 0 in the third step: when the optimizer is about to step, and at
    most."""

    def __init__(self) -> None:
        self.found: list[float] = []
        self._mode: Allocated | None = None

    def on_train_batch_start(self, trainer: Trainer, module: Module, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            gc.collect()
            self._mode = Allocated()
            self._mode.add_all()
            self._mode.__enter__()

    def on_before_optimizer_step(self, trainer: Trainer, module: Module, optimizer: Any) -> None:
        if self._mode is not None:
            gc.collect()
            self._mode.add_all()  # gradients that C++ code allocated
            self.found.append(self._mode.bytes / (8 * 512 * 512))

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self.found.append(self._mode.most / (8 * 512 * 512))
            self._mode = None

    def state_dict(self) -> dict[str, Any]:
        return {"found": self.found}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.found = state["found"]


TIGHT = {"reduce_bucket_size": 2**16, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
"""Buffers for a model of 8 MB: the defaults suit models from 500 MB on."""


def measure(strategy: str | Strategy, devices: int) -> list[float]:
    memory = Memory()
    data = DataLoader(TensorDataset(torch.randn(3 * devices, 512)), batch_size=1)
    quiet(strategy=strategy, devices=devices, seed=0, callbacks=[memory]).fit(Wide(), data)
    return memory.found


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
def test_memory_of_a_rank(devices: int) -> None:
    """Bytes a parameter in float32 with AdamW; on the way come layers, and a copy of a rank's gradients beside the
    step."""
    found = {"ddp": measure("ddp", devices)} | {
        stage: measure(DeepSpeed(stage=stage, config={"zero_optimization": TIGHT}), devices) for stage in (1, 2, 3)
    }
    print(json.dumps({str(name): [round(value, 2) for value in values] for name, values in found.items()}))
    layer = 4 / 8
    for name, held, most in (
        ("ddp", 4 + 8 + 8, 20 + layer),  # parameters, gradients and the buckets they are summed in, two moments
        (
            1,
            4 + 16 / devices,
            4 + 4 + 16 / devices,
        ),  # the parameters besides cut masters, gradients and moments; gradients are whole until they met
        (2, 4 + 16 / devices, 4 + 20 / devices + layer),
        (3, 20 / devices, 24 / devices + 3 * layer),  # parameters and their masters are two tensors in float32 too
    ):
        assert found[name][0] == pytest.approx(held, abs=0.2), name
        assert held <= found[name][1] <= most + 0.2, name


class Collectives(TorchDispatchMode):
    """Bytes of the whole tensors that collectives of two ranks work on, by collective."""

    KINDS = {"allreduce_": "all-reduce", "_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter"}

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = self.KINDS.get(func.name().removeprefix("c10d::"))
        if kind is not None:
            tensors = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
            whole = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self.bytes[kind] = self.bytes.get(kind, 0) + whole * (2 if kind == "reduce-scatter" else 1)
        return func(*args, **(kwargs or {}))


class Moved(Callback):
    """What collectives work on in the third step, in sizes of the model; rank 0's, brought back to the caller."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}
        self._mode: Collectives | None = None

    def on_train_batch_start(self, trainer: Trainer, module: Module, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2 and self._mode is None:
            self._mode = Collectives()
            self._mode.__enter__()

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3 and self._mode is not None:
            self._mode.__exit__(None, None, None)
            self.found, self._mode = {kind: size / (8 * 512 * 512 * 4) for kind, size in self._mode.bytes.items()}, None

    def state_dict(self) -> dict[str, Any]:
        return {"found": self.found}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.found = state["found"]


@pytest.mark.slow
def test_bytes_moved_in_a_step_of_two_micro_batches() -> None:
    found = {}
    for stage in (1, 2, 3):
        moved = Moved()
        strategy = DeepSpeed(stage=stage, config={"zero_optimization": TIGHT})
        quiet(strategy=strategy, devices=2, accumulate_grad_batches=2, callbacks=[moved]).fit(
            Wide(), DataLoader(TensorDataset(torch.randn(12, 512)), batch_size=1)
        )
        found[stage] = {kind: size for kind, size in moved.found.items() if size > 0.01}
    assert found == {
        1: {"all-reduce": 1, "all-gather": 1},
        2: {"all-reduce": 2, "all-gather": 1},
        3: {"all-gather": 4, "reduce-scatter": 2},
    }
