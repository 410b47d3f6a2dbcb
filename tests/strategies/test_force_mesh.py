"""With LOCKSTEP_FORCE_MESH=1 one rank runs each strategy's own engine, and the numbers stay those of one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.torch_version import TorchVersion

from lockstep.callbacks import Callback
from lockstep.strategies import DDP, FSDP, DeepSpeed, MeshParallel, Pipeline, SingleDevice, Strategy, TensorParallel
from lockstep.strategies.devices import nth_device, resolve_devices
from lockstep.strategies.launch.environment import forces_mesh, shares_gpu
from tests.strategies import contract
from tests.strategies.contract import Plan, difference, reference, saved_weights
from tests.trainer.toy import Net, distance, equal, loader, net, quiet, weights

ENGINES: dict[str, tuple[Callable[[], Strategy], str]] = {
    "ddp": (DDP, "Replica"),
    "fsdp": (FSDP, "MeshModel"),
    "tensor": (TensorParallel, "MeshModel"),
    "ddp=1,fsdp=1,tensor=1": (lambda: MeshParallel("ddp=1,fsdp=1,tensor=1"), "MeshModel"),
    "pipeline 1f1b": (Pipeline, "Staged"),
    "pipeline zbv": (lambda: Pipeline(schedule="zbv", num_micro_batches=2), "Staged"),
    "fsdp=1,pipeline=1": (lambda: Pipeline(mesh="fsdp=1,pipeline=1", num_micro_batches=3), "Staged"),
    "deepspeed 2": (DeepSpeed, "ZeroStep"),
    "deepspeed 3": (lambda: DeepSpeed(stage=3), "ZeroStep"),
}
"""How to build each strategy, and the class of what its `setup_module` returns."""

PLANS = {
    "clip norm": Plan(clip=0.1, accumulate=2),
    "clip value": Plan(clip=0.003, clip_algorithm="value"),
    "token counts": Plan(step="token_step", accumulate=2),
    "uneven": Plan(num_samples=13, global_batch=5, optimizer="SGD"),
}

pytestmark = pytest.mark.usefixtures("one_rank_keeps_its_mesh")


def computes_in_double(name: str) -> bool:
    return "deepspeed" not in name


@pytest.mark.ranks
@pytest.mark.parametrize("name", ENGINES)
def test_a_mesh_of_one_rank_passes_the_contract(name: str, tmp_path: Path) -> None:
    make, _ = ENGINES[name]
    for key, plan in PLANS.items():
        plan = replace(plan, precision="64-true" if computes_in_double(name) else "32-true")
        found = contract.run(make(), 1, plan, tmp_path / key)
        model, expected = reference(plan)
        bound = 1e-12 if computes_in_double(name) else 1e-5
        assert difference(saved_weights(tmp_path / key), model) < bound, key
        assert found["counts"] == expected["counts"]
        assert found["norms"] == pytest.approx(expected["norms"], rel=bound)
        assert torch.tensor(found["outputs"]).allclose(torch.tensor(expected["outputs"]), rtol=bound, atol=bound)
        assert found["world_size"] == found["data_size"] == 1


class Engine(Callback):
    """What the run is made of while it trains."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.group = dist.is_initialized() and dist.get_world_size()
        self.wrapped = type(trainer._run.wrapped).__name__
        self.kinds = {type(p).__name__ for p in module.parameters()}


@pytest.mark.ranks
@pytest.mark.parametrize("name", ENGINES)
def test_the_trainer_computes_by_the_engine_what_one_process_computes(name: str) -> None:
    make, wrapped = ENGINES[name]
    precision = "64-true" if computes_in_double(name) else "32-true"
    options: dict[str, Any] = {
        "precision": precision,
        "devices": 1,
        "accelerator": "cpu",
        "max_epochs": 2,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5,
        "seed": 3,
    }
    engine, module, alone = Engine(), net(), net()
    run = quiet(strategy=make(), callbacks=[engine], **options)
    run.fit(module, loader(n=44, shuffle=True), loader(n=20))
    expected = quiet(strategy=SingleDevice(), **options)
    expected.fit(alone, loader(n=44, shuffle=True), loader(n=20))
    bound = 1e-12 if computes_in_double(name) else 1e-5
    assert engine.group == 1 and engine.wrapped.endswith(wrapped)
    if wrapped == "MeshModel":
        assert "DTensor" in engine.kinds
    assert distance(weights(module), weights(alone)) < bound
    assert run.global_step == expected.global_step == 6
    metrics, theirs = ({k: float(v) for k, v in t.callback_metrics.items()} for t in (run, expected))
    assert metrics == pytest.approx(theirs, rel=bound)


class Adversarial(Net):
    """The gradient of the inputs by a plain backward, which fills the gradients of the whole weights as well."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        x = batch[0].clone().requires_grad_()
        F.cross_entropy(self(x), batch[1]).backward()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self((x + 0.1 * x.grad.sign()).detach()), batch[1]))
        optimizer.step()


@pytest.mark.parametrize("name", ["ddp", "tensor", "fsdp"])
def test_a_plain_backward_on_one_rank_is_exact_or_refused(name: str) -> None:
    found = []
    for strategy in ("single", name):
        torch.manual_seed(0)
        module = Adversarial()
        run = quiet(strategy=strategy, devices=1, accelerator="cpu", precision="64-true")
        if strategy == "fsdp":
            with pytest.raises(RuntimeError, match="training_step called backward.* call self.manual_backward"):
                run.fit(module, loader())
            return
        run.fit(module, loader())
        found.append(weights(module))
    assert distance(*found) < 1e-12


@pytest.mark.parametrize("torch_version", ["2.11.0", "2.12.0"])
def test_second_derivatives_of_sharded_layers_need_a_torch_that_has_them(
    torch_version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Penalized(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x = batch[0].clone().requires_grad_()
            (gradient,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
            return super().training_step(batch, batch_idx) + gradient.square().sum(1).mean()

    monkeypatch.setattr(torch, "__version__", TorchVersion(torch_version))
    run = quiet(strategy="tensor", devices=1, accelerator="cpu")
    if torch_version == "2.12.0":
        run.fit(Penalized(), loader())
    else:
        with pytest.raises(RuntimeError, match=r"create_graph=True.* sharded over tensor ranks.* use torch 2\.12"):
            run.fit(Penalized(), loader())


def test_one_rank_is_a_single_device_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCKSTEP_FORCE_MESH")
    engine, module, alone = Engine(), net(), net()
    quiet(strategy="fsdp", devices=1, accelerator="cpu", seed=3, callbacks=[engine]).fit(module, loader())
    quiet(strategy="single", accelerator="cpu", seed=3).fit(alone, loader())
    assert engine.group is False and engine.kinds == {"Parameter"}
    assert equal(weights(module), weights(alone))


def test_a_group_of_one_rank_is_reached_from_this_machine_only() -> None:
    strategy = FSDP()
    strategy.configure(devices=1, accelerator="cpu")
    before = listening()
    strategy.setup()
    try:
        assert all(address.startswith("0100007F:") for address in listening() - before)
    finally:
        strategy.teardown()


def listening() -> set[str]:
    """Addresses, in /proc's spelling, of the sockets on which this process listens."""
    links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    own = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:")}
    rows = [row.split() for kind in ("tcp", "tcp6") for row in Path(f"/proc/self/net/{kind}").read_text().splitlines()]
    return {row[1] for row in rows if row[3] == "0A" and row[9] in own}


@pytest.mark.parametrize("value", ["yes", "2", "true"])
@pytest.mark.parametrize(("name", "flag"), [("LOCKSTEP_FORCE_MESH", forces_mesh), ("LOCKSTEP_SHARE_GPU", shares_gpu)])
def test_a_value_that_is_neither_0_nor_1_is_refused(
    name: str, flag: Callable[[], bool], value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name} must be 0 or 1, but it is '{value}'"):
        flag()
    if flag is forces_mesh:
        with pytest.raises(ValueError, match=name):
            FSDP().configure(devices=1, accelerator="cpu")


def test_ranks_that_share_a_gpu_may_be_more_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="devices=2, but this machine has 1 CUDA devices"):
        resolve_devices(2, "cuda")
    assert nth_device("cuda", 1) == torch.device("cuda", 1)
    monkeypatch.setenv("LOCKSTEP_SHARE_GPU", "1")
    assert resolve_devices(2, "cuda") == 2 and resolve_devices("auto", "cuda") == 1
    assert nth_device("cuda", 1) == torch.device("cuda", 0)
    with pytest.raises(ValueError, match="devices must be"):
        resolve_devices(0, "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="has 0 CUDA devices"):
        resolve_devices(2, "cuda")
