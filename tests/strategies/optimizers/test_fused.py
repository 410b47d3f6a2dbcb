"""Fused optimizer kernels: chosen where nobody has decided, and a step that they skip changes nothing."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.strategies.optimizers.fused import FUSED, fuse, prepare, skips_on_device
from tests.trainer.toy import Net, distance, equal, loader, net, quiet, weights


def stepped(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    torch.manual_seed(1)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()


@pytest.mark.parametrize("cls", FUSED)
def test_a_fused_optimizer_is_the_one_that_torch_would_make(cls: Any) -> None:
    one, two, three = net(), net(), net()
    chosen = cls(one.parameters(), lr=0.01)
    assert not skips_on_device(chosen)
    fuse(chosen)
    assert skips_on_device(chosen)
    stepped(chosen, one)
    stepped(cls(two.parameters(), lr=0.01, fused=True), two)
    stepped(cls(three.parameters(), lr=0.01), three)
    assert equal(weights(one), weights(two))
    assert distance(weights(one), weights(three)) < 1e-5


@pytest.mark.parametrize("cls", FUSED)
def test_a_skipped_step_changes_nothing(cls: Any) -> None:
    model = net()
    optimizer = cls(model.parameters(), lr=0.01)
    fuse(optimizer)
    stepped(optimizer, model)
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    optimizer.found_inf = torch.ones(())
    stepped(optimizer, model)
    assert equal(weights(model), before)
    for key, entry in optimizer.state_dict()["state"].items():
        assert all(
            torch.equal(value, state["state"][key][name])
            for name, value in entry.items()
            if isinstance(value, torch.Tensor)
        )
    optimizer.found_inf = torch.zeros(())
    stepped(optimizer, model)
    assert not equal(weights(model), before)


@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"fused": False}, {"differentiable": True}, {"capturable": True}]
)
def test_what_the_user_chose_stays(options: dict[str, bool]) -> None:
    optimizer = torch.optim.AdamW(net().parameters(), **options)
    fuse(optimizer)
    assert {name: optimizer.param_groups[0][name] for name in options} == options
    assert optimizer.param_groups[0]["fused"] in (None, False)


@pytest.mark.parametrize("cls", FUSED)
def test_state_of_earlier_steps_is_taken_over(cls: Any) -> None:
    """As of an optimizer that was stepped, or loaded, before the run."""
    one, two = net(), net()
    chosen, plain = cls(one.parameters(), lr=0.01), cls(two.parameters(), lr=0.01)
    for optimizer, model in ((chosen, one), (plain, two)):
        stepped(optimizer, model)
    before = copy.deepcopy(chosen.state_dict()["state"])
    fuse(chosen)
    for parameter, state in chosen.state.items():
        if "step" in state:
            assert state["step"].device == parameter.device and state["step"].dtype == torch.float32
            assert state["step"] == 3
    assert chosen.state_dict()["state"].keys() == before.keys()
    for optimizer, model in ((chosen, one), (plain, two)):
        stepped(optimizer, model)
    assert distance(weights(one), weights(two)) < 1e-5


def test_a_sparse_gradient_is_stepped_as_by_the_loop_by_hand() -> None:
    """Before any parameter has moved: the dense ones come first, in a group of their own."""
    found = []
    for chosen in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
        optimizer = torch.optim.SGD([{"params": model[1].parameters()}, {"params": model[0].parameters()}], lr=0.1)
        if chosen:
            fuse(optimizer)
        for i in range(3):
            model(torch.tensor([1, i, 3])).square().sum().backward()
            prepare(optimizer)
            assert skips_on_device(optimizer) is False
            optimizer.step()
            optimizer.zero_grad()
        found.append(weights(model))
    assert equal(*found)


def first_steps(fused: bool | None, skips: Any = (), without: Any = (), **options: Any) -> list[torch.Tensor]:
    """SGD over six steps; in those of `skips` the gradients are bad, in those of `without` one parameter has none."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters, lr=0.1, fused=fused, **options)
    if fused is None:
        fuse(optimizer)
    for i in range(6):
        parameters[0].grad, parameters[1].grad = torch.randn(3), None if i in without else torch.randn(3)
        bad = torch.tensor(float(i in skips))
        if fused is not False:
            prepare(optimizer)
        if skips_on_device(optimizer):
            optimizer.found_inf = bad
        elif bad:
            continue
        optimizer.step()
    return [p.detach() for p in parameters]


@pytest.mark.parametrize("fused", [None, True], ids=["chosen here", "by the user"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "maximize": True},
        {"momentum": 0.9, "dampening": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("skips", [(), (0,), (0, 1, 4)], ids=str)
def test_momentum_begins_with_the_first_step_that_is_not_skipped(fused: Any, options: Any, skips: Any) -> None:
    """torch would begin with uninitialized memory."""
    ballast = torch.full((3,), float("nan"))  # what a new tensor of this size may find
    del ballast
    assert distance(first_steps(fused, skips, **options), first_steps(False, skips, **options)) < 1e-6


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.5}], ids=str)
def test_a_parameter_may_get_its_first_gradient_later(options: Any) -> None:
    """torch's fused kernels fail where only some parameters have a momentum."""
    assert distance(first_steps(None, without=(0, 1), **options), first_steps(False, without=(0, 1), **options)) < 1e-6


def test_sgd_keeps_its_own_kernels_for_sharded_parameters() -> None:
    parameter = nn.Parameter(torch.randn(3))
    parameter.device_mesh = "of a DTensor"  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    fuse(optimizer)
    assert not skips_on_device(optimizer)


def test_fused_kernels_that_the_user_chose_keep_refusing_sparse_gradients() -> None:
    model = nn.Embedding(9, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    model(torch.tensor([1, 3])).sum().backward()
    prepare(optimizer)
    assert skips_on_device(optimizer)
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()


def test_other_optimizers_are_left_alone() -> None:
    class Own(torch.optim.SGD):
        pass

    parameters = list(net().parameters())
    for optimizer in (Own(parameters, lr=0.1), torch.optim.RMSprop(parameters), torch.optim.Adagrad(parameters)):
        fuse(optimizer)
        assert not skips_on_device(optimizer)


class Kernels(Net):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, **self.options)


def test_kernels_are_not_part_of_what_is_resumed() -> None:
    """A run saved with one kernel continues with that of the run that resumes it."""

    class Save(Kernels):
        def on_train_end(self) -> None:
            self.trainer.save_checkpoint("saved")

    quiet().fit(Save(fused=True), loader())
    resumed = quiet(max_epochs=2)
    resumed.fit(Kernels(), loader(), ckpt_path=Path("saved"))
    assert resumed.optimizers[0].param_groups[0]["fused"] is None
    assert resumed.optimizers[0].param_groups[0]["lr"] == 0.01


@pytest.mark.gpu
def test_on_a_gpu_fused_kernels_are_chosen() -> None:
    run = quiet(accelerator="gpu", devices=1)
    run.fit(Kernels(), loader())
    assert skips_on_device(run.optimizers[0])
