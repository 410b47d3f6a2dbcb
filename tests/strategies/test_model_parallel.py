"""Layers over several devices; on CPU the devices are logical."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.strategies import ModelParallel, model_parallel
from lockstep.strategies.model_parallel import balanced
from tests.strategies.contract import build
from tests.trainer.toy import distance, loader, net, quiet, weights


def test_cuts_are_contiguous_and_balanced_by_bytes() -> None:
    model = build()
    placed = balanced(model, 3)
    assert list(placed) == [f"body.{i}" for i in range(6)]
    indices = list(placed.values())
    assert indices == sorted(indices) and set(indices) == {0, 1, 2}
    sizes = [
        sum(
            p.numel()
            for name, p in model.named_parameters()
            if placed[name.rsplit(".", 2)[0] if name.count(".") > 2 else name.rsplit(".", 1)[0]] == i
        )
        for i in range(3)
    ]
    assert max(sizes) < 2 * min(sizes)


@pytest.mark.parametrize("device_map", [None, {"net.0": 1, "net.3": 0}], ids=["automatic", "by name"])
def test_a_run_has_the_numbers_of_one_device(device_map: dict[str, int] | None) -> None:
    expected, found = net(), net()
    quiet(max_epochs=2).fit(expected, loader(40), loader(16))
    trainer = quiet(max_epochs=2, strategy=ModelParallel(device_map=device_map), devices=2)
    trainer.fit(found, loader(40), loader(16))
    assert distance(weights(found), weights(expected)) == 0
    assert set(trainer.strategy.device_map.values()) == {0, 1}  # type: ignore[attr-defined]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in found.modules())  # the module is plain again


def test_activations_are_brought_to_each_layer_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which device each tensor is sent to, with device numbers that CPU tensors cannot show."""
    import lockstep.strategies.model_parallel as module

    sent: list[Any] = []
    real = module.move_in_place
    monkeypatch.setattr(
        module, "move_in_place", lambda value, device: (sent.append(device), real(value, torch.device("cpu")))[1]
    )
    monkeypatch.setattr(model_parallel, "nth_device", lambda kind, index: torch.device("cpu", index))
    strategy = ModelParallel()
    strategy.configure(devices=2, accelerator="cpu")
    strategy.setup()
    model = net()
    strategy.setup_module(model)
    model(torch.zeros(2, 8))
    strategy.teardown()
    assert [device.index for device in sent] == [0, 0, 1, 1, 0], (
        "arguments and keywords of both layers, then the output back home"
    )


class Reading(nn.Module):
    """Reads a tensor of a dict, writes to another in place, adds one, and may call itself or fail."""

    def forward(self, given: dict[str, Any], how: str) -> Any:
        assert given["mask"].is_meta and given["pair"][0].is_meta and given["total"].is_meta
        given["total"].add_(1)
        given["made"] = given["mask"] * 2
        if how == "twice":
            self(given, "once")
            assert given["mask"].is_meta
        if how == "fails":
            raise ZeroDivisionError
        return given["mask"]


@pytest.mark.parametrize("how", ["once", "twice", "fails"])
def test_what_a_layer_only_reads_is_the_callers_after_the_call(how: str) -> None:
    layer, mover = Reading(), model_parallel._Mover(torch.device("meta"))
    mover.hooks_of(layer)
    mask, y, pair = torch.ones(2), torch.ones(2), (torch.ones(2), "x")
    given = {"mask": mask, "y": y, "pair": pair, "total": torch.zeros(2)}
    try:
        assert layer(given, how).is_meta and how != "fails"
    except ZeroDivisionError:
        assert how == "fails"
    assert given["mask"] is mask and given["y"] is y and given["pair"][0] is pair[0]
    assert given["made"].is_meta and given["total"].is_meta, "what it has written stays"
    assert not mover.replaced._calls


@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        ({"nett": 0}, "names 'nett', which is not a submodule"),
        ({"net": 2}, "below devices=2, but 'net' has 2"),
        ({"net.0": 0}, "'net.3.weight' is in none of the submodules"),
    ],
)
def test_a_wrong_map_is_one_sentence(device_map: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quiet(strategy=ModelParallel(device_map=device_map), devices=2).fit(net(), loader(8))


def test_too_few_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="cuts between layers, but Sequential has 1 for devices=3"):
        balanced(nn.Sequential(nn.Linear(2, 2)), 3)


class Positions(nn.Module):
    """Most of a model, in a list, beside a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(4))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))


def test_a_module_with_parameters_of_its_own_is_one_layer() -> None:
    model = nn.ModuleDict({"encoder": Positions(), "head": nn.Linear(4, 2)})
    assert balanced(model, 2) == {"encoder": 0, "head": 1}
    with pytest.raises(ValueError, match="'position' belongs to none"):
        balanced(model["encoder"], 2)  # type: ignore[arg-type]


def test_modules_without_a_list_are_taken_apart_if_there_are_too_few_layers() -> None:
    pair = nn.Module()
    pair.first, pair.second = nn.Linear(4, 4), nn.Linear(4, 4)
    assert balanced(nn.Sequential(pair), 2) == {"0.first": 0, "0.second": 1}
