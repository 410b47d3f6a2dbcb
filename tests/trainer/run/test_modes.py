"""Training runs in the modes that the user has set, and leaves them so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep import Module, Trainer
from lockstep.callbacks import LambdaCallback, ModelCheckpoint
from tests.trainer.toy import equal, loader, quiet, weights


class Frozen(Module):
    """A network of which only the last layers are trained, the root in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))
        self.double().freeze()
        self.net[3].train()
        self.net[4].requires_grad_(True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0].double()), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert not any(layer.training for layer in self.modules())
        self.log("val/loss", F.cross_entropy(self.net(batch[0].double()), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.1)

    def modes(self) -> list[bool]:
        return [layer.training for layer in self.net]


def by_hand(epochs: int) -> Frozen:
    module = Frozen()
    optimizer = module.configure_optimizers()
    for _ in range(epochs):
        for i, batch in enumerate(loader(16)):
            module.training_step(batch, i).backward()
            optimizer.step()
            optimizer.zero_grad()
    return module


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["single", "dp", "ddp", "fsdp", "tensor", "pipeline"])
def test_a_module_in_evaluation_mode_is_trained_in_it(strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    module, expected = Frozen(), by_hand(epochs=2)
    devices = 1 if strategy == "single" else 2
    quiet(strategy=strategy, devices=devices, split_batches=True, max_epochs=2).fit(module, loader(16), loader(8))
    assert not module.training and module.modes() == expected.modes()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-12, atol=1e-12)
    if strategy == "single":
        assert caplog.text.count("Frozen is in evaluation mode, and fit keeps the mode of every submodule") == 1


class Unfreezes(Frozen):
    """Puts a layer into training mode within the run."""

    def on_train_epoch_end(self) -> None:
        self.net[2].train(self.current_epoch == 0)


def test_a_resumed_run_has_the_modes_of_the_one_that_it_resumes(tmp_path: Path) -> None:
    def trainer(epochs: int) -> Trainer:
        saves = ModelCheckpoint(dirpath=tmp_path, filename=f"{epochs}")
        return quiet(max_epochs=epochs, seed=1, enable_checkpointing=True, callbacks=saves)

    straight, resumed = Unfreezes(), Unfreezes()
    trainer(3).fit(straight, loader(16), loader(8))
    trainer(1).fit(Unfreezes(), loader(16), loader(8))
    trainer(3).fit(resumed, loader(16), loader(8), ckpt_path=tmp_path / "1")
    assert equal(weights(resumed), weights(straight)) and resumed.modes() == straight.modes()
    assert not resumed.training


class Sets(Frozen):
    """Decides itself which layers train after a validation, as modules written before Lightning 2.2 do."""

    def __init__(self, with_base: bool) -> None:
        super().__init__()
        self.train()
        self.with_base = with_base

    def on_validation_model_train(self) -> None:
        if self.with_base:
            super().on_validation_model_train()
        else:
            self.train()
        self.net[1].eval()


@pytest.mark.parametrize("with_base", [False, True])
def test_a_module_sets_its_modes_after_a_validation(with_base: bool) -> None:
    module = Sets(with_base)
    module.net[2].eval()
    quiet().fit(module, loader(16), loader(8))
    assert module.modes() == [True, False, not with_base, True, True]


def test_modes_that_a_checkpoint_of_the_validation_does_not_have_are_refused(tmp_path: Path) -> None:
    saves = LambdaCallback(on_validation_end=lambda trainer, module: trainer.save_checkpoint(tmp_path / "1"))
    with pytest.raises(RuntimeError, match="on_validation_model_train leaves layers in modes that a checkpoint"):
        quiet(callbacks=[saves]).fit(Sets(True), loader(16), loader(8))
