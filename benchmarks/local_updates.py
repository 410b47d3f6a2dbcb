"""What local updates give: throughput on ranks of different speed, and the validation loss of examples/gpt.yaml.

    python -m benchmarks.local_updates speed
    python -m benchmarks.local_updates quality [--seeds 3] [--match TEXT] [overrides of the config]

`speed`: four learners on two ranks, whose second takes three times as long for each micro-batch (both sleep, so that
the machine's cores do not matter), spread equally and as 3 + 1; with a digest of the weights, which must be one.
`quality`: two ranks with ddp, local SGD (from the start, and after 256 synchronous steps), DiLoCo and compressed
gradients on the same samples; the worst seed beside ddp's of that seed. 45 s a run on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.methods import measure
from lockstep import Module, Trainer
from lockstep.strategies import DiLoCo

SECONDS = 0.05
STEPS = 40
RUNS = {
    "ddp": ["strategy=ddp"],
    "local_sgd": ["strategy=local_sgd"],
    "post-local": ["strategy=local_sgd", "strategy.start=256"],
    "diloco, period 50": ["strategy=diloco", "strategy.period=50"],
    "diloco, period 20": ["strategy=diloco", "strategy.period=20"],
    "diloco, period 5": ["strategy=diloco", "strategy.period=5"],
    "int8": ["strategy=ddp", "strategy.compress=int8"],
    "powersgd=4": ["strategy=ddp", "strategy.compress=powersgd=4"],
    "topk=0.01": ["strategy=ddp", "strategy.compress=topk=0.01,warmup=200"],
}


class Uneven(Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(16, 16)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(SECONDS * (3 if self.trainer.global_rank else 1))
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure local updates.")
    parser.add_argument("what", choices=["speed", "quality"])
    parser.add_argument("overrides", nargs="*", help="of examples/gpt.yaml")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--match", default="", help="ddp, and only runs whose name contains it")
    arguments = parser.parse_intermixed_args()
    if arguments.what == "speed":
        speed()
    else:
        quality(arguments.seeds, arguments.match, arguments.overrides)


def speed() -> None:
    print("| learners on the ranks | steps/s | weights |\n|---|---|---|")
    rates = []
    for per_rank in ((2, 2), (3, 1)):
        seconds, digest = run(per_rank)
        rates.append(STEPS / seconds)
        print(f"| {per_rank[0]} + {per_rank[1]} | {rates[-1]:.2f} | {digest[:12]} |", flush=True)
    print(f"3 + 1 over 2 + 2: {rates[1] / rates[0]:.2f} x (target >= 1.8)")


def run(per_rank: tuple[int, int]) -> tuple[float, str]:
    """Seconds of the steps, and a digest of the weights."""
    seconds, data = [], torch.randn(4 * (STEPS + 1), 16, generator=torch.Generator().manual_seed(1))
    for steps in (1, 1, STEPS + 1):  # the first one warms up, and what a start takes is not counted
        module, began = Uneven(), time.perf_counter()
        Trainer(
            strategy=DiLoCo(learners_per_rank=per_rank, period=10),
            devices=2,
            accelerator="cpu",
            max_steps=steps,
            seed=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        ).fit(module, DataLoader(TensorDataset(data), 1))
        seconds.append(time.perf_counter() - began)
    weights = b"".join(p.detach().numpy().tobytes() for p in module.parameters())
    return seconds[2] - seconds[1], hashlib.sha256(weights).hexdigest()


def quality(seeds: int, match: str, overrides: list[str]) -> None:
    print("| | seed | val/loss | of ddp's | wall s |\n|---|---|---|---|---|")
    losses: dict[tuple[str, int], float] = {}
    for name, options in RUNS.items():
        if name != "ddp" and match not in name:
            continue
        for seed in range(seeds):
            at_end = ["devices=2", f"seed={seed}", "trainer.val_check_interval=1.0"]
            history, wall_s, _ = measure("gpt", [*options, *at_end, *overrides])
            losses[name, seed] = history["val/loss"][-1][1]
            ratio = losses[name, seed] / losses["ddp", seed]
            print(f"| {name} | {seed} | {losses[name, seed]:.4f} | {ratio:.4f} | {wall_s:.0f} |", flush=True)
        worst = max(losses[name, seed] / losses["ddp", seed] for seed in range(seeds))
        print(f"| {name} | worst | | {worst:.4f} | |", flush=True)


if __name__ == "__main__":
    main()
