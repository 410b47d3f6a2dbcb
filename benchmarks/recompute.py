"""What activation checkpointing saves and costs: bytes kept between forward and backward, and seconds of both.

    python -m benchmarks.recompute [--width 128] [--depth 4] [--steps 5] [--json FILE]

One process, float32, the model of examples/gpt.py on 8 sequences of 128 tokens. Bytes are exact: of every tensor that
the forward keeps for the backward, parameters skipped. Seconds are those of the fastest step. Expect ten seconds.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._rounds import machine, make_parser, write_json
from examples.gpt import GPT, VOCABULARY
from lockstep.strategies import SingleDevice
from lockstep.strategies.data.sharded_loader import MicroBatch, Window

CONTEXT, BATCH = 128, 8


def main() -> None:
    parser = make_parser("Measure activation checkpointing on the example's model.")
    parser.add_argument("--width", type=int, default=128, help="of the model")
    parser.add_argument("--depth", type=int, default=4, help="blocks of the model")
    parser.add_argument("--steps", type=int, default=5, help="to take the fastest of")
    arguments = parser.parse_args()
    print(f"{'activation_checkpointing':<26}{'kept MiB':>10}{'step ms':>10}")
    rows = {}
    for on in (False, True):
        kept, seconds = measure(on, arguments.width, arguments.depth, arguments.steps)
        rows[str(on)] = {"kept_bytes": kept, "step_s": seconds}
        print(f"{on!s:<26}{kept / 2**20:>10.1f}{seconds * 1e3:>10.0f}")
    write_json(arguments.json, machine(), rows)


def measure(on: bool, width: int, depth: int, steps: int) -> tuple[int, float]:
    torch.manual_seed(0)
    gpt = GPT(width, depth, head_width=width // 4, context=CONTEXT)
    tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1))
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def step(batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(gpt(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def noted(batch: Any, batch_idx: int) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            return step(batch, batch_idx)

    strategy = SingleDevice(activation_checkpointing=on)
    strategy.configure(accelerator="cpu")
    strategy.setup()
    try:
        wrapped = strategy.setup_module(gpt)
        # What enters a recomputed block is kept beside the graph.
        hooks = [
            block.register_forward_pre_hook(
                lambda _, args: [note(arg) for arg in args if isinstance(arg, Tensor)] and None
            )
            for block in gpt.blocks
        ]
        strategy.forward_backward(wrapped, noted, Window([MicroBatch(tokens, BATCH)], BATCH))
        for hook in hooks:
            hook.remove()
        for parameter in gpt.parameters():
            kept.pop(parameter.untyped_storage().data_ptr(), None)
        times = []
        for _ in range(steps):
            gpt.zero_grad()
            started = time.perf_counter()
            strategy.forward_backward(wrapped, step, Window([MicroBatch(tokens, BATCH)], BATCH))
            times.append(time.perf_counter() - started)
        return sum(kept.values()), min(times)
    finally:
        strategy.teardown()


if __name__ == "__main__":
    main()
