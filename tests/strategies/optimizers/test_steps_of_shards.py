"""Torch's Adam and AdamW compute with plain shards, and user code sees DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from lockstep.strategies.sync.contents import same_bits

MAKE: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "AdamW": lambda p: AdamW(p, lr=0.1),
    "Adam": lambda p: Adam(
        [{"params": p[:1], "weight_decay": 0.1, "amsgrad": True}, {"params": p[1:], "maximize": True}], lr=0.1
    ),
}


@pytest.mark.ranks
def test_adam_computes_with_shards_to_the_bits_of_dtensors(run_ranks: Callable[..., Any]) -> None:
    for name, differs, dispatched, classes, counts, left in run_ranks(stepped_both_ways, 2):
        assert not differs, name
        assert dispatched == [], f"{name}: DTensor's dispatch is what takes the time"
        assert classes == {"DTensor"}, name
        assert counts, f"{name}: who reads versions must see what the step has written"
        assert not left, name


def stepped_both_ways() -> list[tuple[Any, ...]]:
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    from lockstep.strategies import FSDP

    class Seen(TorchDispatchMode):
        """The operations that get a DTensor to write to."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if isinstance(next(iter(args), None), DTensor) and func._schema.name.endswith("_"):
                seen.append(str(func))
            return func(*args, **kwargs or {})

    seen, hooked = list[str](), list[type]()
    strategy = FSDP()
    strategy.configure(devices=2, accelerator="cpu")
    strategy.setup()
    found = []
    for name, make in MAKE.items():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1))  # uneven shards, and one that a rank has nothing of
        wrapped = strategy.setup_module(model)
        parameters = list(model.parameters())
        copies = [nn.Parameter(p.detach().clone()) for p in parameters]
        here, there = strategy.setup_optimizers(wrapped, {"": make(parameters)})[""], make(copies)
        hooked.clear()
        here.register_step_post_hook(lambda o, *_: hooked.extend(type(p.data) for p in o.state))
        for step in range(3):
            for parameter, copied in zip(parameters, copies, strict=True):
                strategy.write_gradient(wrapped, parameter, torch.randn(parameter.shape))
                copied.grad = parameter.grad.clone()  # type: ignore[union-attr]
            if step != 1:  # the first step makes state, and counts as user code may
                strategy.optimizer_step(wrapped, here)
            else:
                versions = [p._version for p in parameters]
                of_gradients = [p.grad._version for p in parameters]  # type: ignore[union-attr]
                with Seen():
                    strategy.optimizer_step(wrapped, here)
                counts = all(p._version > before for p, before in zip(parameters, versions, strict=True))
                counts = counts and of_gradients == [p.grad._version for p in parameters]  # type: ignore[union-attr]
            there.step()
        pairs: list[tuple[Any, Any]] = list(zip(parameters, copies, strict=True))
        for one, other in list(pairs):
            state = here.state[one]
            pairs += [(state[key], value) for key, value in there.state[other].items() if isinstance(value, Tensor)]
        differs = [
            tuple(one.shape)
            for one, other in pairs
            if not same_bits(*(getattr(each, "_local_tensor", each).detach() for each in (one, other)))
        ]
        classes = {each.__name__ for each in hooked} | {type(here.state[p]["exp_avg"]).__name__ for p in parameters}
        found.append((name, differs, list(seen), classes, counts, "_init_group" in vars(here)))
    strategy.teardown()
    return found
