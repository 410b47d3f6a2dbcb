"""What the server of a federated run does: adds up what clients send, steps, and keeps their control variates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Optimizer

_HIGH, _LOW = 2.0**16, 2.0**46
"""A number is held as a whole number of 2**-16 and one of 2**-62."""
LIMIT = 2.0**30
"""Below which in absolute value each number must be that is added."""
SERVERS = ("fedavg", "fedadam", "fedprox", "scaffold")


class ExactSums:
    """Sums of `size` numbers whose bits depend on neither the order nor on which rank adds what: int64 of fixed
    point, 16 bytes a number. Up to 2**16 numbers below `LIMIT` are added without overflow, each rounded to 2**-62."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._high, self._low = (torch.zeros(size, dtype=torch.int64, device=device) for _ in range(2))

    def add(self, start: int, values: Tensor) -> None:
        """Add float64 values `[n]` to the sums from `start`."""
        scaled = values * _HIGH  # exact, as all of this is but the last rounding
        high = scaled.trunc()
        end = start + values.numel()
        self._high[start:end] += high.to(torch.int64)
        self._low[start:end] += ((scaled - high) * _LOW).round_().to(torch.int64)

    def reduce(self) -> Tensor:
        """The sums over all ranks: float64 `[size]`. Every rank calls it."""
        if dist.is_initialized():
            for part in (self._high, self._low):
                dist.all_reduce(part)
        return self._high.double().div_(_HIGH) + self._low.double().div_(_HIGH * _LOW)


class FedAdam(Optimizer):
    """The server of FedAdam, algorithm 2 of Reddi et al., 2021: no bias correction, and v begins at eps squared."""

    def __init__(
        self, params: Iterable[Tensor], lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99), eps: float = 1e-3
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), eps = group["betas"], group["eps"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(parameter), torch.full_like(parameter, eps**2)
                state["m"].mul_(beta1).add_(parameter.grad, alpha=1 - beta1)
                state["v"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
                parameter.addcdiv_(state["m"], state["v"].sqrt().add_(eps), value=-group["lr"])


Server = Callable[[Sequence[Tensor]], Optimizer]


def parse(server: str | Server, lr: float | None) -> tuple[str, Server, float]:
    """(name, what makes the server's optimizer, mu of FedProx) of what was given. Raises ValueError or TypeError."""
    if not isinstance(server, str):
        if not callable(server):
            raise TypeError(
                f"server must be {_choices()} or a function of parameters that returns an optimizer, but server="
                f"{server!r}"
            )
        if lr is not None:
            raise ValueError(f"server_lr={lr} has no effect on a server that is a function; set it there")
        return "own", server, 0.0
    name, _, value = server.partition("=")
    if name not in SERVERS or bool(value) != (name == "fedprox"):
        raise ValueError(f"server must be {_choices()}, but server={server!r}")
    try:
        mu = float(value or 0)
    except ValueError:
        mu = -1.0
    if not 0 <= mu < float("inf"):
        raise ValueError(f"write server='fedprox=0.01' with mu of at least 0, but server={server!r}")
    if lr is not None and not 0 < lr < float("inf"):
        raise ValueError(f"server_lr must be a number above 0, but server_lr={lr!r}")
    if name == "fedadam":
        return name, lambda params: FedAdam(params, lr=0.01 if lr is None else lr), mu
    return name, lambda params: SGD(params, lr=1.0 if lr is None else lr), mu


def _choices() -> str:
    return "'fedavg', 'fedadam', 'fedprox=0.01', 'scaffold'"
