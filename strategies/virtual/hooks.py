"""What a strategy with virtual ranks says of its own: where the gradient of a share is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.base import StepResult, W
from lockstep.strategies.sync.tree import PartialSums, add_gradients


class ShareHooks(Generic[W]):
    """By default every rank holds whole gradients. Every rank calls each of them, in the same order."""

    _watched: list[nn.Parameter]
    argument = "virtual_ranks"
    """The user's argument that says how many shares there are, for messages."""

    def take_share(self, wrapped: W, optimizers: dict[str, Optimizer], share: int) -> bool:
        """Called after the steps of a window, before users' hooks for `share` of this rank: let the model and the
        optimizers hold what is that share's own. Return whether they hold something else now."""
        return False

    def sum_numbers(self, result: StepResult, of_shares: list[tuple[float, float]]) -> StepResult:
        """`result` with its count and loss in the tree over all shares; of each own share (count, sum of losses).

        It has the sums of ranks in the order of ranks, which is the tree's where a rank's shares follow each other.
        """
        return result

    def keep_gradients(self) -> PartialSums[list[Tensor | None]]:
        """What takes the gradients of one share after the other, and gives those of the window."""
        return PartialSums(add_gradients)

    def reduce_shares(self, num_samples: int, count: float) -> int | None:
        """Called once it is known what the losses of all shares count, whose gradients are divided by `num_samples`.

        Return what the gradients are still divided by; None if they are those of the mean.
        """
        return num_samples

    def take_gradients(self, wrapped: W) -> list[Tensor | None]:
        """The gradients of the share that has run, in the order of the parameters, which have none afterwards."""
        taken = []
        for parameter in self._watched:
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None and gradient.layout != torch.strided:
                raise ValueError(
                    f"{self.argument} add dense gradients, but a parameter has a sparse one; use an embedding with "
                    "sparse=False"
                )
            taken.append(gradient)
        return taken

    def put_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Let these be what `_conclude` completes."""
        for parameter, gradient in zip(self._watched, gradients, strict=True):
            parameter.grad = gradient

    def gradient_part(self, parameter: nn.Parameter) -> Tensor:
        """The part of a parameter's gradient that this rank applies."""
        assert parameter.grad is not None
        return parameter.grad

    def counted_part(self, parameter: nn.Parameter, part: Tensor) -> Tensor:
        """What of it this rank adds to the norm."""
        return part

    def counted_rows(self, parameter: nn.Parameter) -> int:
        """How many rows of the whole gradient are counted, by all ranks that hold a part."""
        return parameter.shape[0] if parameter.dim() else 1

    def norm_facts(self, rows: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Rows and dtype of the norm of the whole model, from those of what this rank knows of."""
        return rows, dtype

    def norm_groups(self) -> Sequence[dist.ProcessGroup | None]:
        """The ranks that hold other parts of the gradient."""
        return ()
