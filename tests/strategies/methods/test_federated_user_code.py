"""What user code may do in a federated run: it has its effect on each client, or is refused by name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from lockstep import Module, Trainer
from lockstep.callbacks import Callback, ClientMetrics, Guard, ModelCheckpoint, WeightAveraging
from lockstep.strategies import Federated, dirichlet
from lockstep.strategies.base import NO_HOOKS
from lockstep.strategies.data.randomness import Randomness
from lockstep.strategies.methods.federated.clients import population_of
from lockstep.strategies.methods.federated.control import ClientStates
from lockstep.strategies.methods.federated.loader import FederatedLoader
from lockstep.strategies.methods.federated.server import ExactSums
from tests.strategies.methods.federated_runs import SIZES, Regression, bits, data, fit, flat


class Counts(Regression):
    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        return super().training_step(batch, batch_idx)


class IntegerBuffer(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        return super().training_step(batch, batch_idx)


class Clamps(Regression):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.net[0].weight.clamp_(-0.1, 0.1)


class Grows(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not hasattr(self, "extra"):
            self.extra = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        return super().training_step(batch, batch_idx)


class NewStream(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.rand(1, generator=self.random_stream("late"))
        return super().training_step(batch, batch_idx)


class OwnBackward(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx).backward()
        return super().training_step(batch, batch_idx)


class Closure(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class TwoModes(Regression):
    def configure_optimizers(self) -> Any:
        class Free(torch.optim.SGD):
            def train(self) -> None: ...
            def eval(self) -> None: ...

        return Free(self.parameters(), 0.1)


class Manual(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Complex(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))


class Synced(Regression):
    def __init__(self) -> None:
        super().__init__(layers=nn.Sequential(nn.Linear(3, 2), nn.SyncBatchNorm(2), nn.Linear(2, 1)).double())


class Gathers(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.all_gather(batch[0])
        return super().training_step(batch, batch_idx)


class Wholes(Regression):
    def on_train_batch_start(self, *args: Any) -> None:
        with self.trainer.whole(self):
            pass


class Averages(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.averages = [p.detach().clone() for p in self.net.parameters()]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for average, parameter in zip(self.averages, self.net.parameters(), strict=True):
            average.lerp_(parameter.detach(), 0.1)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Averages, "changed averages on a client"),
        (Counts, "training changed calls"),
        (IntegerBuffer, "changed the buffer seen of torch.int64"),
        (Clamps, "a hook of a batch changed the parameters net.0.weight"),
        (Grows, "parameters were added or replaced"),
        (NewStream, "random_stream('late') was first asked for while a client trained"),
        (OwnBackward, "changed gradients by itself"),
        (Closure, "computes each local step once"),
        (TwoModes, "weights to train and weights to evaluate"),
        (Manual, "needs automatic optimization"),
        (Complex, "phase is torch.complex64"),
        (Synced, "net.1 is a SyncBatchNorm"),
        (Gathers, "all_gather was called while a client trained"),
        (Wholes, "trainer.whole was called while a client trained"),
    ],
)
def test_what_a_client_may_not_do_is_refused_before_a_parameter_changes(
    module: Callable[[], Module], words: str
) -> None:
    model = module()
    before = bits(model.net)
    with pytest.raises((ValueError, RuntimeError), match=re.escape(words)):
        fit(model, fraction=1.0, epochs=1)
    assert bits(model.net) == before


class Ends(Regression):
    """Hooks of batches that read and change what is a client's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ends", torch.zeros((), dtype=torch.float64))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ends += 1
        self.net[0].weight.data = self.net[0].weight.data * 0.9
        self.log("norm", self.net[0].weight.detach().norm(), on_step=False, on_epoch=True)
        self.log("step", self.global_step + torch.rand(()), on_step=False, on_epoch=True)


@pytest.mark.ranks
def test_each_batch_of_a_client_ends_on_the_client() -> None:
    found = []
    for devices in (1, 2):
        model = Ends()
        metrics = fit(model, devices, fraction=0.9).callback_metrics
        found.append((bits(model), [float(metrics[name]) for name in ("norm", "step")], float(model.ends)))
    assert found[0] == found[1]
    assert bits(model.net) != bits(Regression().net) and found[0][2] > 4


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(data())


@pytest.mark.parametrize(
    ("loader", "options", "words"),
    [
        (DataLoader(Stream(), 4), {}, "a map-style dataset, but got DataLoader of Stream"),
        ([DataLoader(data(), 4)] * 2, {}, "needs one DataLoader"),
        (DataLoader(data(), 4, sampler=WeightedRandomSampler([1.0] * 9, 9)), {}, "without a sampler of its own"),
        (DataLoader(data(), 4, drop_last=True), {}, "drop_last=True would drop all of a client"),
        (DataLoader(data(), None), {}, "needs a DataLoader with a batch_size"),
        (DataLoader(data(), 4), {"split_batches": True}, "is each client's own"),
        (DataLoader(data(), 4), {"overfit_batches": 1}, "overfit_batches cannot be used with Federated"),
        (DataLoader(data(), 4), {"virtual_ranks": 2}, "virtual_ranks=2 needs a strategy"),
        (DataLoader(data(), 4), {"strategy": "federated"}, "Federated needs clients"),
        (DataLoader(data(), 4), {"strategy": Federated("user")}, "clients='user' must be a key of each item"),
        (DataLoader(data(), 4), {"precision": "16-mixed"}, "with Federated use 'bf16-mixed'"),
    ],
    ids=lambda value: None if isinstance(value, (dict, str)) else type(value).__name__,
)
def test_what_cannot_be_shared_out_over_clients_is_refused(loader: Any, options: dict[str, Any], words: str) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    settings = {"strategy": Federated(2), "devices": 1, "max_epochs": 1, **quiet, **options}
    with pytest.raises((ValueError, TypeError), match=re.escape(words)):
        Trainer(**settings).fit(Regression(), loader)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"fraction": 0}, "fraction must be above 0"),
        ({"local_epochs": 0}, "local_epochs must be a whole number"),
        ({"server": "fedsgd"}, "server must be 'fedavg'"),
        ({"server": "fedprox"}, "server must be 'fedavg'"),
        ({"server": "fedprox=x"}, "write server='fedprox=0.01'"),
        ({"clients": 1.5}, "clients must be a key"),
        ({"server": "fedadam", "server_lr": 0}, "server_lr must be a number above 0, but server_lr=0"),
        ({"clients": "dirichlet(0.3)"}, "write clients='dirichlet(0.3, n=100)'"),
        ({"server": lambda p: torch.optim.SGD(p, 1.0), "server_lr": 1.0}, "server_lr=1.0 has no effect"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(words)):
        Federated(**({"clients": 2} | arguments))


def test_fixed_point_sums_have_the_same_bits_in_any_order_and_lose_nothing() -> None:
    random = torch.Generator().manual_seed(0)
    values = torch.randn(50, 40, dtype=torch.float64, generator=random)
    values *= 10.0 ** torch.arange(-12.0, 8.0, 0.5, dtype=torch.float64)
    found = []
    for order in (range(50), reversed(range(50))):
        sums = ExactSums(40, torch.device("cpu"))
        for i in order:
            sums.add(0, values[i, :25])
            sums.add(25, values[i, 25:])
        found.append(sums.reduce())
    assert torch.equal(*found)
    assert ((found[0] - values.sum(0)).abs() < 1e-17 + 1e-14 * values.abs().sum(0)).all()


def test_populations() -> None:
    class Named(Dataset):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"x": torch.rand(1), "user": "ab"[index % 2]}

    with Randomness(3):
        before = torch.random.get_rng_state()
        named = population_of(Named(), "user")
        assert torch.equal(before, torch.random.get_rng_state())
    assert (named.names, named.samples(1).tolist()) == (("a", "b"), [1, 3, 5])
    assert population_of(Named(), lambda index: index // 4).names == (0, 1)
    labels = torch.arange(600) % 3
    split = population_of(TensorDataset(labels, labels), dirichlet(0.3, n=50))
    assert sorted(split.order.tolist()) == list(range(600))
    assert len(split) <= 50
    assert split.names == population_of(TensorDataset(labels, labels), dirichlet(0.3, n=50)).names
    few = [len(set(labels[split.samples(k)].tolist())) for k in range(len(split))]
    many = population_of(TensorDataset(labels, labels), dirichlet(1000.0, n=50))
    assert np.mean(few) < 2.5 < np.mean([len(set(labels[many.samples(k)].tolist())) for k in range(len(many))])


def test_a_draw_is_without_replacement_and_of_its_round() -> None:
    loader = FederatedLoader(DataLoader(data(), 4), 2, rank=0, size=1, seed=0, fraction=0.5)
    rounds = [loader.participants(number) for number in range(200)]
    assert all(len(set(drawn)) == 4 for drawn in rounds)
    assert len({tuple(drawn) for drawn in rounds}) > 40
    counts = np.bincount(np.array(rounds).ravel(), minlength=8)
    assert counts.min() > 70 and counts.max() < 130


class Steps(Callback):
    """Notes learning rates, and what the loop calls."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.clients: list[int] = []
        self.ends: list[int] = []
        self.pseudo = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.clients.append(int(batch[2][0]))
            self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ends.append(batch_idx)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.pseudo += 1


def test_hooks_are_called_for_each_batch_and_schedulers_step_by_round() -> None:
    class Scheduled(Regression):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), 0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    steps, model = Steps(), Scheduled()
    trainer = fit(model, epochs=3, fraction=1.0, local_epochs=2, callbacks=[steps])
    assert steps.clients == list(range(8)) * 3
    assert steps.rates == [0.1] * 8 + [0.05] * 8 + [0.025] * 8
    assert len(steps.ends) == 3 * 2 * sum(-(-size // 4) for size in SIZES)
    assert (steps.pseudo, trainer.global_step) == (3, 3)
    assert not trainer.optimizers[0].state


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_last_on_after_backward_sees_the_gradient_that_the_optimizer_gets(accumulate: int) -> None:
    class Clips(Regression):
        def __init__(self) -> None:
            super().__init__(weighted=True)
            self.net[0].weight.register_hook(lambda gradient: gradient * 0.01)

        def on_after_backward(self) -> None:
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)

    alone, client = Clips(), Clips()
    samples = TensorDataset(*data(SIZES[:4]).tensors[:2], torch.arange(sum(SIZES[:4])) % 5)
    quiet: dict[str, Any] = {"max_epochs": 3, "logger": False, "enable_checkpointing": False, "seed": 0}
    quiet |= {"enable_progress_bar": False, "accelerator": "cpu", "accumulate_grad_batches": accumulate}
    for model, strategy in ((alone, "single"), (client, Federated(clients=lambda index: 0, fraction=1.0))):
        loader = DataLoader(samples, len(samples) // accumulate)
        Trainer(strategy=strategy, devices=1, **quiet).fit(model, loader)
    assert (flat(alone) - flat(client)).abs().max() <= 1e-12


def test_clipping_is_that_of_local_steps() -> None:
    norms: list[float] = []

    class Measured(Regression):
        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any
        ) -> None:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            norms.append(float(torch.cat([p.grad.flatten() for p in self.parameters()]).norm()))

    model = Measured()
    start = flat(model)
    fit(model, epochs=1, fraction=1.0, gradient_clip_val=1e-3)
    assert len(norms) == sum(-(-size // 4) for size in SIZES)
    assert max(norms) < 1e-3 * 1.001
    assert (flat(model) - start).norm() < 0.1 * 1e-3 * 8


def test_several_optimizers_each_train_and_average_their_own() -> None:
    class Two(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return {"0": loss, "1": 2 * loss}

        def configure_optimizers(self) -> Any:
            first, last = self.net[0].parameters(), self.net[2].parameters()
            return [torch.optim.SGD(first, 0.1), torch.optim.SGD(last, 0.05)]

    one, two = Regression(), Two()
    fit(one, epochs=3)
    fit(two, epochs=3)
    assert (flat(one) - flat(two)).abs().max() < 1e-12


class Remembering(torch.optim.SGD):
    """Steps less and less, by a count, a list and a sum of its own."""

    steps = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rates: list[float] = []

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        self.total = getattr(self, "total", torch.zeros(())) + 1.0
        self.rates.append(0.1 / self.steps)
        for group in self.param_groups:
            group["lr"] = self.rates[-1] + 0.01 * len(self.rates) + 0.01 * float(self.total)
        return super().step(closure)


class Box:
    steps = 0


class InBox(torch.optim.SGD):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.box = Box()

    def step(self, closure: Any = None) -> Any:
        self.box.steps += 1
        return super().step(closure)


def test_what_an_optimizer_remembers_begins_again_on_each_client() -> None:
    lasts = []

    class Own(Regression):
        def configure_optimizers(self) -> Any:
            return Remembering(self.parameters(), 0.1)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if not batch_idx:
                optimizer = self.optimizers()
                lasts.append((optimizer.steps, [*optimizer.rates], hasattr(optimizer, "total")))

    fit(Own(), epochs=2, fraction=1.0)
    assert len(lasts) == 2 * len(SIZES)
    assert all(last == (0, [], False) for last in lasts)


def test_an_optimizer_that_cannot_begin_again_is_refused() -> None:
    class Own(Regression):
        def configure_optimizers(self) -> Any:
            return InBox(self.parameters(), 0.1)

    model = Own()
    before = bits(model.net)
    with pytest.raises(RuntimeError, match="InBox changed its attribute 'box' on a client"):
        fit(model, epochs=1, fraction=1.0)
    assert bits(model.net) == before


def test_averages_of_weights_are_saved_beside_the_state_of_servers(tmp_path: Path) -> None:
    def trained(epochs: int, **options: Any) -> str:
        model = Regression()
        callbacks = [WeightAveraging(), *options.pop("callbacks", [])]
        fit(model, epochs=epochs, server="fedadam", enable_checkpointing=True, callbacks=callbacks, **options)
        return bits(model)

    saver = ModelCheckpoint(dirpath=str(tmp_path), save_top_k=-1, filename="{epoch}")
    trained(2, callbacks=[saver], default_root_dir=str(tmp_path))
    assert trained(4, resume=str(tmp_path / "epoch=1"), default_root_dir=str(tmp_path)) == trained(
        4, default_root_dir=str(tmp_path)
    )


@pytest.mark.unit
def test_the_state_of_a_client_is_written_and_read_whole_or_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: write(file, data[:24], offset))  # a nearly full disk
    states, values = ClientStates(str(tmp_path)), torch.arange(20, dtype=torch.float64).view(2, 10)
    for client, value in enumerate(values):
        states.put(client, value)
    states.commit()
    assert [states.get(client, torch.float64).tolist() for client in (0, 1)] == values.tolist()
    os.truncate(states._file.fileno(), 150)
    with pytest.raises(ValueError, match="greater than file size"):
        states.get(1, torch.float64)


@pytest.mark.unit
def test_a_state_that_cannot_be_read_ends_the_run_and_drops_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    get = ClientStates.get

    def broken(states: ClientStates, client: int, dtype: torch.dtype) -> torch.Tensor | None:
        if client == 3:
            raise OSError(5, "Input/output error")
        return get(states, client, dtype)

    monkeypatch.setattr(ClientStates, "get", broken)
    with pytest.raises(OSError, match="Input/output error"):
        fit(Regression(), fraction=1.0, server="scaffold")


def test_a_skipped_round_leaves_the_clients_states_as_they_were() -> None:
    class Sometimes(Regression):
        broken = -1

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if self.current_epoch == self.broken else loss

    def controls(broken: int, epochs: int) -> tuple[str, list[Any]]:
        model, seen = Sometimes(), []
        type(model).broken = broken

        class Reads(Callback):
            def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
                control = trainer.strategy._control
                states = [control.states.get(k, torch.float64).tolist() for k in control.states.clients()]
                seen.append([states, [c.tolist() for c in control.server.values()]])

        fit(model, epochs=epochs, server="scaffold", fraction=1.0, callbacks=[Guard(non_finite="skip"), Reads()])
        return bits(model), seen

    weights, seen = controls(1, 2)
    assert seen[1] == seen[0]
    assert (weights, seen[:1]) == controls(-1, 1)


def test_a_target_network_and_other_parameters_without_an_optimizer_are_averaged() -> None:
    class Target(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.target = nn.Parameter(torch.zeros((), dtype=torch.float64), requires_grad=False)
            self.register_buffer("mean", torch.full((2,), -torch.inf, dtype=torch.float64))
            self.register_buffer("sum", torch.zeros((), dtype=torch.float64))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with torch.no_grad():
                self.target.fill_(float(batch[2][0]))
                self.sum = self.sum + 1
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.parameters(), 0.1)

    model = Target()
    fit(model, epochs=1, fraction=1.0, batch_size=100)
    assert abs(float(model.target) - sum(i * size for i, size in enumerate(SIZES)) / sum(SIZES)) < 1e-12
    assert float(model.sum) == 1.0
    assert model.mean.isinf().all()


def test_a_collate_function_that_skips_samples_counts_what_is_left() -> None:
    def odd(samples: list[Any]) -> Any:
        kept = [sample for sample in samples if sample[0] % 2]
        return torch.stack([sample[0] for sample in kept]) if kept else torch.empty(0)

    class Mean(Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Parameter(torch.zeros((), dtype=torch.float64))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return 0.5 * (self.value - batch.double()).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1.0)

    samples = TensorDataset(torch.tensor([1, 2, 4, 8, 3, 3, 5, 2]), torch.tensor([0, 0, 0, 2, 1, 1, 1, 1]))
    model = Mean()
    strategy = Federated(1, fraction=1.0)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = Trainer(strategy=strategy, devices=1, max_epochs=1, **quiet)
    trainer.fit(model, DataLoader(samples, 8, collate_fn=odd))
    assert model.value.item() == 12 / 4


def test_a_loop_of_ones_own_drives_rounds() -> None:
    model, trained = Regression(), Regression()
    fit(trained, epochs=2, shuffle=False)
    from lockstep.trainer.seeding import derive

    strategy = Federated(2, fraction=0.5).configure(devices=1, accelerator="cpu")
    strategy.setup()
    wrapped = strategy.setup_module(model.net)
    optimizers = strategy.setup_optimizers(wrapped, {"0": torch.optim.SGD(model.net.parameters(), 0.1)})
    loader = strategy.shard_loader(DataLoader(data(), 4), seed=derive(0, "train"), accumulate=1)
    for epoch in range(2):
        for window in loader.windows(epoch):
            strategy.forward_backward(
                wrapped, lambda batch, _: (model.net(batch[0]) - batch[1]).square().mean(), window, NO_HOOKS
            )
            strategy.optimizer_step(wrapped, optimizers["0"])
    strategy.teardown()
    assert bits(model.net) == bits(trained.net)


def test_client_metrics_are_quantiles_over_clients_and_the_worst_of_them() -> None:
    class Validated(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return {"value": (batch[2] * 10).double() + (batch_idx == 0)}

    metrics, model = ClientMetrics(2, worst=0.25, quantiles=(0.5, 1.0)), Validated()
    clients = torch.arange(8).repeat(3)
    values = TensorDataset(clients, clients, clients)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = Trainer(strategy=Federated(2), devices=1, max_epochs=1, callbacks=[metrics], **quiet)
    trainer.fit(model, DataLoader(data(), 4), DataLoader(values, 8))
    found = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("clients/")}
    third = 1 / 3
    assert found["clients/count"] == 8
    assert found["clients/value/p50"] == pytest.approx(30 + third, abs=1e-12)
    assert found["clients/value/p100"] == pytest.approx(70 + third, abs=1e-12)
    assert found["clients/value/worst"] == pytest.approx(5 + third, abs=1e-12)


class RaisesOnOne(Regression):
    """The step of client 3 raises in between what changes and puts back."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.scale, self.broken = nn.Dropout(0.5), 1.0, 0
        self.held = torch.zeros(())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, client = batch
        self.drop.eval()
        self.net[0].weight.requires_grad_(False)
        self.scale = 0.1
        if (client == 3).any():
            self.broken += 1
            self.remember()
            raise ValueError("a broken sample")
        self.scale = 1.0
        self.net[0].weight.requires_grad_(True)
        self.drop.train()
        return (self.net(self.drop(x)) - y).square().mean() * self.scale / (1 + self.broken)

    def remember(self) -> None: ...


class RemembersAnError(RaisesOnOne):
    def remember(self) -> None:
        self.held = torch.ones(())


@pytest.mark.ranks
def test_what_a_dropped_client_has_changed_is_put_back() -> None:
    alone, ranks = RaisesOnOne(), RaisesOnOne()
    fit(alone, epochs=1, fraction=1.0)
    fit(ranks, devices=2, epochs=1, fraction=1.0)
    assert bits(alone.net) == bits(ranks.net)
    assert alone.broken == 0
    assert alone.drop.training


def test_what_a_dropped_client_remembers_otherwise_is_refused() -> None:
    with pytest.raises(RuntimeError, match="training changed held on a client, which would depend on the clients"):
        fit(RemembersAnError(), epochs=1, fraction=1.0)


class Fills(Regression):
    """Fills what is None at first, which depends on the client."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("center", None, persistent=persistent)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, _ = batch
        if self.center is None:
            self.center = y.mean(0)
        return (self.net(x) - y + self.center).square().mean()


@pytest.mark.ranks
def test_a_buffer_that_clients_make_is_refused_and_a_cache_is_each_clients_own() -> None:
    with pytest.raises(RuntimeError, match="training made the buffer center, of which the server has none"):
        fit(Fills(True), epochs=1, fraction=1.0)
    alone, ranks = Fills(False), Fills(False)
    fit(alone, epochs=1, fraction=1.0)
    fit(ranks, devices=2, epochs=1, fraction=1.0)
    assert bits(alone.net) == bits(ranks.net)


def test_scaffold_refuses_other_clients_in_a_later_epoch() -> None:
    class Reloads(Regression):
        def train_dataloader(self) -> Any:
            x, y, clients = data().tensors
            return DataLoader(TensorDataset(x, y, clients + 8 * self.current_epoch), 4)

    run = Trainer(
        strategy=Federated(clients=2, fraction=1.0, server="scaffold"), devices=1, accelerator="cpu", max_epochs=2,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, reload_dataloaders_every_n_epochs=1,
    )  # fmt: skip
    with pytest.raises(ValueError, match="the training data was loaded again and now has other clients, for which"):
        run.fit(Reloads())
