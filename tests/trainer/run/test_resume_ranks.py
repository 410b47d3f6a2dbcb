"""A run continues on another number of ranks: the same global batches, losses, rates and validations."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, Sampler

from lockstep.callbacks import Callback, LRScaling, LRWarmup
from tests.trainer.toy import Net, distance, quiet, weights

pytestmark = pytest.mark.ranks

N, GLOBAL_BATCH, ACCUMULATE, EPOCHS = 67, 24, 2, 2  # an epoch is two full windows and one of 19 samples
RANKS = (1, 2, 3, 4)


class Rows(Dataset[Any]):
    """Sample i, its number and its label."""

    def __init__(self, n: int = N) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x, self.y = (
            torch.randn(n, 8, generator=generator, dtype=torch.float64),
            torch.randint(0, 3, (n,), generator=generator),
        )

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index], index


class Validated(Net):
    """Validates so that the metric, and with it the plateau, depends on when."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["seen"] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, _ = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train/loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        steps = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        return [optimizer], [{"scheduler": steps, "interval": "step"}, {"scheduler": plateau, "monitor": "val/loss"}]


class Numbered(Validated):
    """Notes the samples of each step, which a pipeline refuses."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.extend(batch[2].tolist())
        return super().training_step(batch, batch_idx)


class Trace(Callback):
    """What happened in the run so far, over all ranks; continues after a restart."""

    def __init__(self, save_at: tuple[int, ...] = (), folder: str = "") -> None:
        self.save_at, self.folder = save_at, folder
        self.steps: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer._run.window_is_open:
            return
        mine = torch.full((GLOBAL_BATCH,), -1)
        mine[: len(module.seen)] = torch.tensor(module.seen, dtype=torch.int64)
        module.seen.clear()
        numbers = sorted(number for number in trainer.strategy.all_gather(mine).flatten().tolist() if number >= 0)
        (factor,) = (callback.factor for callback in trainer.callbacks if isinstance(callback, LRScaling))
        lr, progress = trainer.optimizers[0].param_groups[0]["lr"], trainer._run.progress
        self.steps.append([trainer._run.last_loss, lr, factor, numbers, progress.batches_seen, progress.total_batches])
        if trainer.global_step in self.save_at:
            trainer.save_checkpoint(f"{self.folder}/{trainer.global_step}")
            trainer.should_stop = trainer.global_step == self.save_at[-1]

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.steps.append([trainer.callback_metrics["val/loss"].item()])


def fit(
    ranks: int,
    began: int,
    trace: Trace,
    ckpt_path: str | None = None,
    loader: Any = None,
    kind: type[Validated] = Numbered,
    **options: Any,
) -> tuple[Any, Validated]:
    """Train on `ranks` with the loader of a run that began on so many."""
    torch.manual_seed(0)
    model = kind()
    options = {
        "strategy": "single" if ranks == 1 else "ddp",
        "accumulate_grad_batches": ACCUMULATE,
        "val_check_interval": 4,
        "max_epochs": EPOCHS,
    } | options
    given = (
        None if loader is None or not isinstance(loader.batch_sampler, Fives) else 24
    )  # a user's batches have no size that we know
    callbacks = [trace, LRScaling(reference_batch_size=12, global_batch_size=given), LRWarmup(steps=3)]
    trainer = quiet(devices=ranks, precision="64-true", seed=3, callbacks=callbacks, **options)
    loader = loader or DataLoader(Rows(), GLOBAL_BATCH // ACCUMULATE // began, shuffle=True)
    trainer.fit(model, loader, DataLoader(Rows(20), 5), ckpt_path=ckpt_path)
    return trainer, model


@functools.cache
def undisturbed(**options: Any) -> tuple[list[Any], list[torch.Tensor], dict[str, float]]:
    trace = Trace()
    trainer, model = fit(1, 1, trace, **options)
    return trace.steps, weights(model), {name: value.item() for name, value in trainer.callback_metrics.items()}


def same(steps: list[Any], expected: list[Any]) -> None:
    assert len(steps) == len(expected)
    for step, other in zip(steps, expected, strict=True):
        assert step[0] == pytest.approx(other[0], rel=1e-12), "the loss"
        assert step[1:2] == pytest.approx(other[1:2], rel=1e-15)
        assert step[2:] == other[2:], "factor, samples of the global batch, batches of the epoch and of the run"


def each_once(steps: list[Any], n: int = N, per_epoch: int = 3) -> None:
    samples = [step[3] for step in steps if len(step) > 1]
    for epoch in range(EPOCHS):
        assert sorted(itertools.chain(*samples[per_epoch * epoch : per_epoch * (epoch + 1)])) == list(range(n))


@pytest.mark.parametrize("began", RANKS)
@pytest.mark.parametrize("stop", [4, pytest.param(5, marks=pytest.mark.slow)])
def test_every_number_of_ranks_continues_from_every_other(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], began: int, stop: int
) -> None:
    """Stopped in the second epoch, one or two windows before its short last one."""
    fit(began, began, Trace((stop,), str(tmp_path)))
    expected, final, metrics = undisturbed()
    each_once(expected)
    assert len([step for step in expected if len(step) == 1]) == EPOCHS, "validations, one in each epoch"
    for ranks in RANKS:
        trace = Trace()
        trainer, model = fit(ranks, began, trace, str(tmp_path / str(stop)))
        same(trace.steps, expected)
        assert distance(weights(model), final) < 1e-12
        assert {name: value.item() for name, value in trainer.callback_metrics.items()} == pytest.approx(
            metrics, rel=1e-12
        ), "over all of the epoch"
        said = capfd.readouterr().err.count("global batches keep 24 samples")
        assert said == (began != ranks), "once, by rank 0"


@pytest.mark.parametrize("path", [(2, 3, 1), pytest.param((3, 2, 3), marks=pytest.mark.slow)])
def test_restarted_again_and_again(tmp_path: Path, path: tuple[int, ...]) -> None:
    """Each checkpoint says how the run began, so a chain of restarts ends where none would have."""
    ckpt = None
    for i, ranks in enumerate(path):
        trace = Trace((2 * i + 2,) if i < len(path) - 1 else (), str(tmp_path))
        _, model = fit(ranks, path[0], trace, ckpt)
        ckpt = f"{tmp_path}/{2 * i + 2}"
    expected, final, _ = undisturbed()
    same(trace.steps, expected)
    assert distance(weights(model), final) < 1e-12


def test_limits_and_intervals_count_as_they_did(tmp_path: Path) -> None:
    """Five batches an epoch: two full windows and half a one; validation after every third batch, over the run."""
    options: dict[str, Any] = {"limit_train_batches": 5, "val_check_interval": 3, "check_val_every_n_epoch": None}
    expected, final, _ = undisturbed(**options)
    assert [len(step[3]) for step in expected if len(step) > 1] == [24, 24, 12] * EPOCHS
    fit(3, 3, Trace((4,), str(tmp_path)), **options)
    for ranks in (1, 2):
        trace = Trace()
        _, model = fit(ranks, 3, trace, f"{tmp_path}/4", **options)
        same(trace.steps, expected)
        assert distance(weights(model), final) < 1e-12


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        pytest.param("fsdp", 3, marks=pytest.mark.slow),
        ("tensor", 2),
        pytest.param("pipeline", 2, marks=pytest.mark.slow),
    ],
)
def test_on_another_number_of_ranks_under_another_strategy(tmp_path: Path, strategy: str, ranks: int) -> None:
    """What counts are ranks that see different samples: two of a tensor-parallel or pipelined run are one."""
    expected, final, _ = undisturbed()
    fit(2, 2, Trace((4,), str(tmp_path)))
    trace = Trace()
    _, model = fit(ranks, 2, trace, f"{tmp_path}/4", kind=Validated, strategy=strategy)
    for step, other in zip(trace.steps, expected, strict=True):
        assert step[0] == pytest.approx(other[0], rel=1e-12)
        assert step[4:] == other[4:]
    assert distance(weights(model), final) < 1e-12


@pytest.mark.parametrize("accumulate", [1, 4])
def test_another_accumulation_goes_on_at_the_same_sample(tmp_path: Path, accumulate: int) -> None:
    """48 samples of the epoch are done, whatever a step is from now on: two batches are left, one of them short."""
    fit(1, 1, Trace((2,), str(tmp_path)))
    trace = Trace()
    trainer, _ = fit(
        1, 1, trace, f"{tmp_path}/2", max_epochs=1, accumulate_grad_batches=accumulate, val_check_interval=None
    )
    ours = [step for step in trace.steps[2:] if len(step) > 1]
    assert [len(step[3]) for step in ours] == ([12, 7] if accumulate == 1 else [19])
    assert [step[4] for step in ours] == ([5, 6] if accumulate == 1 else [6])
    assert trainer.current_epoch == 1


class ByHand(Numbered):
    """Steps by itself, once a batch."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        self.seen.extend(batch[2].tolist())
        self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def test_manual_optimization_keeps_one_batch_a_step(tmp_path: Path) -> None:
    def train(ranks: int, save_at: int | None, ckpt: str | None) -> tuple[list[Any], list[torch.Tensor]]:
        torch.manual_seed(0)
        model, trace = ByHand(), Trace((save_at,) if save_at else (), str(tmp_path))
        trainer = quiet(
            devices=ranks, strategy="single" if ranks == 1 else "ddp", precision="64-true", max_epochs=2, seed=3
        )
        trainer.callbacks += [trace, LRScaling(reference_batch_size=12)]
        trainer.fit(model, DataLoader(Rows(), 8, shuffle=True), ckpt_path=ckpt)
        return trace.steps, weights(model)

    expected, final = train(3, None, None)
    train(3, 4, None)
    for ranks in (1, 2):
        steps, ended = train(ranks, None, f"{tmp_path}/4")
        assert [step[3:] for step in steps] == [step[3:] for step in expected]
        assert distance(ended, final) < 1e-12


class Backwards(Sampler[int]):
    """A sampler of the user's."""

    def __iter__(self) -> Any:
        return iter(range(N - 1, -1, -1))

    def __len__(self) -> int:
        return N


class Fives(Sampler[list[int]]):
    """Batches of the user's, not ours to cut."""

    def __iter__(self) -> Any:
        return (list(range(begin, min(begin + 5, N))) for begin in range(0, N, 5))

    def __len__(self) -> int:
        return -(-N // 5)


@pytest.mark.parametrize("kind", ["sampler", "batch sampler"])
@pytest.mark.parametrize(("began", "ranks"), [(1, 2), pytest.param(2, 3, marks=pytest.mark.slow)])
def test_the_users_own_order_continues(tmp_path: Path, kind: str, began: int, ranks: int) -> None:
    def loader() -> Any:
        return (
            DataLoader(Rows(), batch_sampler=Fives())
            if kind == "batch sampler"
            else DataLoader(Rows(), 4, sampler=Backwards())
        )

    whole, trace = Trace(), Trace()
    options: dict[str, Any] = {"max_epochs": 2, "val_check_interval": None}
    _, expected = fit(began, began, whole, loader=loader(), **options)
    fit(began, began, Trace((12 // began,), str(tmp_path)), loader=loader(), **options)
    _, model = fit(ranks, began, trace, f"{tmp_path}/{12 // began}", loader=loader(), **options)
    same(trace.steps, whole.steps)
    assert distance(weights(model), weights(expected)) < 1e-12
