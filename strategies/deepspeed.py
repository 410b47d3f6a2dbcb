"""Optimizer state, gradients and parameters cut over the ranks: ZeRO stages 1, 2 and 3 of DeepSpeed's own engine."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import io
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies import environment
from strategies.base import Agreement, Loss, split_loss
from strategies.data import MicroBatch, ShardedLoader, Window
from strategies.eager import EagerStrategy
from strategies.state import Reader, Shard, State, check_names, check_optimizers, check_shape, names_of, pack, parameter_names, saved_groups, unpack
from strategies.traceless import traceless

ELEMENTWISE = ("ASGD", "Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
"""torch's optimizers that treat each element by itself, so that it does not matter where tensors are cut."""
Part = Callable[[int], AbstractContextManager[Any]]
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class DeepSpeed(EagerStrategy):
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
    `timeout_s`: seconds that a collective waits for the other ranks.
    """

    def __init__(
        self,
        *,
        stage: int | None = None,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        config: Mapping[str, Any] | str | Path | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        super().__init__()
        if stage not in (None, 1, 2, 3):
            raise ValueError(f"stage must be 1, 2 or 3, but stage={stage!r}")
        self.timeout_s = timeout_s
        self._stage, self._offload_optimizer, self._offload_parameters = stage, offload_optimizer, offload_parameters
        self._source = config
        self._config: dict[str, Any] = {}
        self._given_batches: dict[str, int] = {}
        self._given_clip: float | None = None
        self._batches: tuple[int, int | None] | None = None
        self._attached = self._clipped = self._steps = False
        self._detach: Callable[[], None] = _nothing

    # ---- 1. processes and devices ----------------------------------------------------------------

    def configure(self, *, devices: int | str = "auto", accelerator: str = "auto", num_nodes: int = 1, precision: str = "32-true") -> None:
        super().configure(devices=devices, accelerator=accelerator, num_nodes=num_nodes, precision=precision)
        if importlib.util.find_spec("deepspeed") is None:
            raise ImportError("strategy='deepspeed' needs the package deepspeed; install it with `pip install 'lockstep[deepspeed]'`")
        if self.precision.name not in PRECISIONS:
            raise ValueError(f"DeepSpeed keeps float32 weights, or bfloat16 ones with float32 masters, so precision must be one of {', '.join(PRECISIONS)}, but precision={precision!r}")
        config = _read(self._source)
        self._config = _agreed(config, self._stage, self._offload_optimizer, self._offload_parameters, self.precision.name)
        self._given_batches = {key: self._config.pop(key) for key in BATCH_KEYS if key in self._config}
        self._given_clip = self._config.pop("gradient_clipping", None) or None

    def setup(self) -> None:
        super().setup()
        # torch 2.13 renamed collectives that DeepSpeed calls by their old names, several times a step.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
        if self.world_size == 1 and not dist.is_initialized():  # the engine wants a group, if only of one
            dist.init_process_group("cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)

    def teardown(self) -> None:
        self._detach()
        self._detach = _nothing
        self._attached = self._clipped = self._steps = False
        self._batches = None
        super().teardown()
        if "deepspeed.utils.groups" in sys.modules:  # the next engine of this process must not find groups that are gone
            sys.modules["deepspeed.utils.groups"]._release_process_group_references()

    def place(self, model: nn.Module) -> nn.Module:
        return _Step(self.precision.convert(model).to(self.device))

    def release(self, placed: nn.Module) -> None:
        if isinstance(placed, _Step) and placed.engine is not None:
            world = environment.detect()
            keeps = self.rank == 0 or (world is not None and world.launcher != "lockstep")  # else this process ends with the run
            placed.release(keeps)

    def attach(self, placed: nn.Module, optimizers: dict[str, Optimizer]) -> dict[str, Optimizer]:
        """Build the engine: from here on parameters, gradients and optimizer state are cut."""
        assert isinstance(placed, _Step)
        if len(optimizers) != 1:
            raise ValueError(
                f"DeepSpeed's engine steps one optimizer, but configure_optimizers returned {len(optimizers)} ({', '.join(optimizers)}); "
                "return one, with parameter groups where rates differ, or use strategy='ddp'"
            )
        ((key, optimizer),) = optimizers.items()
        kind = type(optimizer)
        config = copy.deepcopy(self._config)
        if not (kind.__module__.startswith("torch.optim.") and kind.__name__ in ELEMENTWISE) and not config.get("zero_allow_untested_optimizer"):
            raise ValueError(
                f"ZeRO hands the optimizer flat pieces of the parameters, which is exact only if it treats each element by itself; of {kind.__name__} that is not known: "
                f"use one of {', '.join(ELEMENTWISE)}, or set zero_allow_untested_optimizer to true in DeepSpeed's config"
            )
        scalar = next((name for name, p in placed.model.named_parameters() if not p.dim()), None)
        if scalar is not None:
            raise ValueError(f"DeepSpeed cannot send a parameter without dimensions, which {scalar} is; give it the shape (1,)")
        names = parameter_names(placed.model)
        placed.groups = [[names_of(p, names, key) for p in group["params"]] for group in optimizer.param_groups]
        trained = [[p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]
        if [] in trained:
            raise ValueError(f"group {trained.index([])} of the optimizer has no trainable parameter, and ZeRO has nothing to cut there; leave the group out")
        self._attached = True
        self._check_batches()
        # Windows are weighted and gradients clipped here.
        config |= {"zero_allow_untested_optimizer": True, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
        at_once = min(500_000_000, max(2**23, sum(p.numel() for group in trained for p in group) // 16))
        for name in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_max_reuse_distance"):  # elements beside those that a rank keeps
            if not {name, name.removeprefix("stage3_")} & set(config["zero_optimization"]):
                config["zero_optimization"][name] = at_once
        self._detach = placed.detach
        placed.attach(optimizer, config, [p for group in trained for p in group], self.device, self.local_rank)
        optimizer.register_step_pre_hook(self._only_through_the_engine)
        return optimizers

    # ---- 2. gradient sync ------------------------------------------------------------------------

    def forward_backward(
        self, placed: nn.Module, step_fn: Callable[[Any, int], Any], window: Window, *, micro_batches: Iterable[MicroBatch] | None = None, automatic: bool = True, **options: Any
    ) -> Agreement:
        assert isinstance(placed, _Step)
        if not automatic:
            raise ValueError("DeepSpeed's engine decides when gradients meet, so it cannot optimize manually; set automatic_optimization = True, or use strategy='ddp'")
        placed.begin_window(options.get("part"))
        agreement = super().forward_backward(placed, step_fn, window, micro_batches=placed.each(window, micro_batches), **options)
        self._clipped = False
        if agreement.count:
            placed.check_unused()
        else:
            placed.forget_gradients()
        return agreement

    def evaluate(self, placed: nn.Module, step_fn: Callable[..., Any], micro_batch: MicroBatch, *args: Any, part: Part | None = None) -> Any:
        assert isinstance(placed, _Step)
        if placed.engine is None or placed.stage < 3:
            return super().evaluate(placed, step_fn, micro_batch, *args, part=part)
        with self.precision.autocast(self.device):
            if micro_batch.num_samples:
                return placed.evaluate(functools.partial(step_fn, micro_batch.batch, *args))
            with _no_trace(placed.model, part):  # padding runs too, as parameters are gathered on the way
                placed.evaluate(functools.partial(step_fn, micro_batch.batch, *args))
            return None

    def backward(self, placed: nn.Module, loss: Tensor, weight: float = 1.0) -> None:
        raise RuntimeError("DeepSpeed's engine decides when gradients meet, so there is no manual backward; return the loss from training_step, or use strategy='ddp'")

    def clip_gradients(self, placed: nn.Module, optimizer: Optimizer, value: float, algorithm: str = "norm") -> Tensor | None:
        if self._given_clip is not None and (value, algorithm) != (self._given_clip, "norm"):
            raise ValueError(
                f"DeepSpeed's config has gradient_clipping={self._given_clip} (by norm), but the run has gradient_clip_val={value} and gradient_clip_algorithm={algorithm!r}; drop one of them"
            )
        self._clipped = True
        gradients = self._gradients(placed)
        if algorithm != "norm":
            torch._foreach_clamp_min_(gradients, -value)
            torch._foreach_clamp_max_(gradients, value)
            return None
        norm = self.all_reduce(torch.nn.utils.get_total_norm(gradients).double().square()).sqrt()
        torch._foreach_mul_(gradients, (value / (norm + 1e-6)).clamp(max=1.0).to(gradients[0].dtype))
        return norm.float()

    def optimizer_step(self, placed: nn.Module, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        assert isinstance(placed, _Step)
        if closure is not None:
            raise ValueError(f"DeepSpeed's engine steps without a closure, which {type(optimizer).__name__} needs; use strategy='ddp'")
        if self._given_clip is not None and not self._clipped:
            self.clip_gradients(placed, optimizer, self._given_clip)
        self._steps = True
        try:
            placed.engine.step()
        finally:
            self._steps = False
        return placed.engine.was_step_applied()

    # ---- 3. sampler seeding ----------------------------------------------------------------------

    def shard_loader(self, loader: Any, *, seed: int, shuffle: bool | None = None, accumulate: int = 1, split: bool = False) -> ShardedLoader:
        sharded = super().shard_loader(loader, seed=seed, shuffle=shuffle, accumulate=accumulate, split=split)
        if self._batches is None:  # the first loader is the one to train on; without an optimizer nobody trains
            self._batches = accumulate, sharded.batch_size
            self._check_batches()
        return sharded

    # ---- 4. checkpointing ------------------------------------------------------------------------

    def state_dict(self, placed: nn.Module, optimizers: dict[str, Optimizer]) -> State:
        """Each rank contributes its rows of every tensor; the tensors are gathered one at a time."""
        assert isinstance(placed, _Step)
        if placed.engine is None:
            return super().state_dict(placed, optimizers)
        state, shared = State(), State()  # `shared`: what all ranks hold alike, rank 0 writes
        model: dict[str, Any] = {}
        for name, value in placed.model.state_dict(keep_vars=True).items():
            if isinstance(value, Tensor):
                self._contribute(state, f"model/{name}", placed.whole(value))
                model[name] = None
            else:
                model[name] = pack(value, f"model/{name}", shared.tensors)
        ((key, optimizer),) = optimizers.items()
        entries: dict[str, Any] = {}
        for name, parameter in placed.named_trained():
            for k, v in optimizer.state.get(placed.flat(parameter), {}).items():
                full = f"optimizer/{key}/{name}/{k}"
                if isinstance(v, Tensor) and v.dim():
                    self._contribute(state, full, placed.whole(parameter, v))
                    v = {"$tensor": full}
                else:
                    v = pack(v, full, shared.tensors)
                entries.setdefault(name, {})[k] = v
        groups = [{**group, "params": names} for group, names in zip(optimizer.param_groups, placed.groups, strict=True)]
        packed = [pack(group, f"optimizer/{key}/group{i}", shared.tensors) for i, group in enumerate(groups)]
        state.meta = {"model": model, "optimizers": {key: {"param_groups": packed, "state": entries}}}
        if self.rank == 0:
            state.tensors.update(shared.tensors)
        return state

    def load_state_dict(self, placed: nn.Module, optimizers: dict[str, Optimizer], state: Reader) -> None:
        """Each rank reads its own pieces only."""
        assert isinstance(placed, _Step)
        if placed.engine is None:
            return super().load_state_dict(placed, optimizers, state)
        own = placed.model.state_dict(keep_vars=True)
        check_names(own, state)
        extra = {}
        with torch.no_grad():
            for name, value in own.items():
                if isinstance(value, Tensor):
                    check_shape(name, placed.shape(value), state)
                    placed.fill(value, functools.partial(_read_range, state, f"model/{name}", placed.shape(value)))
                else:
                    extra[name] = unpack(state.meta["model"][name], state.read)
            if extra:
                placed.model.load_state_dict(extra, strict=False)
            if optimizers:
                ((key, optimizer),) = optimizers.items()
                check_optimizers(optimizers, state)
                for group, saved in zip(optimizer.param_groups, saved_groups(state, key, placed.groups), strict=True):
                    group.update({name: value for name, value in saved.items() if name != "params"})
                self._load_optimizer(placed, optimizer, key, state)
            placed.refresh()

    # ---- what the base class asks ------------------------------------------------------------------

    def _runner(self, placed: nn.Module, step_fn: Callable[[Any, int], Any] | None) -> Callable[[Any, int], Any]:
        assert isinstance(placed, _Step) and step_fn is not None
        return functools.partial(placed.step, step_fn)

    def _padding(self, placed: nn.Module, step_fn: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
        assert isinstance(placed, _Step)
        return functools.partial(placed.weightless_step, step_fn)

    def _gradients(self, placed: nn.Module) -> list[Tensor]:
        assert isinstance(placed, _Step)
        return placed.gradients()

    def _user_model(self, placed: nn.Module) -> nn.Module:
        assert isinstance(placed, _Step)
        return placed.model

    # ---- helpers -----------------------------------------------------------------------------------

    def _check_batches(self) -> None:
        """Compare DeepSpeed's config with the loader, once both are known."""
        if not self._attached or self._batches is None:
            return
        accumulate, size = self._batches
        ours: dict[str, tuple[str, float | None]] = {
            "gradient_accumulation_steps": ("accumulate_grad_batches", accumulate),
            "train_batch_size": ("samples of all ranks in a step", size),
            "train_micro_batch_size_per_gpu": ("samples of a rank in a micro-batch", size and size / accumulate / self.data_size),
        }
        for key, theirs in self._given_batches.items():
            what, value = ours[key]
            if value is not None and theirs != value:
                raise ValueError(f"DeepSpeed's config has {key}={theirs}, but the run has {what}={value:g}; drop the key from the config, or give the run the same")

    def _only_through_the_engine(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._steps:
            raise RuntimeError(f"{type(optimizer).__name__}.step was called, but under DeepSpeed the engine steps it; call the module's own optimizer_step (super().optimizer_step(...)) instead")

    def _contribute(self, state: State, name: str, whole: Tensor) -> None:
        """Add this rank's rows of a tensor that all ranks hold."""
        shape = tuple(whole.shape)
        rows = shape[0] if shape and whole.numel() else 1
        first, last = self.rank * rows // self.world_size, (self.rank + 1) * rows // self.world_size
        if first < last:
            mine = whole[first:last] if rows > 1 else whole
            state.tensors[name] = Shard(mine.detach().to("cpu", copy=True), shape, (first, *[0] * len(shape))[: len(shape)])

    def _load_optimizer(self, placed: _Step, optimizer: Optimizer, key: str, state: Reader) -> None:
        """Put saved optimizer state, a tensor a parameter, into the flat tensors that the engine steps."""
        saved = state.meta["optimizers"][key]["state"]
        if not saved:
            return
        optimizer.state.clear()
        for name, parameter in placed.named_trained():
            if name not in saved:
                raise ValueError(f"the checkpoint holds optimizer state of other parameters, but none of {name}, and ZeRO steps them together; go on under the strategy that saved it")
            shape, flat = placed.shape(parameter), placed.flat(parameter)
            entry = optimizer.state[flat]
            for k, v in saved[name].items():
                full = f"optimizer/{key}/{name}/{k}"
                if isinstance(v, dict) and "$tensor" in v and k != "step" and tuple(state.shape(full)) == shape:
                    if k not in entry:
                        entry[k] = torch.zeros_like(flat)
                    placed.fill(parameter, functools.partial(_read_range, state, full, shape), entry[k])
                    continue
                value = unpack(v, state.read)
                if isinstance(value, Tensor) and (optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")):
                    value = value.to(flat.device)
                if not bool(entry.setdefault(k, value) == value):
                    raise ValueError(f"the checkpoint's {k} of {name} is {value}, but {entry[k]} of other parameters, and ZeRO keeps one for all; go on under the strategy that saved it")


class _Step(nn.Module):
    """What the engine wraps: a module whose forward is a step of the user's module. Knows where the engine keeps what it cuts.

    The step and its output pass by the engine's hooks, which would take batches and outputs apart; only the loss goes through them.
    """

    engine: Any = None

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.groups: list[list[str]] = []
        """Names of the parameters in each group of the optimizer."""
        self.call: Callable[[], Any] = _nothing
        self.forwarded: Callable[[], Any] = _nothing
        self.last: Callable[[], Any] | None = None
        """A step on the last micro-batch that gave a loss."""
        self.output: Any = None
        self.part: Part | None = None
        self.ran = False
        """Whether the running step has called a submodule."""

    def attach(self, optimizer: Optimizer, config: dict[str, Any], trained: list[nn.Parameter], device: torch.device, local_rank: int) -> None:
        """Build the engine. Every rank calls it."""
        self.local_rank = local_rank
        self.before = [(owner, set(vars(owner))) for owner in (*self.model.modules(), *self.model.parameters())]
        self.linear = F.linear  # replaced by ZeRO-3
        accelerator = {"DS_ACCELERATOR": "cpu"} if device.type == "cpu" else {}
        with _environment(LOCAL_RANK=str(local_rank), **accelerator), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            import deepspeed

            # An operator for inference, which would be compiled here (45 s, and not without g++).
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
            engine, *_ = deepspeed.initialize(model=self, optimizer=optimizer, config=config, dist_init_required=False)
        self.__dict__["engine"] = engine  # no child: the engine holds this module
        self.stage = int(engine.zero_optimization_stage())
        self.trained = trained
        self.offloads = engine.zero_cpu_offload()
        self.kept = [flat.grad for flat in self.flats()]
        self.used = _Used(trained)
        self.hooks = [child.register_forward_pre_hook(self._note_run) for child in self.model.modules()] if self.stage == 3 else []
        if engine.optimizer.optimizer is not optimizer:
            raise ValueError(f"DeepSpeed replaces {type(optimizer).__name__} by an optimizer of its own, which schedulers do not reach; use another optimizer")

    def release(self, keep: bool) -> None:
        """Take the engine off; with `keep` the model holds its weights, whole. Every rank calls it."""
        whole = []
        for parameter in self.model.parameters():
            value = self.whole(parameter) if self.stage == 3 else parameter.detach()
            whole += [(parameter, value.to(parameter.dtype, copy=True))] if keep else []
        self.detach()
        for parameter, value in whole:
            parameter.data = value

    def detach(self) -> None:
        """Remove the engine and what it has put on the model. Calls no collective; where parameters were cut, they stay so."""
        if self.engine is None:
            return
        self.used.close()
        for hook in self.hooks:
            hook.remove()
        self.engine.destroy()
        del self.__dict__["engine"]
        F.linear = self.linear
        for owner, names in self.before:
            for name in set(vars(owner)) - names:
                del vars(owner)[name]
            if isinstance(owner, nn.Module):
                vars(owner)["_parameters"] = dict(owner._parameters)

    # ---- a window --------------------------------------------------------------------------------

    def begin_window(self, part: Part | None) -> None:
        self.part = part
        optimizer = self.engine.optimizer
        if self.stage == 3:
            optimizer.grad_partitions_flat_buffer.zero_()  # a parameter without gradient would be stepped by its last one
        elif self.offloads:
            for flat, gradient in zip(self.flats(), self.kept, strict=True):
                flat.grad = gradient  # the optimizer's own zero_grad has dropped the buffers that the engine copies into

    def each(self, window: Window, micro_batches: Iterable[MicroBatch] | None) -> Iterator[MicroBatch]:
        """The micro-batches, telling the engine which one ends the window: it must not count them itself."""
        last = len(window.micro_batches) - 1
        for i, micro_batch in enumerate(window.micro_batches if micro_batches is None else micro_batches):
            self.engine.set_gradient_accumulation_boundary(i == last)
            yield micro_batch

    def step(self, step_fn: Callable[[Any, int], Any], batch: Any, batch_idx: int) -> Any:
        """What the step returns, through the engine. Where it returns None, gradients of zero."""
        self.call = functools.partial(step_fn, batch, batch_idx)
        value = self._through_engine(self._loss)
        return _with_loss(self._taken(), value)

    def weightless_step(self, step_fn: Callable[[Any, int], Any], batch: Any, batch_idx: int) -> Loss:
        """Padding: the other ranks exchange parameters and gradients in this micro-batch, in the order in which they are used."""
        with _no_trace(self.model, self.part):
            output = self.step(step_fn, batch, batch_idx)
        value: Any = split_loss(output, 0)[0]
        return Loss(value * 0, 0)

    def evaluate(self, call: Callable[[], Any]) -> Any:
        self.call = call
        self._through_engine(self._output)
        return self._taken()

    def forward(self) -> Tensor | None:
        return self.forwarded()

    def _through_engine(self, forwarded: Callable[[], Any]) -> Any:
        self.forwarded = forwarded
        with _environment(LOCAL_RANK=str(self.local_rank)):  # where ZeRO-3 looks for it, and not every launcher sets it
            return self.engine()

    def _taken(self) -> Any:
        """The output of the step, which must not be kept alive here."""
        output, self.output, self.call = self.output, None, _nothing
        return output

    def _output(self) -> None:
        self.output = self.call()

    def _loss(self) -> Any:
        self.ran = False
        self.output = self.call()
        if self.output is not None:
            self.last = self.call if self.stage > 1 else None
            return split_loss(self.output, 0)[0]
        if self.stage == 1:
            return torch.stack([parameter.sum() * 0 for parameter in self.trained]).sum()
        if self.last is None or (self.ran and self.stage == 3):
            when = "for a rank's first micro-batch" if self.last is None else "after it had run the model"
            raise RuntimeError(
                f"training_step returned None {when}, but under ZeRO-{self.stage} every rank must do what the others do to exchange tensors; return Loss(total * 0, 0) for no weight"
            )
        with _no_trace(self.model, self.part):  # do again what the other ranks do now
            value: Any = split_loss(self.last(), 0)[0]
        return value * 0

    def _note_run(self, *_: Any) -> None:
        self.ran = True

    def check_unused(self) -> None:
        """Raise RuntimeError where the first window left parameters without gradient: ZeRO would step them all the same."""
        if self.used.closed or not self.used.seen:
            return
        self.used.close()
        unused = [name for name, parameter in self.named_trained() if id(parameter) not in self.used.seen]
        if unused:
            shown = ", ".join(unused[:10]) + (f" and {len(unused) - 10} more" if len(unused) > 10 else "")
            raise RuntimeError(
                f"these parameters got no gradient in a step, but ZeRO steps them with the others: {shown}; use them in training_step, or freeze them (requires_grad=False)"
            )

    def forget_gradients(self) -> None:
        """A window that counts nothing is not stepped: the next one must not add to it."""
        self.engine.optimizer.zero_grad()
        if self.stage < 3:
            self.engine.optimizer.micro_step_id = -1

    # ---- where things are ------------------------------------------------------------------------

    def flats(self) -> list[Tensor]:
        """This rank's pieces of the weights as the optimizer steps them, several parameters in one tensor."""
        optimizer = self.engine.optimizer
        return optimizer.fp32_partitioned_groups_flat if self.stage == 3 else optimizer.single_partition_of_fp32_groups

    def gradients(self) -> list[Tensor]:
        """This rank's pieces of the global gradient, once a window is through."""
        if self.offloads:
            return [flat.grad for flat in self.flats()]  # type: ignore[misc]
        return [gradient for group in self.engine.optimizer.averaged_gradients.values() for gradient in group]

    def named_trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that the optimizer steps, by canonical name, in the optimizer's order."""
        parameters = dict(self.model.named_parameters())
        return ((name, parameters[name]) for group in self.groups for name in group if parameters[name].requires_grad)

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        return tuple(getattr(tensor, "ds_shape", tensor.shape))

    def flat(self, parameter: nn.Parameter) -> Tensor:
        """The flat tensor of this rank for the parameter's group; optimizer state is kept under it."""
        if self.stage == 3:
            optimizer = self.engine.optimizer
            return self.flats()[optimizer.grad_position[optimizer.get_param_id(parameter)][0]]
        return self.flats()[self.engine.optimizer._get_param_group_idx(parameter)]

    def whole(self, tensor: Tensor, state: Tensor | None = None) -> Tensor:
        """All of a parameter or buffer, or of `state` (a tensor like `flat`) of a parameter. Every rank calls it."""
        piece = self._piece(tensor, state)
        if piece is None:
            return tensor.detach()
        shape = self.shape(tensor)
        buffer = torch.zeros(math.prod(shape), dtype=piece.source.dtype, device=self.engine.device)
        buffer[piece.offset : piece.offset + piece.source.numel()] = piece.source.detach().to(buffer.device)
        dist.all_reduce(buffer)
        return buffer.view(shape)

    def fill(self, tensor: Tensor, read: Callable[[int, int], Tensor], state: Tensor | None = None) -> None:
        """Copy into this rank's piece what `read(offset, numel)` gives of the flattened tensor."""
        piece = self._piece(tensor, state)
        if piece is None:
            tensor.copy_(read(0, tensor.numel()).view(tensor.shape))
        elif piece.source.numel():
            piece.source.copy_(read(piece.offset, piece.source.numel()))

    def refresh(self) -> None:
        """Let the parameters that the model computes with follow the weights that the optimizer steps. Every rank calls it."""
        optimizer = self.engine.optimizer
        if self.stage < 3:
            optimizer.update_lp_params()
            return
        for low, high in zip(optimizer.fp16_partitioned_groups_flat, self.flats(), strict=True):
            low.copy_(high)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)

    def _piece(self, tensor: Any, state: Tensor | None) -> _Piece | None:
        """This rank's piece of a tensor, or None where every rank holds all of it."""
        optimizer, rank = self.engine.optimizer, dist.get_rank()
        if self.stage == 3:
            if not hasattr(tensor, "ds_id"):
                return None
            source = tensor.ds_tensor
            if optimizer.get_param_id(tensor) in optimizer.grad_position:
                index, begin, numel = optimizer.grad_position[optimizer.get_param_id(tensor)]
                source = (self.flats()[index] if state is None else state)[begin : begin + numel]
            offset = rank * source.numel()
            return _Piece(source[: max(0, tensor.ds_numel - offset)], offset)
        if not hasattr(tensor, "_hp_mapping"):
            return None
        mapping = tensor._hp_mapping
        if mapping is None:
            return _Piece(self.flats()[0][:0], 0)
        at, numel = mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel
        return _Piece((self.flats()[mapping.param_group_index] if state is None else state)[at : at + numel], mapping.lp_fragment_address.start)


class _Piece(NamedTuple):
    source: Tensor
    """A flat view of what this rank holds."""
    offset: int
    """Where it begins in the flattened tensor."""


class _Used:
    """Notes which parameters get a gradient, until it is closed."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.seen: set[int] = set()
        self.closed = False
        self._hooks = [parameter.register_post_accumulate_grad_hook(lambda p: self.seen.add(id(p))) for parameter in parameters]

    def close(self) -> None:
        self.closed = True
        for hook in self._hooks:
            hook.remove()


@contextlib.contextmanager
def _no_trace(model: nn.Module, part: Part | None) -> Iterator[None]:
    """Run a step whose logged values, counters and random numbers do not count."""
    with traceless(model), contextlib.nullcontext() if part is None else part(0):
        yield


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set environment variables for a while, where they are not set."""
    missing = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in missing})
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def _nothing() -> None: ...


def _read(source: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """DeepSpeed's configuration as it was given."""
    config: Any = source or {}
    if not isinstance(config, Mapping):
        try:
            config = json.loads(Path(config).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"config must be a dict or the path of a JSON file, but config={str(source)!r} cannot be read: {error}") from None
        if not isinstance(config, dict):
            raise ValueError(f"DeepSpeed's config must be a JSON object, but {str(source)!r} holds {type(config).__name__}")

    def known(section: Mapping[str, Any]) -> dict[str, Any]:
        """A copy without "auto", by which files for other trainers leave a value open."""
        return {key: known(value) if isinstance(value, Mapping) else copy.deepcopy(value) for key, value in section.items() if value != "auto"}

    return known(config)


def _agreed(config: dict[str, Any], stage: int | None, offload_optimizer: bool, offload_parameters: bool, precision: str) -> dict[str, Any]:
    """DeepSpeed's configuration with the run's settings; raises ValueError where they contradict each other."""
    for section in ("optimizer", "scheduler"):
        if section in config:
            raise ValueError(f"DeepSpeed's config has the section {section!r}, but configure_optimizers makes it; drop the section")
    theirs = _get(config, "zero_optimization.stage")
    if theirs not in (None, 1, 2, 3):
        raise ValueError(f"DeepSpeed's config has zero_optimization.stage={theirs!r}, but it must be 1, 2 or 3")
    stage = stage or theirs or 2
    _set(config, "zero_optimization.stage", stage, f"stage={stage}", always=True)
    for name, option, offload in (("optimizer", "offload_optimizer", offload_optimizer), ("param", "offload_parameters", offload_parameters)):
        key = f"zero_optimization.offload_{name}.device"
        if _get(config, key) == "nvme":
            raise ValueError(f"DeepSpeed's config has {key}='nvme', where checkpoints cannot read it; give 'cpu'")
        if offload:
            _set(config, key, "cpu", f"{option}=True", always=True)
    if _get(config, "zero_optimization.offload_param.device") == "cpu" and stage != 3:
        raise ValueError(f"offload_parameters needs stage 3, where parameters are cut, but stage={stage}")
    for key, wanted in (("bf16", precision == "bf16-true"), ("fp16", False), ("torch_autocast", precision == "bf16-mixed")):
        _set(config, f"{key}.enabled", wanted, f"precision={precision!r}", always=wanted)
    if precision == "bf16-mixed":
        _set(config, "torch_autocast.dtype", "bfloat16", f"precision={precision!r}", always=True)
        config["torch_autocast"].setdefault("lower_precision_safe_modules", [])  # gradients meet in float32, as under every strategy
    _set(config, "gradient_allreduce_op", "mean", "gradients that are means")
    _set(config, "managed_gradient_accumulation", True, "windows that it weights itself")
    if stage < 3 and _get(config, "zero_optimization.offload_optimizer.device") != "cpu":
        config["zero_optimization"].setdefault("compute_grad_norm", False)  # `clip_gradients` computes it where it is wanted
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    config.setdefault("steps_per_print", 1_000_000_000)
    return config


def _get(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _set(config: dict[str, Any], key: str, ours: Any, setting: str, always: bool = False) -> None:
    """Raise ValueError where the configuration says something else than `ours`; with `always` write it where it says nothing."""
    theirs = _get(config, key)
    if theirs not in (None, ours):
        raise ValueError(f"DeepSpeed's config has {key}={theirs!r}, but the run has {setting}; drop one of them")
    if always:
        *sections, last = key.split(".")
        for section in sections:
            if not isinstance(config.get(section), dict):
                config[section] = {}
            config = config[section]
        config[last] = ours


def _with_loss(output: Any, value: Any) -> Any:
    """What a step returned, with the loss that went through the engine's hooks in its place."""
    if output is None:
        return Loss(value, 0)
    if isinstance(output, Loss):
        return Loss(value, output.count)
    return {**output, "loss": _with_loss(output["loss"], value)} if isinstance(output, Mapping) else value


def _read_range(state: Reader, name: str, shape: tuple[int, ...], offset: int, numel: int) -> Tensor:
    """`numel` elements of a saved tensor from element `offset` on; reads the rows that hold them."""
    if not shape or not numel:
        return state.read(name).reshape(-1)[offset : offset + numel]
    row = math.prod(shape[1:])
    first, last = offset // row, -(-(offset + numel) // row)
    rows = state.read(name, (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))
    return rows.reshape(-1)[offset - first * row :][:numel]
