"""What a step of `dp` on two slices costs beside a hand-written loop that runs the same two slices.

    python -m benchmarks.dp_slices [--rounds 9] [--steps 30] [--match TEXT] [--json FILE]

Both are one process on CPU with one thread, SGD, 64 samples. The loop by hand cuts each batch in two, runs forward and
backward on one half after the other and steps; `dp` reads besides what the module holds, so that each slice begins with
what the batch found. So the models have much of that: many layers, a usual network with BatchNorm and Dropout, and
large lists and dicts in attributes. A time is microseconds a step, the median over rounds; a ratio is the median of
those to the loop by hand of the same round. CPU time is that of the process, which other programs on the machine
hardly change. Expect two minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._rounds import (
    STEP_COLUMNS,
    Clock,
    Ticks,
    described,
    machine,
    make_parser,
    report,
    summarize_steps,
    take_turns,
)
from benchmarks.step_overhead import BARE
from lockstep import Module, Trainer

WARMUP_STEPS, SLICES, BATCH = 5, 2, 64


class Net(Module):
    """A network over rows of `width` numbers, or images of it, and what its attributes hold besides."""

    def __init__(self, net: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.net, self.shape = net, shape

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def layers() -> Net:
    """800 layers of eight numbers each."""
    return Net(nn.Sequential(*(nn.Linear(8, 8) for _ in range(800))), (8,))


def scales() -> Net:
    """800 layers that do next to nothing."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    return Net(nn.Sequential(*(Scale() for _ in range(800))), (8,))


def mlp() -> Net:
    sizes = (64, 256, 256, 256)
    blocks = [(nn.Linear(a, b), nn.ReLU(), nn.Dropout(0.1)) for a, b in pairwise(sizes)]
    return Net(nn.Sequential(*(layer for block in blocks for layer in block), nn.Linear(256, 10)), (64,))


def cnn() -> Net:
    sizes = (3, 16, 32, 32)
    blocks = [
        (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)) for a, b in pairwise(sizes)
    ]
    layers = (layer for block in blocks for layer in block)
    return Net(nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 16, 10)), (3, 32, 32))


def containers() -> Net:
    """The network of `mlp` with large lists and dicts in attributes."""
    net: Any = mlp()
    net.words = {f"word {i}": i for i in range(20_000)}
    net.losses = [float(i) for i in range(20_000)]
    net.rows = [[i, i + 1] for i in range(1000)]
    net.by_name = {f"name {i}": {"count": i} for i in range(1000)}
    net.pairs = [(i, str(i)) for i in range(2000)]
    return net


MODELS: dict[str, Callable[[], Net]] = {
    "800 linear layers": layers,
    "800 layers of a factor": scales,
    "MLP": mlp,
    "CNN": cnn,
    "MLP, large containers": containers,
}


def loader(net: Net, num_steps: int) -> DataLoader:
    num_samples = BATCH * (WARMUP_STEPS + num_steps + 1)
    x = torch.randn(num_samples, *net.shape, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, torch.arange(num_samples) % 8), batch_size=BATCH)


def by_hand(build: Callable[[], Net], num_steps: int) -> Clock:
    torch.manual_seed(0)
    module, clock = build(), Clock(num_steps, WARMUP_STEPS)
    optimizer: Any = module.configure_optimizers()
    for step, (x, y) in enumerate(loader(module, num_steps)):
        clock.tick(step)
        for part in zip(x.chunk(SLICES), y.chunk(SLICES), strict=True):
            (module.training_step([*part], step) / SLICES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return clock


def in_slices(build: Callable[[], Net], num_steps: int) -> Clock:
    torch.manual_seed(0)
    module, clock = build(), Clock(num_steps, WARMUP_STEPS)
    trainer = Trainer(strategy="dp", devices=SLICES, accelerator="cpu", callbacks=Ticks(clock), **BARE)
    trainer.fit(module, loader(module, num_steps))
    return clock


def main() -> None:
    parser = make_parser("Measure what a step of dp costs beside a hand-written loop.", rounds=9, match="models")
    parser.add_argument(
        "--steps", type=int, default=30, help=f"steps that count in a turn, after {WARMUP_STEPS} that do not"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    facts = machine()
    variants, references = {}, {}
    for name, build in MODELS.items():
        if arguments.match in name:
            own, reference = f"{name}, dp", f"{name}, by hand"
            variants[reference] = partial(by_hand, build, arguments.steps)
            variants[own] = partial(in_slices, build, arguments.steps)
            references |= {own: reference, reference: reference}
    results = summarize_steps(take_turns(variants, arguments.rounds), references)
    print(f"{described(facts)}; {arguments.rounds} rounds of {arguments.steps} steps of {SLICES} slices")
    report(arguments, facts, results, STEP_COLUMNS)


if __name__ == "__main__":
    main()
