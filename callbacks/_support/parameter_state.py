"""State that a callback has for each parameter: sharded as the parameters are, and saved with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class ParameterState(Optimizer):
    """Tensors by parameter that a checkpoint holds as it holds the state of an optimizer, from which it derives.

    So every strategy saves and loads it under the parameters' names, whatever rank holds them. It is never stepped.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(list(dict.fromkeys(parameters)), {})  # several optimizers may hold one

    def tensors(self) -> dict[Tensor, dict[str, Tensor]]:
        """What this rank keeps of the parameters that it holds, by key."""
        raise NotImplementedError

    def take(self, parameter: Tensor, saved: dict[str, Tensor]) -> None:
        """Continue with what `tensors` returned for `parameter` when it was saved."""
        raise NotImplementedError

    def reset(self) -> None:
        """Drop all state: the next update starts from the parameters."""
        raise NotImplementedError

    @contextmanager
    def saving(self) -> Iterator[None]:
        """While it lasts the parameters are those that a checkpoint is to hold."""
        yield

    def parameters(self) -> list[Tensor]:
        """All parameters, those of other ranks' pipeline stages included."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def follow(self, optimizers: Iterable[Optimizer]) -> None:
        """Add the parameters that were added to `optimizers` since this was made."""
        have = set(self.parameters())
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            added = [parameter for parameter in group["params"] if parameter not in have]
            if added:
                have.update(added)
                self.add_param_group({"params": added})

    def state_dict(self) -> dict[str, Any]:
        index = {parameter: i for i, parameter in enumerate(self.parameters())}
        state = {index[parameter]: saved for parameter, saved in self.tensors().items()}
        first, groups = 0, []
        for group in self.param_groups:
            groups.append({"params": list(range(first, first + len(group["params"])))})
            first += len(group["params"])
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        parameters = self.parameters()
        for i, saved in state_dict["state"].items():
            self.take(parameters[i], saved)

    def step(self, closure: Any = None) -> Any:
        raise RuntimeError(f"{type(self).__name__} holds state for each parameter; it does not step them")


def is_held(parameter: Tensor) -> bool:
    """Whether this rank holds the parameter or values of its shard, and not another pipeline stage or ZeRO-3 rank."""
    return not parameter.is_meta and bool(getattr(parameter, "_local_tensor", parameter).untyped_storage().nbytes())


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, which shares its memory; a tensor that is not sharded is its own."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
