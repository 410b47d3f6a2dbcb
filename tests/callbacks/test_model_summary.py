"""ModelSummary: the printed table, and that printing it leaves no trace."""

from __future__ import annotations

import copy
import random
import threading
from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn

from lockstep.callbacks.model_summary import ModelSummary, summarize


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(8 * 64, 10, dtype=torch.float32)
        self.head.bias.requires_grad_(False)
        self.calls = 0
        self.example_input_array: Any = torch.rand(4, 1, 8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.cache = x * random.random() * np.random.rand()
        return self.head(nn.functional.dropout(self.stem(x), 0.5))


def cells(summary: str, name: str) -> list[str]:
    (row,) = [line for line in summary.splitlines() if line.split(" ")[0] == name]
    return [cell.strip() for cell in row.split(" | ")]


def test_layers_totals_and_flops() -> None:
    summary = summarize(Net())
    assert cells(summary, "Name") == ["Name", "Type", "Params", "Trainable", "Bytes", "In", "Out"]
    assert cells(summary, "stem") == ["stem", "Sequential", "96", "96", "384 B", "[4, 1, 8, 8]", "[4, 512]"]
    assert cells(summary, "head") == ["head", "Linear", "5,130", "5,120", "20.0 KiB", "[4, 512]", "[4, 10]"]
    assert cells(summary, "(own)")[:5] == ["(own)", "Net", "3", "3", "12 B"]
    assert "Parameters: 5,229 = 5,219 trainable + 10 non-trainable" in summary
    assert "20.4 KiB in parameters, 72 B in buffers" in summary
    conv, linear = 2 * 4 * 8 * 9 * 64, 2 * 4 * 512 * 10
    # The example needs no gradient, so backward of the first layer computes the gradient of its weight only.
    assert (
        f"{(conv + linear) / 1000:.1f} kFLOPs forward, {(2 * conv + 3 * linear) / 1000:.1f} kFLOPs forward and "
        "backward, for a batch of 4" in summary
    )


def test_frozen_layers_cost_no_backward() -> None:
    net = Net()
    net.stem.requires_grad_(False)
    conv, linear = 2 * 4 * 8 * 9 * 64, 2 * 4 * 512 * 10
    assert f"{(conv + 2 * linear) / 1000:.1f} kFLOPs forward and backward" in summarize(net)


def test_it_leaves_no_trace() -> None:
    net = Net()
    net.stem.eval()
    called: list[Any] = []
    net.head.register_forward_hook(lambda *_: called.append(1))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    torch_rng, numpy_rng, python_rng = torch.get_rng_state(), np.random.get_state()[1], random.getstate()
    summarize(net, max_depth=-1)
    assert torch.equal(torch_rng, torch.get_rng_state())
    assert np.array_equal(numpy_rng, np.random.get_state()[1])  # type: ignore[arg-type]
    assert python_rng == random.getstate()
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert (net.training, net.stem.training, net.calls, hasattr(net, "cache"), called) == (True, False, 0, False, [])
    assert all(parameter.grad is None for parameter in net.parameters())
    net(net.example_input_array).sum().backward()
    assert called, "the module's own hooks are where they were"


class Meter:
    """What a model may hold that counts calls of forward."""

    __slots__ = ("__dict__", "count")

    def __init__(self, owner: nn.Module) -> None:
        self.count, self.owner, self.seen = 0, owner, list[Any]()

    def add(self, x: torch.Tensor) -> None:
        self.count += 1
        self.seen.append(x)


class Table(dict[str, int]):
    """A dict that lets nobody set an item."""

    def __setitem__(self, *_: Any) -> None:
        raise TypeError("read only")


class Counting(nn.Module):
    """Keeps account of its calls in whatever an attribute may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.twice = nn.ModuleList([nn.Linear(4, 4)])
        self.state: dict[str, Any] = {"calls": 0, "deep": [[0]]}
        self.twice[0].state = self.state  # type: ignore[assignment]
        self.maps: list[Any] = []
        self.last: deque[Any] = deque(maxlen=2)
        self.named, self.pair = {0}, ([0], 1)
        self.table, self.space = Table(a=1), SimpleNamespace(calls=0)
        self.number, self.array = torch.zeros(()), np.zeros(2)
        self.meter, self.bound, self.partly = Meter(self), self.count, partial(self.count, 2)
        self.hidden = [nn.BatchNorm1d(4)]
        self.rng, self.noise = np.random.default_rng(0), torch.Generator().manual_seed(0)
        self.calls, self.lock = 0, threading.Lock()
        self.mean = torchmetrics.MeanMetric(nan_strategy="disable")
        self.example_input_array = torch.rand(3, 4)

    def count(self, by: int = 1) -> None:
        self.calls += by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.twice[0].state is self.state and self.meter.owner is self
        self.state["calls"] += 1
        self.state["deep"][0][0] += 1
        self.maps.append(x)
        self.last.append(x)
        self.named.add(len(self.maps))
        self.pair[0][0] += 1
        self.space.calls += 1
        self.number.add_(1)
        self.array += 1
        self.meter.add(x)
        self.bound()
        self.partly()
        with self.lock:
            x = x * (self.table["a"] + self.rng.random()) + torch.randn(4, generator=self.noise)
        self.mean.update(x)
        return self.twice[0](self.hidden[0](self.inner(x)))

    def account(self) -> list[Any]:
        held = [self.state, self.maps, [*self.last], self.named, self.pair, self.space.calls, float(self.number)]
        held += [self.array.tolist(), self.meter.count, self.meter.seen, self.calls, self.rng.bit_generator.state]
        held += [self.noise.get_state().tolist(), self.mean._update_count, float(self.mean.mean_value)]
        return copy.deepcopy([*held, self.hidden[0].running_mean.tolist()])


def test_what_attributes_hold_is_as_it_was() -> None:
    net = Counting()
    before = net.account()
    assert "Compute: " in summarize(net)
    assert net.account() == before
    net(torch.rand(3, 4))
    assert net.account() != before


def test_an_object_that_acts_as_it_ends_is_shared() -> None:
    ended = []

    class Folder:
        def __del__(self) -> None:
            ended.append(1)

    net: Any = Net()
    net.folder = Folder()
    assert "Compute: " in summarize(net) and not ended


def test_depth_and_dtype() -> None:
    net = Net().to(torch.bfloat16)
    assert [line.split(" ")[0] for line in summarize(net, max_depth=2).splitlines()[2:9]] == [
        "stem",
        "stem.0",
        "stem.1",
        "stem.2",
        "stem.3",
        "head",
        "(own)",
    ]
    assert "10.2 KiB in parameters" in summarize(net, max_depth=0)
    assert "|" not in summarize(net, max_depth=0)
    for wrong in (-2, "all"):
        with pytest.raises(ValueError, match=f"max_depth must be .*, but it is {wrong!r}"):
            ModelSummary(max_depth=wrong)  # type: ignore[arg-type]


def test_models_without_data_or_shapes() -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(1000, 1000, bias=False), nn.Linear(1000, 10**9, bias=False))
    assert "Parameters: 1,000,001,000,000 = " in summarize(net)
    assert "1 lazy ones" in summarize(nn.Sequential(nn.LazyLinear(3, bias=False), nn.Linear(3, 1)))


def test_shared_parameters_count_once() -> None:
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    net[1].weight = net[0].weight
    assert "Parameters: 16 = 16 trainable" in summarize(net)


def test_sharded_parameters_count_with_their_global_shape() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    net: Any = Net()
    whole = summarize(net)
    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        fully_shard(net, mesh=init_device_mesh("cpu", (4,)))
        assert net.head.weight.to_local().numel() < 5120
        assert summarize(net).replace("FSDPNet", "Net    ") == whole
    finally:
        torch.distributed.destroy_process_group()


def test_a_forward_that_fails_is_reported_and_does_no_harm() -> None:
    net = Net()
    net.example_input_array = (torch.rand(1, 3),)
    assert "Sizes and FLOPs are unknown: forward on example_input_array failed with RuntimeError: " in summarize(net)


def test_rank_0_prints_when_fit_starts(capsys: pytest.CaptureFixture[str]) -> None:
    net: Any = Net()
    for rank in (1, 0):
        assert capsys.readouterr().out == ""
        ModelSummary().on_fit_start(SimpleNamespace(is_global_zero=rank == 0), net)  # type: ignore[arg-type]
    assert capsys.readouterr().out == summarize(net) + "\n"
