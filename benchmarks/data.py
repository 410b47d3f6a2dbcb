"""Samples a second from a DataLoader into the step: through the Trainer, beside a bare loop over the same loader.

    python -m benchmarks.data [--rounds 5] [--batches 150] [--json FILE]

An image of 3 x 64 x 64 numbers is made and scaled in `__getitem__`, which takes tens of microseconds; the step is one
multiplication, so that the path of the data is what is measured. Batches of 32, shuffled, without workers and with
two; where there is a GPU, also with pinned memory and on the way to it, beside a bare loop that copies a batch ahead
on a stream of its own, as a careful engineer would. A number is samples a second, the median over rounds; a ratio is
the median of the ratios to the bare loop of the same round (above 1 is faster). Expect two minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks._rounds import Clock, described, machine, make_parser, report, summarize, take_turns
from lockstep import Module, Trainer

BATCH, WARMUP_STEPS = 32, 10
SHAPE = (3, 64, 64)


class Images(Dataset):
    """Images that are decoded from bytes and normalized, as from a folder; the bytes are in memory."""

    def __init__(self, num_images: int) -> None:
        self.num_images = num_images
        self.pixels = torch.randint(256, (64, *SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return (self.pixels[index % 64].float() - 127.5) / 127.5, index % 10


class Scale(Module):
    """Next to no work: one number times the mean of the images."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.weight, self.clock = nn.Parameter(torch.ones(())), clock

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.clock.tick(batch_idx)
        return self.weight * batch[0].mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(clock: Clock, options: dict[str, Any]) -> DataLoader:
    return DataLoader(Images((clock.marks[1] + 1) * BATCH), BATCH, shuffle=True, **options)


def by_hand(num_batches: int, device: str, options: dict[str, Any]) -> float:
    clock = Clock(num_batches, WARMUP_STEPS)
    model = Scale(clock).to(device)
    optimizer = model.configure_optimizers()
    batches: Iterable[Any] = loader(clock, options)
    for step, batch in enumerate(ahead(batches) if device == "cuda" else batches):
        model.training_step(batch, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return BATCH / clock.s_per_step()


def ahead(batches: Iterable[Any]) -> Iterator[list[Tensor]]:
    """Each batch on the GPU, its copy begun while the one before is computed on."""
    stream, before = torch.cuda.Stream(), None
    for images, labels in batches:
        with torch.cuda.stream(stream):
            copied = [images.to("cuda", non_blocking=True), labels.to("cuda", non_blocking=True)]
        if before is not None:
            yield before
        torch.cuda.current_stream().wait_stream(stream)
        for tensor in copied:
            tensor.record_stream(torch.cuda.current_stream())
        before = copied
    if before is not None:
        yield before


def lockstep(num_batches: int, device: str, options: dict[str, Any]) -> float:
    clock = Clock(num_batches, WARMUP_STEPS)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    accelerator = "gpu" if device == "cuda" else "cpu"
    Trainer(accelerator=accelerator, devices=1, max_epochs=1, **quiet).fit(Scale(clock), loader(clock, options))
    return BATCH / clock.s_per_step()


def main() -> None:
    parser = make_parser("Measure the path of the data.", rounds=5)
    parser.add_argument(
        "--batches", type=int, default=150, help=f"that count in a turn, after {WARMUP_STEPS} that do not"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kinds: dict[str, tuple[str, dict[str, Any]]] = {"no workers": ("cpu", {}), "2 workers": ("cpu", {"num_workers": 2})}
    if torch.cuda.is_available():
        kinds |= {
            "GPU, no workers": ("cuda", {}),
            "GPU, 2 workers": ("cuda", {"num_workers": 2}),
            "GPU, 2 workers, pinned": ("cuda", {"num_workers": 2, "pin_memory": True}),
        }
    variants: dict[str, Callable[[], float]] = {}
    for kind, how in kinds.items():
        variants[f"{kind}, bare loop"] = partial(by_hand, arguments.batches, *how)
        variants[f"{kind}, lockstep"] = partial(lockstep, arguments.batches, *how)
    facts = machine()
    speeds = take_turns(variants, arguments.rounds)
    results = summarize(speeds, "per_s", {name: f"{name.rpartition(', ')[0]}, bare loop" for name in variants})
    print(f"{described(facts)}; {arguments.rounds} rounds of {arguments.batches} batches of {BATCH}")
    columns = {
        "samples/s": ("median_per_s", ",.0f"),
        "min": ("min_per_s", ",.0f"),
        "max": ("max_per_s", ",.0f"),
        "ratio": ("ratio", ".3f"),
    }
    report(arguments, facts, results, columns, batches=arguments.batches, batch_size=BATCH)


if __name__ == "__main__":
    main()
