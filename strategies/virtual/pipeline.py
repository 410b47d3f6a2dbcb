"""What "pipeline" and "ddp=…,pipeline=…" are with virtual ranks: shares are the microbatches of the schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.base import NO_HOOKS, StepFn, StepHooks, StepResult
from lockstep.strategies.data.sharded_loader import MicroBatch, Window
from lockstep.strategies.modules.absent import is_here
from lockstep.strategies.modules.model_changes import prepared
from lockstep.strategies.pipeline.microbatches import OWN_BACKWARD
from lockstep.strategies.pipeline.optimizers import own_parameters
from lockstep.strategies.pipeline.staged_module import Staged
from lockstep.strategies.pipeline.strategy import Pipeline, StagedStrategy
from lockstep.strategies.sync.buffers import share_buffers
from lockstep.strategies.sync.collectives import sum_gradients
from lockstep.strategies.sync.tree import PartialSums, add_gradients, all_reduce
from lockstep.strategies.virtual.replicas import VirtualReplicas
from lockstep.strategies.virtual.stage_links import StageLinks
from lockstep.strategies.virtual.step import VirtualStep, add_numbers, refuse_parts, vote_of
from lockstep.strategies.virtual.streams import Streams

if TYPE_CHECKING:
    from lockstep.strategies.virtual.share_engine import ShareEngines, ShareWindow

_NO_COMPILE = (
    "compile=True builds a graph for each layer of a pipeline and one of the whole model elsewhere, so with "
    "virtual_ranks the bits would depend on the ranks; use strategy='ddp', or remove it"
)
_NO_OUTPUTS = (
    "on_train_batch_end uses its outputs, which with virtual_ranks and accumulate_grad_batches ranks of a pipeline "
    "have at the end of the window only; log in training_step (self.log), remove one of the two, or use strategy='ddp'"
)
_DTYPES = torch.float32, torch.float64


class VirtualPipeline(StagedStrategy, VirtualStep[Staged]):
    """Each share is one microbatch, whose random streams travel from stage to stage. Every stage keeps the gradients of
    shares apart and adds them in the tree; then ranks along ddp add theirs."""

    capabilities = replace(
        VirtualStep.capabilities,
        refuses={**VirtualStep.capabilities.refuses, "compile": _NO_COMPILE, "backward": OWN_BACKWARD},
    )

    def __init__(self, strategy: Pipeline, virtual_ranks: int) -> None:
        if strategy.schedule.stages_per_rank > 1:
            raise ValueError(
                f"virtual_ranks={virtual_ranks} needs a schedule with one stage a rank, whose shares follow each "
                f"other, which schedule={strategy.schedule.name!r} is not; use '1f1b' or 'gpipe'"
            )
        if strategy.num_micro_batches is not None:
            raise ValueError(
                f"with virtual_ranks={virtual_ranks} the microbatches of a pipeline are the shares, but "
                f"num_micro_batches={strategy.num_micro_batches}; remove it"
            )
        if "fsdp" in strategy.axes:
            raise ValueError(
                f"virtual_ranks={virtual_ranks} cannot be used with the axis fsdp of a pipeline, whose reductions are "
                "not in the order of shares; use pipeline, or a mesh of ddp and pipeline"
            )
        super().__init__(
            schedule=strategy.schedule.name,
            module=strategy.module,
            split=strategy.split,
            sample=strategy.sample,
            activation_checkpointing=strategy.activation_checkpointing,
            timeout_s=strategy.timeout_s,
        )
        self.axes = dict(strategy.axes)
        self.virtual_ranks, self._stands_for = virtual_ranks, strategy.name
        self.one_rank = partial(VirtualReplicas, virtual_ranks)
        self._streams = Streams()
        self._buffered: list[nn.Module] = []

    def wrap(self, model: nn.Module) -> Staged:
        staged = super().wrap(model)
        assert isinstance(staged, Staged)
        links = staged.links = StageLinks(staged.group, staged.device, self._streams)
        staged.inference.kept_streams = self._streams.kept
        tied = staged.tensors.tied()
        if tied and self.precision.autocast_dtype is not None:
            names = ", ".join(name for named in tied.values() for name in named)
            raise ValueError(
                f"stages of the pipeline share {names}, whose gradients precision={self.precision.name!r} adds in "
                "another order than on one process; with virtual_ranks choose split so that all who use it are on one "
                "stage, or use strategy='ddp' or 'fsdp'"
            )
        links.tied_here = [p for _, parameters in staged.tied.by_group for p in parameters]
        links.tied = [
            p for holders, named in tied.items() if self._ranks.stage_rank in holders[:-1] for p in named.values()
        ]
        self._buffered = [
            module
            for module in model.modules()
            if all(is_here(buffer) for buffer in module._buffers.values() if buffer is not None)
        ]
        return staged

    @property
    def engines(self) -> type[ShareEngines]:
        from lockstep.strategies.virtual.share_engine import ShareEngines

        return ShareEngines

    # ---- the step ------------------------------------------------------------------------------------

    def forward_backward(
        self, wrapped: Staged, step_fn: StepFn, window: Window, hooks: StepHooks = NO_HOOKS
    ) -> StepResult:
        from lockstep.strategies.virtual.share_engine import ShareWindow

        assert self._agreement is not None
        if not hooks.automatic:
            self._refuse("manual_optimization")
        refuse_parts(window, hooks)
        if hooks.shares_outputs and len(window.micro_batches) > window.num_shares:
            raise RuntimeError(_NO_OUTPUTS)
        self._step_hooks = hooks
        hooks = hooks._replace(prepare=partial(prepared, hooks=hooks, changes=self._changes))
        self._steps_seen += 1
        engines = self._engines = self._engines or self._make_engines()
        before, gradients = self._weights(begins=True), PartialSums(add_gradients)
        with self._in_shares(wrapped, hooks):
            shares = ShareWindow(
                wrapped,
                self._alone(step_fn, self._agreement),
                window,
                hooks,
                self._watched,
                lambda: gradients.append(self.take_gradients(wrapped)),
            )
            engines.run_shares(shares, partial(self._send_numbers, shares))  # type: ignore[attr-defined]
        for micro_batch in window.micro_batches if hooks.shares_outputs else ():
            micro_batch.output = wrapped.links.shared(micro_batch.output, wrapped.rank_of[-1])
        if before != self._weights():
            raise self._changed(wrapped, before, None)
        self.put_gradients(gradients.total())
        self._sum_tied(wrapped, shares)
        result = self._receive(wrapped, self._agreement, in_tree=True)
        result = self._conclude(wrapped, result, hooks, window.num_samples)
        if self._ranks.data_group is not None:
            self._shapes.follow(self._buffered, self._ranks.data_group)
            share_buffers(self._buffered, self._ranks.data_group)
        return result

    @contextmanager
    def _in_shares(self, wrapped: Staged, hooks: StepHooks) -> Iterator[None]:
        links: Any = wrapped.links
        self._streams.named = {} if hooks.streams is None else hooks.streams
        with self._share():
            links.in_step = True
            try:
                yield
            finally:
                links.in_step = False

    def _send_numbers(self, shares: ShareWindow) -> None:
        """Send this rank's part of the step agreement: what the losses came to, on the last stage."""
        vote = vote_of(shares.window, shares.hooks)
        numbers = PartialSums(add_numbers)
        for of_share in shares.numbers():
            numbers.append(of_share)
        count, total = numbers.total()
        vote = vote if self.topology.is_reporting_rank else vote._replace(keys=0)
        finite = self.topology.device.type != "cpu" or math.isfinite(total)
        self._agreement.send(vote, shares.window.num_samples, count, finite, total)  # type: ignore[union-attr]

    @torch.no_grad()
    def _sum_tied(self, wrapped: Staged, shares: ShareWindow) -> None:
        """Add up what stages have computed for parameters that they share, of each micro-batch from the last stage to
        the first, as one process does, and then over shares."""
        places = {id(p): i for i, p in enumerate(shares.links.tied_here)}
        for group, parameters in wrapped.tied.by_group:
            for parameter in parameters:
                held = [gradients[places[id(parameter)]] for gradients in shares.tied.values()]
                if not held:
                    continue
                mine = torch.stack([torch.zeros_like(parameter) if g is None else g for g in held])
                has = torch.tensor([g is not None for g in held], dtype=torch.int8, device=mine.device)
                found = [[torch.empty_like(t) for _ in range(dist.get_world_size(group))] for t in (mine, has)]
                for theirs, own in zip(found, (mine, has), strict=True):
                    dist.all_gather(theirs, own, group=group)
                *earlier, total = found[0]
                for part in reversed(earlier):
                    total = total + part
                exists = torch.stack(found[1]).amax(0).tolist()
                parameter.grad = _over_shares(
                    shares, dict(zip(shares.tied, zip(total, exists, strict=True), strict=True))
                )

    def finish_gradients(self, wrapped: Staged) -> None:
        if self._ranks.data_group is not None:
            trained = [p for p in self._watched if p.requires_grad]
            sum_gradients(trained, [self._ranks.data_group], all_reduce, multiple=self.topology.data_size)

    def evaluate(
        self,
        wrapped: Staged,
        step_fn: Callable[..., Any],
        micro_batch: MicroBatch,
        *args: Any,
        hooks: StepHooks = NO_HOOKS,
    ) -> Any:
        assert isinstance(wrapped.links, StageLinks)
        if not micro_batch.num_samples:
            return None
        wrapped.links.begin()
        with self._in_shares(wrapped, hooks), self.precision.autocast(self.topology.device):
            output = wrapped.run_evaluation(None, lambda: step_fn(micro_batch.batch, *args), hooks.log_scope)
        return wrapped.links.shared(output, wrapped.rank_of[-1]) if hooks.shares_outputs else output

    # ---- clipping ------------------------------------------------------------------------------------

    def clip_gradients(
        self, wrapped: Staged, optimizer: Optimizer, value: float, algorithm: str = "norm"
    ) -> Tensor | None:
        self._copies_of_others = {id(p) for p in wrapped.tied.copies}
        with own_parameters(optimizer):
            return VirtualStep.clip_gradients(self, wrapped, optimizer, value, algorithm)

    def counted_part(self, parameter: nn.Parameter, part: Tensor) -> Tensor:
        if id(parameter) not in self._copies_of_others:
            return part
        return part[:0] if part.dim() else part.reshape(-1)[:0]

    def counted_rows(self, parameter: nn.Parameter) -> int:
        return 0 if id(parameter) in self._copies_of_others else super().counted_rows(parameter)

    def norm_facts(self, rows: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        found = torch.tensor([rows, _DTYPES.index(dtype)])
        everyone = [torch.empty_like(found) for _ in range(self.num_stage_ranks)]
        dist.all_gather(everyone, found, group=self._ranks.group)
        numbers = torch.stack(everyone)
        return int(numbers[:, 0].sum()), _DTYPES[int(numbers[:, 1].max())]

    def norm_groups(self) -> Sequence[dist.ProcessGroup | None]:
        return (self._ranks.group,)


def _over_shares(shares: ShareWindow, found: dict[int, tuple[Tensor, int]]) -> Tensor | None:
    """The sum of a parameter's gradients by micro-batch: within a share in order, over shares in the tree."""
    sums = PartialSums(add_gradients)
    for start in range(0, len(shares.window.micro_batches), shares.of_a_share):
        of_share: Tensor | None = None
        for number in range(start, start + shares.of_a_share):
            gradient, exists = found.get(number, (None, 0))
            if exists:
                assert gradient is not None
                of_share = gradient.clone() if of_share is None else of_share.add_(gradient)
        sums.append([of_share])
    return sums.total()[0]
