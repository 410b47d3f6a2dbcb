"""Each strategy's own code on one GPU, as a mesh of one rank: numbers of loops by hand, no host synchronization in a
step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from lockstep import Loss
from lockstep.callbacks import Callback, Guard, ModelCheckpoint
from lockstep.strategies import DDP, FSDP, SingleDevice, Strategy
from tests.strategies import contract
from tests.strategies.contract import difference, reference, saved_weights
from tests.strategies.test_force_mesh import ENGINES, PLANS, computes_in_double
from tests.trainer.run.test_guards import Brittle, by_hand, far, marked_data
from tests.trainer.toy import Net, distance, loader, net, quiet

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning"),
    pytest.mark.filterwarnings("ignore:No (positive|negative) samples in targets:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
]

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "single": SingleDevice,
    **{name: make for name, (make, _) in ENGINES.items()},
    "fsdp offloaded": lambda: FSDP(cpu_offload=True),
}
OWN_SYNCS = ("deepspeed", "offloaded", "fsdp=1,pipeline=1")
"""What waits for the device in each step: engines that read numbers on the host, or step there, and stages whose shards
are compared with what was gathered of them."""


@pytest.fixture(autouse=True)
def _syncs_are_let_be(one_rank_keeps_its_mesh: None) -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


class NoHostSyncs(Callback):
    """torch raises in steps 3 to 5 where the host would wait for the device. In the second DDP rebuilds its buckets,
    once."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        torch.cuda.set_sync_debug_mode("error" if 2 <= batch_idx <= 4 else "default")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps += torch.cuda.get_sync_debug_mode() == 2
        if batch_idx >= 4:
            torch.cuda.set_sync_debug_mode("default")


class Counts(Net):
    """A loss that says in a tensor what it counted."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        weight = (x[:, 0] > -0.5).to(x.dtype)
        total = (F.cross_entropy(self(x), y, reduction="none") * weight).sum()
        self.log("total", total)
        return Loss(total, weight.sum())


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_contract(name: str, tmp_path: Path) -> None:
    for key, plan in PLANS.items():
        plan = replace(plan, precision="64-true" if computes_in_double(name) else "32-true")
        found = contract.run(STRATEGIES[name](), 1, plan, tmp_path / key, "gpu")
        model, expected = reference(plan)
        bound = 1e-9 if computes_in_double(name) else 1e-4
        assert difference(saved_weights(tmp_path / key), model) < bound, key
        assert found["counts"] == expected["counts"]
        assert found["norms"] == pytest.approx(expected["norms"], rel=bound)


@pytest.mark.parametrize("step", [Net, Counts], ids=["mean", "count in a tensor"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("name", [name for name in STRATEGIES if not any(own in name for own in OWN_SYNCS)])
def test_no_step_waits_for_the_device(name: str, precision: str, step: type[Net]) -> None:
    """Logging and clipping included; what is shown every so many steps is not."""
    if "pipeline" in name and (precision == "16-mixed" or step is Counts):
        pytest.skip("a pipeline refuses 16-mixed, and reads the counts of its losses")
    watch = NoHostSyncs()
    run = quiet(
        strategy=STRATEGIES[name](),
        devices=1,
        accelerator="gpu",
        precision=precision,
        gradient_clip_val=0.5,
        log_every_n_steps=50,
        callbacks=[watch],
    )
    run.fit(step(), loader(48, 8))
    assert watch.steps == 3 and run.global_step == 6


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_trainer_moves_the_weights_as_the_loop_by_hand_does(name: str, precision: str) -> None:
    module, by_hand = net(), net().cuda()
    run = quiet(
        strategy=STRATEGIES[name](),
        devices=1,
        accelerator="gpu",
        precision=precision,
        gradient_clip_val=0.5,
        max_epochs=2,
    )
    run.fit(module, loader(48, 8))
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=1e-2, fused=True)
    for _ in range(2):
        for x, y in loader(48, 8):
            with torch.autocast("cuda", torch.bfloat16, enabled=precision != "32-true"):
                loss = F.cross_entropy(by_hand(x.cuda()), y.cuda())
            loss.backward()
            nn.utils.clip_grad_norm_(by_hand.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    ours = [p.detach().cpu() for p in module.parameters()]
    theirs = [p.detach().cpu() for p in by_hand.parameters()]
    assert distance(ours, theirs) < (1e-4 if precision == "32-true" else 0.1)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("name", ["single", "ddp", "fsdp", "tensor", "fsdp offloaded"])
def test_momentum_begins_with_the_first_step_that_is_taken(name: str, precision: str) -> None:
    """The first two steps overflow under loss scaling, and one layer gets its first gradient later."""

    class Late(Net):
        def __init__(self, foreach: bool | None) -> None:
            super().__init__()
            self.foreach = foreach

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * 1e36 if batch_idx < 2 and precision == "16-mixed" else loss

        def on_after_backward(self) -> None:
            if self.trainer.global_step < 2:
                self.net[0].bias.grad = None

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, foreach=self.foreach)

    found = []
    for strategy, foreach in ((STRATEGIES[name](), None), (SingleDevice(), True)):  # which is not fused
        torch.manual_seed(0)
        module = Late(foreach)
        run = quiet(strategy=strategy, devices=1, accelerator="gpu", precision=precision, max_epochs=2)
        run.fit(module, loader(48, 8))
        found.append([p.detach().cpu() for p in module.parameters()])
    assert distance(*found) < (1e-5 if precision == "32-true" else 1e-3)


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp", "tensor", "fsdp offloaded"])
def test_a_step_that_loss_scaling_skips_does_not_count(name: str) -> None:
    class Overflows(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * 1e36 if batch_idx in (0, 3) else loss

    run = quiet(strategy=STRATEGIES[name](), devices=1, accelerator="gpu", precision="16-mixed")
    run.fit(Overflows(), loader(48, 8))
    assert run.global_step == 4


@pytest.mark.parametrize("kind", ["SGD", "Adagrad"])
def test_single_takes_sparse_gradients(kind: str) -> None:
    class Words(Net):
        def __init__(self) -> None:
            super().__init__(optimizer=kind)
            self.words = nn.Embedding(5, 8, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x + self.words((x[:, 0] > 0).long()))

    found = []
    for accelerator in ("gpu", "cpu"):
        torch.manual_seed(0)
        module = Words()
        quiet(strategy="single", accelerator=accelerator, devices=1).fit(module, loader(48, 8))
        found.append([p.detach().cpu() for p in module.parameters()])
    assert distance(*found) < 1e-4


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp", "tensor", "pipeline 1f1b"])
def test_a_batch_that_a_hook_leaves_on_the_cpu_stays_there(name: str) -> None:
    class KeepsLabels(Net):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            return batch[0].to(device), batch[1]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert batch[0].is_cuda and batch[1].device.type == "cpu"
            return F.cross_entropy(self(batch[0]), batch[1].cuda())

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert batch[0].is_cuda and batch[1].device.type == "cpu"

    quiet(strategy=STRATEGIES[name](), devices=1, accelerator="gpu").fit(KeepsLabels(), loader(16, 8), loader(8, 8))


class ScalesByData(Net):
    """Hooks of its last layer write through `data`, which leaves no trace in version counters."""

    def __init__(self, within_backward: bool) -> None:
        super().__init__()
        register = (
            self.net[-1].register_full_backward_hook if within_backward else self.net[-1].register_forward_pre_hook
        )
        register(self.scale)

    @staticmethod
    def scale(layer: nn.Module, *_: Any) -> None:
        for parameter in layer.parameters(recurse=False):
            parameter.data.mul_(0.9)


@pytest.mark.parametrize("within_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("make", [FSDP, lambda: FSDP(wrap=nn.Linear)], ids=["whole", "in blocks"])
def test_what_hooks_write_through_data_is_kept(make: Callable[[], Strategy], within_backward: bool) -> None:
    found = []
    for strategy in (SingleDevice(), make()):
        torch.manual_seed(0)
        module = ScalesByData(within_backward)
        quiet(strategy=strategy, devices=1, accelerator="gpu").fit(module, loader(48, 8))
        found.append([p.detach().cpu() for p in module.parameters()])
    assert distance(*found) < 1e-5


class Noisy(Net):
    """Draws random numbers in each step, on the device."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)]
        self.net = nn.Sequential(*layers)


class Counted(Noisy):
    """With states of metrics in tensors and in lists, on the device and on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(3)
        self.in_a_list, self.on_the_host = MulticlassAUROC(3), MulticlassAUROC(3, compute_on_cpu=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self(batch[0])
        for name in ("accuracy", "in_a_list", "on_the_host"):
            metric = getattr(self, name)
            metric(output.detach().float(), batch[1])
            self.log(name, metric, on_step=False, on_epoch=True)
        return F.cross_entropy(output, batch[1])


class StopsAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            raise KeyboardInterrupt


def fit_until(
    folder: Path, module: Net, stop: int = 0, ckpt_path: str | None = None, **options: Any
) -> dict[str, Tensor]:
    """Train for 10 steps, or until step `stop`, with checkpoints; return weights and logged values."""
    saver = ModelCheckpoint(dirpath=folder, every_n_train_steps=2, save_last=True)
    run = quiet(
        devices=1,
        accelerator="gpu",
        max_epochs=2,
        seed=0,
        enable_checkpointing=True,
        callbacks=[saver, *([StopsAt(stop)] if stop else [])],
        **options,
    )
    with suppress(KeyboardInterrupt, SystemExit):
        run.fit(module, loader(40, 8, shuffle=True), ckpt_path=ckpt_path)
    assert run.global_step == (stop or 10)
    return {key: value.detach().cpu() for key, value in {**module.state_dict(), **run.callback_metrics}.items()}


def made(kind: type[Net]) -> Net:
    torch.manual_seed(1)
    return kind()


@pytest.mark.ranks  # DeepSpeed asks numactl as it saves
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_run_resumed_in_mid_epoch_is_the_run_that_was_not_stopped(name: str, precision: str, tmp_path: Path) -> None:
    whole = fit_until(tmp_path / "whole", made(Noisy), strategy=STRATEGIES[name](), precision=precision)
    fit_until(tmp_path / "cut", made(Noisy), 7, strategy=STRATEGIES[name](), precision=precision)
    resumed = fit_until(
        tmp_path / "cut", made(Noisy), ckpt_path="last", strategy=STRATEGIES[name](), precision=precision
    )
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[key], resumed[key]) for key in whole)


@pytest.mark.parametrize("options", [{}, {"virtual_ranks": 4, "split_batches": True}], ids=["plain", "shares"])
@pytest.mark.parametrize("name", ["single", "ddp", "fsdp"])
def test_metrics_resumed_in_mid_epoch_are_those_of_the_run_that_was_not_stopped(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    whole = fit_until(tmp_path / "whole", made(Counted), strategy=STRATEGIES[name](), **options)
    fit_until(tmp_path / "cut", made(Counted), 7, strategy=STRATEGIES[name](), **options)
    resumed = fit_until(tmp_path / "cut", made(Counted), ckpt_path="last", strategy=STRATEGIES[name](), **options)
    assert {"accuracy", "in_a_list", "on_the_host"} < whole.keys()
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[key], resumed[key]) for key in whole)


@pytest.mark.parametrize("name", [name for name in STRATEGIES if "deepspeed" not in name])
def test_a_window_that_is_not_finite_can_be_skipped(name: str) -> None:
    guard, module = Guard(non_finite="skip"), Brittle()
    run = quiet(strategy=STRATEGIES[name](), devices=1, accelerator="gpu", precision="64-true", callbacks=[guard])
    run.fit(module, marked_data(3, 4))
    assert far(module.cpu(), by_hand({3, 4}, "64-true")[0]) < 1e-9
    assert guard.skipped_steps == 2


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_virtual_ranks_give_the_same_bits_under_each_strategy(precision: str) -> None:
    found = []
    for name in ("single", "ddp", "fsdp", "pipeline 1f1b"):
        torch.manual_seed(1)
        module = Noisy()
        run = quiet(
            strategy=STRATEGIES[name](),
            devices=1,
            accelerator="gpu",
            precision=precision,
            virtual_ranks=4,
            split_batches=True,
            accumulate_grad_batches=2,
            gradient_clip_val=0.5,
            seed=0,
        )
        run.fit(module, loader(96, 16, shuffle=True))
        found.append([value.detach().cpu() for value in module.state_dict().values()])
        assert all(map(torch.equal, found[0], found[-1])), name


def test_ddp_binds_its_group_to_the_device() -> None:
    strategy = DDP()
    strategy.configure(devices=1, accelerator="gpu")
    strategy.setup()
    try:
        assert dist.group.WORLD.bound_device_id == strategy.topology.device == torch.device("cuda", 0)
        assert strategy.all_reduce(torch.ones(3, device="cuda")).tolist() == [1.0, 1.0, 1.0]
        assert strategy.all_reduce(torch.ones(3)).tolist() == [1.0, 1.0, 1.0]
        strategy.barrier()
    finally:
        strategy.teardown()
