"""State of optimizers in all forms that torch saves, in checkpoints too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.callbacks import ModelCheckpoint
from tests.strategies.optimizers.test_attributes import Stepped, fit
from tests.trainer.toy import distance, equal, loader, quiet, weights


class Momentum(Optimizer):
    """The state of a parameter is a tensor, without a dict around it."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    def moved(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        self.state[parameter] = gradient + 0.9 * self.state[parameter] if parameter in self.state else gradient.clone()
        return self.state[parameter]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(self.moved(parameter, parameter.grad), alpha=-group["lr"])


class Numbered(Momentum):
    """The state of a parameter has numbers for keys."""

    def moved(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        self.state[parameter][1] = gradient + 0.9 * self.state[parameter].get(1, torch.zeros_like(gradient))
        return self.state[parameter][1]


class Wide(Momentum):
    """The state has another dtype than the parameter."""

    dtype = torch.float64

    def moved(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        state = self.state[parameter]
        state["momentum"] = gradient.to(self.dtype) + 0.9 * state.get("momentum", torch.zeros_like(gradient))
        state["momentum"] = state["momentum"].to(self.dtype)
        return state["momentum"].to(parameter.dtype)


class Narrow(Wide):
    dtype = torch.bfloat16


class Signs(Momentum):
    """Masks, counts by element, and a tuple of both dtypes."""

    def moved(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        state = self.state[parameter]
        was, count, pair = state.get("mask", gradient > 0), state.get("count", 0), state.get("pair", (gradient, 0))
        state["mask"], state["count"] = was ^ (gradient > 0), (gradient > 0).long() + count
        state["pair"] = (pair[0] + gradient, (gradient.double() + pair[1]))
        return torch.where(was, gradient, state["pair"][1].to(gradient.dtype)) / (1 + state["count"] // 2)


class Counting(torch.optim.SGD):
    """A part of the state is of no parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        counted = self.state.get("all", {"steps": 0, "rate": torch.ones(())})
        self.state["all"] = {"steps": counted["steps"] + 1, "rate": counted["rate"] * 0.9}
        for group in self.param_groups:
            group["lr"] = 0.05 * float(self.state["all"]["rate"]) / self.state["all"]["steps"]
        return super().step(closure)


def nadam(parameters: Any) -> Optimizer:
    return torch.optim.NAdam(parameters, lr=0.05)


@pytest.mark.parametrize("kind", [Momentum, Numbered, Counting, Wide, Narrow, Signs])
def test_a_resumed_run_has_the_state_of_the_one_that_was_saved(kind: type[Optimizer], tmp_path: Path) -> None:
    whole, trainer = fit(kind, tmp_path)
    resumed, again = fit(kind, tmp_path, ckpt=tmp_path / "step=3")
    assert equal(resumed, whole)
    if kind is Counting:
        assert again.optimizers[0].state["all"] == trainer.optimizers[0].state["all"]


def test_state_in_float32_of_parameters_in_bfloat16_stays_so(tmp_path: Path) -> None:
    whole, trainer = fit(nadam, tmp_path, precision="bf16-true")
    resumed, again = fit(nadam, tmp_path, ckpt=tmp_path / "step=3", precision="bf16-true")
    kinds = [
        {name: value.dtype for name, value in entry.items()}
        for run in (trainer, again)
        for entry in run.optimizers[0].state.values()
    ]
    assert equal(resumed, whole)
    assert all(each == kinds[0] for each in kinds)
    assert kinds[0]["mu_product"] == torch.float32


def test_state_in_the_dtype_of_parameters_follows_them_to_another(tmp_path: Path) -> None:
    fit(nadam, tmp_path)
    _, again = fit(nadam, tmp_path, ckpt=tmp_path / "step=3", precision="64-true")
    assert all(entry["exp_avg"].dtype == torch.float64 for entry in again.optimizers[0].state.values())


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_stage_1"])
def test_shards_of_state_keep_their_dtype(strategy: str, tmp_path: Path) -> None:
    if strategy != "fsdp":
        pytest.importorskip("deepspeed")
    found = []
    for ckpt in (None, tmp_path / "step=3"):
        module = Stepped(Narrow)
        save = [ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")]
        options = {"split_batches": True, "enable_checkpointing": True, "callbacks": save}
        quiet(strategy=strategy, devices=2, **options).fit(module, loader(48), ckpt_path=ckpt)
        found.append(weights(module))
    assert equal(*found)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", [Momentum, Numbered, Counting])
def test_another_strategy_reads_it(kind: type[Optimizer], tmp_path: Path) -> None:
    whole, _ = fit(kind, tmp_path, precision="64-true")
    module = Stepped(kind)
    save = ModelCheckpoint(tmp_path / "sharded", save_last=True)
    options = {"precision": "64-true", "split_batches": True, "enable_checkpointing": True, "callbacks": [save]}
    run = quiet(strategy="fsdp", devices=2, **options)
    run.fit(module, loader(48), ckpt_path=tmp_path / "step=3")
    assert distance(weights(module), whole) < 1e-12


class OneElement(Momentum):
    def moved(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        self.state[parameter]["scale"] = self.state[parameter].get("scale", torch.ones(1)) * 0.5
        return gradient * self.state[parameter]["scale"]


REFUSED = {
    "of one element": (
        "deepspeed_stage_1",
        OneElement,
        r"optimizer '0' \(OneElement\) keeps 'scale' in the state of a parameter, which is neither",
    ),
    "of no parameter in a pipeline": (
        "pipeline",
        Counting,
        r"the state_dict of optimizer '0' \(Counting\) has state\['all",
    ),
    "of no parameter": (
        "deepspeed_stage_2",
        Counting,
        r"the state_dict of optimizer '0' \(Counting\) has state\['all'",
    ),
    "with a number": (
        "deepspeed_stage_2",
        Numbered,
        r"optimizer '0' \(Numbered\) keeps state of a parameter without a",
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize("what", REFUSED)
def test_state_that_a_checkpoint_cannot_hold_is_refused_by_name(what: str, tmp_path: Path) -> None:
    strategy, kind, message = REFUSED[what]
    if strategy != "pipeline":
        pytest.importorskip("deepspeed")
    run = quiet(strategy=strategy, devices=2, enable_checkpointing=True, default_root_dir=tmp_path)
    with pytest.raises(ValueError, match=message):
        run.fit(Stepped(kind), loader(48))


class DropsAGroup(Stepped):
    def __init__(self) -> None:
        super().__init__(torch.optim.AdamW)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([{"params": self.net[i].parameters()} for i in (0, 3)], lr=0.01)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.net[0].requires_grad_(False)
            del self.trainer.optimizers[0].param_groups[0]


def test_state_of_a_group_that_was_dropped_is_named(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, every_n_train_steps=3)
    run = quiet(callbacks=[save], enable_checkpointing=True)
    with pytest.raises(ValueError, match=r"'0' \(AdamW\) has state of net.0.weight, net.0.bias, but none of its param"):
        run.fit(DropsAGroup(), loader(48))


class OwnKeys(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"seen": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})


class BesideMuon(Stepped):
    def __init__(self) -> None:
        super().__init__(OwnKeys)

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.dim() == 2]
        rest = [p for p in self.parameters() if p.dim() != 2]
        return torch.optim.Muon(matrices, lr=0.02), OwnKeys(rest, lr=0.05)


@pytest.mark.ranks
def test_own_keys_beside_an_optimizer_of_whole_tensors_are_saved(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, save_last=True)
    quiet(strategy="fsdp", devices=2, callbacks=[save], enable_checkpointing=True).fit(BesideMuon(), loader(48))
    assert (tmp_path / "last").exists()


class Counts(Momentum):
    """Saves a number as a tensor, and takes it back as a number."""

    def moved(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        self.state[parameter]["number"] = self.state[parameter].get("number", 0) + 1
        return gradient / self.state[parameter]["number"]

    def state_dict(self) -> Any:
        found = super().state_dict()
        state = {key: {"number": torch.tensor(entry["number"])} for key, entry in found["state"].items()}
        return {**found, "state": state}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for entry in self.state.values():
            entry["number"] = int(entry["number"])


def test_a_tensor_that_an_optimizer_takes_back_as_a_number_is_one(tmp_path: Path) -> None:
    whole, _ = fit(Counts, tmp_path)
    resumed, _ = fit(Counts, tmp_path, ckpt=tmp_path / "step=3")
    assert equal(resumed, whole)
