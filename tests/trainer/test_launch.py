"""However the ranks are started, the caller has the results; precisions on two ranks; ranks that die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from lockstep import RankFailure, Trainer
from lockstep.callbacks import Callback, CSVLogger, ModelCheckpoint
from lockstep.trainer.checkpoint.store import is_checkpoint
from lockstep.trainer.run.hooks import Hooks
from tests.trainer.toy import Net, data, equal, loader, net, quiet, weights

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os
import torch
from torch.utils.data import DataLoader, TensorDataset
from lockstep.callbacks import Callback
from lockstep import Module, Trainer

class Mine(Module):
    def __init__(self, width=3):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(4, width)

    def training_step(self, batch, batch_idx):
        assert self.trainer.world_size == 2
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss, on_epoch=True, on_step=False)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Mark(Callback):
    def on_fit_end(self, trainer, module):
        open(f"rank{trainer.global_rank}", "w").close()

torch.manual_seed(0)
module, before = Mine(), None
before = module.layer.weight.detach().clone()
trainer = Trainer(OPTIONS, max_epochs=2, callbacks=[Mark()], enable_progress_bar=False, num_sanity_val_steps=0)
trainer.fit(module, DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2))
if trainer.is_global_zero:
    changed = not torch.equal(before, module.layer.weight)
    print("result", trainer.global_step, changed, sorted(trainer.callback_metrics),
        os.path.relpath(trainer.checkpoint_callback.best_model_path))
"""
RESULT = "result 4 True ['loss'] runs/Mine/version_0/checkpoints/"


def run(*command: str, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow  # tests/strategies/launch/test_user_program.py has such a script too
def test_a_script_without_a_main_guard() -> None:
    Path("train.py").write_text(SCRIPT.replace("OPTIONS", "devices=2"))
    output = run("train.py").splitlines()
    assert len(output) == 1 and output[0].startswith(RESULT), "the ranks do not run the script"
    assert Path("rank0").exists() and Path("rank1").exists()


@pytest.mark.slow  # the notebook of two devices, in tests/examples, has such a class too
def test_a_class_that_lives_in_no_file() -> None:
    """As in a notebook: the source is compiled from a string, in pieces."""
    cells = SCRIPT.replace("OPTIONS", "devices=2, strategy='ddp'").split("\ntorch.manual_seed(0)\n")
    Path("cells").write_text(repr(cells))
    output = run(
        "-c", "for cell in eval(open('cells').read()): exec(compile(cell, '<cell>', 'exec'), globals())"
    ).splitlines()
    assert len(output) == 1 and output[0].startswith(RESULT)


@pytest.mark.slow  # torch checks each collective against all ranks
def test_torchs_debug_mode() -> None:
    """In which the constructor of torch's DDP crashes, where it meets a group as it is set up by default."""
    Path("train.py").write_text(SCRIPT.replace("OPTIONS", "devices=2, strategy='ddp'"))
    assert RESULT in run("train.py", TORCH_DISTRIBUTED_DEBUG="DETAIL")


@pytest.mark.slow  # tests/strategies/launch/test_watchdog.py trains so too
def test_torchrun_with_auto() -> None:
    Path("train.py").write_text(SCRIPT.replace("OPTIONS", "strategy='auto'"))
    output = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py").splitlines()
    assert [line for line in output if line.startswith("result")] == [
        line for line in output if line.startswith(RESULT)
    ] and len(output) == 1
    assert Path("rank0").exists() and Path("rank1").exists()


def test_what_a_trainer_and_its_module_hold_after_two_ranks() -> None:
    model, trainer = (
        net(),
        Trainer(
            max_epochs=1,
            devices=2,
            logger=CSVLogger(),
            enable_progress_bar=False,
            callbacks=ModelCheckpoint(monitor="val/loss"),
        ),
    )
    trainer.fit(model, loader(32, 4), loader(16, 4))
    assert (trainer.global_step, trainer.current_epoch, trainer.num_training_batches, trainer.num_val_batches) == (
        4,
        1,
        4,
        [2],
    )
    assert set(trainer.callback_metrics) == {"train/loss", "train/loss_step", "train/loss_epoch", "val/loss", "val/acc"}
    assert set(trainer.logged_metrics) == {"train/loss_step", "train/loss_epoch", "val/loss", "val/acc"}
    assert trainer.log_dir == "runs/Net/version_0" and trainer.is_global_zero and not trainer.should_stop
    saver = trainer.checkpoint_callback
    assert saver.best_model_score == trainer.callback_metrics["val/loss"] and is_checkpoint(saver.best_model_path)
    assert equal(weights(Net.load_from_checkpoint(saver.best_model_path)), weights(model))
    assert model.trainer is trainer and model.training and not equal(weights(model), weights(net()))
    with torch.no_grad():
        x, y = data(16).tensors
        assert F.cross_entropy(model(x), y).item() == pytest.approx(
            trainer.callback_metrics["val/loss"].item(), rel=1e-6
        )

    (validated,) = trainer.validate(model, loader(16, 4), verbose=False)
    assert validated["val/loss"] == pytest.approx(saver.best_model_score.item())
    assert trainer.global_step == 4


@pytest.mark.parametrize("devices", [1, 2])
def test_a_second_fit_counts_on(devices: int) -> None:
    epochs = []

    class Counts(Net):
        def on_train_epoch_start(self) -> None:
            epochs.append(self.current_epoch)

    model, trainer = Counts(), quiet(devices=devices, logger=CSVLogger(), max_epochs=2)
    trainer.fit(model, loader(16, 4))
    assert trainer.global_step == 8 // devices
    with pytest.raises(
        ValueError,
        match="this Trainer has trained its max_epochs=2 already; to train on, set trainer.max_epochs = 4 or the "
        "like and call fit again",
    ):
        trainer.fit(model, loader(16, 4))
    after = weights(model)
    trainer.max_epochs = 3
    trainer.fit(model, loader(16, 4))
    assert trainer.global_step == 12 // devices and not equal(weights(model), after)
    assert trainer.log_dir == "runs/Counts/version_0"
    assert devices > 1 or epochs == [0, 1, 2]
    other = quiet(devices=devices, logger=CSVLogger())
    other.fit(model, loader(16, 4))
    assert other.log_dir == "runs/Counts/version_1"


class Dies(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 1 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def test_a_rank_that_is_killed_is_named_and_the_next_fit_works() -> None:
    model, trainer = Dies(), quiet(devices=2)
    before = weights(model)
    with pytest.raises(RankFailure, match="rank 1 was killed by SIGKILL \\(step 1, in training step\\)") as caught:
        trainer.fit(model, loader(32, 4))
    assert (caught.value.rank, caught.value.signal, caught.value.step) == (1, "SIGKILL", 1)
    assert equal(weights(model), before)
    trainer.fit(net(), loader(32, 4))
    assert trainer.global_step == 4


class Precise(Net):
    """Checks the dtypes of what it is given and computes, on every rank."""

    expected: tuple[torch.dtype, torch.dtype, torch.dtype]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        assert (self.net[0].weight.dtype, x.dtype, logits.dtype) == self.expected, (
            self.net[0].weight.dtype,
            x.dtype,
            logits.dtype,
        )
        assert torch.zeros(1).dtype == self.expected[0] and y.dtype == torch.int64
        self.log("train/loss", loss := F.cross_entropy(logits, y))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert self(batch[0]).dtype == self.expected[2]
        assert torch.get_float32_matmul_precision() == (
            "high" if self.trainer.strategy.precision.name == "tf32-true" else "highest"
        )
        super().validation_step(batch, batch_idx)


B, F32, F64 = torch.bfloat16, torch.float32, torch.float64
PRECISIONS = {
    "bf16-mixed": (F32, F32, B),
    "bf16-true": (B, B, B),
    "16-mixed": (F32, F32, torch.float16),
    "64-true": (F64, F64, F64),
    "32-true": (F32, F32, F32),
    "tf32-true": (F32, F32, F32),
}


@pytest.mark.parametrize(
    ("precision", "devices"), [*((name, 1) for name in PRECISIONS), ("bf16-mixed", 2), ("bf16-true", 2)]
)
def test_precisions(precision: str, devices: int) -> None:
    model = net()
    model.__class__ = Precise
    model.expected = PRECISIONS[precision]  # type: ignore[attr-defined]
    trainer = quiet(precision=precision, devices=devices, max_epochs=3, gradient_clip_val=1.0)
    trainer.fit(model, loader(48), loader(16))
    assert trainer.global_step == 18 // devices
    assert model.net[0].weight.dtype == PRECISIONS[precision][0] and torch.zeros(1).dtype == torch.float32
    assert torch.get_float32_matmul_precision() == "highest"
    reference = net()
    quiet(devices=devices, max_epochs=3, gradient_clip_val=1.0).fit(reference, loader(48))
    for one, other in zip(weights(model), weights(reference), strict=True):
        assert torch.allclose(one.float(), other, atol=0.05)


class Overflows(Net):
    """Rank 1's loss is infinite in the second batch: no rank may step, and all must stay equal."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=self.fused or None)

    def on_fit_start(self) -> None:
        self.last = weights(self)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 1 and self.global_rank == self.trainer.world_size - 1 else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = weights(self)
        assert equal(now, self.last) == (batch_idx == 1), batch_idx
        assert all(torch.isfinite(parameter).all() for parameter in now)
        flat = self.all_gather(torch.cat([parameter.reshape(-1) for parameter in now]))
        assert torch.equal(flat[0], flat[-1]), "the ranks differ"
        assert self.global_step == batch_idx + (batch_idx < 1), "a skipped step does not count"
        scales = self.all_gather(torch.tensor(self.trainer.strategy.precision.scaler.get_scale()))
        assert scales[0] == scales[-1] == (65536.0 if batch_idx < 2 else 32768.0)
        self.last = now


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_loss_scaling_skips_the_same_step_on_all_ranks(devices: int, fused: bool, own: bool) -> None:
    """Also where the optimizer is called and skips the step by itself, as fused ones do."""

    class Own(Overflows):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer.step(closure=optimizer_closure)

    trainer = quiet(devices=devices, precision="16-mixed", gradient_clip_val=1.0)
    trainer.fit((Own if own else Overflows)(fused), loader(16 * devices, 4))
    assert trainer.global_step == 3


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_a_skipped_first_step_is_not_a_step(strategy: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that watches the first step mistakes it for one that moves nothing, and the scheduler waits."""
    monkeypatch.setenv("LOCKSTEP_FORCE_MESH", "1")

    class First(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * 1e36 if batch_idx == 0 else loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, fused=fused or None)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    trainer = quiet(strategy=strategy, devices=1, accelerator="cpu", precision="16-mixed")
    trainer.fit(First(), loader(16, 4))
    assert trainer.global_step == 3
    assert trainer._run.schedulers[0].scheduler.last_epoch == 3


def test_what_belongs_to_a_running_fit_does_not_travel_to_the_ranks() -> None:
    """Every name that is emptied for the journey is one that the Trainer has, and nothing of a finished fit is on
    it."""
    run = quiet(enable_checkpointing=True)
    run.fit(net(), loader(8))
    run._run.saving = threading.Lock()  # type: ignore[assignment]  # as unfit for a journey as the thread of a save
    sent = run._run.__getstate__()
    assert sent.keys() == vars(run._run).keys()
    active = ("wrapped", "resumed", "saving", "module", "datamodule", "train_dataloader", "folder", "metrics")
    assert [sent[name] for name in active] == [None] * len(active)
    assert sent["hooks"] == Hooks()


class Locked(Callback):
    def __init__(self) -> None:
        self.lock = threading.Lock()


class LockedData(TensorDataset):
    def __init__(self) -> None:
        super().__init__(torch.ones(4, 8))
        self.lock = threading.Lock()


def test_what_cannot_travel_is_named_as_users_know_it() -> None:
    with pytest.raises(TypeError, match=r"\(arguments\.callbacks\[0\]\.lock is a lock\)"):
        quiet(devices=2, accelerator="cpu", callbacks=[Locked()]).fit(net(), loader())
    with pytest.raises(TypeError, match=r"\(loaders\['train'\]\.dataset\.lock is a lock\)"):
        quiet(devices=2, accelerator="cpu").fit(net(), DataLoader(LockedData()))
