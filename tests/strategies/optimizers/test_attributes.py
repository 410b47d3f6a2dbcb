"""What optimizers remember in attributes is saved, and put back; what cannot be is named."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import Optimizer

from lockstep.callbacks import ModelCheckpoint
from lockstep.strategies import ParameterServer
from lockstep.strategies.optimizers.attributes import kept, put_back
from lockstep.trainer.checkpoint.store import Checkpoint, CheckpointError
from tests.trainer.toy import Net, equal, loader, quiet, weights


class Decay(Optimizer):
    """Divides its rate by the steps that it has counted."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.seen: Any = 0
        self.bound = 10.0
        self.rates: dict[str, Any] = {"all": [], "last": (None, 0.0)}

    def count(self, parameter: torch.Tensor) -> float:
        return float(self.seen)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.seen += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] / self.count(parameter))
        self.rates["all"].append(float(self.seen))
        self.rates["last"] = (self.rates["last"][1], float(self.seen))


class OfTensor(Decay):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.seen = torch.zeros(())


class ById(Decay):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.counts: dict[int, int] = {}

    def count(self, parameter: torch.Tensor) -> float:
        self.counts[id(parameter)] = self.counts.get(id(parameter), 0) + 1
        return self.counts[id(parameter)]

    @property
    def held(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]


class ByIdSaved(ById):
    """Saves what it counts itself, under keys of its own."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"seen": self.seen, "counts": [self.counts.get(id(p), 0) for p in self.held]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own = dict(state_dict)
        self.seen, counts = own.pop("seen"), own.pop("counts")
        super().load_state_dict(own)
        self.counts = dict(zip(map(id, self.held), counts, strict=True))


class Around(Optimizer):
    """Steps by another optimizer, whose momentum is not in its own state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.05, momentum=0.9)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class WithoutGroups(Decay):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}


class Stepped(Net):
    def __init__(self, optimizer: type[Optimizer]) -> None:
        super().__init__()
        self.kind = optimizer

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters())  # type: ignore[call-arg]


def fit(optimizer: type[Optimizer], tmp_path: Path, strategy: Any = "single", ckpt: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    module = Stepped(optimizer)
    saver = ModelCheckpoint(dirpath=str(tmp_path), every_n_train_steps=3, save_top_k=-1, filename="{step}")
    callbacks = [] if ckpt else [saver]
    trainer = quiet(strategy=strategy, callbacks=callbacks, enable_checkpointing=not ckpt, devices=1, **options)
    trainer.fit(module, loader(48), ckpt_path=ckpt)
    return weights(module), trainer


@pytest.mark.parametrize("kind", [Decay, OfTensor, ByIdSaved])
@pytest.mark.parametrize("options", [{}, {"virtual_ranks": 2, "split_batches": True}])
def test_a_resumed_run_counts_on(kind: type[Optimizer], options: dict[str, Any], tmp_path: Path) -> None:
    whole, _ = fit(kind, tmp_path, **options)
    resumed, trainer = fit(kind, tmp_path, ckpt=tmp_path / "step=3", **options)
    assert equal(resumed, whole)
    assert float(trainer.optimizers[0].seen) == trainer.global_step == 6
    assert trainer.optimizers[0].rates["last"] == (5.0, 6.0) or kind is ByIdSaved


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline", lambda: ParameterServer(staleness=0, workers=1)])
def test_engines_hand_it_to_one_process(strategy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_FORCE_MESH", "1")
    whole, _ = fit(Decay, tmp_path, strategy if isinstance(strategy, str) else strategy())
    monkeypatch.delenv("LOCKSTEP_FORCE_MESH")
    resumed, _ = fit(Decay, tmp_path, ckpt=tmp_path / "step=3")
    torch.testing.assert_close(resumed, whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "what"), [(ById, "counts (it has parameters, or their ids, as keys)"), (Around, "inner (it is a SGD)")]
)
def test_what_cannot_be_saved_is_named_once_and_not_resumed(
    kind: type[Optimizer], what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "lockstep"):
        fit(kind, tmp_path)
    warned = [message for message in caplog.messages if what in message]
    assert len(warned) == 1 and kind.__name__ in warned[0] and "define state_dict and load_state_dict" in warned[0]
    with pytest.raises(CheckpointError, match="keeps outside of state and param_groups what checkpoints do not hold"):
        fit(kind, tmp_path, ckpt=tmp_path / "step=3")


def test_a_checkpoint_holds_only_what_has_changed(tmp_path: Path) -> None:
    fit(Decay, tmp_path / "own")
    saved = Checkpoint.open(tmp_path / "own" / "step=3").state["optimizer_attributes"]["0"]
    assert saved["values"].keys() == {"seen", "rates"} and not saved["lost"]
    fit(torch.optim.AdamW, tmp_path / "torch")
    checkpoint = Checkpoint.open(tmp_path / "torch" / "step=3")
    assert "optimizer_attributes" not in checkpoint.state
    assert checkpoint.meta["optimizers"]["0"].keys() == {"param_groups", "state"}


def test_a_state_dict_without_groups_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"WithoutGroups\) has the keys \['seen'\], but a checkpoint needs 'state'"):
        fit(WithoutGroups, tmp_path)


class OwnKeys(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"seen": 3}


class OwnKeysOfMatrices(OwnKeys):
    """Needs whole matrices, each on one rank."""

    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            parameter.grad /= parameter.grad.norm() + 1e-6
        super().step()


class NeverSteps(Net):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters(), lr=0.1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        raise AssertionError("the run has begun")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "make"),
    [
        ("pipeline", OwnKeys),
        ("fsdp", OwnKeysOfMatrices),
        ("deepspeed_stage_3", OwnKeys),
        ("parameter_server", OwnKeys),
    ],
)
def test_own_keys_that_cannot_be_saved_are_refused_before_the_first_step(
    strategy: str, make: Any, tmp_path: Path
) -> None:
    save = ModelCheckpoint(tmp_path, save_last=True)
    run = quiet(strategy=strategy, devices=2, callbacks=[save], enable_checkpointing=True)
    with pytest.raises(ValueError, match=r"the state_dict of optimizer '0' \(OwnKeys.*\) has seen besides state and"):
        run.fit(NeverSteps(make), loader(8, 8))


class Holds(torch.optim.SGD):
    def __init__(self) -> None:
        super().__init__([torch.zeros(1)], lr=0.1)
        self.count, self.seen = 3, [1]
        self.generator, self.drawn = torch.Generator(), np.random.RandomState(0)


def test_what_a_client_changes_in_attributes_is_put_back() -> None:
    optimizer = Holds()
    before = kept(optimizer)
    optimizer.count, optimizer.made = 5, True
    del optimizer.seen
    assert put_back(optimizer, before) == []
    assert (optimizer.count, optimizer.seen, hasattr(optimizer, "made")) == (3, [1], False)
    optimizer.drawn.rand()
    assert put_back(optimizer, before) == ["drawn"]
    del optimizer.generator
    assert put_back(optimizer, before) == ["generator", "drawn"]
