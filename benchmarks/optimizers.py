"""How far each optimizer is from one process under each strategy, and which are refused.

    python -m benchmarks.optimizers                  # all of them: the table of docs/optimizers.md
    python -m benchmarks.optimizers --match muon     # those whose name contains "muon"
    python -m benchmarks.optimizers --price --traffic    # what Muon costs under fsdp, see _optimizer_price.py

A cell is the largest difference of a weight, over the largest weight, after 20 steps in float64 on the same data. Local
updates are compared with learners on one rank each.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._optimizer_price import price
from benchmarks._rounds import machine, write_json
from benchmarks.virtual_ranks import enter_own_network
from lockstep import Module, RankFailure, Trainer

STRATEGIES = {
    "ddp": 2, "fsdp": 2, "tensor": 2, "pipeline": 2, "fsdp=2,tensor=2": 4, "fsdp=2,pipeline=2": 4, "diloco=2,fsdp=2": 4
}  # fmt: skip
STEPS, BATCH = 20, 64


def _pytorch_optimizer(name: str, **options: Any) -> Callable[[Iterable[Tensor]], Optimizer]:
    def make(params: Iterable[Tensor]) -> Optimizer:
        import pytorch_optimizer

        made: Optimizer = getattr(pytorch_optimizer, name)(params, **options)
        return made

    return make


def _schedule_free(params: Iterable[Tensor]) -> Optimizer:
    import schedulefree

    made: Optimizer = schedulefree.AdamWScheduleFree(params, lr=1e-2)
    return made


def _muon(params: Iterable[Tensor]) -> Optimizer:
    return torch.optim.Muon([p for p in params if p.dim() == 2], lr=1e-2)


def _ada_muon(params: Iterable[Tensor]) -> Optimizer:
    from pytorch_optimizer import AdaMuon

    params = list(params)
    made: Optimizer = AdaMuon(
        [
            {"params": [p for p in params if p.dim() == 2], "use_muon": True},
            {"params": [p for p in params if p.dim() != 2], "use_muon": False},
        ],
        lr=1e-2,
    )
    return made


OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Adam": lambda p: torch.optim.Adam(p),
    "AdamW": lambda p: torch.optim.AdamW(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "ASGD": lambda p: torch.optim.ASGD(p, t0=5),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    "Muon": _muon,
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Lion": _pytorch_optimizer("Lion", lr=1e-3),
    "LAMB": _pytorch_optimizer("Lamb", lr=1e-2),
    "LARS": _pytorch_optimizer("LARS", lr=1e-2),
    "Shampoo": _pytorch_optimizer("Shampoo", lr=1e-2, preconditioning_compute_steps=1),
    "SOAP": _pytorch_optimizer("SOAP", lr=1e-3, precondition_frequency=3),
    "schedule-free AdamW": _schedule_free,
    "Prodigy": _pytorch_optimizer("Prodigy", lr=1.0),
    "AdaMuon": _ada_muon,
}


class Net(Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        torch.manual_seed(3)
        # Square, without what takes a direction from gradients: where a gradient has none, Shampoo and SOAP divide
        # rounding by rounding, on any strategy.
        self.layers = nn.Sequential(
            nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.RMSNorm(16), nn.Linear(16, 16), nn.Tanh(),
            nn.Linear(16, 16),
        )  # fmt: skip

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.layers(x), y)

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.name](self.parameters())
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        rest = [p for p in self.parameters() if id(p) not in held]
        return {"first": optimizer, "rest": torch.optim.AdamW(rest)} if rest else optimizer


def trained(name: str, strategy: str = "single", devices: int = 1) -> dict[str, Tensor]:
    """The weights after `STEPS` steps."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS * BATCH, 16, generator=generator, dtype=torch.float64)
    data = TensorDataset(x, (x @ torch.randn(16, 16, generator=generator, dtype=torch.float64)).tanh())
    module = Net(name)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            strategy=strategy, devices=devices, accelerator="cpu", precision="64-true", max_epochs=1, seed=1,
            split_batches=True, logger=False, enable_progress_bar=False, enable_checkpointing=False,
            default_root_dir=folder,
        ).fit(module, DataLoader(data, batch_size=BATCH))  # fmt: skip
    return {key: value.detach().double() for key, value in module.state_dict().items()}


def cell(name: str, strategy: str, devices: int, alone: dict[str, Tensor]) -> float | str:
    """The difference to one process, or why it was refused."""
    try:
        if "diloco" in strategy:
            alone = trained(name, "diloco=2", 2)
        found = trained(name, strategy, devices)
    except (ValueError, RuntimeError, RankFailure) as error:
        return f"{type(error).__name__}: {error}"
    return max(float((found[key] - value).abs().max() / value.abs().max()) for key, value in alone.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="", help="only optimizers whose name contains it")
    parser.add_argument("--strategy", action="append", help="only this strategy; may be repeated")
    parser.add_argument("--price", action="store_true", help="measure what Muon costs under fsdp instead")
    parser.add_argument("--traffic", action="store_true", help="with --price: count bytes, in an own network namespace")
    parser.add_argument("--rounds", type=int, default=5, help="with --price: turns of each variant")
    parser.add_argument("--steps", type=int, default=10, help="with --price: steps in a turn that count")
    parser.add_argument("--width", type=int, default=256, help="with --price: of the model")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="with --price")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there as well")
    options = parser.parse_args()
    if options.price:
        if options.traffic:
            enter_own_network("benchmarks.optimizers")
        price(options)
        return
    strategies = {name: n for name, n in STRATEGIES.items() if not options.strategy or name in options.strategy}
    warnings.simplefilter("ignore")
    facts, cells = machine(), dict[str, dict[str, float | str]]()
    lines, notes = ["| | " + " | ".join(strategies) + " |", "|---|" + "---|" * len(strategies)], []
    for name in OPTIMIZERS:
        if options.match.lower() not in name.lower():
            continue
        alone = trained(name)
        row, cells[name] = [], {}
        for strategy, devices in strategies.items():
            cells[name][strategy] = found = cell(name, strategy, devices, alone)
            row.append("refused" if isinstance(found, str) else f"{found:.0e}")
            if isinstance(found, str):
                notes.append(f"{name}, {strategy}: {found}")
            print(name, strategy, found if isinstance(found, str) else row[-1], flush=True)
        lines.append(f"| {name} | " + " | ".join(row) + " |")
    print("\n".join([*lines, "", *notes]))
    write_json(options.json, facts, cells)


if __name__ == "__main__":
    main()
