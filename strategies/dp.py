"""One process, the batch split over devices: replicas of the model run in threads, gradients add up on the first."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import replicate

from strategies.base import Agreement, Note
from strategies.blocks import Rule
from strategies.data import MicroBatch, Window, guess_batch_size
from strategies.eager import EagerStrategy, detach, move, weighted_losses
from strategies.slices import cut


class DataParallel(EagerStrategy):
    """Each micro-batch is cut into one slice a device, and the step runs on all slices at once, in threads.

    On several GPUs the replicas are those of `torch.nn.parallel.replicate`, made anew in each window; on
    CPU, or on one GPU, `devices` replicas share the parameters' memory. Prefer `ddp`: it needs no copies
    of the parameters in a step and no lock of the interpreter is shared.

    The model is the first replica. Buffers that the other replicas change (BatchNorm statistics) are lost, as in
    torch's DataParallel; torchmetrics objects are merged. A step that draws random numbers runs its slices one
    after the other, since threads would share one random stream. Evaluation runs on the first device.

    `activation_checkpointing`: compute what lies within blocks again in the backward; True, or which blocks.
    """

    single_process = True
    max_devices = None

    def __init__(self, *, activation_checkpointing: bool | Rule = False) -> None:
        super().__init__(activation_checkpointing=activation_checkpointing)
        self._threads: ThreadPoolExecutor | None = None
        self._draws = True

    def setup(self) -> None:
        super().setup()
        self.device = torch.device(self._accelerator, 0) if self._accelerator == "cuda" else self.device
        self.steps_whole = False
        self._draws = True  # until the first window has shown that it does not
        self._threads = ThreadPoolExecutor(self._num_devices, thread_name_prefix="replica")

    def teardown(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        super().teardown()

    def place(self, model: nn.Module) -> nn.Module:
        return super().place(model).to(self.device)

    def forward_backward(
        self, placed: nn.Module, step_fn: Callable[[Any, int], Any], window: Window, **options: Any
    ) -> Agreement:
        if self._num_devices == 1:
            return super().forward_backward(placed, step_fn, window, **options)
        if not options.pop("automatic", True) or options.pop("parameters", None):
            raise ValueError(
                "strategy 'dp' needs automatic optimization with one optimizer; use strategy='ddp' for others"
            )
        return self._in_slices(placed, step_fn, window, **options)

    def _in_slices(
        self,
        placed: nn.Module,
        step_fn: Callable[[Any, int], Any],
        window: Window,
        *,
        micro_batches: Iterable[MicroBatch] | None = None,
        note: Callable[[], Note] | None = None,
        part: Callable[[int], AbstractContextManager[Any]] | None = None,
        before_backward: Callable[[Tensor], None] | None = None,
        after_backward: Callable[[], None] | None = None,
    ) -> Agreement:
        if self._scaler_used:
            self._update_scaler()
        random_state = torch.get_rng_state() if self._draws else None
        replicas = self._replicas(placed)
        steps = [step_fn, *(rebind(step_fn, placed, replica) for replica in replicas[1:])]
        count, weighted = 0.0, 0.0
        walking = threading.Lock()
        for micro_batch in window.micro_batches if micro_batches is None else micro_batches:
            slices = _slices(micro_batch, self._num_devices)
            contexts = [nullcontext() if part is None else part(n) for _, n in slices]

            def run(
                i: int, slices: Any = slices, contexts: Any = contexts, batch_idx: int = micro_batch.batch_idx
            ) -> tuple[Any, list[Any], float]:
                batch, num_samples = slices[i]
                device = (
                    self.device if self.device.type == "cpu" else torch.device("cuda", i % torch.cuda.device_count())
                )
                with (
                    contexts[i],
                    torch.autocast(
                        device.type, self.precision.autocast_dtype, self.precision.autocast_dtype is not None
                    ),
                ):
                    output = steps[i](move(batch, device, None), batch_idx)
                losses, counted = weighted_losses(output, num_samples, 1 / window.num_samples, None)
                for value, _, returned in losses:
                    with walking:
                        if before_backward is not None:
                            before_backward(returned)
                    (value if self.precision.scaler is None else self.precision.scaler.scale(value)).backward()
                    with walking:
                        if after_backward is not None:
                            after_backward()
                return output, [value for value, *_ in losses], counted

            assert self._threads is not None
            results = (
                [run(i) for i in range(len(slices))]
                if self._draws
                else list(self._threads.map(run, range(len(slices))))
            )
            for _, values, counted in results:
                count += counted
                weighted += sum(value.item() for value in values) if self.device.type == "cpu" else 0.0
            micro_batch.output = detach(results[0][0])
        self._join(placed, replicas)
        if random_state is not None:
            self._draws = not torch.equal(random_state, torch.get_rng_state())
        finite = math.isfinite(weighted)
        loss = weighted * window.num_samples / count if count and self.device.type == "cpu" else None
        agreement = Agreement(
            count,
            note().stop if note else 0,
            None if finite or self.precision.scaler is not None else "the loss of rank 0",
            loss,
        )
        if count and count != window.num_samples:
            torch._foreach_mul_([p.grad for p in placed.parameters() if p.grad is not None], window.num_samples / count)
        return self._concluded(placed, agreement)

    def _replicas(self, model: nn.Module) -> list[nn.Module]:
        """The model itself, and what the other threads run: equal parameters, gradients and buffers of their own."""
        if self.device.type == "cuda" and torch.cuda.device_count() > 1:
            devices = [i % torch.cuda.device_count() for i in range(self._num_devices)]
            return [model, *replicate(model, devices)[1:]]
        return [model, *(share(model) for _ in range(self._num_devices - 1))]

    def _join(self, model: nn.Module, replicas: list[nn.Module]) -> None:
        """Add up gradients and metrics, in the order of the replicas."""
        for replica in replicas[1:]:
            for own, other in zip(_parameters(model), _parameters(replica), strict=False):
                if other.is_leaf and other.grad is not None:  # replicas on other GPUs walk back into the model's own
                    own.grad = other.grad if own.grad is None else own.grad.add_(other.grad)
            for metric, copied in zip(_metrics(model), _metrics(replica), strict=True):
                if copied._update_count:
                    metric.merge_state(copied)


def share(model: nn.Module) -> nn.Module:
    """A structural copy whose parameters share the model's memory but have gradients of their own."""
    aliases: dict[int, nn.Parameter] = {}
    copies: dict[int, nn.Module] = {}
    for module in model.modules():
        if hasattr(module, "merge_state"):  # a torchmetrics object: counts by itself, merged afterwards
            copied = copy.deepcopy(module)
            copied.reset()  # type: ignore[operator]
        else:
            copied = module._replicate_for_data_parallel()
        copies[id(module)] = copied
    for module in model.modules():
        copied = copies[id(module)]
        if hasattr(module, "merge_state"):
            continue
        for name, child in module._modules.items():
            copied._modules[name] = None if child is None else copies[id(child)]
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in aliases:
                aliases[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
            copied._parameters[name] = None if parameter is None else aliases[id(parameter)]
        for name, buffer in module._buffers.items():
            copied._buffers[name] = None if buffer is None else buffer.clone()
    return copies[id(model)]


def rebind(step_fn: Callable[..., Any], model: nn.Module, replica: nn.Module) -> Callable[..., Any]:
    """`step_fn` as a method of `replica`. Raises TypeError where it is no method of `model`."""
    if hasattr(step_fn, "rebind"):  # an adapter around a method
        return step_fn.rebind(lambda method: rebind(method, model, replica))
    if getattr(step_fn, "__self__", None) is not model:
        raise TypeError("strategy 'dp' needs a step that is a method of the module that it placed")
    return step_fn.__func__.__get__(replica)  # type: ignore[attr-defined]


def _slices(micro_batch: MicroBatch, num_devices: int) -> list[tuple[Any, int]]:
    """A micro-batch for each device, with the samples of each; a batch may hold several rows a sample."""
    rows, num_samples = guess_batch_size(micro_batch.batch), micro_batch.num_samples
    return [
        (batch, round(size * num_samples / rows) if rows else num_samples)
        for batch, size in cut(micro_batch.batch, rows, min(num_devices, num_samples))
    ]


def _parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    seen: set[int] = set()
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def _metrics(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "merge_state") and hasattr(module, "_update_count")]
