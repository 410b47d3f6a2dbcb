"""Optimizer state, gradients and parameters sharded over the ranks: ZeRO stages 1, 2 and 3 of DeepSpeed's engine."""

from __future__ import annotations

import copy
import functools
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.base import NO_HOOKS, Capabilities, StepFn, StepHooks, StepResult, Strategy, Topology
from lockstep.strategies.checkpoint_state import Reader, State, names_of, parameter_names
from lockstep.strategies.data.sharded_loader import MicroBatch, ShardedLoader, Window
from lockstep.strategies.deepspeed import checkpoint
from lockstep.strategies.deepspeed import config as deepspeed_config
from lockstep.strategies.deepspeed.checks import (
    check_groups,
    check_optimizer,
    check_parameters,
    check_used,
    check_weights_alike,
)
from lockstep.strategies.deepspeed.optimizer_view import OptimizerView
from lockstep.strategies.deepspeed.refusals import REFUSES
from lockstep.strategies.deepspeed.zero_step import ZeroStep, no_trace
from lockstep.strategies.launch import environment
from lockstep.strategies.modules.blocks import Rule
from lockstep.strategies.modules.model_changes import refuse_sparse, shortened
from lockstep.strategies.optimizers.copies import INSTEAD, steps_with
from lockstep.strategies.spmd import SPMDStrategy
from lockstep.strategies.sync.buffers import SharedBuffers, shared
from lockstep.strategies.sync.call_order import END_BACKWARD, CallOrder
from lockstep.strategies.sync.collectives import clip_by_norm, clip_by_value

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class DeepSpeed(SPMDStrategy[ZeroStep]):
    """Data parallelism whose ranks each keep a part of what DDP keeps whole, on DeepSpeed's engine.

    The engine steps the one optimizer that `configure_optimizers` returns, which must treat each element by
    itself. It computes in float32 ("32-true"), in float32 under autocast ("bf16-mixed"), or in bfloat16 with
    float32 master weights ("bf16-true").

    `stage`: 1 cuts the optimizer state, 2 (the default) the gradients too, 3 the parameters too.
    `offload_optimizer`: keep optimizer state and master weights in host memory, and step there.
    `offload_parameters`: keep each rank's part of the parameters in host memory (stage 3).
    `config`: DeepSpeed's configuration, a dict or the path of its JSON file. What it says of batch sizes,
        accumulation, precision and the options above must agree with the run; its `gradient_clipping` holds
        where the run clips nothing itself.
    `broadcast_buffers`: True: rank 0's buffers overwrite the others' after each step; None: the same, but buffers that
        differ between ranks are refused, apart from statistics of BatchNorm and InstanceNorm; False: each rank keeps
        its own.
    `activation_checkpointing`: recompute the blocks' activations in the backward; True, or which blocks.
    `timeout_s`: seconds that a collective waits for the other ranks.
    """

    cuts_gradients = True
    capabilities = Capabilities(preserves_memory_format=False, refuses=REFUSES)

    def __init__(
        self,
        *,
        stage: int | None = None,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        config: Mapping[str, Any] | str | Path | None = None,
        broadcast_buffers: bool | None = None,
        activation_checkpointing: bool | Rule = False,
        timeout_s: float = 1800.0,
    ) -> None:
        super().__init__(activation_checkpointing=activation_checkpointing)
        if stage not in (None, 1, 2, 3):
            raise ValueError(f"stage must be 1, 2 or 3, but stage={stage!r}")
        self.timeout_s = timeout_s
        self.broadcast_buffers = broadcast_buffers
        self._stage, self._offload_optimizer, self._offload_parameters = stage, offload_optimizer, offload_parameters
        self._source = config
        self._config: dict[str, Any] = {}
        self._given_batches: dict[str, int] = {}
        self._given_clip: float | None = None
        self._batches: tuple[int, int | None] | None = None
        self._attached = self._clipped = self._steps = False
        self._view: OptimizerView | None = None
        self._detach: Callable[[], None] | None = None
        self._order: CallOrder | None = None

    # ---- 1. processes and devices ----------------------------------------------------------------

    def configure(
        self, *, devices: int | str = "auto", accelerator: str = "auto", num_nodes: int = 1, precision: str = "32-true"
    ) -> Strategy:
        chosen = super().configure(devices=devices, accelerator=accelerator, num_nodes=num_nodes, precision=precision)
        if importlib.util.find_spec("deepspeed") is None:
            raise ImportError(
                "strategy='deepspeed' needs the package deepspeed; install it with `pip install "
                "'lockstep-trainer[deepspeed]'`"
            )
        config = deepspeed_config.read(self._source)
        self._config = deepspeed_config.agreed(
            config, self._stage, self._offload_optimizer, self._offload_parameters, self.precision.name
        )
        self._given_batches = {key: self._config.pop(key) for key in BATCH_KEYS if key in self._config}
        self._given_clip = self._config.pop("gradient_clipping", None) or None
        return chosen

    @property
    def zero(self) -> dict[str, Any]:
        """`zero_optimization` of DeepSpeed's configuration, once `configure` has read it."""
        return self._config["zero_optimization"]

    def setup(self) -> Topology:
        # torch 2.13 renamed collectives that DeepSpeed calls by their old names, several times a step.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
        return super().setup()

    def teardown(self) -> None:
        if self._detach is not None:
            self._detach()
        self._detach = self._view = None
        if self._order is not None:
            self._order.close()
            self._order = None
        self._attached = self._clipped = self._steps = False
        self._batches = None
        super().teardown()
        if "deepspeed.utils.groups" in sys.modules:  # the next engine must not find groups that are gone
            sys.modules["deepspeed.utils.groups"]._release_process_group_references()

    def wrap(self, model: nn.Module) -> ZeroStep:
        return ZeroStep(model.to(self.topology.device))

    def teardown_module(self, wrapped: ZeroStep) -> None:
        if wrapped.engine is not None:
            keeps = environment.outlives_run(self.topology.rank)
            wrapped.release(keeps)
        super().teardown_module(wrapped)

    def setup_optimizers(self, wrapped: ZeroStep, optimizers: dict[str, Optimizer]) -> dict[str, Optimizer]:
        """Build the engine: from here on parameters, gradients and optimizer state are cut."""
        if len(optimizers) != 1:
            self._refuse("several_optimizers")
        ((key, optimizer),) = optimizers.items()
        config = copy.deepcopy(self._config)
        if not config.get("zero_allow_untested_optimizer"):
            check_optimizer(optimizer, config["zero_optimization"]["stage"])
        check_parameters(wrapped.model, self.precision)
        refuse_sparse(wrapped.model, self.name)
        check_groups(optimizer)
        names = parameter_names(wrapped.model)
        wrapped.groups = [[names_of(p, names, key) for p in group["params"]] for group in optimizer.param_groups]
        held = [list(group["params"]) for group in optimizer.param_groups]
        trained = [p for params in held for p in params if p.requires_grad]
        saves, self._attached = [*optimizer.state_dict()], True
        self._check_batches()
        for parameter in filter(lambda p: not p.is_contiguous(), wrapped.model.parameters()):
            parameter.data = parameter.data.contiguous()  # DeepSpeed sends its bytes
        deepspeed_config.complete(config, sum(p.numel() for p in trained))
        self._detach = wrapped.detach
        self._watch_changes(wrapped)
        device_index = self.topology.local_rank if self.topology.device.index is None else self.topology.device.index
        wrapped.attach(optimizer, config, trained, self.topology.device, device_index)
        self._view = OptimizerView(optimizer, held, saves, wrapped)
        if wrapped.stage > 1:
            self._order = wrapped.call_order = CallOrder(
                self.timeout_s,
                wrapped.name_of,
                f"ZeRO-{wrapped.stage}",
                "use strategy='ddp' or 'deepspeed_stage_1'",
            )
        self._buffers = SharedBuffers(wrapped.model, self.broadcast_buffers)
        self._compare_edits(None, optimizers)  # those of the model by values, as the engine cuts it
        optimizer.register_step_pre_hook(self._only_through_the_engine)
        return optimizers

    # ---- 2. gradient sync ------------------------------------------------------------------------

    def forward_backward(
        self, wrapped: ZeroStep, step_fn: StepFn, window: Window, hooks: StepHooks = NO_HOOKS
    ) -> StepResult:
        if not hooks.automatic:
            self._refuse("manual_optimization")
        wrapped.begin_window(hooks)
        if self._view is not None:
            self._view.stepped = False
        try:
            with shared(self._buffers if self._in_group else None, window, self.name):
                result = super().forward_backward(wrapped, step_fn, window, wrapped.around_backward(hooks))
        finally:
            wrapped.access.is_users = True
        self._clipped = False
        if not result.count:
            wrapped.forget_gradients()
        return result

    def evaluate(
        self,
        wrapped: ZeroStep,
        step_fn: Callable[..., Any],
        micro_batch: MicroBatch,
        *args: Any,
        hooks: StepHooks = NO_HOOKS,
    ) -> Any:
        nothing = micro_batch.batch is None and not micro_batch.num_samples  # on all ranks
        if wrapped.engine is None or wrapped.stage < 3 or nothing:
            return super().evaluate(wrapped, step_fn, micro_batch, *args, hooks=hooks)
        with self.precision.autocast(self.topology.device):
            if micro_batch.num_samples:
                return wrapped.evaluate(functools.partial(step_fn, micro_batch.batch, *args))
            with no_trace(wrapped.model, hooks):  # padding runs too, as parameters are gathered on the way
                wrapped.evaluate(functools.partial(step_fn, micro_batch.batch, *args))
            return None

    def clip_gradients(
        self, wrapped: ZeroStep, optimizer: Optimizer, value: float, algorithm: str = "norm"
    ) -> Tensor | None:
        if self._given_clip is not None and (value, algorithm) != (self._given_clip, "norm"):
            raise ValueError(
                f"DeepSpeed's config has gradient_clipping={self._given_clip} (by norm), but the run has "
                f"gradient_clip_val={value} and gradient_clip_algorithm={algorithm!r}; drop one of them"
            )
        if not wrapped.has_gradients:
            raise RuntimeError(
                "the gradient of a window, or its norm, was asked for before the window's last backward, when "
                "DeepSpeed's engine has not summed it; ask in on_before_optimizer_step"
            )
        self._clipped = True
        gradients = {(None,): self.local_gradients(wrapped)}
        if algorithm == "norm":
            return clip_by_norm(gradients, value, self.topology.device)
        clip_by_value(gradients, value)
        return None

    def optimizer_step(self, wrapped: ZeroStep, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        assert self._view is not None
        if closure is not None:
            self._refuse("closures")
        if hooked := steps_with(optimizer):
            raise RuntimeError(
                f"{type(optimizer).__name__} has got {hooked} during the run, which would see flat pieces of the "
                f"parameters; {INSTEAD}"
            )
        if self._view.stepped:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step was called again for the same gradient, which DeepSpeed's engine "
                "drops as it steps; step once, or use strategy='ddp' or 'fsdp'"
            )
        if self._given_clip is not None and not self._clipped:
            self.clip_gradients(wrapped, optimizer, self._given_clip)
        # A host synchronization, as the engine cannot skip a step on the device.
        if self._non_finite is not None and bool(self._non_finite):
            wrapped.forget_gradients()
            return False
        self._adopt_weights(wrapped)
        self._steps = True
        try:
            with wrapped.access.of_engine(), self._view.of_engine():
                wrapped.engine.step()
            self._view.stepped = True
        finally:
            self._steps = wrapped.has_gradients = False
        return wrapped.engine.was_step_applied()

    def _adopt_weights(self, wrapped: ZeroStep) -> None:
        """Let the optimizer step what hooks have changed. Raises RuntimeError if ranks have changed other weights."""
        wrapped.partitions.adopt_weights()
        changed = wrapped.partitions.take_changed()
        if self._agreement is not None and self._agreement.first_rank(changed) is not None:
            check_weights_alike(wrapped, self.all_gather)

    def synchronize(self, wrapped: ZeroStep) -> None:
        if wrapped.engine is not None:
            self._adopt_weights(wrapped)

    # ---- 3. sampler seeding ----------------------------------------------------------------------

    def shard_loader(
        self, loader: Any, *, seed: int, shuffle: bool | None = None, accumulate: int = 1, split: bool = False
    ) -> ShardedLoader:
        sharded = super().shard_loader(loader, seed=seed, shuffle=shuffle, accumulate=accumulate, split=split)
        if self._batches is None:  # the first loader is the one to train on; without an optimizer nobody trains
            self._batches = accumulate, sharded.batch_size
            self._check_batches()
        return sharded

    # ---- 4. checkpointing ------------------------------------------------------------------------

    def state_dict(self, wrapped: ZeroStep, optimizers: dict[str, Optimizer]) -> State:
        if wrapped.engine is None:
            return super().state_dict(wrapped, optimizers)
        self._check_saved(optimizers)
        return checkpoint.save(wrapped, optimizers, self.topology)

    def load_state_dict(self, wrapped: ZeroStep, optimizers: dict[str, Optimizer], state: Reader) -> None:
        if wrapped.engine is None:
            return super().load_state_dict(wrapped, optimizers, state)
        self._check_saved(optimizers)
        checkpoint.load(wrapped, optimizers, state)

    def _check_saved(self, optimizers: dict[str, Optimizer]) -> None:
        for key in optimizers:
            assert self._view is not None
            self._view.check_saved(key)

    # ---- what the base class asks ------------------------------------------------------------------

    def run_step(self, wrapped: ZeroStep, step_fn: StepFn) -> StepFn:
        return functools.partial(wrapped.step, step_fn)

    def run_padding(self, wrapped: ZeroStep, step_fn: StepFn) -> StepFn:
        padding = functools.partial(wrapped.weightless_step, step_fn)
        return lambda batch, batch_idx: None if batch is None else padding(batch, batch_idx)

    def local_gradients(self, wrapped: ZeroStep) -> list[Tensor]:
        return wrapped.partitions.gradients()

    def end_backward(self, wrapped: ZeroStep) -> None:
        wrapped.access.is_users = wrapped.access.hides_gradients = True
        if self._order is not None:
            self._order.note(END_BACKWARD)

    def finish_gradients(self, wrapped: ZeroStep) -> None:
        wrapped.partitions.check_written()
        check_used(wrapped, None if self._agreement is None else self._agreement.gather, self.all_reduce)
        changed = self._changes.trainability() if self._changes is not None else []
        if changed:
            raise RuntimeError(
                f"requires_grad was changed within a step ({', '.join(changed[:5])}), but DeepSpeed's engine is built "
                "for the parameters that are trained when the run begins; use strategy='ddp' or 'fsdp'"
            )
        if self.topology.data_size > 1:
            torch._foreach_mul_(self.local_gradients(wrapped), self.topology.data_size)  # the engine averages
        wrapped.has_gradients = True

    def trainability_changed(self, wrapped: ZeroStep, names: list[str]) -> None:
        if wrapped.engine is None:
            return
        raise RuntimeError(
            f"requires_grad or the dtype of {shortened(names)} changed during the run, but ZeRO shards what is trained "
            "when it starts, as it is then; freeze and cast layers before fit, or use strategy='ddp' or 'fsdp'"
        )

    @contextmanager
    def whole(self, wrapped: ZeroStep) -> Iterator[None]:
        if wrapped.engine is None:
            yield
            return
        with wrapped.partitions.unsharded(wrapped.has_gradients):
            yield

    def read_gradient(self, wrapped: ZeroStep, parameter: nn.Parameter) -> Tensor | None:
        return wrapped.partitions.gradient(parameter) if parameter.requires_grad else None

    def write_gradient(self, wrapped: ZeroStep, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        if gradient is not None:
            wrapped.partitions.set_gradient(parameter, gradient)
        elif wrapped.has_gradients:  # all of them, at the first parameter
            wrapped.forget_gradients()

    def unwrap(self, wrapped: ZeroStep) -> nn.Module:
        return wrapped.model

    # ---- helpers -----------------------------------------------------------------------------------

    def _check_batches(self) -> None:
        """Compare DeepSpeed's config with the loader, once both are known."""
        if self._attached and self._batches is not None:
            deepspeed_config.check_batches(self._given_batches, *self._batches, self.topology.data_size)

    def _only_through_the_engine(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._steps:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step was called, but it holds pieces that only DeepSpeed's engine may "
                "step; leave the step to the Trainer"
            )
