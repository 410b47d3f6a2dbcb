"""The page reads in the order in which things happen: how deep the framework is at the user's code, and how wide a
step."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import lockstep as package
from tests.trainer.toy import Net, loader, quiet

ROOT = Path(package.__file__).parent
FOLDERS = tuple(str(ROOT / name) + "/" for name in ("trainer", "strategies", "callbacks"))


def depth(frame: FrameType | None) -> int:
    """Framework frames below `frame`, up to the test."""
    count = 0
    while frame is not None:
        count += frame.f_code.co_filename.startswith(FOLDERS)
        frame = frame.f_back
    return count


class Probe(Net):
    """Notes how many framework frames are on the stack at the user's step and at the optimizer's, and what a step
    calls."""

    at_step = at_optimizer = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.at_step = max(self.at_step, depth(sys._getframe(1)))
        self.called.append(set())  # a step begins
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        module = self

        class Watched(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                module.at_optimizer = max(module.at_optimizer, depth(sys._getframe(1)))
                return super().step(closure)

        return Watched(self.parameters(), lr=0.1)


def test_hop_budget_of_one_process_without_callbacks() -> None:
    model = Probe()
    model.called = []  # type: ignore[assignment]
    run = quiet()

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and model.called and frame.f_code.co_filename.startswith(FOLDERS):
            model.called[-1].add((frame.f_code.co_filename, frame.f_code.co_name, frame.f_code.co_firstlineno))

    gc.collect()
    gc.disable()  # what it calls for objects of other tests is part of no step
    sys.setprofile(profile)
    try:
        run.fit(model, loader(64))
    finally:
        sys.setprofile(None)
        gc.enable()
    steps = model.called[1:-1]  # whole steps, from one training_step to the next
    functions = max(len(step) for step in steps)
    files = max(len({name for name, _, _ in step}) for step in steps)
    assert len(steps) == 6
    assert 0 < model.at_step <= 5, model.at_step
    assert 0 < model.at_optimizer <= 3, model.at_optimizer
    assert functions <= 20, " ".join(sorted(f"{Path(file).name}:{name}" for file, name, _ in set().union(*steps)))
    assert files <= 8, " ".join(sorted(f"{Path(file).name}:{name}" for file, name, _ in set().union(*steps)))
    print(
        f"frames at training_step {model.at_step}, at optimizer.step {model.at_optimizer}; functions a step "
        f"{functions}, files {files}"
    )
