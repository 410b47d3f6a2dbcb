"""Every model and habit of the zoo under every strategy, as a table: equal to one process, refused by name, or
documented.

`python -m tests.zoo.table` writes the table into docs/exactness.md; `test_zoo.py` compares what happens with what is
there.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Module, Trainer
from lockstep.strategies import DDP, DiLoCo, LocalSGD, ParameterServer, Strategy
from lockstep.strategies.launch import environment
from lockstep.strategies.launch.launcher import launch
from tests.zoo.habits import HABITS, Plain
from tests.zoo.models import MODELS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "exactness.md"
STRATEGIES: dict[str, tuple[str, int]] = {
    "dp": ("dp", 2),
    "model": ("model", 2),
    "ddp": ("ddp", 2),
    "ddp on 3": ("ddp", 3),
    "fsdp": ("fsdp", 2),
    "tensor": ("tensor", 2),
    "pipeline": ("pipeline", 2),
    "zero 1": ("deepspeed_stage_1", 2),
    "zero 2": ("deepspeed_stage_2", 2),
    "zero 3": ("deepspeed_stage_3", 2),
    "ddp=2,fsdp=2": ("ddp=2,fsdp=2", 4),
    "ddp=2,tensor=2": ("ddp=2,tensor=2", 4),
    "fsdp=2,tensor=2": ("fsdp=2,tensor=2", 4),
    "ddp=2,pipeline=2": ("ddp=2,pipeline=2", 4),
    "fsdp=2,pipeline=2": ("fsdp=2,pipeline=2", 4),
}
METHODS: dict[str, tuple[Callable[[], Strategy], dict[str, Any]]] = {
    "ddp in 2 shares": (DDP, {"virtual_ranks": 2}),
    "compress all": (lambda: DDP(compress="topk=1.0"), {}),
    "compress in 2 shares": (lambda: DDP(compress="topk=0.3"), {"virtual_ranks": 2}),
    "local SGD of each step": (lambda: LocalSGD(period=1), {}),
    "2 learners": (lambda: DiLoCo(learners=2, period=2), {}),
    "2 islands": (lambda: DiLoCo(learners=2, period=2, inner="fsdp=2"), {}),
    "parameter server without staleness": (lambda: ParameterServer(staleness=0), {}),
}
"""What changes the method, with options of the Trainer; by a name that `train` takes for a strategy."""
ACCUMULATING = " in 2 micro-batches"
"""Behind a strategy's name: each step accumulates two micro-batches; the last step has samples for one only."""
TABLES = {"zoo": "", "zoo in 2 micro-batches": ACCUMULATING}
"""Where in the page the columns are whose names end so."""
DOCUMENTED = {
    "batch norm": "statistics are those of a rank's samples, as in torch's DDP",
    "dropout": "the same noise only on the same number of ranks",
}
SIGNS = {"=": "equal", "refused": "refused", "see below": "documented", "error": "error"}
NUM_SAMPLES, BATCH, EPOCHS = 17, 8, 2  # the last batch has one sample: the second rank has none


@dataclass(frozen=True)
class Result:
    """What came of one training: values by name, or the error that ended it."""

    values: dict[str, torch.Tensor]
    error: str = ""


def cases() -> dict[str, Any]:
    return {**{name: lambda make=make: Plain(make()) for name, make in MODELS.items()}, **HABITS}


def train(name: str, strategy: str, devices: int, precision: str, accelerator: str = "cpu") -> Result:
    """Train one case; on ranks that run already, in place."""
    generator = torch.Generator().manual_seed(3)
    dtype = torch.float64 if precision == "64-true" else torch.float32
    size, batch = (32, 16) if name == "batch norm" else (NUM_SAMPLES, BATCH)  # it takes two samples of each rank
    x = torch.randn(size, 8, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randint(0, 4, (size,), generator=generator)
    torch.manual_seed(7)
    module: Module = cases()[name]()
    plain = strategy.removesuffix(ACCUMULATING)
    make, options = METHODS.get(plain, (lambda: plain, {}))
    if plain != strategy:
        options = options | {"accumulate_grad_batches": 2}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = Trainer(
            strategy=make(),
            devices=devices,
            accelerator=accelerator,
            precision=precision,
            max_epochs=EPOCHS,
            split_batches=True,
            seed=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            num_sanity_val_steps=0,
            default_root_dir=folder,
            **options,
        )
        loaders = [DataLoader(TensorDataset(x, y), batch_size=batch) for _ in range(2)]
        try:
            run.fit(module, *loaders)
        except Exception as error:
            return Result({}, f"{type(error).__name__}: {error}")
    world = environment.detect()
    if world is not None and world.rank:  # the whole weights are on rank 0
        return Result({})
    values = {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}
    values |= {f"logged {name}": value.detach().cpu().clone() for name, value in run.callback_metrics.items()}
    return Result(values)


def train_all(
    names: list[str], strategy: str, devices: int, precision: str, done: str | None = None, accelerator: str = "cpu"
) -> dict[str, Result]:
    found = {}
    for name in names:
        found[name] = train(name, strategy, devices, precision, accelerator)
        if done is not None and environment.detect().rank == 0:  # type: ignore[union-attr]
            torch.save({name: tuple(vars(result).values()) for name, result in found.items()}, f"{done}.new")
            os.replace(f"{done}.new", done)
    return found


def results(strategy: str, devices: int, names: list[str], accelerator: str = "cpu") -> dict[str, Result]:
    """Every case under one strategy, one after the other on the same ranks; a case that ends these, or whose error may
    follow from another rank's, is trained by itself."""
    precision = precision_of(strategy)
    if strategy.removesuffix(ACCUMULATING) in ("dp", "model"):
        return train_all(names, strategy, devices, precision, None, accelerator)
    alone = {name for name in names if name in APART}
    os.environ.setdefault("LOCKSTEP_WATCHDOG_S", "30")  # a case that is not in APART, and ends one rank only
    found: dict[str, Result] = {}
    left = [name for name in names if name not in alone]
    while left:
        with tempfile.TemporaryDirectory() as folder:
            done = f"{folder}/done"
            try:
                found |= launch(train_all, (left, strategy, devices, precision, done, accelerator), devices)
                break
            except Exception:
                saved = torch.load(done) if Path(done).exists() else {}
        found |= {name: Result(*values) for name, values in saved.items()}
        left = [name for name in left if name not in saved]
        alone.update(left[:1])  # the ranks of the others are gone with it
        left = left[1:]
    alone |= {name for name, result in found.items() if result.error and not is_refusal(result.error)}
    return found | {name: train(name, strategy, devices, precision, accelerator) for name in alone}


APART = {
    "sparse mixture of experts",
    "a layer that is never used",
    "A counter in training_step that weights the loss",
    "Values collected in training_step whose mean a hook logs",
}
"""Cases in which an error comes up on one rank, and ends the others."""


def precision_of(strategy: str) -> str:
    return "32-true" if "deepspeed" in strategy else "64-true"


def outcome(name: str, result: Result, expected: Result, precision: str) -> str:
    """ "equal", "refused", "documented", or "error" for one of torch's own; raises AssertionError for a difference."""
    if result.error:
        return "refused" if is_refusal(result.error) else "error"
    assert not expected.error, f"{name} trains on several devices, but not on one: {expected.error}"
    worst = max((distance(result.values.get(key), value), key) for key, value in expected.values.items())
    if worst[0] <= (1e-11 if precision == "64-true" else 2e-4):
        return "equal"
    assert name in DOCUMENTED, f"{name}: {worst[1]} differs by {worst[0]:.1e} from one process"
    return "documented"


def distance(value: torch.Tensor | None, expected: torch.Tensor) -> float:
    if value is None or value.shape != expected.shape:
        return float("inf")
    return float((value - expected).abs().max()) if expected.numel() else 0.0


def is_refusal(error: str) -> bool:
    """Whether an error is a sentence of ours: it says what to do instead, in one line, and not an error of torch's."""
    foreign = ("got mixed torch.Tensor", "the same mesh", "finished reduction", "run stage backward", "NoneType", "SIG")
    kind, _, sentence = error.partition(": ")
    return (
        kind in ("ValueError", "RuntimeError", "TypeError", "NotImplementedError")
        and "\n" not in sentence
        and not any(word in error for word in (*foreign, "hangs", "has ended", "Gloo"))
        and "; " in sentence
    )


def column(strategy: str, devices: int, expected: dict[str, Result]) -> dict[str, str]:
    found = results(strategy, devices, list(expected))
    return {name: outcome(name, result, expected[name], precision_of(strategy)) for name, result in found.items()}


def expected_results(strategy: str, names: list[str] | None = None) -> dict[str, Result]:
    """What one process gets, in as many micro-batches."""
    suffix = ACCUMULATING if strategy.endswith(ACCUMULATING) else ""
    return train_all(list(cases()) if names is None else names, f"single{suffix}", 1, precision_of(strategy))


def as_markdown(columns: dict[str, dict[str, str]]) -> str:
    rows = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    signs = {value: sign for sign, value in SIGNS.items()}
    for kind, names in (("models", list(MODELS)), ("habits", list(HABITS))):
        rows.append(f"| **{kind}** |" + " |" * len(columns))
        rows += ["| " + " | ".join([name, *(signs[columns[c][name]] for c in columns)]) + " |" for name in names]
    return "\n".join(rows)


def columns_of(suffix: str) -> dict[str, tuple[str, int]]:
    """Strategy and devices of each column of a table, by its whole name."""
    return {f"{head}{suffix}": (f"{name}{suffix}", devices) for head, (name, devices) in STRATEGIES.items()}


COLUMNS = {head: column for suffix in TABLES.values() for head, column in columns_of(suffix).items()}


def written() -> dict[str, dict[str, str]]:
    """The tables of the page, by column and case."""
    table: dict[str, dict[str, str]] = {}
    for mark, suffix in TABLES.items():
        table_text = PAGE.read_text().partition(f"<!-- {mark} -->")[2].partition(f"<!-- end of {mark} -->")[0]
        lines = [line for line in table_text.splitlines() if line.startswith("| ")]
        heads = [f"{cell.strip()}{suffix}" for line in lines[:1] for cell in line.strip("|").split("|")[1:]]
        table |= {head: {} for head in heads}
        for line in lines[1:]:
            name, *cells = (cell.strip() for cell in line.strip().strip("|").split("|"))
            if name in cases():
                for head, cell in zip(heads, cells, strict=True):
                    table[head][name] = SIGNS[cell]
    return table


def main() -> None:
    """Train the columns named on the command line, or all, and write them into the page."""
    wanted = sys.argv[1:] or list(COLUMNS)
    expected: dict[tuple[str, bool], dict[str, Result]] = {}
    columns = written()
    for head in wanted:
        strategy, devices = COLUMNS[head]
        precision = precision_of(strategy)
        key = precision, strategy.endswith(ACCUMULATING)
        if key not in expected:
            expected[key] = expected_results(strategy)
        reference, column_, wrong = expected[key], {}, []
        for name, result in results(strategy, devices, list(reference)).items():
            try:
                column_[name] = outcome(name, result, reference[name], precision)
            except AssertionError as error:
                wrong.append(str(error))
            if result.error:
                print(f"{head}: {name}: {result.error}"[:400], flush=True)
        if wrong:
            sys.exit(f"{head}: " + "; ".join(wrong))
        columns[head] = column_
        write(columns)


def write(columns: dict[str, dict[str, str]]) -> None:
    text = PAGE.read_text()
    for mark, suffix in TABLES.items():
        found = {head.removesuffix(suffix): columns[head] for head in columns_of(suffix) if head in columns}
        begin, end = f"<!-- {mark} -->\n", f"\n<!-- end of {mark} -->"
        before, _, rest = text.partition(begin)
        text = before + begin + as_markdown(found) + end + rest.partition(end)[2]
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
