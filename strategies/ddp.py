"""A replica of the model on every rank, gradients averaged: torch.nn.parallel.DistributedDataParallel."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from strategies.base import Agreement, Loss
from strategies.blocks import Rule
from strategies.data import Window
from strategies.eager import EagerStrategy, resolve_accelerator
from strategies.meta import materialise
from strategies.rendezvous import plain_group


class DDP(EagerStrategy):
    """Data parallelism: each rank holds the whole model and sees its share of the global batch.

    Gradients are averaged by torch's DDP while the last backward of a window runs; the backwards before
    it exchange nothing.

    `find_unused_parameters`: allow steps in which some parameters get no gradient (walks the graph every step).
    `static_graph`: promise that every step uses the same parameters in the same way.
    `gradient_as_bucket_view`: gradients live in the communication buckets (saves one copy of them).
    `broadcast_buffers`: rank 0's buffers (BatchNorm statistics) overwrite the others' at each forward.
    `sync_batchnorm`: turn BatchNorm layers into SyncBatchNorm, whose statistics span the ranks (CUDA only).
    `bucket_cap_mb`: size of a communication bucket in MiB; None takes torch's default.
    `activation_checkpointing`: compute what lies within blocks again in the backward; True, or which blocks.
    `timeout_s`: seconds that a collective waits for the other ranks.
    """

    def __init__(
        self,
        *,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        broadcast_buffers: bool = True,
        sync_batchnorm: bool = False,
        bucket_cap_mb: float | None = None,
        activation_checkpointing: bool | Rule = False,
        timeout_s: float = 1800.0,
    ) -> None:
        super().__init__(activation_checkpointing=activation_checkpointing)
        if find_unused_parameters and static_graph:
            raise ValueError("find_unused_parameters=True contradicts static_graph=True; give one of them")
        self.sync_batchnorm = sync_batchnorm
        self.timeout_s = timeout_s
        self._options: dict[str, Any] = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "bucket_cap_mb": bucket_cap_mb,
        }
        if not broadcast_buffers:  # renamed in torch 2.13
            renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
            self._options["forward_sync_buffers" if renamed else "broadcast_buffers"] = False
        self._first_window = True

    def configure(
        self, *, devices: int | str = "auto", accelerator: str = "auto", num_nodes: int = 1, precision: str = "32-true"
    ) -> None:
        super().configure(devices=devices, accelerator=accelerator, num_nodes=num_nodes, precision=precision)
        if self.sync_batchnorm and resolve_accelerator(accelerator) == "cpu":
            raise ValueError(
                "sync_batchnorm=True needs CUDA devices: torch's SyncBatchNorm does not run on CPU; leave it out"
            )

    def place(self, model: nn.Module) -> nn.Module:
        self._first_window = True
        if self.sync_batchnorm:
            nn.SyncBatchNorm.convert_sync_batchnorm(model)
        model = super().place(materialise(model)).to(self.device)
        if not self._in_group or not any(p.requires_grad for p in model.parameters()):
            return model  # DDP refuses a model without trainable parameters; evaluation needs no sync
        group = plain_group() if dist.get_debug_level() == dist.DebugLevel.DETAIL else None
        return DistributedDataParallel(_Step(model), process_group=group, **self._options)

    def forward_backward(
        self, placed: nn.Module, step_fn: Callable[[Any, int], Any], window: Window, **options: Any
    ) -> Agreement:
        watches = self._first_window and options.get("automatic", True) and self._reports_unused(placed)
        watch = _UsedParameters(self._user_model(placed)) if watches else None
        try:
            agreement = super().forward_backward(placed, step_fn, window, **options)
        except RuntimeError as error:
            if "finished reduction in the prior iteration" in str(error):
                raise RuntimeError(_unused(self._indexed_names(placed, str(error)))) from error
            raise
        if watch is not None and agreement.count:
            unused = watch.unused()
            if unused:
                raise RuntimeError(_unused(unused))
        self._first_window = False
        return agreement

    def _runner(self, placed: nn.Module, step_fn: Callable[[Any, int], Any] | None) -> Callable[[Any, int], Any]:
        if isinstance(placed, DistributedDataParallel):
            return functools.partial(placed, step_fn)
        return super()._runner(placed, step_fn)

    def _sync_gradients(self, placed: nn.Module, on: bool) -> None:
        # What DDP.no_sync does. With static_graph the whole first window must be exchanged: torch records
        # the graph in it and asserts otherwise.
        placed.require_backward_grad_sync = on or (self._first_window and self._options["static_graph"])  # type: ignore[assignment]

    def _user_model(self, placed: nn.Module) -> nn.Module:
        return placed.module.model if isinstance(placed, DistributedDataParallel) else placed

    def _reports_unused(self, placed: nn.Module) -> bool:
        return isinstance(placed, DistributedDataParallel) and not (
            self._options["find_unused_parameters"] or self._options["static_graph"]
        )

    def _indexed_names(self, placed: nn.Module, message: str) -> list[str]:
        names = [name for name, p in self._user_model(placed).named_parameters() if p.requires_grad]
        found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", message)
        return [names[int(i)] for i in found.group(1).split()] if found else ["some parameters"]


class _Step(nn.Module):
    """What DDP wraps: a module whose forward is a training step, so that DDP brackets the step and nothing is patched."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, step_fn: Callable[[Any, int], Any] | None, batch: Any, batch_idx: int) -> Any:
        output = None if step_fn is None else step_fn(batch, batch_idx)
        # DDP exchanges gradients in the backward, so a rank with nothing to say walks back from zero.
        if output is not None:
            return output
        zero = sum(p.sum() * 0 for p in self.model.parameters() if p.requires_grad)
        return Loss(zero, 0)  # type: ignore[arg-type]


class _UsedParameters:
    """Finds which trainable parameters the backwards of a window reach."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._seen: set[str] = set()
        self._hooks = [
            p.register_post_accumulate_grad_hook(functools.partial(self._mark, name)) for name, p in self._names.items()
        ]

    def unused(self) -> list[str]:
        for hook in self._hooks:
            hook.remove()
        return [name for name in self._names if name not in self._seen]

    def _mark(self, name: str, _: torch.Tensor) -> None:
        self._seen.add(name)


def _unused(names: list[str]) -> str:
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    return (
        f"these parameters got no gradient in a step: {shown}; "
        "use them in training_step, freeze them (requires_grad=False), or give strategy=DDP(find_unused_parameters=True)"
    )
