"""What tensor parallelism shards: the record that is found or given, checked and applied."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel.style import ParallelStyle

from lockstep.strategies.mesh.tensor_plan.styles import Column, SequenceSharding


@dataclass
class Plan:
    """What is cut: styles by the name of the layer, and what the automatic plan promises of the modules around them."""

    styles: dict[str, str | ParallelStyle] = field(default_factory=dict)
    is_given: bool = False
    """Whether the user has given the styles."""
    sequence: SequenceSharding | None = None
    checked: dict[str, list[str]] = field(default_factory=dict)
    """Modules that must compute the same with these layers cut as whole: the automatic plan knows names, not code."""
    kinds: set[tuple[Any, ...]] = field(default_factory=set)
    """Kinds of checked modules of which the first call of one is compared with a whole copy."""
    heads: dict[str, dict[str, int]] = field(default_factory=dict)
    """Attributes of modules that count heads, to be set to what one rank has."""
    dropouts: dict[str, int] = field(default_factory=dict)
    """Dropout layers on cut activations, and the width that is cut."""
    within: dict[nn.Module, nn.Sequential] = field(default_factory=dict)
    """The sequence that hands sharded activations on between its layers, by each that does otherwise if anything else
    calls it: column-wise layers and Dropout."""
    between: list[str] = field(default_factory=list)
    """What runs on sharded activations besides these layers and what the checked modules hold."""
    left: list[str] = field(default_factory=list)
    """Linear layers that stay whole, as they have hooks, a forward of their own or a weight that something computes."""
    columns: list[Column] = field(default_factory=list)
    """The styles of column-wise layers, once they are sharded."""
    traced: set[nn.Module] = field(default_factory=set)
    """What lies within a compiled block: torch would take a graph for each of its hooks that is called after a failure
    as well."""

    def end_forward(self) -> None:
        """The forward of a step is over, to its end or not."""
        for column in self.columns:
            column.forget()
        if self.sequence is not None:
            self.sequence.close()
