"""Work that a thread does beside the steps, on a GPU in a stream of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future

import torch
from torch import Tensor

Tensors = list[Tensor] | None


class Beside:
    """Runs `work` in a thread. On a GPU the steps do not wait for what it computes and exchanges, as they would in
    their own stream, until its tensors are asked for."""

    def __init__(self, thread: Executor, device: torch.device) -> None:
        self._thread, self._device = thread, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, work: Callable[[], Tensors], given: Sequence[Tensor]) -> Callable[[], Tensors]:
        """Begin `work`, on tensors that nothing else changes meanwhile; what is returned waits for its tensors.

        `given` are those that may be dropped before it is done.
        """
        if self._stream is None:
            return self._thread.submit(work).result
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for tensor in given:
            tensor.record_stream(self._stream)
        future: Future[tuple[Tensors, torch.cuda.Event]] = self._thread.submit(self._run, self._stream, work)
        return lambda: self._taken(*future.result())

    def _run(self, stream: torch.cuda.Stream, work: Callable[[], Tensors]) -> tuple[Tensors, torch.cuda.Event]:
        with torch.cuda.stream(stream):  # also makes its device the current one, which a thread begins without
            return work(), stream.record_event()

    def _taken(self, tensors: Tensors, done: torch.cuda.Event) -> Tensors:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(done)
        for tensor in tensors or ():
            tensor.record_stream(stream)
        return tensors
