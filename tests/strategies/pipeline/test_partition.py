"""Layers are found, balanced by parameters or seconds, and what cannot be split is named before a run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.strategies import Pipeline
from lockstep.strategies.modules.blocks import balance
from lockstep.strategies.pipeline.partition import check, cut, measure, stages
from tests.strategies.pipeline.models import Model
from tests.trainer.toy import net

pytestmark = pytest.mark.ranks


def test_layers_are_found_and_balanced() -> None:
    parts = cut(Model())
    assert parts.name == "inner.net"
    names = [layer.name.removeprefix("inner.net.") for layer in parts.layers]
    assert names == ["token", "condition", *(f"blocks.{i}" for i in range(5)), "norm", "head"]
    assert stages(parts, 3) == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert stages(parts, 2, split=["blocks.3"]) == [0] * 5 + [1] * 4
    assert stages(parts, 2, costs=[0, 0, 1, 1, 1, 9, 1, 0, 5]) == [0] * 6 + [1] * 3
    assert balance([5, 1, 1, 1, 5], 3) == [0, 1, 4]
    root = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), nn.Flatten())
    assert cut(root).name == "" and [layer.name for layer in cut(root).layers] == ["0", "1.1"]


def test_layers_are_balanced_by_seconds_where_a_sample_is_given() -> None:
    class Slow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(300):
                x = x + 1e-9
            return super().forward(x)

    sample = torch.randn(4, 64)
    net = nn.Sequential(nn.Linear(64, 64), nn.Dropout(), nn.BatchNorm1d(64), Slow(64, 2), nn.Linear(2, 2))
    before, state = torch.get_rng_state(), {name: value.clone() for name, value in net.state_dict().items()}
    costs = measure(cut(nn.ModuleDict({"net": net})), sample, torch.device("cpu"))
    assert costs[2] > 5 * max(costs[0], costs[1], costs[3])
    assert torch.equal(before, torch.get_rng_state()) and all(
        torch.equal(state[name], value) for name, value in net.state_dict().items()
    )
    assert stages(cut(nn.ModuleDict({"net": net})), 2) == [0, 1, 1, 1] and stages(
        cut(nn.ModuleDict({"net": net})), 2, costs=costs
    ) in (
        [0, 0, 1, 1],
        [0, 0, 0, 1],
    )


def test_what_is_compiled_around_layers_is_refused_and_compiled_layers_are_not() -> None:
    model = Model()
    model.frozen.compile(backend="eager")
    for layer in model.inner.net.blocks:
        layer.compile(backend="eager")
    check(model, None, 2, None, None, False)
    model.inner.compile(backend="eager")
    with pytest.raises(ValueError, match=r"inner is compiled, .* give the plain module, and compile=True"):
        check(model, None, 2, None, None, False)
    wrapped = Model()
    wrapped.inner = torch.compile(wrapped.inner, backend="eager")  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"inner is compiled, "):
        check(wrapped, None, 2, None, None, False)


def test_what_cannot_be_cut_is_named_before_anything_runs() -> None:
    outside = Model()
    outside.frozen.requires_grad_(True)
    with pytest.raises(ValueError, match=r"frozen.weight is outside of 'inner.net'"):
        cut(outside, "inner.net")
    scattered = nn.ModuleDict({"one": nn.Linear(2, 2), "two": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match=r"they are in one, two of ModuleDict, which has no forward"):
        cut(scattered)
    with pytest.raises(
        ValueError, match=r"module must name a submodule of Model, but module='net'; it has inner, frozen"
    ):
        cut(Model(), "net")
    with pytest.raises(
        ValueError, match=r"a pipeline of 3 stages needs as many layers, but net has 2 with parameters \(net.0, net.3\)"
    ):
        stages(cut(net()), 3)
    for split, message in (
        (["block"], "'block' is not among them; the layers are"),
        (["blocks.3", "blocks.1"], "in order, but split="),
        (["blocks.1", "blocks.2"], "stages 1 to 1 begin"),
    ):
        with pytest.raises(ValueError, match=message):
            stages(cut(Model()), 3 if len(split) == 2 and split[0] == "blocks.3" else 2, split=split)
    for options, message in (
        ({"schedule": "pipedream"}, "schedule must be one of gpipe, 1f1b, "),
        ({"num_micro_batches": 0}, "num_micro_batches must be a whole number of at least 1"),
        ({"stages_per_rank": 2}, "schedule='1f1b' has 1 stages a rank"),
        (
            {"schedule": "looped_bfs", "stages_per_rank": 1},
            "stages_per_rank of schedule='looped_bfs' must be a whole number of at least 2",
        ),
        ({"split": ["a"], "sample": torch.ones(1)}, "give one of them"),
    ):
        with pytest.raises(ValueError, match=message):
            Pipeline(**options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="use 'bf16-mixed'"):
        Pipeline().configure(devices=2, accelerator="cpu", precision="16-mixed")
