"""Validation metrics by client: quantiles over clients, and the mean of the worst of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lockstep.callbacks.base import Callback

if TYPE_CHECKING:
    from lockstep import Module, Trainer

_UNIT = 2.0**60
"""Values are added as whole numbers of 2**-60, so that sums do not depend on the order of samples and ranks."""


class ClientMetrics(Callback):
    """Logs what validation measures for each client: quantiles over all clients, and the mean of the worst part.

    `validation_step` returns a dict of tensors with one value a sample, such as `{"acc": predicted == label}`. Of each
    name, with the mean over a client's samples as the client's value, this logs `clients/acc/p10` and so on,
    `clients/acc/worst` and `clients/count`. Works under every strategy that gives a rank whole samples.

    Args:
        client: The key or index of the clients' numbers or names in a batch, or a function of the batch that returns
            them: one a sample.
        quantiles: Which quantiles over clients to log: of n sorted values the one at place ceil(q n).
        worst: The part of the clients, at least one, whose mean `worst` is.
        mode: "max" if larger values are better, else "min".
        names: The names to log; None for all that `validation_step` returns.
    """

    def __init__(
        self,
        client: str | int | Callable[[Any], Any],
        *,
        quantiles: Sequence[float] = (0.1, 0.5, 0.9),
        worst: float = 0.1,
        mode: str = "max",
        names: Sequence[str] | None = None,
    ) -> None:
        if mode not in ("max", "min"):
            raise ValueError(f"mode must be 'max' or 'min', but mode={mode!r}")
        if not all(0 < part <= 1 for part in (*quantiles, worst)):
            raise ValueError(
                f"quantiles and worst must be above 0 and at most 1, but quantiles={quantiles} and worst={worst}"
            )
        self.client, self.quantiles, self.worst, self.mode = client, tuple(quantiles), worst, mode
        self.names = None if names is None else tuple(names)
        self.values: dict[str, dict[Any, float]] = {}
        """By name and client what the last validation has measured, in the order of clients."""
        self._sums: dict[str, dict[Any, list[int]]] = {}

    def on_validation_epoch_start(self, trainer: Trainer, module: Module) -> None:
        self._sums = defaultdict(dict)

    def on_validation_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if outputs is None and not trainer.strategy.topology.is_reporting_rank:
            return
        if not isinstance(outputs, Mapping):
            raise TypeError(
                "ClientMetrics needs validation_step to return a dict of tensors with one value a sample, but it "
                f"returned {type(outputs).__name__}"
            )
        clients = self.client(batch) if callable(self.client) else batch[self.client]
        clients = clients.tolist() if isinstance(clients, Tensor) else list(clients)
        for name in outputs if self.names is None else self.names:
            value = outputs[name]
            if not isinstance(value, Tensor) or value.shape != (len(clients),):
                raise ValueError(
                    f"ClientMetrics needs one value a sample of {name!r}, a tensor of shape [{len(clients)}], but got "
                    + (f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__)
                )
            if not trainer.strategy.topology.is_reporting_rank:
                continue
            sums = self._sums.setdefault(name, {})
            for client, number in zip(clients, value.detach().double().cpu().tolist(), strict=True):
                if not math.isfinite(number):
                    raise ValueError(f"{name!r} is {number} for a sample of client {client!r}, which has no mean")
                total = sums.setdefault(client, [0, 0])
                total[0] += int(number * _UNIT)
                total[1] += 1

    def on_validation_epoch_end(self, trainer: Trainer, module: Module) -> None:
        strategy = trainer.strategy
        mine = [[name, client, *total] for name, by_client in self._sums.items() for client, total in by_client.items()]
        rows = [row for rank in range(strategy.topology.world_size) for row in strategy.broadcast(mine, rank)]
        sums: dict[str, dict[Any, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
        for name, client, total, count in rows:
            sums[name][client][0] += total
            sums[name][client][1] += count
        self.values = {
            name: {client: total / _UNIT / count for client, (total, count) in sorted(by_client.items(), key=_order)}
            for name, by_client in sums.items()
        }
        for name, by_client in sorted(self.values.items()):
            ordered = sorted(by_client.values())
            for q in self.quantiles:
                module.log(f"clients/{name}/p{100 * q:g}", ordered[math.ceil(q * len(ordered)) - 1])
            number = max(1, math.ceil(self.worst * len(ordered)))
            worst = ordered[:number] if self.mode == "max" else ordered[-number:]
            module.log(f"clients/{name}/worst", math.fsum(worst) / number)
            module.log("clients/count", float(len(ordered)))


def _order(item: tuple[Any, Any]) -> tuple[bool, Any]:
    return isinstance(item[0], str), item[0]
