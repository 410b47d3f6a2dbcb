"""Which module runs: by its hooks in the forward, by autograd's numbering of operations in the backward."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

_NAME = "_planned_name"


class Places:
    """The names of modules and blocks, as a step comes to them."""

    def __init__(self) -> None:
        self.blocks: list[str] = []
        """Names of the blocks, in the order in which they run."""
        self._last = ""
        self._is_block: set[str] = set()
        self._stack: list[str] = []
        self._block: list[str] = []
        self._numbers: list[int] = []
        self._at: list[str] = []
        self.is_tail = False
        """Whether the last block has run in this forward."""

    @property
    def name(self) -> str:
        """The innermost module that runs; empty outside of all."""
        return self._stack[-1] if self._stack else ""

    @property
    def block(self) -> str:
        return self._block[-1] if self._block else ""

    def of_backward(self) -> str:
        """The module whose operation the backward is at."""
        node = torch._C._current_autograd_node()
        if node is None or not self._numbers:
            return ""
        place = bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._at[place] if place >= 0 else ""

    @contextmanager
    def following(self, model: nn.Module, blocks: Sequence[str]) -> Iterator[None]:
        """While it lasts the modules of `model` are followed; `blocks` are names, in the order in which they run."""
        for name, module in model.named_modules():
            vars(module)[_NAME] = name  # which replicas have as well
        self.blocks, self._last = list(blocks), blocks[-1] if blocks else ""
        self._is_block = set(blocks)
        handles = [
            torch_module.register_module_forward_pre_hook(self._enter),
            torch_module.register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for module in model.modules():
                vars(module).pop(_NAME, None)
            self._stack.clear()
            self._block.clear()

    def begin_micro_batch(self) -> None:
        """A forward begins, and those before it have had their backward."""
        self.begin_slice()
        self._numbers.clear()
        self._at.clear()

    def begin_slice(self) -> None:
        """A forward begins."""
        self.is_tail = False

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = vars(module).get(_NAME)
        if name is None:
            return
        self._stack.append(name)
        if name in self._is_block:
            self._block.append(name)
            self.is_tail = False
        self._note(name)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        name = vars(module).get(_NAME)
        if name is None:
            return
        while self._stack and self._stack.pop() != name:
            pass
        if name in self._is_block:
            while self._block and self._block.pop() != name:
                pass
            self.is_tail = name == self._last
        self._note(self.name)

    def _note(self, name: str) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._numbers.append(torch.autograd._get_sequence_nr())
            self._at.append(name)
