"""What local updates give: throughput on ranks of different speed, and the validation loss of examples/gpt.yaml.

    python -m benchmarks.local_updates speed
    python -m benchmarks.local_updates quality [--seeds 3] [--match TEXT] [--results FILE] [overrides]

`speed`: four learners on two ranks, whose second takes three times as long for each micro-batch (both sleep, so that
the machine's cores do not matter), spread equally and as 3 + 1; with a digest of the weights, which must be one.
`quality`: two ranks with ddp, local updates and compressed gradients, all on the same samples: an epoch of two million
bytes of text, 879 steps. Prints the validation loss at its end, that beside ddp's of the same seed, and the worst seed.
Each run is added to the results file, and a run that is there is not repeated, so that rows may be measured one by one
(`--match`) and in several processes; 90 s a run on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.methods import measure
from lockstep import Module, Trainer
from lockstep.strategies import DiLoCo

SECONDS = 0.05
STEPS = 40
SENT = ["strategy=ddp", "module.betas=[0.0,0.99]"]
RESET = ["strategy=local_sgd", "strategy.start=220"]
RUNS = {
    "ddp": ["strategy=ddp"],
    "LocalSGD(period=8)": ["strategy=local_sgd"],
    "LocalSGD(period=8, start=220)": ["strategy=local_sgd", "strategy.start=220"],
    "LocalSGD(period=1, start=220, compress='topk=0.01')": [*RESET, "strategy.period=1", "strategy.compress=topk=0.01"],
    "LocalSGD(period=1, start=220, compress='powersgd=4')": [
        *RESET,
        "strategy.period=1",
        "strategy.compress=powersgd=4",
    ],
    "LocalSGD(period=4, start=220, compress='topk=0.04')": [*RESET, "strategy.period=4", "strategy.compress=topk=0.04"],
    "DiLoCo(period=50)": ["strategy=diloco", "strategy.period=50"],
    "DiLoCo(period=50, start=220)": ["strategy=diloco", "strategy.period=50", "strategy.start=220"],
    "DiLoCo(period=50, start=220, fragments=4, delay=5, mixing=0, compress='int8')": [
        *("strategy=diloco", "strategy.period=50", "strategy.start=220"),
        *("strategy.fragments=4", "strategy.delay=5", "strategy.mixing=0.0", "strategy.compress=int8"),
    ],
    "int8": ["strategy=ddp", "strategy.compress=int8"],
    "powersgd=4,start=220": ["strategy=ddp", "strategy.compress='powersgd=4,start=220'"],
    "topk=0.01,warmup=400": ["strategy=ddp", "strategy.compress='topk=0.01,warmup=400'"],
    "topk=0.01,warmup=400,momentum=0.5": [*SENT, "strategy.compress='topk=0.01,warmup=400,momentum=0.5'"],
    "topk=0.01,warmup=400,momentum=0.8": [*SENT, "strategy.compress='topk=0.01,warmup=400,momentum=0.8'"],
}
"""By name the options that differ from those of `examples/gpt.yaml`."""


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
    parser.add_argument("--results", type=Path, default=Path("build/local_updates.jsonl"), help="of all runs, so far")
    arguments = parser.parse_intermixed_args()
    if arguments.what == "speed":
        speed()
    else:
        quality(arguments.seeds, arguments.match, arguments.results, arguments.overrides)


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


def quality(seeds: int, match: str, file: Path, overrides: list[str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    for name in RUNS:
        for seed in range(seeds) if match in name or name == "ddp" else ():
            if (name, seed) not in measured(file, overrides):
                at_end = ["devices=2", f"seed={seed}", "trainer.val_check_interval=1.0", "data.max_bytes=2_000_000"]
                history, wall_s, _ = measure("gpt", [*at_end, *RUNS[name], *overrides])
                row = {"run": name, "seed": seed, "loss": history["val/loss"][-1][1], "wall_s": round(wall_s)}
                with open(file, "a") as lines:
                    lines.write(json.dumps(row | {"options": [*RUNS[name], *overrides]}) + "\n")
    losses = measured(file, overrides)
    print("| | val/loss, by seed | of ddp's | worst |\n|---|---|---|---|")
    for name in RUNS:
        own = {seed: loss for (run, seed), loss in losses.items() if run == name}
        ratios = [loss / losses["ddp", seed] for seed, loss in sorted(own.items()) if ("ddp", seed) in losses]
        if own and (match in name or name == "ddp"):
            cells = [", ".join(f"{value:.3f}" for value in values) for values in (own.values(), ratios)]
            print(f"| {name} | {' | '.join(cells)} | {max(ratios, default=float('nan')):.3f} |")


def measured(file: Path, overrides: list[str]) -> dict[tuple[str, int], float]:
    """The validation loss of each run in the file, by name and seed, if it had these overrides."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {(r["run"], r["seed"]): r["loss"] for r in rows if r["options"] == [*RUNS.get(r["run"], ()), *overrides]}


if __name__ == "__main__":
    main()
