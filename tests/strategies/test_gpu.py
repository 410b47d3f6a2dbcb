"""ddp, fsdp, tensor and their meshes on GPUs with NCCL: the numbers of a loop by hand, bfloat16, clipping, checkpoints
that leave the GPU, ranks that fall."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Module, RankFailure
from lockstep.callbacks import Callback, ModelCheckpoint
from lockstep.strategies import (
    DDP,
    FSDP,
    DiLoCo,
    LocalSGD,
    MeshParallel,
    ParameterServer,
    SingleDevice,
    Strategy,
    TensorParallel,
)
from tests.strategies import contract, gpus
from tests.strategies.contract import Plan, difference, reference, saved_weights
from tests.trainer.toy import distance, loader, net, quiet

GPU = "gpu"
DEVICE, BACKEND = "cuda", "nccl"

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]


@pytest.fixture(autouse=True)
def _ranks_share_a_gpu(devices: int, one_rank_keeps_its_mesh: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with gpus.shared_by(devices, monkeypatch):
        yield


def on(count: int, make: Callable[[], Strategy], name: str) -> Any:
    return pytest.param(make, count, marks=gpus.needs(count), id=f"{name} on {count}")


LAYOUTS = [
    on(1, FSDP, "fsdp"),
    on(1, TensorParallel, "tensor"),
    on(2, DDP, "ddp"),
    on(2, FSDP, "fsdp"),
    on(2, lambda: FSDP(cpu_offload=True), "fsdp offloaded"),
    on(2, TensorParallel, "tensor"),
    on(2, lambda: TensorParallel(sequence_parallel=True), "tensor sequence"),
    on(4, lambda: MeshParallel("fsdp=2,tensor=2"), "fsdp=2,tensor=2"),
    on(4, lambda: MeshParallel("ddp=2,fsdp=2"), "ddp=2,fsdp=2"),
    on(4, lambda: MeshParallel("ddp=2,tensor=2"), "ddp=2,tensor=2"),
]
LAYOUT = pytest.mark.parametrize(("make", "devices"), LAYOUTS)


@LAYOUT
@pytest.mark.parametrize("clip", [{"clip": 0.1}, {"clip": 0.01, "clip_algorithm": "value"}], ids=["norm", "value"])
def test_the_numbers_of_a_loop_by_hand(
    make: Callable[[], Strategy], devices: int, clip: dict[str, Any], tmp_path: Path
) -> None:
    """On the CPU, in double precision, with shares that are uneven or empty, gradients accumulated and clipped."""
    plan = Plan(accumulate=2, num_samples=37, global_batch=9, **clip)
    found = contract.run(make(), devices, plan, tmp_path / "end", GPU)
    model, expected = reference(plan)
    assert difference(saved_weights(tmp_path / "end"), model) < 1e-9
    assert found["world_size"] == devices
    assert found["counts"] == expected["counts"]
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-9)
    assert torch.tensor(found["outputs"]).allclose(torch.tensor(expected["outputs"]), rtol=1e-8, atol=1e-9)


@LAYOUT
def test_state_goes_to_one_process_on_the_cpu_and_back(
    make: Callable[[], Strategy], devices: int, tmp_path: Path
) -> None:
    """Weights and optimizer state: training continues there as if nothing had happened, in both directions."""
    half = Plan(epochs=1)
    model, kept = reference(half)
    expected, _ = reference(half, model, kept["optimizer"])
    contract.run(make(), devices, half, tmp_path / "gpu", GPU)
    contract.run(SingleDevice(), 1, replace(half, start_from=str(tmp_path / "gpu")), tmp_path / "gpu then cpu")
    contract.run(SingleDevice(), 1, half, tmp_path / "cpu")
    contract.run(make(), devices, replace(half, start_from=str(tmp_path / "cpu")), tmp_path / "cpu then gpu", GPU)
    for folder in ("gpu then cpu", "cpu then gpu"):
        assert difference(saved_weights(tmp_path / folder), expected) < 1e-9


LR, WIDTH = 0.05, 16


class Mixed(Module):
    """Reads its own dtypes and devices in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.body = contract.Body(hidden=WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.body(batch[0])
        assert logits.dtype == torch.bfloat16 and logits.device.type == DEVICE
        return nn.functional.cross_entropy(logits, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LR)


class Look(Callback):
    """What is on the GPUs when an optimizer steps, under strategies that cut parameters over ranks."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        from torch.distributed import distributed_c10d
        from torch.distributed.tensor import DTensor

        parameters = list(module.parameters())
        assert all(p.dtype == p.grad.dtype == torch.float32 and p.device.type == DEVICE for p in parameters), (
            "weights and gradients stay in float32"
        )
        if trainer.world_size > 1:
            cut = [p for p in parameters if isinstance(p, DTensor)]
            assert cut and all(p.device_mesh.device_type == DEVICE for p in cut)
            assert f"{DEVICE}:{BACKEND}" in distributed_c10d.get_backend_config()
            assert sum(p.to_local().numel() for p in cut) < 0.8 * sum(p.numel() for p in cut), (
                "each rank holds its part"
            )


@LAYOUT
def test_bfloat16_computes_and_float32_keeps(make: Callable[[], Strategy], devices: int) -> None:
    """The training moves the weights as a loop by hand under autocast does, up to bfloat16's rounding."""
    if isinstance(make(), FSDP) and make().options.cpu_offload:
        pytest.skip("weights are in host memory")
    dataset = TensorDataset(*contract.dataset(32).tensors)
    torch.manual_seed(0)
    module, by_hand = Mixed(), contract.Body(hidden=WIDTH).to(DEVICE)
    by_hand.load_state_dict(module.body.state_dict())
    before = [p.detach().clone() for p in module.parameters()]

    trainer = quiet(
        strategy=make(),
        devices=devices,
        accelerator=GPU,
        precision="bf16-mixed",
        split_batches=True,
        max_epochs=4,
        seed=0,
        callbacks=[Look()],
    )
    trainer.fit(module, DataLoader(dataset, 16))

    optimizer = torch.optim.SGD(by_hand.parameters(), lr=LR)
    for _ in range(4):
        for x, y in DataLoader(dataset, 16):
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = nn.functional.cross_entropy(by_hand(x.to(DEVICE)), y.to(DEVICE))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    moved = torch.cat([(p.detach().cpu() - old).flatten() for p, old in zip(module.parameters(), before, strict=True)])
    expected = torch.cat(
        [(p.detach().cpu() - old).flatten() for p, old in zip(by_hand.parameters(), before, strict=True)]
    )
    assert trainer.global_step == 8 and expected.norm() > 0.01
    assert (moved - expected).norm() < 0.05 * expected.norm()


class Falls(Callback):
    """Ends rank 1 in step 5, or lets it wait there."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 5:
            if self.how == "raises":
                raise ArithmeticError("no")
            os.kill(os.getpid(), signal.SIGKILL if self.how == "is killed" else signal.SIGSTOP)


ENDS = {
    "raises": (ArithmeticError, "no"),
    "is killed": (RankFailure, r"rank 1 was killed by SIGKILL \(step 5"),
    "hangs": (RankFailure, r"rank 1 hangs \(step 5"),
}


@pytest.mark.faults
@pytest.mark.parametrize("devices", [pytest.param(2, marks=gpus.needs(2))])
@pytest.mark.parametrize(
    ("make", "how"),
    [(DDP, "raises"), (DDP, "is killed"), (DDP, "hangs"), (FSDP, "is killed"), (TensorParallel, "raises")],
)
def test_a_run_of_which_a_rank_fell_is_ended_and_resumed(
    make: Callable[[], Strategy], how: str, devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank waits in NCCL, which does not see that its peer is gone."""

    def fit(folder: str, *callbacks: Callback, ckpt_path: str | None = None) -> list[Tensor]:
        module = net()
        quiet(
            strategy=make(),
            devices=devices,
            accelerator=GPU,
            split_batches=True,
            max_epochs=2,
            seed=0,
            enable_checkpointing=True,
            callbacks=[ModelCheckpoint(dirpath=tmp_path / folder, every_n_train_steps=2, save_last=True), *callbacks],
        ).fit(module, loader(40, 8, shuffle=True), ckpt_path=ckpt_path)
        return [parameter.detach().cpu() for parameter in module.parameters()]

    whole = fit("whole")
    monkeypatch.setenv("LOCKSTEP_WATCHDOG_S", "10")
    error, match = ENDS[how]
    began = time.monotonic()
    with pytest.raises(error, match=match):
        fit("cut", Falls(how))
    assert time.monotonic() - began < 60
    resumed = fit("cut", ckpt_path="last")
    assert all(torch.equal(one, other) for one, other in zip(resumed, whole, strict=True))


METHODS: dict[str, tuple[Callable[[], Strategy], int]] = {
    "powersgd": (lambda: DDP(compress="powersgd=2"), 2),
    "local updates": (lambda: LocalSGD(period=2), 2),
    "learners that train on while they are averaged": (lambda: DiLoCo(learners=2, period=4, fragments=2, delay=1), 2),
    "the same, compressed": (
        lambda: DiLoCo(learners=2, period=4, fragments=2, delay=1, compress="topk=0.5"),
        2,
    ),
    "the same, sharded": (lambda: DiLoCo(learners=2, period=4, fragments=2, delay=1, inner="fsdp=2"), 4),
    "a server": (lambda: ParameterServer(staleness=0), 2),
    "servers on some of the ranks": (lambda: ParameterServer(staleness=0, servers=2), 4),
}


@pytest.mark.parametrize(
    ("make", "devices"), [pytest.param(*case, marks=gpus.needs(case[1]), id=name) for name, case in METHODS.items()]
)
def test_a_method_has_the_numbers_of_the_cpu(make: Callable[[], Strategy], devices: int) -> None:
    found = []
    for accelerator in (GPU, "cpu"):
        module = net()
        quiet(
            strategy=make(),
            devices=devices,
            accelerator=accelerator,
            precision="64-true",
            split_batches=True,
            max_epochs=2,
            seed=0,
        ).fit(module, loader(64, 8))
        found.append([parameter.detach().cpu() for parameter in module.parameters()])
    assert distance(*found) < 1e-9
