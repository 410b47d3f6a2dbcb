"""WeightAveraging against averages computed by a loop by hand, under every strategy, and over a restart."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep import CheckpointError, Module
from lockstep.callbacks import Callback, ModelCheckpoint, WeightAveraging
from lockstep.strategies import DDP
from tests.trainer.toy import Net, distance, equal, loader, net, quiet, weights

STEPS = 7  # of an epoch of 50 samples in batches of 8


class Observed(Callback):
    """What the run sees: weights in validation and after it, as whole tensors."""

    def __init__(self) -> None:
        self.in_validation: list[list[torch.Tensor]] = []
        self.in_training: list[list[torch.Tensor]] = []
        self.losses: list[float] = []

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self.in_validation.append(weights(module))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.in_training.append(weights(module))
        self.losses.append(float(trainer.callback_metrics["val/loss"]))


def fit(averaging: Callback, *callbacks: Callback, ckpt_path: Any = None, **options: Any) -> tuple[Net, Any]:
    module = net()
    trainer = quiet(
        **{"precision": "64-true", "split_batches": True, "max_epochs": 2}
        | {"callbacks": [averaging, *callbacks], "enable_checkpointing": False}
        | options
    )
    trainer.fit(module, loader(), loader(24), ckpt_path=ckpt_path)
    return module, trainer


def by_hand(decay: float | None, epochs: int = 2, every: int = 1, start: int = 0) -> tuple[list[Any], list[Any], Any]:
    """Weights after each epoch, their averages then, and the validation loss of the last averages."""
    module = net().double()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    average: list[torch.Tensor] | None = None
    trained, averaged, updates, step = [], [], 0, 0
    for _ in range(epochs):
        for x, y in loader():
            optimizer.zero_grad()
            F.cross_entropy(module(x.double()), y).backward()
            optimizer.step()
            if step >= start and (step - start) % every == 0:
                if average is None:
                    average = weights(module)
                else:
                    share = 1 / (updates + 1) if decay is None else 1 - decay
                    average = [a + share * (w - a) for a, w in zip(average, weights(module), strict=True)]
                updates += 1
            step += 1
        trained.append(weights(module))
        averaged.append(average if average is not None else weights(module))
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), averaged[-1], strict=True):
            parameter.copy_(value)
        losses = [F.cross_entropy(module(x.double()), y) * len(x) for x, y in loader(24)]
    return trained, averaged, (sum(losses) / 24).item()


@pytest.mark.parametrize(
    ("averaging", "hand"),
    [
        (lambda: WeightAveraging(0.9), {"decay": 0.9}),
        (lambda: WeightAveraging(None), {"decay": None}),
        (
            lambda: WeightAveraging(0.5, update_every_n_steps=3, update_starting_at_step=2),
            {"decay": 0.5, "every": 3, "start": 2},
        ),
        (lambda: WeightAveraging(0.9, update_starting_at_step=100), {"decay": 0.9, "start": 100}),
    ],
    ids=["ema", "mean", "every third step from the third", "not yet"],
)
def test_averages_are_those_of_a_loop_by_hand(averaging: Any, hand: dict[str, Any]) -> None:
    seen = Observed()
    module, _ = fit(averaging(), seen)
    trained, averaged, loss = by_hand(**hand)
    for epoch in range(2):
        assert distance(seen.in_training[epoch], trained[epoch]) <= 1e-14
        assert distance(seen.in_validation[epoch], averaged[epoch]) <= 1e-14
    assert distance(weights(module), averaged[-1]) <= 1e-14
    assert seen.losses[-1] == pytest.approx(loss, rel=1e-13)


def test_averages_of_epoch_ends() -> None:
    module, _ = fit(WeightAveraging(None, update_every_n_steps=None), max_epochs=3)
    trained, _, _ = by_hand(None, epochs=3)
    assert distance(weights(module), [sum(values) / 3 for values in zip(*trained, strict=True)]) <= 1e-14


def test_averages_of_epoch_ends_begin_at_a_step() -> None:
    averaging = WeightAveraging(None, update_every_n_steps=None, update_starting_at_step=2 * STEPS)
    module, _ = fit(averaging, max_epochs=3)
    trained, _, _ = by_hand(None, epochs=3)
    assert averaging.num_updates == 2
    assert distance(weights(module), [(a + b) / 2 for a, b in zip(*trained[1:], strict=True)]) <= 1e-14


class SteppedTwice(Net):
    """Two optimizers step the same parameters."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=lr) for lr in (0.1, 0.05)]


def test_a_parameter_of_two_optimizers_is_averaged_once() -> None:
    seen: list[list[torch.Tensor]] = []

    class Sees(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(weights(module))

    module = SteppedTwice()
    callbacks = [WeightAveraging(0.75), Sees()]
    quiet(precision="64-true", callbacks=callbacks).fit(module, loader())
    average = seen[0]
    for now in seen[1:]:
        average = [0.75 * a + 0.25 * w for a, w in zip(average, now, strict=True)]
    assert distance(weights(module), average) <= 1e-14


def test_one_s_own_schedule() -> None:
    class OddSteps(WeightAveraging):
        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            return step_idx is not None and step_idx % 2 == 1

    averaging = OddSteps(0.9)
    counts: list[int] = []

    class Counts(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            counts.append(averaging.num_updates)

    fit(averaging, Counts())
    assert counts == [3, 7]


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp", "tensor", "pipeline"))]
)
def test_a_strategy_changes_no_average_and_a_resumed_run_is_the_whole_run(strategy: str, tmp_path: Path) -> None:
    """Also: what one strategy has saved another continues."""
    one, expected = fit(WeightAveraging(0.9))
    options = {"strategy": strategy, "devices": 2}
    whole, trainer = fit(WeightAveraging(0.9), **options)
    assert distance(weights(whole), weights(one)) <= 1e-12
    for name, value in expected.callback_metrics.items():
        assert float(trainer.callback_metrics[name]) == pytest.approx(float(value), rel=1e-12, abs=1e-12)

    saving = {"enable_checkpointing": True, "default_root_dir": str(tmp_path)}
    first = ModelCheckpoint(dirpath=tmp_path / "run", save_last=True, save_top_k=0)
    fit(WeightAveraging(0.9), first, max_epochs=1, **saving, **options)
    last = str(tmp_path / "run" / "last")
    resumed, _ = fit(WeightAveraging(0.9), ckpt_path=last, **options)
    assert equal(weights(resumed), weights(whole))
    elsewhere, _ = fit(WeightAveraging(0.9), ckpt_path=last)
    assert distance(weights(elsewhere), weights(one)) <= 1e-12


def test_a_checkpoint_holds_the_averages(tmp_path: Path) -> None:
    saving = ModelCheckpoint(dirpath=tmp_path, save_last=True, save_top_k=0)
    module, _ = fit(WeightAveraging(0.9), saving, enable_checkpointing=True)
    loaded = Net.load_from_checkpoint(tmp_path / "last").double()
    assert distance(weights(loaded), weights(module)) <= 1e-7  # a new module is float32
    _, averaged, _ = by_hand(0.9)
    assert distance(weights(loaded), averaged[-1]) <= 1e-7


def test_a_checkpoint_of_weights_alone_holds_the_averages(tmp_path: Path) -> None:
    saving = ModelCheckpoint(dirpath=tmp_path, save_last=True, save_top_k=0, save_weights_only=True)
    seen = Observed()
    fit(WeightAveraging(0.9), saving, seen, enable_checkpointing=True, max_epochs=1)
    loaded = Net.load_from_checkpoint(tmp_path / "last").double()
    assert distance(weights(loaded), seen.in_validation[-1]) <= 1e-7
    assert distance(weights(loaded), seen.in_training[-1]) > 1e-4


def test_a_checkpoint_after_fit_continues_the_weights_that_train(tmp_path: Path) -> None:
    """`fit` returns the averages; what trains is in the last checkpoint, which is copied."""
    _, trainer = fit(WeightAveraging(0.9), max_epochs=1)
    with pytest.raises(RuntimeError, match="WeightAveraging; give weights_only=True"):
        trainer.save_checkpoint(tmp_path / "refused")
    last = ModelCheckpoint(dirpath=tmp_path / "run", save_last=True, save_top_k=0)
    _, trainer = fit(WeightAveraging(0.9), last, enable_checkpointing=True, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "after")
    resumed, _ = fit(WeightAveraging(0.9), ckpt_path=tmp_path / "after")
    whole, _ = fit(WeightAveraging(0.9))
    assert equal(weights(resumed), weights(whole))


def test_weights_that_are_changed_in_validation_are_refused() -> None:
    class Resets(Callback):
        def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
            with torch.no_grad():
                module.net[0].weight.mul_(0.5)

    with pytest.raises(RuntimeError, match="weights were changed in validation"):
        fit(WeightAveraging(0.9), Resets())


def test_two_averages_are_refused() -> None:
    class Another(WeightAveraging):
        pass

    with pytest.raises(ValueError, match="only one WeightAveraging"):
        fit(WeightAveraging(0.9), Another(0.5))


def test_a_second_fit_continues_from_the_averages_and_averages_again() -> None:
    averaging = WeightAveraging(0.9)
    module, trainer = fit(averaging)
    before = weights(module)
    trainer.max_epochs = 3
    trainer.fit(module, loader(), loader(24))
    assert distance(weights(module), before) > 1e-4


def test_a_resume_without_the_callback_is_refused(tmp_path: Path) -> None:
    saving = ModelCheckpoint(dirpath=tmp_path, save_last=True, save_top_k=0)
    fit(WeightAveraging(0.9), saving, enable_checkpointing=True, max_epochs=1)
    trainer = quiet(precision="64-true", split_batches=True, max_epochs=2)
    with pytest.raises(CheckpointError, match="WeightAveraging validates and saves"):
        trainer.fit(net(), loader(), loader(24), ckpt_path=tmp_path / "last")


def test_a_checkpoint_without_averages_starts_them_again(tmp_path: Path) -> None:
    saving = ModelCheckpoint(dirpath=tmp_path, save_last=True, save_top_k=0)
    trainer = quiet(precision="64-true", split_batches=True, callbacks=[saving], enable_checkpointing=True)
    trainer.fit(net(), loader(), loader(24))
    module, _ = fit(WeightAveraging(0.9), ckpt_path=tmp_path / "last")
    _, averaged, _ = by_hand(0.9, start=STEPS)
    assert distance(weights(module), averaged[-1]) <= 1e-14


def test_weights_that_are_narrow_are_averaged_in_float32() -> None:
    """In bfloat16 an average of decay 0.999 would stand still."""

    class Ramp(Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return -self.weight.sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    module = Ramp()
    trainer = quiet(
        precision="bf16-true", max_steps=100, max_epochs=None, callbacks=[WeightAveraging(0.999)], accelerator="cpu"
    )
    trainer.fit(module, loader(batch_size=10))
    average = 1.0
    for value in range(2, 101):
        average += 1e-3 * (value - average)
    assert module.weight.item() == pytest.approx(average, rel=4e-3)  # rounded to bfloat16 once


def test_layers_unfrozen_later_are_averaged() -> None:
    class Unfreezes(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net[0].requires_grad_(False)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net[3].parameters(), lr=0.1)

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.net[0].requires_grad_(True)
                self.trainer.optimizers[0].add_param_group({"params": list(self.net[0].parameters()), "lr": 0.1})

    torch.manual_seed(0)
    module = Unfreezes()
    before = copy.deepcopy(module.net[0].weight)
    seen = Observed()
    quiet(max_epochs=2, callbacks=[WeightAveraging(0.5), seen]).fit(module, loader(), loader(24))
    assert not torch.equal(module.net[0].weight, before)
    assert not torch.equal(module.net[0].weight, seen.in_training[-1][0])


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_is_refused(stage: int) -> None:
    with pytest.raises(ValueError, match="WeightAveraging keeps state beside the parameters: DeepSpeed"):
        fit(WeightAveraging(0.9), strategy=f"deepspeed_stage_{stage}", devices=2, precision="32-true")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"decay": 1.0}, "decay must be above 0"), ({"update_every_n_steps": 0}, "update_every_n_steps must be")],
)
def test_invalid_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightAveraging(**arguments)


class Saves(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)

    def on_train_end(self, trainer: Any, module: Any) -> None: ...


@pytest.mark.long
@pytest.mark.ranks
def test_users_may_save_averages_in_a_hook(tmp_path: Any) -> None:
    for options in ({"strategy": "pipeline", "devices": 2, "split_batches": True}, {}):
        torch.manual_seed(0)
        trainer = quiet(
            accelerator="cpu", seed=0, callbacks=[WeightAveraging(), Saves(f"{tmp_path}/{len(options)}")], **options
        )
        trainer.fit(Net(), loader())
        assert trainer.global_step == 7


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(("every", "step"), [(None, STEPS), (None, 3 * STEPS), (1, 3), (1, STEPS), (1, 3 * STEPS)])
def test_a_checkpoint_of_a_callback_at_an_end_is_resumed(
    every: int | None, step: int, is_first: bool, tmp_path: Any
) -> None:
    class SavesAtEnds(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if every is not None:
                trainer.save_checkpoint(tmp_path / f"{trainer.global_step}")

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            if every is None:
                trainer.save_checkpoint(tmp_path / f"{trainer.global_step}")

    averaging, saver = WeightAveraging(0.5, update_every_n_steps=every), SavesAtEnds()
    whole, _ = fit(*((saver, averaging) if is_first else (averaging, saver)), max_epochs=3)
    path = tmp_path / f"{step}"
    resumed, _ = fit(WeightAveraging(0.5, update_every_n_steps=every), max_epochs=3, ckpt_path=path)
    assert equal(weights(resumed), weights(whole))


class Normed(Module):
    """Has running statistics, a constant buffer with an infinity, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Mean(Callback):
    """The running mean that validation sees, and that of training after it."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seen.append(module.net[1].running_mean.clone())

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seen.append(module.net[1].running_mean.clone())


def fit_normed(averaging: Callback, *more: Callback, ckpt_path: Any = None, **options: Any) -> Normed:
    torch.manual_seed(0)
    module = Normed()
    options = {"precision": "64-true", "split_batches": True, "max_epochs": 2, "accelerator": "cpu"} | options
    trainer = quiet(callbacks=[averaging, *more], **options)
    trainer.fit(module, loader(48), loader(24), ckpt_path=ckpt_path)
    return module


def test_buffers_are_averaged_as_torch_averages_them() -> None:
    torch.manual_seed(0)
    module = Normed().double()
    average = torch.optim.swa_utils.AveragedModel(
        module, avg_fn=torch.optim.swa_utils.get_ema_avg_fn(0.7), use_buffers=True
    )
    optimizer, expected = module.configure_optimizers(), []
    for _ in range(2):
        for x, y in loader(48):
            optimizer.zero_grad()
            F.cross_entropy(module.net(x.double()), y).backward()
            optimizer.step()
            average.update_parameters(module)
        expected += [average.module.net[1].running_mean.clone(), module.net[1].running_mean.clone()]
    mean = Mean()
    trained = fit_normed(WeightAveraging(0.7, use_buffers=True), mean)
    assert distance(mean.seen, expected) <= 1e-12
    for name in ("running_mean", "running_var"):
        assert distance([getattr(trained.net[1], name)], [getattr(average.module.net[1], name)]) <= 1e-12
    assert torch.equal(trained.mask, module.mask) and int(trained.net[1].num_batches_tracked) == 12


@pytest.mark.parametrize(
    "strategy", ["auto", *(pytest.param(name, marks=pytest.mark.ranks) for name in ("ddp", "pipeline"))]
)
def test_averaged_buffers_are_saved_and_resumed(strategy: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"strategy": strategy, "devices": 1 if strategy == "auto" else 2, "virtual_ranks": 2}
    saver = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    whole = fit_normed(WeightAveraging(None, use_buffers=True), saver, enable_checkpointing=True, **options)
    path = tmp_path / "step=4"
    resumed = fit_normed(WeightAveraging(None, use_buffers=True), ckpt_path=path, **options)
    assert all(map(torch.equal, resumed.state_dict().values(), whole.state_dict().values()))
    if strategy == "auto":
        with pytest.raises(CheckpointError, match="holds averages in the place of buffers.*use_buffers=True"):
            fit_normed(WeightAveraging(None), ckpt_path=path, **options)
        saver = ModelCheckpoint(dirpath=tmp_path / "plain", filename="{step}", every_n_train_steps=4, save_top_k=-1)
        fit_normed(WeightAveraging(None), saver, enable_checkpointing=True, **options)
        with pytest.raises(CheckpointError, match="none of buffers such as 'mask'; give.*use_buffers=False"):
            fit_normed(WeightAveraging(None, use_buffers=True), ckpt_path=tmp_path / "plain" / "step=4", **options)
    if strategy == "pipeline":
        elsewhere = fit_normed(WeightAveraging(None, use_buffers=True), ckpt_path=path, virtual_ranks=2)
        assert all(map(torch.equal, elsewhere.state_dict().values(), whole.state_dict().values()))


def raised(module: Any) -> None:
    module.mask[0] += 1


def grown(module: Any) -> None:
    module.mask = torch.zeros(3)


def deleted(module: Any) -> None:
    del module.mask


@pytest.mark.parametrize("hook", ["on_validation_epoch_end", "on_train_batch_start"])
@pytest.mark.parametrize(
    ("change", "error"),
    [
        (raised, "buffer 'mask' was changed in validation.*; give use_buffers=False, or change it in a hook of train"),
        (grown, r"buffer 'mask', whose average has the shape \(2,\), has the shape \(3,\) now; give.*use_buffers=Fal"),
        (deleted, r"buffer 'mask', whose average has the shape \(2,\), is gone; give.*use_buffers=False"),
    ],
)
def test_a_buffer_that_is_not_what_it_was_is_an_error(change: Any, error: str, hook: str) -> None:
    class Changes(Callback):
        def change(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step and not trainer.sanity_checking and hasattr(module, "mask"):
                change(module)

    setattr(Changes, hook, Changes.change)
    if change is raised and hook == "on_train_batch_start":
        fit_normed(WeightAveraging(0.7, use_buffers=True), Changes())
        return
    with pytest.raises(RuntimeError, match=error):
        fit_normed(WeightAveraging(0.7, use_buffers=True), Changes())


class Counting(WeightAveraging):
    """A subclass with hooks of its own, which only a batch and an epoch may call."""

    batches = epochs = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches += len(batch) == 2
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.epochs += 1
        super().on_train_epoch_end(trainer, module)


class SavesAtEpochs(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}")


def test_hooks_of_a_subclass_are_called_by_the_loop_alone(tmp_path: Path) -> None:
    averaging = Counting(0.5, update_every_n_steps=None)
    fit(SavesAtEpochs(tmp_path), averaging)
    assert (averaging.batches, averaging.epochs, averaging.num_updates) == (2 * STEPS, 2, 2)
    averaging = Counting(0.5, update_every_n_steps=None)
    fit(averaging, ckpt_path=tmp_path / "0")
    assert (averaging.batches, averaging.epochs, averaging.num_updates) == (STEPS, 1, 2)


class SavesAtTheStart(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.folder / "again")


def test_averages_that_begin_in_a_resumed_run_take_no_epoch_of_before(tmp_path: Path) -> None:
    fit(SavesAtEpochs(tmp_path))
    first = WeightAveraging(0.5, update_every_n_steps=None)
    whole, _ = fit(first, SavesAtTheStart(tmp_path), max_epochs=3, ckpt_path=tmp_path / "0")
    second = WeightAveraging(0.5, update_every_n_steps=None)
    again, _ = fit(second, max_epochs=3, ckpt_path=tmp_path / "again")
    assert first.num_updates == second.num_updates == 2 and equal(weights(whole), weights(again))


class SavesSteps(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}")


def test_a_save_between_shares_of_one_rank_changes_no_weights(tmp_path: Path) -> None:
    def averaging() -> WeightAveraging:
        return WeightAveraging(0.5, use_buffers=True)

    whole = fit_normed(averaging(), virtual_ranks=2)
    saved = fit_normed(averaging(), SavesSteps(tmp_path), virtual_ranks=2)
    resumed = fit_normed(averaging(), ckpt_path=tmp_path / "3", virtual_ranks=2)
    for module in (saved, resumed):
        assert all(map(torch.equal, module.state_dict().values(), whole.state_dict().values()))


class Fills(Callback):
    def on_train_start(self, trainer: Any, module: Any) -> None:
        with torch.no_grad():
            module.net[0].weight.fill_(0.1)


class Assigns(Callback):
    def on_train_start(self, trainer: Any, module: Any) -> None:
        trainer.optimizers = [torch.optim.SGD(module.parameters(), 0.05)]


@pytest.mark.parametrize("last", [Fills, Assigns])
def test_a_hook_of_the_start_that_has_weights_loaded_again_takes_no_update_away(
    last: type[Callback], tmp_path: Path
) -> None:
    def averaging() -> WeightAveraging:
        return WeightAveraging(0.5, use_buffers=True, update_starting_at_step=2)

    whole = fit_normed(averaging(), last())
    saved = fit_normed(SavesSteps(tmp_path), averaging(), last())  # before the averages follow the step
    assert all(map(torch.equal, saved.state_dict().values(), whole.state_dict().values()))
    for step in (1, 3, 5, 9):
        resumed = fit_normed(averaging(), last(), ckpt_path=tmp_path / f"{step}")
        assert all(map(torch.equal, resumed.state_dict().values(), whole.state_dict().values())), step


@pytest.mark.ranks
def test_averages_of_buffers_that_differ_by_rank_are_refused() -> None:
    module = net()
    module.register_buffer("mean", torch.zeros(2))
    trainer = quiet(
        strategy=DDP(broadcast_buffers=False),
        devices=2,
        accelerator="cpu",
        callbacks=[WeightAveraging(use_buffers=True)],
    )
    with pytest.raises(ValueError, match="with broadcast_buffers=False each rank of DDP has buffers of its own"):
        trainer.fit(module, loader(), loader(24))
