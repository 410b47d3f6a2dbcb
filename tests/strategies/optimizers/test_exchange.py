"""What owners of parameters keep between steps, and when it is sent again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Muon

from lockstep.strategies.sync.contents import same_bits

EDITS: dict[str, Callable[[Tensor], Any]] = {
    "nothing": lambda shard: None,
    "in place": lambda shard: shard.mul_(0.5),
    "data": lambda shard: shard.data.mul_(0.5),
    "numpy": lambda shard: shard.numpy().fill(0.25),
    "nothing again": lambda shard: None,
    "one bit": lambda shard: shard.view(torch.int64).bitwise_xor_(torch.eye(*shard.shape, dtype=torch.int64)),
    "another optimizer": lambda shard: None,
    "nothing at last": lambda shard: None,
}
"""By name what rank 1 does to its shard before a step."""


@pytest.mark.unit
def test_bits_are_compared() -> None:
    some = torch.tensor([0.0, 1.0, float("nan")])
    assert same_bits(some, some.clone())
    assert not same_bits(some, torch.tensor([-0.0, 1.0, float("nan")]))
    assert not same_bits(some, some.double()) and not same_bits(some, some[:2])
    assert same_bits(some[:0], some[:0].clone()) and same_bits(some.bfloat16(), some.bfloat16())


@pytest.mark.ranks
def test_values_are_sent_again_once_a_shard_was_edited(run_ranks: Callable[..., Any]) -> None:
    for name, elements, distance in run_ranks(steps_with_edits, 2):
        values = name not in ("nothing", "nothing again", "nothing at last")
        # To the other rank: a shard of gradients and a flag, one of values if they were edited; new values.
        assert elements == [20 + 1] + [20] * values + [20], name
        assert distance < 1e-15, name


def steps_with_edits() -> list[tuple[str, list[int], float]]:
    """After each of EDITS the elements that the exchanges of a step send to the other rank, and how far the step is
    from one on whole tensors."""
    from lockstep.strategies import FSDP

    strategy = FSDP()
    strategy.configure(devices=2, accelerator="cpu", precision="64-true")
    strategy.setup()
    model = nn.Sequential(*(nn.Linear(5, 8, bias=False) for _ in range(2))).double()
    wrapped = strategy.setup_module(model)
    parameters = list(model.parameters())
    alone = [nn.Parameter(p.full_tensor().detach().clone()) for p in parameters]  # type: ignore[attr-defined]
    muon = Muon(alone, lr=0.1)
    optimizers = {"muon": Muon(parameters, lr=0.1), "sgd": SGD(parameters, lr=0.1)}
    optimizers = strategy.setup_optimizers(wrapped, optimizers)
    send, elements = dist.all_to_all_single, list[int]()

    def counts(into: Tensor, out: Tensor, theirs: list[int], mine: list[int], group: Any = None) -> Any:
        elements.append(mine[1 - dist.get_rank()])
        return send(into, out, theirs, mine, group=group)

    dist.all_to_all_single = counts
    found = []
    for name in ["first", *EDITS]:
        gradients = [torch.randn(8, 5, generator=torch.Generator().manual_seed(len(found))).double() for _ in alone]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            strategy.write_gradient(wrapped, parameter, gradient)
        if dist.get_rank() == 1 and name in EDITS:
            EDITS[name](parameters[1].to_local().detach())  # type: ignore[attr-defined]
        if name == "another optimizer":
            strategy.optimizer_step(wrapped, optimizers["sgd"])
        for one, parameter, gradient in zip(alone, parameters, gradients, strict=True):
            one.data, one.grad = parameter.full_tensor().detach().clone(), gradient  # type: ignore[attr-defined]
        elements.clear()
        strategy.optimizer_step(wrapped, optimizers["muon"])
        muon.step()
        ends = [p.full_tensor().detach() for p in parameters]  # type: ignore[attr-defined]
        far = max(float((end - one.detach()).abs().max()) for end, one in zip(ends, alone, strict=True))
        found.append((name, list(elements), far))
    dist.all_to_all_single = send
    strategy.teardown()
    assert found[0][1] == [40, 20]  # values and gradients in one
    return found[1:]
