"""What user code writes to in a model, for ranks to compare: what one does, all are to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from lockstep.strategies.modules.absent import is_here


class UserEdits:
    """The names of parameters to whose values, gradients or `requires_grad` user code writes between `begin` and `end`.

    Of a model whose parameters are on several ranks, in place of gradients, of which each rank has others, the names of
    buffers, of which each rank has all. Writes that torch does not count (through `.data` or numpy) are not seen. What
    engines write outside of the two is not seen either.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._parameters = {} if model is None else dict(model.named_parameters())
        self._with_gradients = all(map(is_here, self._parameters.values()))
        self._buffers: list[tuple[str, nn.Module, str]] = []
        if model is not None and not self._with_gradients:
            for path, module in model.named_modules():
                self._buffers += [(f"{path}.{name}" if path else name, module, name) for name in module._buffers]
        self._before: list[object] | None = None
        self._found: Counter[str] = Counter()
        self.asked = False
        """Whether user code has run since the last `take`."""

    def begin(self) -> None:
        self._before = self._marks()
        self.asked = bool(self._parameters)

    def end(self) -> None:
        if self._before is None:
            return
        after = self._marks()
        if after != self._before:
            gradients = self._parameters if self._with_gradients else ()
            names = [*self._parameters, *gradients, *(name for name, *_ in self._buffers)]
            self._found.update({name for name, a, b in zip(names, self._before, after, strict=True) if a != b})
        self._before = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within it an engine writes, though user code has called it."""
        was_on = self._before is not None
        self.end()
        try:
            yield
        finally:
            if was_on:
                self.begin()

    def take(self) -> list[str]:
        """What was found since the last call, and in how many hooks: ranks may call one for more batches than others.

        Within `begin` and `end` it continues to look.
        """
        if self._before is not None:
            self.end()
            self.begin()
        self.asked = False
        found = [f"{name} ({times} times)" if times > 1 else name for name, times in sorted(self._found.items())]
        self._found.clear()
        return found

    def _marks(self) -> list[object]:
        """What a write changes, of each parameter and buffer."""
        parameters = self._parameters.values()
        marks: list[object] = [(p._version, p.requires_grad) for p in parameters]
        written = [p.grad for p in parameters] if self._with_gradients else []
        written += [getattr(module, name, None) for _, module, name in self._buffers]
        return marks + [None if tensor is None else (id(tensor), tensor._version) for tensor in written]
