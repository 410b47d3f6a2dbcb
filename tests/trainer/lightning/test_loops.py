"""`trainer.fit_loop` and its kin, and a fit that is to train nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lockstep.lightning.pytorch as pl
from tests.trainer.lightning.projects import BARE, classifier, loader


class Seen(pl.Callback):
    """Where the loops are, in hooks of batches and of a validation."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, ...]] = []

    def note(self, trainer: Any) -> None:
        loop, batches = trainer.fit_loop, trainer.fit_loop.epoch_loop.batch_progress
        self.rows.append((
            loop.batch_idx, loop.total_batch_idx, batches.current.ready, batches.current.completed,
            batches.total.ready, batches.total.completed, loop.epoch_progress.current.completed,
        ))  # fmt: skip

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.note(trainer)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note(trainer)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.note(trainer)


def test_loops_show_where_training_is() -> None:
    seen = Seen()
    trainer = pl.Trainer(**BARE, devices=1, max_epochs=2, callbacks=[seen], num_sanity_val_steps=0)
    assert (trainer.fit_loop.batch_idx, trainer.fit_loop.total_batch_idx, trainer.fit_loop.done) == (-1, -1, False)
    trainer.fit(classifier(pl)(), loader(8), loader(8))
    first = [(0, 0, 1, 0, 1, 0, 0)] * 2 + [(1, 1, 2, 1, 2, 1, 0)] * 2 + [(1, 1, 2, 2, 2, 2, 0)]
    second = [(0, 2, 1, 0, 3, 2, 1)] * 2 + [(1, 3, 2, 1, 4, 3, 1)] * 2 + [(1, 3, 2, 2, 4, 4, 1)]
    assert seen.rows == first + second
    loop = trainer.fit_loop
    assert (loop.max_epochs, loop.min_epochs, loop.max_steps, loop.max_batches) == (2, 0, -1, 2)
    assert (loop.current_epoch, loop.epoch_loop.global_step, loop.batch_idx, loop.total_batch_idx) == (2, 4, 1, 3)
    assert (loop.done, loop.epoch_loop.val_loop.max_batches, trainer.validate_loop.num_dataloaders) == (True, [2], 1)
    loop.max_epochs, loop.epoch_loop.max_steps = 4, 5
    assert (trainer.max_epochs, trainer.max_steps, loop.done) == (4, 5, False)
    predictions = trainer.predict(classifier(pl)(), loader(8))
    assert trainer.predict_loop.predictions is predictions and trainer.predict_loop.max_batches == [2]
    trainer.predict(classifier(pl)(), loader(8), return_predictions=False)
    assert trainer.predict_loop.predictions == []


def test_what_the_loops_lack_is_refused() -> None:
    loop = pl.Trainer(**BARE, max_epochs=1).fit_loop
    with pytest.raises(
        AttributeError, match="FitLoop of lockstep.lightning has no 'restarting'; it has batch_idx, cur"
    ):
        loop.restarting  # noqa: B018
    for name in ("run", "min_epochs", "epoch_loop"):
        with pytest.raises(AttributeError, match=f"no '{name}' that can be set"):
            setattr(loop, name, 3)


@pytest.mark.ranks
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("zero", [{"max_epochs": 0}, {"max_steps": 0}, {"limit_train_batches": 0.0}])
def test_a_limit_of_zero_trains_nothing(zero: dict[str, Any], devices: int, caplog: pytest.LogCaptureFixture) -> None:
    called: list[str] = []
    hooks = ("on_fit_start", "on_sanity_check_end", "on_train_start", "on_train_epoch_start", "on_train_end")
    noted = {name: (lambda self, name=name: called.append(name)) for name in (*hooks, "on_fit_end")}
    module = classifier(pl, **noted)()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    trainer = pl.Trainer(**BARE, devices=devices, **zero)
    assert [getattr(trainer, name) for name in zero] == [0] and trainer.fit_loop.done
    trainer.fit(module, loader(8), loader(8))
    assert all(map(torch.equal, before, module.parameters()))
    assert (trainer.state.finished, trainer.current_epoch, trainer.global_step) == (True, 0, 0)
    if devices == 1:
        assert called == ["on_fit_start", "on_sanity_check_end", "on_fit_end"]
        assert "fit trains nothing, as max_epochs, max_steps or limit_train_batches is 0" in caplog.text
    assert trainer.test(module, loader(8))


@pytest.mark.parametrize("zero", [{"max_epochs": 0}, {"max_steps": 0}, {"limit_train_batches": 0}])
def test_fast_dev_run_holds_over_a_limit_of_zero(zero: dict[str, Any]) -> None:
    trainer = pl.Trainer(**BARE, fast_dev_run=True, **zero)
    trainer.fit(classifier(pl)(), loader(8))
    assert trainer.global_step == 1


def test_schedulers_of_manual_optimization_need_no_step() -> None:
    class Plain:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None: ...

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [Plain(optimizer)]

    module = classifier(pl, configure_optimizers=configure_optimizers)
    trainer = pl.Trainer(**BARE, devices=1, max_epochs=0)
    with pytest.raises(TypeError, match="Plain is not a scheduler of torch: it has no step"):
        trainer.fit(module(), loader(8))
    manual = module()
    manual.automatic_optimization = False
    trainer.fit(manual, loader(8))
