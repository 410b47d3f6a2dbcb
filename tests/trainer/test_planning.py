"""What a plan says is what the run does: collectives as integers, and what cannot be planned in one sentence."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanSquaredError
from torchmetrics.classification import MulticlassAccuracy

from examples.digits import Digits, DigitsData
from examples.gpt import Text, TextModel
from lockstep import DataModule, Module, Trainer, split_parameters
from lockstep.callbacks import Callback, CommunicationLedger
from lockstep.callbacks._support.collectives import collective
from lockstep.callbacks._support.local_ops import LocalOps, watching
from lockstep.strategies import DDP, FSDP, DeepSpeed, DiLoCo, Federated, LocalSGD, ParameterServer, Pipeline
from lockstep.strategies.methods.parameter_server import links
from lockstep.strategies.planning.plan import Plan
from lockstep.trainer.planning import plan, without_memory
from tests.trainer.toy import Net, loader

SLOW = pytest.mark.slow
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "seed": 3,  # with which the planned rounds have clients on all ranks
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
    "log_every_n_steps": 1000,
    "gradient_clip_val": 1.0,
}


def gpt() -> tuple[Module, Any]:
    return TextModel(width=32, depth=2, head_width=8, context=32, sample_bytes=0), Text(
        max_bytes=40_000, context=32, batch_size=4
    )


def digits() -> tuple[Module, Any]:
    return Digits(width=8), DigitsData(batch_size=8)


def planned(found: Plan, gathers_before_it: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Calls and bytes of a round's steps (of one step without rounds) by collective and dtype: of rank 0, and of all
    ranks."""
    own: dict[str, Any] = {}
    everywhere: dict[str, Any] = {}
    for rank in found.ranks:
        for call in rank.collectives:
            if gathers_before_it and call.op == "all-gather":  # before the first batch, with which a ledger begins
                continue
            key = f"{call.op} {call.dtype}"
            steps = 1 if call.phase == "round" else found.round_steps
            for table, times in ((own, steps * (rank.rank == 0)), (everywhere, steps * rank.num_ranks)):
                if times:
                    calls, size = table.get(key, (0, 0))
                    table[key] = calls + times * call.calls, size + times * call.bytes
    return own, everywhere


def counted(
    make: Any, strategy: Any, devices: int, round_steps: int = 1, **options: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same, of a run, once a pipeline no longer compares over its ranks what steps change."""
    first = 17 if "pipeline" in str(strategy) else 2 * round_steps
    ledger = CommunicationLedger(first_step=first, num_steps=round_steps)
    module, data = make()
    options |= {"max_steps": first + round_steps, "callbacks": [ledger]}
    Trainer(strategy=strategy, devices=devices, **QUIET, **options).fit(module, datamodule=data)
    assert ledger.report is not None
    rows = {f"{row['collective']} {row['dtype']}": row for row in ledger.report["rows"]}
    return tuple(  # type: ignore[return-value]
        {
            key: (row[f"calls{of}"] * round_steps, row[f"bytes{of}"] * round_steps)
            for key, row in rows.items()
            if row[f"calls{of}"]
        }
        for of in ("", "_all_ranks")
    )


LAYOUTS = [
    ("gpt", "fsdp", 2, {}),
    ("digits", "pipeline", 2, {}),
    *(
        pytest.param(model, strategy, devices, options, marks=pytest.mark.slow)
        for model in ("gpt", "digits")
        for strategy, devices, options in (
            ("ddp", 2, {}),
            ("ddp", 4, {"accumulate_grad_batches": 2}),
            ("fsdp", 2, {"accumulate_grad_batches": 2}),
            ("fsdp", 4, {}),
            ("fsdp", 2, {"precision": "bf16-mixed"}),
            ("tensor", 2, {}),
            ("pipeline", 2, {"accumulate_grad_batches": 2}),
            ("ddp=2,fsdp=2", 4, {}),
            ("fsdp=2,tensor=2", 4, {}),
            ("ddp=2,tensor=2", 4, {}),
            ("ddp=2,pipeline=2", 4, {}),
            ("fsdp=2,pipeline=2", 4, {}),
        )
        if (model, strategy, len(options)) != ("digits", "pipeline", 0)
    ),
]


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")  # that of digits ends with one
@pytest.mark.parametrize(
    ("model", "strategy", "devices", "options"),
    LAYOUTS,
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_collectives_are_those_of_a_run(model: str, strategy: str, devices: int, options: dict[str, Any]) -> None:
    make = {"gpt": gpt, "digits": digits}[model]
    module, data = make()
    found = plan(Trainer(strategy=strategy, devices=devices, max_epochs=1, **QUIET, **options), module, datamodule=data)
    assert planned(found, gathers_before_it="fsdp=2,pipeline" in strategy) == counted(
        make, strategy, devices, **options
    )


class Here(Executor):
    """Sends in the training's thread, whose collectives a ledger counts."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


CLIENTS = "dirichlet(0.5, n=12, seed=1)"
METHODS: dict[str, tuple[Callable[[], Any], int]] = {
    "DiLoCo": (lambda: DiLoCo(period=2), 2),
    "LocalSGD": (lambda: LocalSGD(period=2), 2),
    "LocalSGD of one step": (lambda: LocalSGD(period=1), 2),
    "LocalSGD of one step, compressed": (lambda: LocalSGD(period=1, compress="topk=0.1"), 2),
    "LocalSGD, compressed": (lambda: LocalSGD(period=2, compress="topk=0.1"), 2),
    "DiLoCo in fragments, in int8": (lambda: DiLoCo(period=4, fragments=2, compress="int8"), 2),
    "DiLoCo with delay": (lambda: DiLoCo(period=4, fragments=2, delay=3, compress="int8"), 2),
    "DiLoCo with delay, whole": (lambda: DiLoCo(period=2, delay=1), 4),
    "DiLoCo of uneven ranks": (lambda: DiLoCo(period=2, learners_per_rank=[2, 1]), 2),
    "DiLoCo of islands": (lambda: DiLoCo(period=2, learners=2, inner="fsdp=2"), 4),
    "topk": (lambda: DDP(compress="topk=0.1"), 2),
    "powersgd": (lambda: DDP(compress="powersgd=2"), 2),
    "replicas in int8": (lambda: FSDP(replicas=2, compress="int8"), 4),
    "offload": (lambda: FSDP(cpu_offload=True), 2),
    "federated": (lambda: Federated(CLIENTS, fraction=0.75), 2),
    "fedprox": (lambda: Federated(CLIENTS, fraction=0.4, server="fedprox=0.1", local_epochs=2), 4),
    "scaffold": (lambda: Federated(CLIENTS, fraction=0.4, server="scaffold", local_epochs=2), 4),
    "virtual ranks": (lambda: "fsdp", 2),
    "virtual ranks of a pipeline": (lambda: "pipeline", 2),
    "virtual ranks of pipelines": (lambda: "ddp=2,pipeline=2", 4),
}


SMALL = {"reduce_bucket_size": 5000, "stage3_param_persistence_threshold": 1000, "stage3_prefetch_bucket_size": 3000}


OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
ALL_OFFLOADED = OFFLOADED | {"offload_param": {"device": "cpu"}}


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("model", "stage", "zero", "devices", "options"),
    [
        ("digits", 3, {}, 2, {}),
        *(
            pytest.param(*case, marks=SLOW)
            for case in (
                ("digits", 1, {}, 2, {}),
                ("digits", 2, {}, 4, {"accumulate_grad_batches": 2}),
                ("gpt", 1, SMALL, 4, {"precision": "bf16-mixed"}),
                ("gpt", 2, {}, 2, {"precision": "bf16-true"}),
                ("gpt", 2, SMALL | {"overlap_comm": True}, 2, {}),
                ("gpt", 3, {}, 4, {"accumulate_grad_batches": 2}),
                ("gpt", 3, SMALL, 2, {"precision": "bf16-true"}),
                ("digits", 1, OFFLOADED, 2, {}),
                ("gpt", 2, OFFLOADED, 4, {"accumulate_grad_batches": 2}),
                ("digits", 3, OFFLOADED, 2, {}),
                ("digits", 3, ALL_OFFLOADED, 2, {}),
                ("gpt", 3, SMALL | {"offload_param": {"device": "cpu"}}, 2, {"precision": "bf16-mixed"}),
            )
        ),
    ],
    ids=lambda value: "-".join(map(str, value)) or "default" if isinstance(value, dict) else str(value),
)
def test_collectives_of_deepspeed_are_those_of_a_run(
    model: str, stage: int, zero: dict[str, Any], devices: int, options: dict[str, Any]
) -> None:
    make, strategy = {"gpt": gpt, "digits": digits}[model], partial(DeepSpeed, stage=stage)
    config = {"zero_optimization": zero} if zero else None
    module, data = make()
    found = plan(
        Trainer(strategy=strategy(config=config), devices=devices, max_steps=1, **QUIET, **options), module, None, data
    )
    assert planned(found) == counted(make, strategy(config=config), devices, **options)


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("DiLoCo", "federated", "virtual ranks of a pipeline") else pytest.param(name, marks=SLOW)
        for name in METHODS
    ],
)
def test_collectives_of_a_method_are_those_of_a_run(name: str) -> None:
    """Of a whole round, if it has rounds."""
    make, devices = METHODS[name]
    module, data = digits()
    options = {"virtual_ranks": 4} if name.startswith("virtual ranks") else {}
    found = plan(Trainer(strategy=make(), devices=devices, max_epochs=1, **QUIET, **options), module, None, data)
    strategy = make()
    if isinstance(strategy, DiLoCo):
        strategy.sender = Here
    run = counted(digits, strategy, devices, found.round_steps, **options)
    if isinstance(strategy, DiLoCo) and devices == 4 and strategy.inner is None:  # which do not divide the elements
        assert planned(found)[0] == run[0]
    else:
        assert planned(found) == run


def of_net(strategy: Any = "ddp", devices: int = 2, module: Module | None = None, **options: Any) -> Plan:
    trainer = Trainer(strategy=strategy, devices=devices, max_steps=1, **QUIET, **options)
    return plan(trainer, module or Net(), loader(8))


class OfAdagrad(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters())  # has its state before the first step


@pytest.mark.unit
def test_virtual_ranks_with_optimizer_state_from_the_start() -> None:
    assert of_net(module=OfAdagrad(), virtual_ranks=4).ranks


@pytest.mark.unit
def test_bytes_of_a_rank_by_kind() -> None:
    """Net under AdamW-less SGD: whole under DDP, a half of it under FSDP."""
    numel = sum(p.numel() for p in Net().parameters())
    for strategy, share in ((DDP(), 1), (FSDP(), 2)):
        (rank,) = of_net(strategy).ranks
        assert rank.parameters == rank.gradients, strategy
        assert 4 * numel / share <= rank.parameters < 4 * numel / share + 512, strategy
        assert rank.peak == sum(size for _, size in rank.peak_by_kind)
        assert rank.peak >= rank.parameters + rank.inputs
        assert rank.role == "all ranks" and rank.num_ranks == 2


@SLOW
@pytest.mark.ranks  # its package starts a process
def test_stages_of_deepspeed_shard_optimizer_state_gradients_and_parameters() -> None:
    """In float32 the engine steps a copy of the weights, which is state of the optimizer beside AdamW's two."""
    module = Net(width=1000)
    half = 2 * sum(p.numel() for p in module.parameters())
    zero = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 5000}
    for stage in (1, 2, 3):
        (rank,) = of_net(DeepSpeed(stage=stage, config={"zero_optimization": zero}), 2, module).ranks
        for size, halves in ((rank.parameters, 1 if stage == 3 else 2), (rank.optimizer, 3)):
            assert halves * half <= size < halves * half + 1000, stage
        assert half <= rank.gradients < 1.5 * half, stage  # a gradient that two ranks share is whole on both


@pytest.mark.long
@pytest.mark.ranks  # its package starts a process
def test_what_deepspeed_offloads_is_in_the_hosts_memory() -> None:
    """Masters, AdamW's two and gradients leave the device; gradients are copied there, new parameters back."""
    module = Net(width=1000)
    half = 2 * sum(p.numel() for p in module.parameters())
    for stage in (1, 2, 3):
        config = {"zero_optimization": {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 5000}}
        strategies = (DeepSpeed(stage=stage, config=config, offload_optimizer=on) for on in (False, True))
        (here,), (away,) = (of_net(strategy, 2, module).ranks for strategy in strategies)
        assert away.parameters == here.parameters and here.host == 0, stage
        assert 4 * half <= away.host < 9 * half, stage
        assert away.peak < here.peak < away.peak_of_both <= away.peak + away.host, stage
        assert not {"gradients", "optimizer"} & dict(away.peak_by_kind).keys(), stage
        copied = {(call.op, call.phase): call.bytes for call in away.transfers}
        for key in (("to device", "optimizer"), ("to host", "backward")):
            assert half <= copied[key] < 1.5 * half, (stage, key)


@pytest.mark.long
@pytest.mark.ranks  # its package starts a process
def test_parameters_that_deepspeed_offloads_are_copied_where_ranks_gather_them() -> None:
    """Small ones stay whole on the device, where they are gathered after each step."""
    module = Net(width=1000)
    half = 2 * sum(p.numel() for p in module.parameters())
    config = {"zero_optimization": {"stage3_param_persistence_threshold": 1500, "reduce_bucket_size": 5000}}
    for steps_on_host in (False, True):
        make = partial(DeepSpeed, stage=3, config=config, offload_optimizer=steps_on_host)
        (here,), (away,) = (of_net(make(offload_parameters=on), 2, module).ranks for on in (False, True))
        assert away.parameters == here.parameters and away.collectives == here.collectives
        assert away.host - here.host == here.peak - away.peak == here.parameters
        assert away.peak_of_both == here.peak_of_both
        copied = {(call.op, call.phase): call.bytes for call in away.transfers}
        gathered = {call.phase: call.bytes for call in away.collectives if call.op == "all-gather"}
        for phase in ("forward", "optimizer"):
            assert copied["to device", phase] == gathered[phase] / 2
        assert half <= copied["to host", "backward" if steps_on_host else "optimizer"] < 1.5 * half
        assert away.steps_on_host == steps_on_host


class Adversaries(Module):
    """Two networks, each stepped by hand."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        of_generator, of_critic = self.optimizers()
        for optimizer, loss in (
            (of_critic, lambda: self.critic(self.generator(batch[0]).detach()) - self.critic(batch[0])),
            (of_generator, lambda: -self.critic(self.generator(batch[0]))),
        ):
            optimizer.zero_grad()
            self.manual_backward(loss().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(net.parameters()) for net in (self.generator, self.critic)]


class OfSteps(Callback):
    """Collectives from the end of the second step to that of the fourth: what a ledger sees begins with a batch."""

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        self.found: Counter[tuple[str, int]] = Counter()

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.watch = watching(LocalOps(self._see))
        elif batch_idx == 3:
            self.watch.close()
            del self.watch

    def _see(self, op: Any, args: tuple[Any, ...], result: Any) -> None:
        if (call := collective(op, args, result)) is not None:
            self.found[call.kind, call.num_bytes] += 1


@pytest.mark.ranks
def test_collectives_of_steps_by_hand_are_those_of_a_run() -> None:
    """Parameters outside of blocks are gathered before the batch begins, and after each optimizer."""
    options = QUIET | {"gradient_clip_val": None, "max_steps": 6}
    (rank,) = plan(Trainer(strategy="fsdp", devices=2, **options), Adversaries(), loader(100)).ranks
    watch = OfSteps()
    Trainer(strategy="fsdp", devices=2, callbacks=[watch], **options).fit(Adversaries(), loader(100))
    planned_calls = {op: 2 * calls for op, calls in _calls(rank.collectives).items()}
    counted_calls: Counter[str] = Counter()
    for (op, _), calls in watch.found.items():
        counted_calls[op] += calls
    assert planned_calls == counted_calls == {"all-gather": 6, "reduce-scatter": 4}
    assert 2 * sum(call.bytes for call in rank.collectives) == sum(n * calls for (_, n), calls in watch.found.items())


def _calls(collectives: Any) -> dict[str, int]:
    return {call.op: sum(c.calls for c in collectives if c.op == call.op) for call in collectives}


class Servers(Net):
    """Counts what rank 0 computes, and the sizes of what its server gets and sends."""

    def on_fit_start(self) -> None:
        self.received: list[int] = []
        self.sent: list[int] = []
        receive, as_bytes = links.receive, links._bytes

        def counted_receive(connection: Any, into: Any, rank: int) -> None:
            self.received.append(self.sent.pop())
            receive(connection, into, rank)

        def counted_bytes(flat: Tensor) -> Any:
            self.sent.append(flat.nbytes)
            return as_bytes(flat)

        links.receive, links._bytes = counted_receive, counted_bytes  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        COMPUTED.append(batch_idx)
        time.sleep(0.02)  # so that the other rank computes as well
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        self.computed = len(COMPUTED)


COMPUTED: list[int] = []
"""Batches of this process."""


@pytest.mark.parametrize(
    "make",
    [partial(Federated, clients=lambda index: index // 4, server="scaffold"), partial(ParameterServer, workers=2)],
)
def test_a_plan_changes_neither_the_strategy_nor_random_numbers(make: Callable[[], Any]) -> None:
    found = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        trainer, module = Trainer(strategy=make(), devices=1, max_epochs=3, **QUIET), Net()
        if is_planned:
            plan(trainer, module, loader(8))
        found.append([torch.rand(1)])
        trainer.fit(module, loader(8))
        found[-1] += module.parameters()
    assert all(map(torch.equal, *found))


@pytest.mark.ranks
def test_messages_of_a_parameter_server_are_those_of_a_run() -> None:
    """One gradient and one answer with values for each batch that another rank computes; and values where ranks meet,
    as in the first two steps and at the end."""
    steps, module = 10, Servers()
    found = of_net(ParameterServer(staleness=1), 2)
    assert [(rank.role, rank.num_ranks) for rank in found.ranks] == [("ranks with servers", 1), ("others", 1)]
    rows = [{call.op: (call.calls, call.bytes) for call in rank.collectives} for rank in found.ranks]
    (one,) = {row[op] for row in rows for op in ("send", "recv")}
    assert one[0] == 1
    Trainer(strategy=ParameterServer(staleness=1), devices=2, max_steps=steps, **QUIET).fit(module, loader(8 * steps))
    assert set(module.received) == set(module.sent) == {one[1]}
    assert len(module.received) == 2 * steps - module.computed > 0
    assert len(module.received) <= len(module.sent)


@pytest.mark.unit
def test_memory_of_a_parameter_server_is_that_of_workers_and_hosts() -> None:
    module = Net(width=1000)
    size = 4 * sum(p.numel() for p in module.parameters())
    holder, other = of_net(ParameterServer(), 2, module).ranks
    for rank in (holder, other):
        assert rank.parameters == rank.gradients and size <= rank.parameters < size + 100
        assert rank.peak_of_both == rank.peak + rank.host and rank.steps_on_host
    assert 2 * size <= other.host < 3 * size, "what it has read, and a gradient to send"
    assert 2 * size <= holder.optimizer < 2 * size + 100 and other.optimizer == 0
    assert 5 * size <= holder.host < 7 * size, "its copy, state, two versions and gradients"
    assert {(call.op, call.phase) for call in holder.collectives} == {("send", "round"), ("recv", "round")}
    module.net[0].requires_grad_(False)
    assert of_net(ParameterServer(), 2, module).ranks[0].optimizer < size, "a frozen layer has no state"
    (alike,) = of_net(ParameterServer(servers=2, staleness=0), 2, module).ranks
    norms = [call for call in alike.collectives if call.op == "all-reduce"]
    assert alike.role == "all ranks" and alike.host < holder.host and [call.bytes for call in norms] == [16 * 4]
    assert of_net(ParameterServer(staleness=0), 2).round_overlap == 0 < of_net(ParameterServer(), 2).round_overlap


class Orthogonal(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3), nn.Linear(3, 3))

    def configure_optimizers(self) -> Any:
        matrices, others = split_parameters(self)
        return {"muon": torch.optim.Muon(matrices, lr=0.1), "sgd": torch.optim.SGD(others, lr=0.1)}


def orthogonal() -> tuple[Module, Any]:
    return Orthogonal(), Data()


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "devices"), [("fsdp", 2), *(pytest.param(s, 4, marks=SLOW) for s in ("fsdp", "fsdp=2,tensor=2"))]
)
def test_what_is_sent_to_owners_is_that_of_a_run(strategy: str, devices: int) -> None:
    """Of rank 0: other ranks own other matrices."""
    found = plan(Trainer(strategy=strategy, devices=devices, max_steps=1, **QUIET), Orthogonal(), loader(64))
    assert planned(found)[0] == counted(orthogonal, strategy, devices)[0]


@pytest.mark.unit
def test_matrices_that_are_stepped_whole() -> None:
    """Gradients are sent to owners, and new values back; what owners and ranks keep of these is counted."""
    module = Orthogonal()
    sizes = [4 * p.numel() for p in module.parameters() if p.dim() == 2]
    (rank,) = of_net("fsdp", 2, module).ranks
    assert [call.calls for call in rank.collectives if call.op == "all-to-all"] == [2]
    assert rank.other_state >= sum(sizes) // 2 + max(sizes)


@pytest.mark.long
@pytest.mark.unit
def test_what_fsdp_offloads_is_in_the_hosts_memory() -> None:
    (here,), (away,) = (of_net(FSDP(cpu_offload=on), 2, Net(width=1000)).ranks for on in (False, True))
    shards = away.parameters
    assert shards == here.parameters and away.collectives == here.collectives
    assert away.host >= shards + away.gradients + away.optimizer and here.host == 0
    assert not {"parameters", "gradients", "optimizer"} & dict(away.peak_by_kind).keys()
    assert away.peak < here.peak <= away.peak_of_both <= away.peak + away.host
    copied = {(call.op, call.phase): call.bytes for call in away.transfers}
    assert copied[("to device", "forward")] == copied[("to host", "backward")] == shards


class Halved(Net):
    """Has a hook on a parameter, and reaches into the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_hook(lambda gradient: gradient * 0.5)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with self.trainer.whole(self):
            pass


def halved() -> tuple[Module, Any]:
    return Halved(), Data()


class Data(DataModule):
    def train_dataloader(self) -> Any:
        return loader(64)


@pytest.mark.long
@pytest.mark.ranks
def test_hooks_of_parameters_and_whole_models_communicate_as_in_a_run() -> None:
    """But for the random streams that ranks share: their text is a few bytes longer or shorter."""
    found, run = planned(of_net("fsdp", 2, Halved())), counted(halved, "fsdp", 2)
    for table, other in zip(found, run, strict=True):
        text, others = table.pop("broadcast uint8"), other.pop("broadcast uint8")
        assert table == other and text[0] == others[0] and text[1] == pytest.approx(others[1], rel=0.02)
    assert found[0]["all-gather float32"][0] == 2 + len([*Net().parameters()]), "of the hooked weight once more"


@pytest.mark.unit
def test_an_optimizer_that_branches_on_values_is_refused() -> None:
    """How often LBFGS computes the step follows from its gradients."""

    class Newton(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ValueError, match=r"lbfgs.py:\d+ branches on the value of a tensor.*with another optimizer"):
        plan(Trainer(strategy="ddp", devices=2, max_steps=1, **QUIET | {"gradient_clip_val": None}), Newton(), loader())


@pytest.mark.long
@pytest.mark.unit
def test_a_thousand_ranks_and_a_model_without_memory() -> None:
    class Wide(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 100_000), nn.Linear(100_000, 100_000), nn.Linear(100_000, 4))

    with without_memory():
        module = Wide()  # 40 GB
    found = of_net("fsdp", 1024, module)
    assert found.num_parameters > 10**10
    assert found.ranks[0].parameters < 4 * found.num_parameters // 1000
    assert found.axes == (("fsdp", 1024),)


@pytest.mark.unit
def test_a_module_without_memory_may_be_converted_as_it_is_built() -> None:
    class Double(Net):
        def __init__(self) -> None:
            super().__init__()
            self.double()
            self.net[0].to("cpu", torch.float64)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.cross_entropy(self.net(batch[0].double()), batch[1])

    with without_memory():
        module = Double()
    assert all(p.dtype == torch.float64 for p in module.parameters())
    found, plain = of_net("fsdp", 2, module), of_net("fsdp", 2, Double())
    assert found.ranks[0].parameters == plain.ranks[0].parameters > of_net("fsdp", 2).ranks[0].parameters
    assert found.ranks[0].collectives == plain.ranks[0].collectives


@pytest.mark.unit
def test_the_module_that_is_planned_is_not_changed() -> None:
    module = Net()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    of_net("fsdp", 2, module)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert not torch.distributed.is_initialized()


@pytest.mark.long
@pytest.mark.unit
def test_activation_checkpointing_trades_activations_for_work() -> None:
    module, data = gpt()
    found = [
        plan(Trainer(strategy=DDP(activation_checkpointing=on), devices=2, max_steps=1, **QUIET), module, None, data)
        for on in (False, True)
    ]
    kept, recomputed = (one.ranks[0] for one in found)
    assert recomputed.activations < kept.activations / 3
    assert recomputed.flops > 1.1 * kept.flops
    assert [block.name for block in kept.blocks][-2:] == ["gpt.blocks.0", "gpt.blocks.1"]


@pytest.mark.unit
def test_each_stage_of_a_pipeline_is_planned() -> None:
    module, data = gpt()
    found = plan(Trainer(strategy=Pipeline(), devices=2, max_steps=1, **QUIET), module, datamodule=data)
    assert sorted(rank.role for rank in found.ranks) == ["pipeline rank 0", "pipeline rank 1"]
    assert found.ranks[0].peak >= found.ranks[1].peak
    assert sum(rank.parameters for rank in found.ranks) == 4 * found.num_parameters


@pytest.mark.long
@pytest.mark.unit
def test_what_methods_keep_between_steps_is_counted() -> None:
    """Learners of a rank have the common weights and the outer optimizer's momentum beside their own weights, ranks
    with more learners more; compression has its residuals, ddp its buckets."""
    (rank,) = of_net(DDP(gradient_as_bucket_view=True)).ranks
    size, small = rank.parameters, 64
    assert rank.other_state < small
    (rank,) = of_net("ddp").ranks
    assert size <= rank.other_state < size + small
    (rank,) = of_net(DDP(gradient_as_bucket_view=True, compress="int8")).ranks
    assert size <= rank.other_state < size + small
    first, later = of_net(DDP(compress="topk=0.1,start=5,warmup=7")), of_net(DDP(compress="topk=0.1"))
    assert first.ranks[0].collectives == later.ranks[0].collectives, "those after the first steps"
    assert (
        first.notes[0].startswith("the first 12 steps send more than compress=TopK(")
        and later.notes[0] != first.notes[0]
    )
    found = of_net(DiLoCo(period=7, learners_per_rank=[2, 1]))
    two, one = found.ranks
    assert (two.role, two.num_ranks, one.role) == ("ranks of 2 learners", 1, "ranks of 1 learner")
    assert 2 * size <= one.other_state < 2 * size + small and 3 * size <= two.other_state < 3 * size + small
    assert found.round_steps == 7 and {call.phase for call in one.collectives} == {"round"}
    assert {work.phase for work in one.work} == {"forward", "backward", "optimizer", "round"}


@pytest.mark.unit
def test_memory_of_a_federated_round_is_flat_in_clients_and_its_work_is_theirs() -> None:
    """The server's weights and the exact sums, two int64 a number, beside a client's step; of a rank with more clients
    in a round the work grows alone."""

    def of_round(fraction: float, server: str = "fedavg") -> Any:
        strategy = Federated(lambda index: index % 4, fraction=fraction, server=server)
        trainer = Trainer(strategy=strategy, devices=1, max_steps=1, **QUIET)
        return plan(trainer, Net(width=1000), loader(32, batch_size=2))

    one, four = of_round(0.25), of_round(1.0)
    (few,), (many,) = one.ranks, four.ranks
    assert (one.samples, four.samples) == (8, 32) and many.peak == few.peak
    assert many.flops == pytest.approx(4 * few.flops) and few.flops > 0
    assert few.peak > (1 + 1 + 4 + 1) * few.parameters  # weights, the server's, sums, a gradient
    (adam,) = of_round(0.25, "fedadam").ranks
    assert few.optimizer == 0 and adam.optimizer == 2 * few.parameters, "clients' optimizers are as they were built"
    assert any("a step is a round of clients" in note for note in one.notes)
    (scaffold,) = of_round(0.25, "scaffold").ranks
    state = scaffold.other_state - few.other_state  # c, the client's own, and the sum of its gradients
    assert 3 * few.parameters <= state < 3.01 * few.parameters and scaffold.peak > few.peak + state


@pytest.mark.unit
def test_a_round_in_which_the_rank_has_samples_is_planned() -> None:
    """With this seed the only client that rank 0 runs in the first round has none."""
    (make, devices), (module, data) = METHODS["scaffold"], digits()
    (rank,) = plan(
        Trainer(strategy=make(), devices=devices, max_steps=1, **QUIET | {"seed": 6}), module, None, data
    ).ranks
    assert rank.flops > 0


@pytest.mark.unit
def test_what_is_sent_beside_steps_stays_in_memory_until_it_is_taken_over() -> None:
    """What learners have moved, and its sum, beside the activations of the steps that follow."""
    module = Net(width=1000)
    (at_once,), (later,) = (of_net(DiLoCo(period=8, delay=delay), 2, module).ranks for delay in (0, 3))
    assert later.other_state >= at_once.other_state + 3 * later.parameters and later.peak > at_once.peak
    assert at_once.collectives == later.collectives and {call.phase for call in later.collectives} == {"round"}
    found = of_net(DiLoCo(period=8, fragments=2, delay=3), 2, module)
    assert found.round_overlap == 0.75 and any("until it is taken over" in note for note in found.notes)


class Reads(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return self.after(loss, batch)

    def after(self, loss: Tensor, batch: Any) -> Tensor:
        return loss


class Branches(Reads):
    def after(self, loss: Tensor, batch: Any) -> Tensor:
        return loss * 2 if loss > 1 else loss


class Selects(Reads):
    def after(self, loss: Tensor, batch: Any) -> Tensor:
        return loss + batch[0][batch[0] > 0].sum() * 0


class Logs(Reads):
    def after(self, loss: Tensor, batch: Any) -> Tensor:
        self.log("loss", loss.item())
        return loss


@pytest.mark.unit
@pytest.mark.parametrize("module", [Branches, Selects])
def test_a_step_that_depends_on_values_is_refused_with_its_line(module: type[Module]) -> None:
    with pytest.raises(ValueError, match=r"test_planning.py:\d+ (branches on|calls nonzero|calls index)"):
        of_net("ddp", 2, module())


@pytest.mark.unit
def test_a_number_that_is_read_is_said_with_its_line() -> None:
    assert any("test_planning.py:" in note and "reads the value" in note for note in of_net("ddp", 2, Logs()).notes)


@pytest.mark.unit
def test_a_layout_that_cannot_be_is_refused_by_the_strategy() -> None:
    with pytest.raises(ValueError, match="the mesh fsdp=3 = 3 ranks is not the number of ranks, 4"):
        of_net("fsdp=3", 4)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("changes", "why"),
    [({"refuses": {"planning": "it asks a scheduler"}}, "it asks"), ({"synchronous": False}, "its ranks do not meet")],
    ids=["refused", "asynchronous"],
)
def test_what_cannot_be_planned_is_refused_by_name(changes: dict[str, Any], why: str) -> None:
    class Own(DDP):
        capabilities = replace(DDP.capabilities, **changes)

    with pytest.raises(ValueError, match=f"cannot be planned: {why}"):
        of_net(Own(), 2)


@pytest.mark.unit
def test_counts_add_up() -> None:
    (rank,) = of_net("ddp", 2).ranks
    calls = Counter(work.phase for work in rank.work)
    assert set(calls) == {"forward", "backward", "optimizer"}
    assert rank.flops == sum(work.flops for work in rank.work) > 0
    assert sum(work.bytes for work in rank.work) > 0


def gpt_works() -> Any:
    module, data = gpt()
    return plan(Trainer(strategy="single", max_steps=1, **QUIET), module, datamodule=data).ranks[0].work


@pytest.mark.unit
def test_products_of_each_size_have_a_roofline_of_their_own() -> None:
    """A narrow product is as slow as memory, and no wide one beside it makes up for that."""
    found = of_net("single", 1, Net(width=1000))
    products = [work for work in found.ranks[0].work if work.flops and work.phase == "forward"]
    assert len(products) == 2 and {work.op for work in products} == {"aten.addmm"}
    alone = [max(work.flops / 1e12, work.bytes / 1e11) for work in products]
    together = max(sum(work.flops for work in products) / 1e12, sum(work.bytes for work in products) / 1e11)
    assert sum(alone) >= together
    assert not [work.op for work in gpt_works() if "view" in work.op], "they move nothing"
    assert {(work.flops, work.bytes) for work in products} == {
        (2.0 * 8 * 1000 * each, 4 * (8 * 1000 + each * (1000 + 8) + bias)) for each, bias in ((8, 1000), (3, 3))
    }


class Moved(MulticlassAccuracy):
    """Says where it is moved to."""

    devices: list[Any] = []

    def to(self, *args: Any, **options: Any) -> Any:
        self.devices += args
        return super().to(*args, **options)


class Clamped(Net):
    """Reaches into the whole model after each step, and counts with a metric that needs values."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = Moved(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = self(batch[0])
        self.log("train/acc", self.accuracy(output, batch[1]))
        self.accuracy.compute()
        return nn.functional.cross_entropy(output, batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with self.trainer.whole(self), torch.no_grad():
            for p in self.parameters():
                p.clamp_(-1, 1)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        ("single", 1),
        ("dp", 2),
        ("model", 2),
        ("ddp", 2),
        ("fsdp", 2),
        ("tensor", 2),
        ("pipeline", 2),
        ("fsdp=2,pipeline=2", 4),
    ],
)
def test_hooks_that_see_the_whole_model_and_metrics_are_planned(
    strategy: str, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Moved, "devices", [])
    found = plan(Trainer(strategy=strategy, devices=devices, max_steps=1, **QUIET), Clamped(), loader(64))
    assert found.world_size == devices and found.ranks[0].peak > found.ranks[0].parameters
    assert torch.device("cpu") in Moved.devices, "its states would stay where they were made"
    (note,) = [note for note in found.notes if "Moved" in note]
    assert note.startswith(f"{__file__}:") and "neither that nor what it keeps is in the plan" in note


@pytest.mark.unit
def test_copies_of_layers_are_planned_with_the_step() -> None:
    """Their tensors are of the plan's mode: of a copied one, weak references to storages would be freed twice."""

    class Copies(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            teacher = copy.deepcopy(self)
            modes.update(next(module.parameters()).fake_mode for module in (self, teacher))
            with torch.no_grad():
                target = teacher(batch[0]).argmax(1)
            return nn.functional.cross_entropy(self(batch[0]), target)

    modes: set[Any] = set()
    trainer = Trainer(strategy="single", max_steps=1, **QUIET)
    found, plain = (plan(trainer, module, loader(64)) for module in (Copies(), Net()))
    assert len(modes) == 1
    assert found.ranks[0].flops > plain.ranks[0].flops


@pytest.mark.unit
def test_a_metric_is_counted_where_its_work_depends_on_shapes_alone() -> None:
    class Squares(Net):
        def __init__(self, counts: bool) -> None:
            super().__init__()
            self.error = MeanSquaredError() if counts else None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = self(batch[0])
            if self.error is not None:
                self.error(output[:, 0], batch[0][:, 0])
            return nn.functional.cross_entropy(output, batch[1])

    trainer = Trainer(strategy="ddp", devices=2, max_steps=1, **QUIET)
    counted, plain = (plan(trainer, Squares(counts), loader(64)) for counts in (True, False))
    assert counted.notes == plain.notes
    works = [sum(work.bytes for work in found.ranks[0].work) for found in (counted, plain)]
    assert works[0] > works[1]
