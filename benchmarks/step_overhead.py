"""What a step costs beside a hand-written loop, and beside peers where they are installed.

    python -m benchmarks.step_overhead [--rounds 15] [--steps 1000] [--json FILE]
    make bench                           # every benchmark, with the peers

The work of a step is next to nothing (Linear(32, 32)-ReLU-Linear(32, 10), 8 samples, SGD, one thread), so what is
measured is the loop around it. Variants take turns in each round. A time is microseconds a step, the median over
rounds; `over` and a ratio are medians of those to the hand-written loop of the same round, and the last column is the
ratio to one that logs five running means to TensorBoard every 50 steps. CPU time is that of the process, which other
programs on the machine hardly change. Peers run in a process of their own, as what they leave behind in one slows down
what runs in it next. Expect a minute, with the peers three.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._rounds import (
    STEP_COLUMNS,
    Clock,
    described,
    machine,
    make_parser,
    quiet,
    report,
    summarize_steps,
    take_turns,
)
from lockstep import Module, Trainer
from lockstep.callbacks import LearningRateMonitor
from lockstep.strategies import SingleDevice

WARMUP_STEPS = 50
LOG_EVERY = 50  # steps, as the trainers do by default
REFERENCE, LOGGING = "hand-written loop", "hand-written loop, 5 values to TensorBoard"


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))


def loader(num_steps: int) -> DataLoader:
    num_samples = 8 * (WARMUP_STEPS + num_steps + 1)
    return DataLoader(TensorDataset(torch.randn(num_samples, 32), torch.randint(10, (num_samples,))), batch_size=8)


def by_hand(num_steps: int) -> Clock:
    model, clock = build(), Clock(num_steps, WARMUP_STEPS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (x, y) in enumerate(loader(num_steps)):
        clock.tick(step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return clock


def by_hand_logging(num_steps: int) -> Clock:
    from torch.utils.tensorboard import SummaryWriter

    model, clock = build(), Clock(num_steps, WARMUP_STEPS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sums = {f"loss{i}": torch.zeros(()) for i in range(5)}
    with SummaryWriter("runs") as writer:
        for step, (x, y) in enumerate(loader(num_steps), start=1):
            clock.tick(step - 1)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            value = loss.detach()
            for total in sums.values():
                total += value
            if step % LOG_EVERY == 0:
                for name, total in sums.items():
                    writer.add_scalar(name, total.item() / LOG_EVERY, step)
                    total.zero_()
    return clock


def module_class(base: type) -> type:
    """The same module for Lockstep and for Lightning."""

    class Small(base):
        def __init__(self, clock: Clock, num_values: int) -> None:
            super().__init__()
            self.net, self.clock, self.num_values = build(), clock, num_values

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.clock.tick(batch_idx)
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            for i in range(self.num_values):
                self.log(f"loss{i}", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Small


BARE: dict[str, Any] = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


def lockstep(num_steps: int, *, num_values: int, everything: bool = False) -> Clock:
    clock = Clock(num_steps, WARMUP_STEPS)
    options = {"max_epochs": 1, "callbacks": [LearningRateMonitor()]} if everything else BARE
    Trainer(accelerator="cpu", **options).fit(module_class(Module)(clock, num_values), loader(num_steps))
    return clock


def verbs(num_steps: int) -> Clock:
    """A loop by hand over the verbs of the strategy: without the Trainer around them."""
    model, clock, strategy = build(), Clock(num_steps, WARMUP_STEPS), SingleDevice()
    strategy.configure(accelerator="cpu")
    strategy.setup()
    wrapped = strategy.setup_module(model)
    optimizer = strategy.setup_optimizers(wrapped, {"main": torch.optim.SGD(model.parameters(), lr=0.01)})["main"]
    for step, window in enumerate(strategy.shard_loader(loader(num_steps), seed=0).windows(0)):
        clock.tick(step)
        strategy.forward_backward(wrapped, lambda batch, _: F.cross_entropy(model(batch[0]), batch[1]), window)
        strategy.optimizer_step(wrapped, optimizer)
        optimizer.zero_grad()
    strategy.teardown()
    return clock


def lightning(num_steps: int, *, num_values: int, everything: bool = False) -> Clock:
    import lightning as peer
    from lightning.pytorch.callbacks import LearningRateMonitor as Monitor

    clock = Clock(num_steps, WARMUP_STEPS)
    options = {"max_epochs": 1, "callbacks": [Monitor()]} if everything else {"enable_model_summary": False, **BARE}
    peer.Trainer(accelerator="cpu", devices=1, **options).fit(
        module_class(peer.LightningModule)(clock, num_values), loader(num_steps)
    )
    return clock


def fabric(num_steps: int) -> Clock:
    from lightning.fabric import Fabric

    peer, model, clock = Fabric(accelerator="cpu", devices=1), build(), Clock(num_steps, WARMUP_STEPS)
    model, optimizer = peer.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for step, (x, y) in enumerate(peer.setup_dataloaders(loader(num_steps))):
        clock.tick(step)
        loss = F.cross_entropy(model(x), y)
        peer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return clock


def accelerate(num_steps: int) -> Clock:
    from accelerate import Accelerator

    peer = Accelerator(cpu=True)
    model, clock = build(), Clock(num_steps, WARMUP_STEPS)
    model, optimizer, batches = peer.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader(num_steps))
    for step, (x, y) in enumerate(batches):
        clock.tick(step)
        loss = F.cross_entropy(model(x), y)
        peer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return clock


VARIANTS: dict[str, Callable[[int], Clock]] = {
    REFERENCE: by_hand,
    LOGGING: by_hand_logging,
    "lockstep, its strategy alone": verbs,
    "lockstep, bare": partial(lockstep, num_values=0),
    "lockstep, 1 logged value": partial(lockstep, num_values=1),
    "lockstep, 5 logged values": partial(lockstep, num_values=5),
    # TensorBoard, progress bar, summary, checkpoints, learning rates
    "lockstep, everything on": partial(lockstep, num_values=5, everything=True),
}
PEERS: dict[str, Callable[[int], Clock]] = {}
if importlib.util.find_spec("lightning"):
    PEERS |= {
        "fabric": fabric,
        "lightning, bare": partial(lightning, num_values=0),
        "lightning, 1 logged value": partial(lightning, num_values=1),
        "lightning, 5 logged values": partial(lightning, num_values=5),
        "lightning, everything on": partial(lightning, num_values=5, everything=True),
    }
if importlib.util.find_spec("accelerate"):
    PEERS |= {"accelerate": accelerate}


def run_peer(name: str, num_steps: int) -> Clock:
    with quiet():
        return PEERS[name](num_steps)


def main() -> None:
    parser = make_parser("Measure what a training step costs beside a hand-written loop.", rounds=15)
    parser.add_argument(
        "--steps", type=int, default=1000, help=f"steps that count in a turn, after {WARMUP_STEPS} that do not"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    facts = machine()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as apart:
        apart.submit(torch.get_num_threads).result()  # it starts here, and not in the folder of a turn
        own = {name: partial(variant, arguments.steps) for name, variant in VARIANTS.items()}

        def in_turn(name: str) -> Clock:
            return apart.submit(run_peer, name, arguments.steps).result()

        peers = {name: partial(in_turn, name) for name in PEERS}
        clocks = take_turns(own | peers, arguments.rounds)
    results = summarize_steps(clocks, dict.fromkeys(clocks, REFERENCE))
    for row in results.values():
        row["ratio_to_logging"] = statistics.median(
            own / base for own, base in zip(row["rounds_us"], results[LOGGING]["rounds_us"], strict=True)
        )
    print(f"{described(facts)}; {arguments.rounds} rounds of {arguments.steps} steps")
    columns = {**STEP_COLUMNS, "to logging": ("ratio_to_logging", ".2f")}
    report(arguments, facts, results, columns)


if __name__ == "__main__":
    main()
