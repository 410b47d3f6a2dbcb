"""What arrives is what was sent: sharing, dtypes and classes kept, large data mapped and not copied."""

import functools
import os
import threading
import weakref
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lockstep.strategies.launch.payload import dumps, pack, unpack


def through(value: Any) -> Any:
    fd = pack(value)
    try:
        return unpack(fd)
    finally:
        os.close(fd)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(2, dtype=torch.bfloat16))


def test_tied_parameters_stay_tied() -> None:
    sent = Tied()
    sent.embedding.weight.requires_grad_(False)
    module = through(sent)
    assert module.head.weight is module.embedding.weight
    assert type(module.head.weight) is nn.Parameter
    assert not module.head.weight.requires_grad
    assert torch.equal(module.head.weight, sent.head.weight)
    assert module.scale.dtype == torch.bfloat16


def test_a_small_buffer_can_be_resized() -> None:
    arrived = through(torch.arange(3.0))
    assert arrived.resize_(5)[:3].tolist() == [0, 1, 2]


def test_functions_share_a_variable_that_they_close_over() -> None:
    number = 0

    def count() -> None:
        nonlocal number
        number += 1
        if number < 3:
            count()

    def read() -> int:
        return number

    sent_count, sent_read = through((count, read))
    sent_count()
    assert (sent_read(), read()) == (3, 0)


def test_an_optimizer_keeps_its_parameters() -> None:
    sent = Tied()
    module, optimizer = through((sent, torch.optim.AdamW(sent.parameters())))
    assert optimizer.param_groups[0]["params"][0] is module.head.weight
    module.head(module.embedding(torch.tensor([1]))).sum().backward()
    optimizer.step()
    assert not torch.equal(module.head.weight, sent.head.weight)


def test_views_share_memory_and_keep_their_strides() -> None:
    base = torch.arange(10.0)
    base, part, turned = through((base, base[2:5], base.view(2, 5).t()))
    assert turned.stride() == (1, 5)
    base[3] = 100.0
    assert part.tolist() == [2.0, 100.0, 4.0]
    assert turned[3, 0] == 100.0


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int8,
        torch.bool,
        torch.complex64,
        torch.uint16,
        torch.float8_e4m3fn,
    ],
)
def test_dtypes(dtype: torch.dtype) -> None:
    sent = torch.tensor([0.0, 1.0, 2.0]).to(dtype)
    got, again = through((sent, nn.Parameter(sent, requires_grad=False)))
    assert got.dtype == dtype
    assert torch.equal(got.float() if dtype.itemsize == 1 else got, sent.float() if dtype.itemsize == 1 else sent)
    assert again.data_ptr() == got.data_ptr()


def test_other_tensors() -> None:
    sparse, empty, scalar, meta, leaf = through(
        (
            torch.eye(3).to_sparse(),
            torch.zeros(0, 4),
            torch.tensor(3),
            torch.empty(2, device="meta"),
            torch.ones(2, requires_grad=True),
        )
    )
    assert torch.equal(sparse.to_dense(), torch.eye(3))
    assert empty.shape == (0, 4)
    assert scalar.item() == 3
    assert meta.is_meta
    assert leaf.requires_grad


@pytest.mark.ranks
def test_a_tensor_in_shared_memory_is_shared_with_processes_that_the_rank_starts() -> None:
    """A loader worker sees what a hook writes to it later; ranks do not write to each other's."""
    shared = torch.ones(2).share_memory_()
    fd = pack({"shared": shared, "view": shared[1:], "private": torch.ones(2)})
    mine, other = unpack(fd), unpack(fd)
    os.close(fd)
    assert mine["shared"].is_shared() and not mine["private"].is_shared()
    child = os.fork()
    if not child:
        mine["view"].fill_(5)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert mine["shared"].tolist() == [1, 5]
    assert other["shared"].tolist() == shared.tolist() == [1, 1]


def test_numpy_arrays_are_writable_and_private() -> None:
    sent = np.arange(6).reshape(2, 3)
    fd = pack(sent)
    first, second = unpack(fd), unpack(fd)
    os.close(fd)
    first[0, 0] = 7
    assert (first[0, 0], second[0, 0], sent[0, 0]) == (7, 0, 0)


def test_loading_maps_the_bytes_of_what_is_large() -> None:
    got = through({"data": torch.ones(1_000_000), "labels": np.ones(1_000_000), "scalar": torch.ones(())})
    assert got["scalar"].data_ptr() % 64 == 0
    for address in (got["data"].data_ptr(), got["labels"].ctypes.data):
        (line,) = [line for line in Path("/proc/self/maps").read_text().splitlines() if contains(line, address)]
        assert "memfd:lockstep" in line
        assert address % 64 == 0


def mapped_bytes() -> int:
    sizes = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:lockstep" in line:
            low, high = (int(bound, 16) for bound in line.split()[0].split("-"))
            sizes += high - low
    return sizes


def test_what_stays_of_a_result_keeps_nothing_else_in_memory() -> None:
    before = mapped_bytes()
    got = through({"scalar": torch.ones(()), "one": torch.ones(1_000_000), "other": torch.ones(2_000_000)})
    kept = got["scalar"], got["one"]
    del got
    assert 4_000_000 <= mapped_bytes() - before < 5_000_000
    assert kept[0].item() == 1 and kept[1].sum() == 1_000_000
    del kept
    assert mapped_bytes() == before


def contains(line: str, address: int) -> bool:
    low, high = (int(bound, 16) for bound in line.split()[0].split("-"))
    return low <= address < high


class Forwards:
    __slots__ = ("__dict__", "more")

    def __init__(self, inner: Any) -> None:
        self.inner, self.more = inner, 3

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Entries(dict[str, int]):
    def __getattr__(self, name: str) -> int:
        return self[name]


def test_objects_that_hand_on_their_attributes_travel() -> None:
    sent = Forwards(Forwards([1, 2]))
    arrived = through(sent)
    assert (arrived.inner.inner, arrived.more, arrived.index(2)) == ([1, 2], 3, 1)
    entries = Entries(a=1)
    vars(entries)["b"] = 2
    assert through(HTTPStatus) is HTTPStatus  # a class whose own class has __getattr__
    assert through(entries).a == 1 and vars(through(entries)) == {"b": 2}


def test_functions_without_a_name_travel() -> None:
    offset = 3
    assert through(lambda x: x + offset)(4) == 7


def test_functions_of_the_program_that_functools_has_wrapped_travel() -> None:
    """Those that no import gives, such as the ones of a script."""

    @functools.lru_cache(maxsize=7)
    def counted(n: int) -> int:
        return n if n < 2 else counted(n - 1) + counted(n - 2)

    @functools.singledispatch
    def of_kind(value: Any) -> str:
        return "other"

    @of_kind.register
    def of_numbers(value: int) -> str:
        return "number"

    class Held:
        @functools.cached_property
        def lazy(self) -> int:
            return counted(6)

    counted(3)
    arrived, kind, held = through((counted, of_kind, Held()))
    assert arrived(6) == 8 and arrived.cache_parameters() == {"maxsize": 7, "typed": False}
    assert arrived.cache_info().misses == 7 and arrived.__name__ == "counted"
    assert (kind(1), kind("a"), held.lazy) == ("number", "other", 8)
    assert through(of_module) is of_module
    assert through(functools.lru_cache(functools.partial(pow, 2)))(3) == 8


@functools.cache
def of_module() -> list[int]:
    return []


def test_weak_containers_travel() -> None:
    layer = nn.Linear(1, 1)
    names, layers = weakref.WeakKeyDictionary({layer: "a"}), weakref.WeakValueDictionary({"a": layer})
    module, names, layers = through((layer, names, layers))
    assert names[module] == "a" and layers["a"] is module
    del module
    assert not names and not layers


def test_a_compiled_function_of_the_program_is_named() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    with pytest.raises(TypeError, match="lambda> is compiled, move it to a file that the program imports"):
        pack({"loss": compiled})
    assert through(torch.compiler.disable(lambda x: x + 1))(1) == 2


@pytest.mark.parametrize(
    "value",
    [threading.Lock(), (i for i in "ab"), {"nested": [threading.Thread()]}, iter(DataLoader(torch.ones(1)))],
)
def test_what_cannot_be_pickled_is_named(value: Any) -> None:
    before = os.listdir("/proc/self/fd")
    named = "cannot pickle '.*' object|_SingleProcessDataLoaderIter cannot be pickled"
    with pytest.raises(TypeError, match=f"must be picklable, but .*({named}).*: create it on the rank"):
        pack(value)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.gpu
def test_tensors_of_a_gpu_arrive_on_the_cpu() -> None:
    """Each rank moves it to the device that is its own; tied parameters stay tied."""
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)).cuda()
    module[2].weight = module[0].weight
    arrived = unpack(pack(module))
    assert arrived[2].weight is arrived[0].weight
    for name, value in module.state_dict().items():
        assert arrived.state_dict()[name].device.type == "cpu"
        assert torch.equal(arrived.state_dict()[name], value.cpu())


class Inner:
    def __init__(self) -> None:
        self.values, self.lock = [1, 2], threading.Lock()


class Outer:
    def __init__(self) -> None:
        self.parts = {"first": Inner()}


def test_what_cannot_be_pickled_is_named_with_its_attribute() -> None:
    with pytest.raises(TypeError, match=r"\(Outer.parts\['first'\].lock is a lock\): create it on the rank"):
        dumps((len, (Outer(),)))
    with pytest.raises(TypeError, match=r"\(Outer.parts\['first'\].lock is a lock\)"):
        dumps([3, Outer()])
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"object \(lock is a lock\): create it on the rank"):
        dumps({"step": lambda: lock.acquire()})


class Slow(nn.Module):
    def __init__(self, held: Callable[["Slow"], Any]) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.slow = held(self)


@pytest.mark.parametrize(
    "held",
    [
        lambda module: id(module.net.weight),
        lambda module: {id(p) for p in module.parameters()},
        lambda module: {id(layer): name for name, layer in module.named_modules()},
        lambda module: [(0.1, id(module.net))],
    ],
)
def test_the_id_of_a_parameter_or_layer_is_refused_in_what_is_sent(held: Callable[[Slow], Any]) -> None:
    module = Slow(held)
    with pytest.raises(TypeError, match=r"^Slow\.slow(\[0\]){0,2} holds the id\(\) of a parameter or layer, which"):
        pack((len, ([3], module)), refuse_ids=True)
    os.close(pack(module))  # what a rank returns is compared with nothing


def test_other_large_numbers_are_sent() -> None:
    module = Slow(lambda module: {id(object()), 2**40, 2**47, -(2**47), "name", True})
    os.close(pack((len, module), refuse_ids=True))
