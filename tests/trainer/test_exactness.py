"""What trainers get wrong, each shown twice: the usual computation, which gives another number, and ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lockstep import Loss
from lockstep.callbacks import Callback
from lockstep.strategies.launch import environment, process_group
from lockstep.trainer.checkpoint.store import Checkpoint
from tests.trainer.toy import Net, data, distance, loader, net, quiet, weights

pytestmark = pytest.mark.ranks


def by_hand(divisor: Any, batch_size: int = 4, accumulate: int = 4, n: int = 37) -> list[torch.Tensor]:
    """Plain torch: each micro-batch's mean loss times its size over `divisor(samples of the window, batches of the
    window)`."""
    model = net().double()
    optimizer = model.configure_optimizers()
    x, y = data(n).tensors
    for window in torch.arange(n).split(batch_size * accumulate):
        parts = window.split(batch_size)
        for part in parts:
            (F.cross_entropy(model(x[part].double()), y[part]) * divisor(len(part), len(window), len(parts))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("devices", [1, 2])
def test_the_last_accumulation_window_has_its_true_weight(devices: int) -> None:
    """37 samples: two windows of 16, and one of a batch of 4 and another of 1."""
    right = by_hand(lambda samples, of_window, batches: samples / of_window)
    by_the_setting = by_hand(lambda samples, of_window, batches: 1 / 4)
    by_the_batches = by_hand(lambda samples, of_window, batches: 1 / batches)
    model = net()
    quiet(devices=devices, precision="64-true", accumulate_grad_batches=4 // devices).fit(model, loader(37, 4))
    assert distance(weights(model), right) < 1e-12
    assert min(distance(by_the_setting, right), distance(by_the_batches, right)) > 1e-4


class Numbered(Dataset[Any]):
    def __init__(self, n: int) -> None:
        self.rows = data(n)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return *self.rows[index], index


class Noting(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with Path(f"seen-{self.global_rank}").open("a") as file:
            file.writelines(f"{number}\n" for number in batch[2].tolist())
        return super().training_step(batch[:2], batch_idx)


class Saved(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint("stopped")


@pytest.mark.parametrize("devices", [1, 2])
def test_after_a_resume_in_the_middle_of_an_epoch_no_sample_comes_again(devices: int) -> None:
    numbered = DataLoader(Numbered(30), 4 // devices, shuffle=True, generator=torch.Generator().manual_seed(1))
    again = [number for _, _, batch in list(numbered)[:3] for number in batch.tolist()] + [
        number for _, _, batch in numbered for number in batch.tolist()
    ]
    assert len(again) > len(set(again)), "a loader that begins again"

    quiet(devices=devices, seed=1, max_steps=3, callbacks=[Saved()]).fit(
        Noting(), DataLoader(Numbered(30), 4 // devices, shuffle=True)
    )
    quiet(devices=devices, seed=1).fit(
        Noting(), DataLoader(Numbered(30), 4 // devices, shuffle=True), ckpt_path="stopped"
    )
    seen = [int(line) for rank in range(devices) for line in Path(f"seen-{rank}").read_text().split()]
    assert sorted(seen) == list(range(30))


class Targets(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/mean", batch[0].mean())
        self.log("val/count", float(len(batch[0])), reduce_fx="sum")


@pytest.mark.parametrize(("devices", "n"), [(2, 5), (3, 7), (3, 1)])
def test_in_evaluation_no_sample_counts_twice(devices: int, n: int) -> None:
    rows = data(n)
    truth = rows.tensors[0].double().mean().item()
    padded = [index for rank in range(devices) for index in DistributedSampler(rows, devices, rank, shuffle=False)]
    assert len(padded) > n
    (values,) = quiet(devices=devices, precision="64-true").validate(Targets(), DataLoader(rows, 2), verbose=False)
    assert values == {"val/count": n, "val/mean": pytest.approx(truth, rel=1e-12)}
    if n > 1:
        assert rows.tensors[0].double()[padded].mean().item() != pytest.approx(truth, rel=1e-3), (
            "as a padded sampler has it"
        )


def naive_reduction(devices: int) -> dict[str, float]:
    """The values of a rank's dict summed over ranks in its own order: what a collective a key, or a stack of all,
    does."""
    process_group.init_process_group(environment.detect(), "gloo")
    try:
        mine = {
            "loss": torch.tensor(1.0),
            "accuracy" if dist.get_rank() == 0 else "perplexity": torch.tensor(0.5 if dist.get_rank() == 0 else 80.0),
        }
        for value in mine.values():
            dist.all_reduce(value)
        return {name: (value / devices).item() for name, value in mine.items()}
    finally:
        process_group.destroy_process_group()


def test_metrics_of_other_names_are_never_averaged_together(run_ranks: Any) -> None:
    assert run_ranks(naive_reduction, 2, 2) == {"loss": 1.0, "accuracy": 40.25}, "an accuracy of 4025 %, silently"

    class Differing(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/loss", 1.0)
            self.log("val/accuracy", 0.5) if self.global_rank == 0 else self.log("val/perplexity", 80.0)

    trainer = quiet(devices=2)
    with pytest.raises(RuntimeError, match="rank 1 logged other metric names than the rest"):
        trainer.validate(Differing(), loader(8, 2), verbose=False)
    assert "val/accuracy" not in trainer.callback_metrics


def naive_divergence() -> list[bool]:
    """A hand-written loop on two ranks, one of which meets an infinite loss."""
    process_group.init_process_group(environment.detect(), "gloo")
    try:
        model = net()
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, (x, y) in enumerate(loader(32, 8)):
            loss = F.cross_entropy(ddp(x), y) * (float("inf") if dist.get_rank() == 1 and step == 2 else 1.0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [bool(weight.isnan().any()) for weight in weights(model)]
    finally:
        process_group.destroy_process_group()


DIVERGES = """
from lockstep.callbacks import ModelCheckpoint
from tests.trainer.toy import *

class Diverging(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (
            float("inf") if self.global_rank == 1 and self.global_step == 2 else 1.0)

trainer = quiet(devices=2, enable_checkpointing=True,
    callbacks=[ModelCheckpoint(every_n_train_steps=1, save_top_k=-1, dirpath="kept")])
trainer.fit(Diverging(optimizer="SGD"), loader(32, 4))
"""


@pytest.mark.long
def test_where_one_rank_diverges_the_run_fails_and_no_weight_is_nan(
    run_ranks: Any, repo_root: Path, tmp_path: Path
) -> None:
    assert all(run_ranks(naive_divergence, 2)), "every weight is NaN on rank 0, and the launch succeeded"

    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(repo_root)!r}){DIVERGES}"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode not in (0, None)
    assert "the loss of rank 1 is NaN or infinite" in run.stderr
    kept = sorted(tmp_path.glob("kept/*"))
    assert len(kept) == 2, "of the two steps before"
    for folder in kept:
        opened = Checkpoint.open(folder)
        assert all(opened.read(name).isfinite().all() for name in opened.names("model/"))


# ---- weights of the mean ---------------------------------------------------------------------------------


class Tokens(Net):
    """A loss per token; the samples of the second half of a global batch of 8 have a hundred times as many as the
    first."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, number = batch
        tokens = torch.where(number % 8 < 4, 1, 100)
        return Loss((F.cross_entropy(self(x), y, reduction="none") * tokens).sum(), tokens.sum())


def test_token_counts_that_differ_a_hundredfold_between_ranks() -> None:
    model = Tokens().double()
    model.load_state_dict(net().double().state_dict())
    quiet(devices=2, precision="64-true").fit(model, DataLoader(Numbered(24), 4))

    def train(mean_of_means: bool) -> list[torch.Tensor]:
        model = net().double()
        optimizer = model.configure_optimizers()
        x, y = data(24).tensors
        for begin in range(0, 24, 8):
            losses = F.cross_entropy(model(x[begin : begin + 8].double()), y[begin : begin + 8], reduction="none")
            tokens = torch.where(torch.arange(8) < 4, 1, 100)
            first, second = losses[:4].mean(), losses[4:].mean()
            ((first + second) / 2 if mean_of_means else (losses * tokens).sum() / tokens.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    assert distance(weights(model), train(False)) < 1e-12
    assert distance(train(True), train(False)) > 1e-3, "a mean of the ranks' means"


class Sometimes(Net):
    """Rank 1's half of a global batch of 8 counts in every second step only."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, number = batch
        return None if number[0] % 16 == 4 else F.cross_entropy(self(x), y)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_none_on_one_rank_has_no_weight(clip: float | None) -> None:
    model = Sometimes().double()
    model.load_state_dict(net().double().state_dict())
    quiet(devices=2, precision="64-true", gradient_clip_val=clip).fit(model, DataLoader(Numbered(32), 4))

    reference = net().double()
    optimizer = reference.configure_optimizers()
    x, y = data(32).tensors
    for begin in range(0, 32, 8):
        end = begin + (4 if begin % 16 == 0 else 8)
        F.cross_entropy(reference(x[begin:end].double()), y[begin:end]).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(reference.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    assert distance(weights(model), weights(reference)) < 1e-12


class Moves(Callback):
    """How far the first step continued rank 0, and where to."""

    def __init__(self) -> None:
        self.step: list[list[float]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.before = [weight.double() for weight in weights(module)]

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not trainer._run.window_is_open:
            self.step = [
                (weight.double() - before).flatten().tolist()
                for weight, before in zip(weights(module), self.before, strict=True)
            ]


@pytest.mark.parametrize(("devices", "accumulate"), [(1, 3), (2, 2)])
def test_scaled_half_precision_steps_and_clips_by_the_true_gradient(devices: int, accumulate: int) -> None:
    """Uneven micro-batches and ranks under loss scaling (65536 at first): the step is that of plain float32, and no
    longer than allowed."""
    reference = net(optimizer="SGD", lr=1.0)
    x, y = data(11).tensors
    F.cross_entropy(reference(x), y).backward()
    gradients = [parameter.grad for parameter in reference.parameters() if parameter.grad is not None]
    gradient = torch.cat([gradient.flatten().double() for gradient in gradients])
    for clip in (None, 0.05):
        moves = Moves()
        trainer = quiet(
            devices=devices,
            precision="16-mixed",
            accumulate_grad_batches=accumulate,
            split_batches=True,
            gradient_clip_val=clip,
            callbacks=[moves],
        )
        trainer.fit(net(optimizer="SGD", lr=1.0), loader(11, 11))
        step = -torch.cat([torch.tensor(part, dtype=torch.float64) for part in moves.step])
        expected = gradient if clip is None else gradient * clip / gradient.norm()
        assert ((step - expected).norm() / expected.norm()).item() < 5e-3
        assert clip is None or step.norm().item() < clip * 1.001
