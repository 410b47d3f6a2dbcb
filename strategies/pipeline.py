"""Layers over ranks: torch.distributed.pipelining around a training step that stays as it is."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_flatten

from strategies import pipeline_split
from strategies.base import Agreement, Loss, Note
from strategies.data import MicroBatch, Window
from strategies.eager import EagerStrategy, detach, weighted_losses
from strategies.permutation import mix
from strategies.pipeline_schedule import Schedule, schedule as find_schedule
from strategies.pipeline_stage import Layout, Stage, Staged, kept_streams, seed_streams
from strategies.precision import Precision
from strategies.state import Reader, State, gather_state, names_of, parameter_names, restore_state


class Pipeline(EagerStrategy):
    """Pipeline parallelism: each rank holds some layers, and parts of a micro-batch follow each other through them.

    One module holds every trainable parameter and is called once a step. `training_step` stays as it is: it runs
    on every rank, for each part of the batch, as far as the layers of that rank go; on the rank of the last stage
    it runs to its end, and what it logs and returns there counts. Tensors of a batch whose first dimension is the
    number of samples are cut into parts, as are lists of that length; the rest is given to each part whole.
    `on_before_backward` is called there for each part; `on_train_batch_end` and the like get outputs there and
    None on other ranks.

    `schedule`: "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv" or "dualpipev".
    `num_micro_batches`: parts of a micro-batch; None takes as many as there are stages.
    `stages_per_rank`: for the interleaved and looped schedules; None takes 2. "gpipe" and "1f1b" have 1, "zbv" and "dualpipev" 2.
    `module`: name of the pipelined module; None finds it.
    `split`: names of the layers with which stages 1, 2, ... begin; None balances the stages.
    `sample`: an input of the pipelined module (a tensor or a tuple of arguments): stages are balanced by the seconds
        that layers take on it instead of by their numbers of parameters.
    `timeout_s`: seconds that a collective waits for the other ranks.
    """

    def __init__(
        self,
        *,
        schedule: str = "1f1b",
        num_micro_batches: int | None = None,
        stages_per_rank: int | None = None,
        module: str | None = None,
        split: Sequence[str] | None = None,
        sample: Any = None,
        timeout_s: float = 1800.0,
    ) -> None:
        super().__init__()
        self.schedule = find_schedule(schedule, stages_per_rank)
        if num_micro_batches is not None and (isinstance(num_micro_batches, bool) or not isinstance(num_micro_batches, int) or num_micro_batches < 1):
            raise ValueError(f"num_micro_batches must be a whole number of at least 1, but num_micro_batches={num_micro_batches!r}")
        if split is not None and sample is not None:
            raise ValueError("split says where stages begin, and sample how to balance them; give one of them")
        self.num_micro_batches = num_micro_batches
        self.module, self.split, self.sample = module, split, sample
        self.timeout_s = timeout_s
        self._group: dist.ProcessGroup | None = None
        self._seed = 0
        self._steps_seen = 0
        self._orders: dict[str, list[list[str]]] = {}
        self._engines: dict[Any, Any] = {}

    # ---- 1. processes and devices ----------------------------------------------------------------

    def configure(self, *, devices: int | str = "auto", accelerator: str = "auto", num_nodes: int = 1, precision: str = "32-true") -> None:
        super().configure(devices=devices, accelerator=accelerator, num_nodes=num_nodes, precision=precision)
        if self.precision.name == "16-mixed":
            raise ValueError("precision='16-mixed' scales losses, which stages of a pipeline cannot agree on; use 'bf16-mixed'")

    def setup(self) -> None:
        super().setup()
        self._engines = {}
        if self.world_size == 1:
            return
        self.data_rank, self.data_size = 0, 1
        self.schedule.check(self.world_size, self._parts())
        self.reports = self._rank_of()[-1] == self.rank
        self._group = dist.new_group(backend="cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo")

    def teardown(self) -> None:
        super().teardown()
        self._engines, self._group = {}, None

    def place(self, model: nn.Module) -> nn.Module:
        model = self.precision.convert(model)
        if self.world_size == 1:
            return model.to(self.device)
        parts = pipeline_split.cut(model, self.module)
        costs = None
        if self.sample is not None:  # one rank's times for all
            costs = self.broadcast(pipeline_split.measure(parts, self.sample, self.device) if self.rank == 0 else None)
        rank_of = self._rank_of()
        staged = Staged(model, parts, pipeline_split.stages(parts, len(rank_of), self.split, costs), rank_of, self.rank, self.device)
        staged.group, staged.splits_backward = self._group, self.schedule.splits_backward
        self._steps_seen = 0
        return staged

    def attach(self, placed: nn.Module, optimizers: dict[str, Optimizer]) -> dict[str, Optimizer]:
        """Leave in the optimizers what this rank holds; placeholders of other stages' parameters go."""
        if isinstance(placed, Staged):
            names = parameter_names(placed.model)
            for key, optimizer in optimizers.items():
                if isinstance(optimizer, LBFGS):
                    raise ValueError(f"optimizer {key!r} is LBFGS, which needs all parameters on one rank; a pipeline needs an optimizer that treats them one by one")
                self._orders[key] = [[names_of(p, names, key) for p in group["params"]] for group in optimizer.param_groups]
                for group in optimizer.param_groups:
                    here = [not placed.is_placeholder(p) for p in group["params"]]
                    for parameter, stays in zip(group["params"], here, strict=True):
                        if not stays:
                            optimizer.state.pop(parameter, None)
                    for item in ("params", "param_names"):
                        if item in group:
                            group[item] = [value for value, stays in zip(group[item], here, strict=True) if stays]
            placed.strip()
        return super().attach(placed, optimizers)

    # ---- 2. gradient sync ------------------------------------------------------------------------

    def forward_backward(
        self,
        placed: nn.Module,
        step_fn: Callable[[Any, int], Any],
        window: Window,
        *,
        micro_batches: Iterable[MicroBatch] | None = None,
        automatic: bool = True,
        parameters: Mapping[str, Sequence[nn.Parameter]] | None = None,
        note: Callable[[], Note] | None = None,
        part: Callable[[int], AbstractContextManager[Any]] | None = None,
        before_backward: Callable[[Tensor], None] | None = None,
        after_backward: Callable[[], None] | None = None,
    ) -> Agreement:
        if not isinstance(placed, Staged):
            return super().forward_backward(
                placed,
                step_fn,
                window,
                micro_batches=micro_batches,
                automatic=automatic,
                parameters=parameters,
                note=note,
                part=part,
                before_backward=before_backward,
                after_backward=after_backward,
            )
        if not automatic:
            raise ValueError("a pipeline walks back by its schedule, so it needs automatic optimization; remove automatic_optimization = False, or use another strategy")
        placed.strip()
        self._steps_seen += 1
        last = len(window.micro_batches) - 1
        tally = _Tally()

        def send() -> None:
            told = note() if note else Note()
            self._control.send(told if self.reports else told._replace(keys=0), tally.count, tally.finite)  # type: ignore[union-attr]

        for i, micro_batch in enumerate(window.micro_batches if micro_batches is None else micro_batches):
            runs = _cut(micro_batch, self._parts())
            tally.outputs = []
            with kept_streams():
                for k, run in enumerate(runs):
                    feed = _Feed(
                        step_fn=step_fn,
                        batch_idx=micro_batch.batch_idx,
                        parts=run,
                        noise=mix(self._seed, self.data_rank, self._steps_seen, i, k),
                        scale=self.data_size / window.num_samples,
                        parameters=parameters,
                        context=part,
                        before_backward=before_backward,
                        before_last_backward=send if i == last and k == len(runs) - 1 else None,
                        tally=tally,
                    )
                    engine = self._engine(placed, feed)
                    if engine is not None:
                        engine.run(feed)
                    elif feed.before_last_backward is not None:
                        feed.before_last_backward()
            if i == last and not runs:
                send()
            if runs and after_backward is not None:
                after_backward()
            micro_batch.output = _merged(tally.outputs) if self.reports else None
        agreement = self._control.receive()  # type: ignore[union-attr]
        if agreement.count and agreement.count != window.num_samples:
            torch._foreach_mul_([p.grad for p in placed.model.parameters() if p.grad is not None], window.num_samples / agreement.count)
        return agreement

    def evaluate(
        self,
        placed: nn.Module,
        step_fn: Callable[..., Any],
        micro_batch: MicroBatch,
        *args: Any,
        part: Callable[[int], AbstractContextManager[Any]] | None = None,
    ) -> Any:
        if not isinstance(placed, Staged):
            return super().evaluate(placed, step_fn, micro_batch, *args, part=part)
        if not micro_batch.num_samples:
            return None
        placed.strip()
        noise = mix(self._seed, self.data_rank, *(arg for arg in args if isinstance(arg, int)))
        counts = nullcontext() if self.reports or part is None else part(0)
        with kept_streams(), counts, self.precision.autocast(self.device):
            seed_streams(noise)  # the step begins alike on all ranks
            return placed.run_evaluation(noise, lambda: step_fn(micro_batch.batch, *args))

    def backward(self, placed: nn.Module, loss: Tensor, weight: float = 1.0) -> None:
        if isinstance(placed, Staged):
            raise ValueError("a pipeline walks back by its schedule, so it needs automatic optimization; remove automatic_optimization = False, or use another strategy")
        super().backward(placed, loss, weight)

    def clip_gradients(self, placed: nn.Module, optimizer: Optimizer, value: float, algorithm: str = "norm") -> Tensor | None:
        if algorithm != "norm" or not isinstance(placed, Staged):
            return super().clip_gradients(placed, optimizer, value, algorithm)
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        own = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        squares = (own.to(self.device).double() ** 2).reshape(())
        dist.all_reduce(squares, group=self._group)
        norm = squares.sqrt().to(self.precision.dtype)
        if parameters:
            torch.nn.utils.clip_grads_with_norm_(parameters, value, norm)
        return norm

    # ---- 3. sampler seeding ----------------------------------------------------------------------

    def shard_loader(self, loader: Any, *, seed: int, shuffle: bool | None = None, accumulate: int = 1, split: bool = False) -> Any:
        if not self._seed:
            self._seed = seed  # equal on all ranks; noise is a function of it
        return super().shard_loader(loader, seed=seed, shuffle=shuffle, accumulate=accumulate, split=split)

    # ---- 4. checkpointing ------------------------------------------------------------------------

    def state_dict(self, placed: nn.Module, optimizers: dict[str, Optimizer]) -> State:
        if not isinstance(placed, Staged):
            return super().state_dict(placed, optimizers)
        placed.strip()
        state = gather_state(placed.model, optimizers)
        foreign = {f"model/{name}" for name in state.meta["model"] if not placed.is_here(name)}
        state.tensors = {name: shard for name, shard in state.tensors.items() if name not in foreign}
        own = {name: value for name, value in state.meta["model"].items() if placed.is_here(name)}
        pieces = [self.broadcast({"model": own, "optimizers": state.meta["optimizers"]}, rank) for rank in range(self.world_size)]
        state.meta["model"] = {name: value for piece in pieces for name, value in piece["model"].items()}
        for key, saved in state.meta["optimizers"].items():
            saved["state"] = {name: entry for piece in pieces for name, entry in piece["optimizers"][key]["state"].items()}
            for i, group in enumerate(saved["param_groups"]):
                group["params"] = self._order(key, i, [name for piece in pieces for name in piece["optimizers"][key]["param_groups"][i]["params"]])
                if "param_names" in group:
                    group["param_names"] = list(group["params"])
        state.meta["pipeline"] = {"steps_seen": self._steps_seen}
        return state

    def load_state_dict(self, placed: nn.Module, optimizers: dict[str, Optimizer], state: Reader) -> None:
        if not isinstance(placed, Staged):
            super().load_state_dict(placed, optimizers, state)
            return
        placed.strip()
        saved = set(state.meta["model"])
        if saved != placed.state_names:
            missing, unexpected = sorted(placed.state_names - saved), sorted(saved - placed.state_names)
            raise KeyError(f"the checkpoint does not fit the module: it lacks {missing[:5]} and has {unexpected[:5]} besides")
        for key in optimizers:
            for i, group in enumerate(state.meta["optimizers"].get(key, {}).get("param_groups", ())):
                order = self._orders.get(key, [])
                if i < len(order) and group["params"] != order[i]:
                    raise ValueError(f"optimizer {key!r} holds other parameters or groups than the one that was saved: group {i} had {group['params'][:3]}, now {order[i][:3]}")
        restore_state(placed.model, optimizers, _StageReader(state, set(placed.model.state_dict())))
        self._steps_seen = state.meta.get("pipeline", {}).get("steps_seen", 0)

    # ---- helpers -----------------------------------------------------------------------------------

    def _user_model(self, placed: nn.Module) -> nn.Module:
        return placed.model if isinstance(placed, Staged) else placed

    def _rank_of(self) -> list[int]:
        return self.schedule.rank_of(self.world_size)

    def _parts(self) -> int:
        return self.num_micro_batches or len(self._rank_of())

    def _order(self, key: str, index: int, names: list[str]) -> list[str]:
        """The names of a parameter group in the user's order."""
        known = self._orders.get(key, [])
        return [*known[index]] if index < len(known) and set(known[index]) == set(names) else names

    def _engine(self, placed: Staged, feed: _Feed) -> _Engine | None:
        """The schedule for parts of this shape: built when a shape is new, kept for the last two. None where the step makes no use of them."""
        key = (_shapes(feed.parts[0].batch), len(feed.parts))
        engine = self._engines.pop(key, None)
        if engine is None:
            with self.precision.autocast(self.device), feed.counted(0):
                layout = placed.layout_of(lambda: feed.step(0))
            if layout is None:
                return None
            fitting = self.schedule.fitting(self.world_size, len(feed.parts))
            engine = _Engine(placed, layout, fitting, len(feed.parts), self.precision)
        self._engines[key] = engine
        while len(self._engines) > 2:  # each has buffers for what it receives
            self._engines.pop(next(iter(self._engines)))
        return engine


@dataclasses.dataclass(slots=True)
class _Part:
    """What one pass through the stages works on."""

    batch: Any
    num_samples: int


@dataclasses.dataclass(slots=True)
class _Tally:
    """What the losses of a window came to, on the rank of the last stage."""

    count: float = 0.0
    finite: bool = True
    outputs: list[tuple[Any, int]] = dataclasses.field(default_factory=list)
    """What the step returned for each part of the running micro-batch, and its number of samples."""


@dataclasses.dataclass(slots=True)
class _Feed:
    """One run of a schedule: parts of equal size, and what to do with them."""

    step_fn: Callable[[Any, int], Any]
    batch_idx: int
    parts: list[_Part]
    noise: int
    scale: float
    """Turns a sum of losses into a share of the global mean."""
    parameters: Mapping[str, Sequence[nn.Parameter]] | None
    context: Callable[[int], AbstractContextManager[Any]] | None
    before_backward: Callable[[Tensor], None] | None
    before_last_backward: Callable[[], None] | None
    tally: _Tally

    def counted(self, num_samples: int) -> AbstractContextManager[Any]:
        """Where a step runs: what it logs weighs `num_samples`, none where another run of it counts."""
        return nullcontext() if self.context is None else self.context(num_samples)

    def step(self, index: int) -> Any:
        """The user's step on a part, from random streams that begin alike on all stages."""
        seed_streams(mix(self.noise, index, 0))
        return self.step_fn(self.parts[index].batch, self.batch_idx)


class _Engine:
    """A schedule of torch's, built for one shape and number of parts."""

    def __init__(self, placed: Staged, layout: Layout, schedule: Schedule, num_parts: int, precision: Precision) -> None:
        self._placed, self._layout, self._precision, self._num_parts = placed, layout, precision, num_parts
        self._loss_shape = (torch.empty((), device="meta", requires_grad=True),)
        stages = [
            PipelineStage(
                Stage(placed, stage, self._forward),
                stage,
                placed.num_stages,
                placed.device,
                input_args=layout.messages[stage - 1].tensors if stage else (),
                output_args=layout.messages[stage].tensors if stage < placed.num_stages - 1 else self._loss_shape,
                group=placed.group,
            )
            for stage in placed.here
        ]
        self._is_last = placed.here[-1] == placed.num_stages - 1
        self._schedule = schedule.build(stages, num_parts, self._loss)
        self._feed: _Feed | None = None
        self._passes: Counter[int] = Counter()
        self._error: Exception | None = None

    def run(self, feed: _Feed) -> None:
        """Forward and backward of all parts; gradients are added to those of the parameters."""
        self._feed, self._error = feed, None
        self._passes.clear()
        try:
            if self._is_last:
                self._schedule.step(target=torch.arange(self._num_parts), losses=[], return_outputs=False)
            else:
                if feed.before_last_backward is not None:
                    feed.before_last_backward()
                self._schedule.step(return_outputs=False)
        except RuntimeError:
            if self._error is None:
                raise
            raise self._error from self._error.__cause__  # the user's own, which torch wraps
        finally:
            self._feed = None

    def _forward(self, stage: int, received: tuple[Tensor, ...]) -> Any:
        """Every stage takes the parts in order."""
        feed, placed, index = self._feed, self._placed, self._passes[stage]
        self._passes[stage] += 1
        last = stage == placed.num_stages - 1
        assert feed is not None
        try:
            with self._precision.autocast(placed.device), feed.counted(feed.parts[index].num_samples if last else 0):
                output, sent = placed.run_stage(stage, received, self._layout, mix(feed.noise, index), lambda: feed.step(index))
            if last:
                return self._weighed(feed, feed.parts[index].num_samples, output, received)
            return sent if sent is not None else tuple(_nothing(t, received, placed.device) for t in self._layout.messages[stage].tensors)
        except Exception as error:
            self._error = error
            raise

    def _weighed(self, feed: _Feed, num_samples: int, output: Any, received: tuple[Tensor, ...]) -> Tensor:
        """The part of the global mean that this part's loss makes."""
        if feed.parameters is not None and isinstance(output, Mapping) and "loss" not in output:
            raise ValueError("a pipeline walks back once a step, so training_step must return one loss for all optimizers; join the losses, or use another strategy")
        losses, count = weighted_losses(output, num_samples, feed.scale, None)
        feed.tally.count += count
        feed.tally.outputs.append((detach(output), num_samples))
        if not losses:
            return _nothing(self._loss_shape[0], received, self._placed.device)
        ((loss, _),) = losses
        if loss.device.type == "cpu" and not math.isfinite(loss.item()):  # no host sync on an accelerator
            feed.tally.finite = False
        if feed.before_backward is not None:
            feed.before_backward(loss)
        return loss.reshape(()).clone()  # no view: torch detaches it in place

    def _loss(self, output: Tensor, index: Tensor) -> Tensor:
        """The last stage has computed the loss already."""
        if int(index) == self._num_parts - 1 and self._feed is not None and self._feed.before_last_backward is not None:
            self._feed.before_last_backward()
        return output


class _StageReader:
    """A saved state as if it held nothing but what lies on this rank."""

    def __init__(self, reader: Reader, model_names: set[str]) -> None:
        self.names, self.shape, self.read = reader.names, reader.shape, reader.read
        self.meta = dict(reader.meta)
        self.meta["model"] = {name: value for name, value in reader.meta["model"].items() if name in model_names}
        self.meta["optimizers"] = {key: self._mine(saved, model_names) for key, saved in reader.meta["optimizers"].items()}

    @staticmethod
    def _mine(saved: dict[str, Any], names: set[str]) -> dict[str, Any]:
        lists = ("params", "param_names")
        groups = [{**group, **{item: [n for n in group[item] if n in names] for item in lists if item in group}} for group in saved["param_groups"]]
        return {"param_groups": groups, "state": {name: entry for name, entry in saved["state"].items() if name in names}}


def _nothing(like: Tensor, received: tuple[Tensor, ...], device: torch.device) -> Tensor:
    """Zeros whose gradient is zero for all that was received: a part without weight."""
    zeros = torch.zeros(like.shape, dtype=like.dtype, device=device)
    if not like.requires_grad:
        return zeros
    empty = [t.flatten()[:0].sum().to(zeros.dtype) for t in received if t.requires_grad]  # of no element: not even a NaN comes through
    return zeros + sum(empty, torch.zeros((), dtype=zeros.dtype, device=device, requires_grad=True))


def _shapes(batch: Any) -> Any:
    """What the shapes within a step follow from."""
    leaves, spec = tree_flatten(batch)
    return str(spec), tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves)


def _cut(micro_batch: MicroBatch, num_parts: int) -> list[list[_Part]]:
    """A micro-batch as runs of parts of equal size; a second run where the number of samples is no multiple."""
    n = micro_batch.num_samples
    if not n:
        return []
    size, larger = divmod(n, min(num_parts, n))
    sizes = [size + 1] * larger + [size] * (min(num_parts, n) - larger)
    if len(sizes) == 1:
        return [[_Part(micro_batch.batch, n)]]
    if not _has_rows(micro_batch.batch, n):
        raise ValueError(
            f"a pipeline cuts batches along the first dimension of their tensors, but none in this {type(micro_batch.batch).__name__} has the batch's {n} samples there; "
            "let the loader make tensors, or lists, dicts and dataclasses of them, or give Pipeline(num_micro_batches=1)"
        )
    starts = [0, *accumulate(sizes)]
    parts = [_Part(_rows(micro_batch.batch, n, start, stop), stop - start) for start, stop in zip(starts, starts[1:], strict=False)]
    return [run for run in (parts[:larger], parts[larger:]) if run]


def _has_rows(batch: Any, n: int) -> bool:
    """Whether a tensor somewhere in `batch` has `n` rows."""
    if isinstance(batch, Tensor):
        return batch.dim() > 0 and len(batch) == n
    if isinstance(batch, Mapping):
        return any(_has_rows(value, n) for value in batch.values())
    if isinstance(batch, (list, tuple)):
        return any(_has_rows(item, n) for item in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return any(_has_rows(getattr(batch, f.name), n) for f in dataclasses.fields(batch))
    return False


def _rows(batch: Any, n: int, start: int, stop: int) -> Any:
    """Samples start to stop of a batch of `n`."""
    if isinstance(batch, Tensor):
        return batch[start:stop] if batch.dim() > 0 and len(batch) == n else batch
    if isinstance(batch, Mapping):
        rows = {key: _rows(value, n, start, stop) for key, value in batch.items()}
        return rows if type(batch) is dict else type(batch)(rows)  # type: ignore[call-arg]
    if isinstance(batch, (list, tuple)):
        if len(batch) == n and not _has_rows(batch, n):  # one item a sample
            return batch[start:stop]
        items = [_rows(item, n, start, stop) for item in batch]
        return items if isinstance(batch, list) else type(batch)(*items) if hasattr(batch, "_fields") else tuple(items)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return dataclasses.replace(batch, **{f.name: _rows(getattr(batch, f.name), n, start, stop) for f in dataclasses.fields(batch) if f.init})
    return batch


def _merged(outputs: list[tuple[Any, int]]) -> Any:
    """What a step has returned for the parts as what it would have returned for the whole: losses and other numbers averaged, tensors joined."""
    outputs = [(value, n) for value, n in outputs if value is not None]
    if len(outputs) <= 1:
        return outputs[0][0] if outputs else None
    first = outputs[0][0]
    if isinstance(first, Loss):
        return Loss(sum(value.total for value, _ in outputs), sum(value.count for value, _ in outputs))  # type: ignore[arg-type]
    if isinstance(first, Tensor):
        if first.dim():
            return torch.cat([value for value, _ in outputs])
        return sum(value * n for value, n in outputs) / sum(n for _, n in outputs)
    if isinstance(first, Mapping):
        return {key: _merged([(value[key], n) for value, n in outputs]) for key in first}
    return outputs[-1][0]

