"""What docs/methods/federated.md states: rounds until 95 % on the digits, and memory with 10,000 clients.

python -m benchmarks.federated rounds                # 20 clients of 2 digits each; 3 minutes a seed on two cores
python -m benchmarks.federated memory                # 100 and 10,000 clients on 2 ranks
"""

from __future__ import annotations

import argparse
import resource
import tempfile
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from examples.federated import Client, ClientData
from lockstep import Module, Trainer
from lockstep.callbacks import Callback
from lockstep.strategies import Federated

WANTED = 0.95
RATES = {"scaffold": 0.07}
"""Of clients, if not 0.1: chosen for all seeds together, where FedSGD has the best of its rates for each."""
QUIET: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
QUIET |= {"accelerator": "cpu", "num_sanity_val_steps": 0}


class Reached(Callback):
    """Ends training once the accuracy has been reached, and counts the rounds that it took; keeps the best."""

    def __init__(self) -> None:
        self.rounds, self.best = 0, 0.0

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        accuracy = float(trainer.callback_metrics["val/acc"])
        self.best = max(self.best, accuracy)
        if accuracy >= WANTED and not self.rounds:
            self.rounds = trainer.global_step
            trainer.should_stop = True


def run(
    server: str, lr: float, epochs: int, batch_size: int, rounds: int, seed: int, arguments: argparse.Namespace
) -> Reached:
    reached = Reached()
    strategy = Federated(2, fraction=1.0, local_epochs=epochs, server=server)
    trainer = Trainer(strategy=strategy, devices=1, max_epochs=rounds, seed=seed, callbacks=[reached], **QUIET)
    torch.manual_seed(seed)
    trainer.fit(Client(arguments.width, lr, arguments.layers), datamodule=ClientData(batch_size))
    return reached


def rounds(arguments: argparse.Namespace) -> None:
    print("| | learning rate | seed | rounds to 95 % | best accuracy |")
    print("|---|---|---|---|---|", flush=True)
    epochs, size, most = arguments.epochs, arguments.batch_size, arguments.rounds
    variants = [("FedSGD", "fedavg", rate, 1, 10_000, arguments.most) for rate in arguments.sgd_lr]
    for name in arguments.servers:
        rate = arguments.lr or RATES.get(name, 0.1)
        variants.append((f"{name}, E = {epochs}", name, rate, epochs, size, most))
    for seed in range(arguments.seeds):
        for name, server, rate, epochs, size, most in variants:
            found = run(server, rate, epochs, size, most, seed, arguments)
            taken = found.rounds or f"not in {most}"
            print(f"| {name} | {rate:g} | {seed} | {taken} | {100 * found.best:.2f} % |", flush=True)


class Line(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(100, 100)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).square().mean()

    def on_train_epoch_end(self) -> None:
        if self.current_epoch + 1 == self.trainer.max_epochs:
            kib = self.trainer.strategy.all_gather(torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
            if self.trainer.is_global_zero:
                print(f"| {len(self.trainer.train_dataloader.population):,} | {kib.max() / 1024:.0f} |", flush=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def memory(arguments: argparse.Namespace) -> None:
    print("| clients | largest resident memory of a rank, MiB |\n|---|---|", flush=True)
    for clients in (100, 10_000):
        data = TensorDataset(torch.randn(20_000, 100), torch.arange(20_000) % clients)
        with tempfile.TemporaryDirectory() as folder:
            strategy = Federated(1, fraction=10 / clients, server="scaffold", state_dir=folder)
            trainer = Trainer(strategy=strategy, devices=2, max_epochs=arguments.rounds, **QUIET)
            trainer.fit(Line(), DataLoader(data, 16, shuffle=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure federated averaging.")
    parser.add_argument("what", choices=["rounds", "memory"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--most", type=int, default=200, help="rounds of FedSGD")
    parser.add_argument("--lr", type=float, help="of the clients; by default 0.1, with scaffold 0.07")
    parser.add_argument("--sgd-lr", type=float, nargs="*", default=[0.5, 0.7, 1.0], help="of FedSGD")
    parser.add_argument("--epochs", type=int, default=20, help="of a client in a round, but with FedSGD")
    parser.add_argument("--servers", nargs="*", default=["fedavg", "fedprox=0.01", "scaffold"])
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--width", type=int, default=200)
    parser.add_argument("--layers", type=int, default=2, help="2 of width 200: the 2NN of McMahan et al., 2017")
    arguments = parser.parse_args()
    {"rounds": rounds, "memory": memory}[arguments.what](arguments)


if __name__ == "__main__":
    main()
