"""The module that DeepSpeed's engine wraps: its forward is a step of the user's."""

from __future__ import annotations

import contextlib
import functools
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.base import NO_HOOKS, Loss, StepFn, StepHooks
from lockstep.strategies.data.sharded_loader import MicroBatch, Window
from lockstep.strategies.deepspeed.access import Access, refuse_copy
from lockstep.strategies.deepspeed.additions import Additions
from lockstep.strategies.deepspeed.engine import initialize, place_of
from lockstep.strategies.deepspeed.partitions import Partitions, group_of
from lockstep.strategies.launch import environment
from lockstep.strategies.losses import StandIn, counting_nothing, split_loss
from lockstep.strategies.modules.model_changes import own_backward
from lockstep.strategies.modules.side_effect_free import numbers, refuse_changed_numbers, side_effect_free
from lockstep.strategies.sync.call_order import END_FORWARD, GATHER, GATHER_FOR_BACKWARD, REDUCE, CallOrder


class ZeroStep(nn.Module):
    """What the engine wraps: a module whose forward is a step of the user's module.

    The step and its output pass by the engine's hooks, which would take batches and outputs apart; only the loss goes
    through them.
    """

    engine: Any = None
    partitions: Partitions
    """Where the engine keeps what it shards, once it is built."""
    __deepcopy__ = refuse_copy

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
        self.step_hooks = NO_HOOKS
        self.ran = False
        """Whether the running step has called a submodule."""
        self.counts = True
        """Whether the running step is one that one process would run too."""
        self.arrived: list[int] = []
        """Indices of the parameters in the order in which this window's backwards gave them a gradient."""
        self.in_backward: set[int] = set()
        """Those of the running backward."""
        self.used: set[int] = set()
        """Those of steps that one process would run too."""
        self.called: list[int] = []
        """Indices of submodules in the order in which this window's steps called them, under stage 3."""
        self.call_order: CallOrder | None = None
        """Compares what ranks gather and reduce on the way, from when it is set."""
        self.access = Access()
        self.has_gradients = False
        """Whether the engine holds the final gradient of a window."""

    def attach(
        self,
        optimizer: Optimizer,
        config: dict[str, Any],
        trained: list[nn.Parameter],
        device: torch.device,
        device_index: int,
    ) -> None:
        """Build the engine. Every rank calls it."""
        self.device_index = device_index
        self.place: dict[str, str | None] = {}
        self.additions = Additions(self.model)
        self.linear = F.linear  # replaced by ZeRO-3
        self.trained, self.num_modules = trained, len([*self.model.modules()])
        self.hooks: list[Any] = [  # before the engine's own
            parameter.register_post_accumulate_grad_hook(functools.partial(self._note_gradient, i))
            for i, parameter in enumerate(trained)
        ]
        cuts = config["zero_optimization"]["stage"] == 3  # torchmetrics objects have nothing to be cut
        modules = [m for m in self.model.modules() if cuts and next(m.parameters(), None) is not None]
        begin, end = self.access.begin_engine, self.access.end_engine  # around the engine's own hooks
        for i, module in enumerate(modules):
            self.hooks.append(module.register_forward_pre_hook(functools.partial(self._announce, GATHER, i)))
            self.hooks += [module.register_forward_pre_hook(begin), module.register_forward_hook(begin)]
            self.hooks.append(module.register_forward_hook(self._refuse_written))
        engine = initialize(self, optimizer, config, device, device_index)
        self.__dict__["engine"] = engine  # not a child: the engine holds this module
        self.additions.seal()
        if engine.optimizer.optimizer is not optimizer:
            raise ValueError(
                f"DeepSpeed replaces {type(optimizer).__name__} by an optimizer of its own, which schedulers do not "
                "reach; use another optimizer"
            )
        self.partitions = Partitions(engine, self.model, trained, self.access)
        self.stage = self.partitions.stage
        for i, module in enumerate(modules):
            own: list[Any] = list(module.parameters(recurse=False))
            cut = any(not parameter.ds_persist for parameter in own)
            before, after = module.register_forward_pre_hook, module.register_forward_hook
            self.hooks += [before(end), after(end), before(functools.partial(self._note_call, i if cut else None))]
        if self.stage == 3:
            self._announce_backward(engine.optimizer.parameter_offload, modules)
        else:
            name = "reduce_gradients" if self.stage == 1 else "overlapping_partition_gradients_reduce_epilogue"
            setattr(engine.optimizer, name, functools.partial(self._reduce_all, getattr(engine.optimizer, name)))
        stepped = set(map(id, trained))
        for name, parameter in self.model.named_parameters():
            if id(parameter) in stepped or hasattr(parameter, "ds_id"):
                self.access.guard(name, parameter, id(parameter) in stepped)

    def release(self, keep: bool) -> None:
        """Take the engine off; with `keep` the model holds its weights, whole. Every rank calls it."""
        whole = []
        with self.access.of_engine():
            self.partitions.adopt_weights()
            for parameter in self.model.parameters():
                value = self.partitions.whole(parameter) if self.stage == 3 else parameter.detach()
                whole += [(parameter, value.to(parameter.dtype, copy=True))] if keep else []
        self.detach()
        for parameter, value in whole:
            parameter.data = value

    def detach(self) -> None:
        """Remove the engine and what it has put on the model. Calls no collective; where parameters were cut, they stay
        so."""
        if self.engine is None:
            return
        for hook in self.hooks:
            hook.remove()
        vars(self).pop("partitions", None)
        for parameter in self.model.parameters():
            self.access.release(parameter)
        self.engine.destroy()
        del self.__dict__["engine"]
        F.linear = self.linear
        self.additions.remove()

    # ---- a window --------------------------------------------------------------------------------

    def begin_window(self, hooks: StepHooks) -> None:
        self.step_hooks = hooks
        self.arrived, self.called, self.used = [], [], set()
        self.access.hides_gradients = self.has_gradients = False
        self.partitions.begin_window()

    def around_backward(self, hooks: StepHooks) -> StepHooks:
        """The user's hooks around a backward, which is the engine's time to read parameters."""

        def before_backward(loss: Tensor) -> None:
            if hooks.before_backward is not None:
                hooks.before_backward(loss)
            self.access.is_users = False

        def after_backward() -> None:
            self.access.is_users = self.access.hides_gradients = True
            if hooks.after_backward is not None:
                hooks.after_backward()

        return hooks._replace(
            prepare=functools.partial(self.each, hooks.prepare),
            before_backward=before_backward,
            after_backward=after_backward,
        )

    def each(self, prepare: Callable[[Window], Iterable[MicroBatch]] | None, window: Window) -> Iterator[MicroBatch]:
        """The micro-batches, telling the engine which one ends the window: it must not count them itself."""
        last = len(window.micro_batches) - 1
        for i, micro_batch in enumerate(window.micro_batches if prepare is None else prepare(window)):
            self.engine.set_gradient_accumulation_boundary(i == last)
            if i and self.stage == 3:
                self.partitions.adopt_weights()  # what hooks have changed since the last one is gathered again
            yield micro_batch

    def step(self, step_fn: StepFn, batch: Any, batch_idx: int) -> Any:
        """What the step returns, through the engine. Where it returns None, gradients of zero."""
        self.call, self.counts = functools.partial(step_fn, batch, batch_idx), True
        return self._run_step()

    def _run_step(self) -> Any:
        self.in_backward = set()
        value = self._through_engine(self._loss)
        self._end_forward()
        return _with_loss(self._taken(), value)

    def weightless_step(self, step_fn: StepFn, batch: Any, batch_idx: int) -> Loss:
        """Padding: the other ranks exchange parameters and gradients in this micro-batch, in the order in which they
        are used."""
        self.call, self.counts = functools.partial(step_fn, batch, batch_idx), False
        before = numbers(self.model)
        with no_trace(self.model, self.step_hooks):
            output = self._run_step()
            refuse_changed_numbers(self.model, before)
        value: Any = split_loss(output, 0)[0]
        return counting_nothing(output, value * 0)

    def evaluate(self, call: Callable[[], Any]) -> Any:
        if self.stage == 3:  # else it reads the parameters themselves, and averages may be in their place for a while
            self.partitions.adopt_weights()
        self.call = call
        self._through_engine(self._output)
        self._end_forward()
        return self._taken()

    def forward(self) -> Tensor | None:
        self.access.is_users = True
        try:
            with environment.variables(self.place):
                return self.forwarded()
        finally:
            self.access.is_users = False

    def _through_engine(self, forwarded: Callable[[], Any]) -> Any:
        self.forwarded = forwarded
        with self.access.of_engine(), environment.variables(place_of(self.device_index)) as self.place:
            try:
                return self.engine()
            except BaseException:
                for module in self.modules():  # else who reads a parameter of it would gather it, without the others
                    if hasattr(module._parameters, "_in_forward"):
                        module._parameters._in_forward = False
                raise

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
        self.counts = False
        if self.stage == 1:
            return torch.stack([parameter.sum() * 0 for parameter in self.trained]).sum()
        value: Any = None
        when = "for a rank's first micro-batch" if self.last is None else "after it had run the model"
        if self.last is not None and not (self.ran and self.stage == 3):
            with no_trace(self.model, self.step_hooks):  # do again what the other ranks do now
                value, when = split_loss(self.last(), 0)[0], "for a reason that is not in its batch"
        if value is None:
            raise RuntimeError(
                f"training_step returned None {when}, but under ZeRO-{self.stage} a rank must do what the others do, "
                "as they exchange tensors on the way; "
                "return Loss(total * 0, 0) for no weight"
            )
        return value * 0

    def name_of(self, index: int) -> str:
        """Of a submodule, or behind these of a trained parameter, as `call_order` counts them."""
        modules = [name for name, _ in self.model.named_modules()]
        return modules[index] if index < len(modules) else self.names([index - len(modules)])[0]

    def _announce(self, kind: int, index: int, module: nn.Module, *_: Any) -> None:
        """Compare with the other ranks which submodule is gathered next, before the engine gathers it."""
        own: list[Any] = list(module.parameters(recurse=False))
        if self.call_order is not None and any(p.ds_status.name != "AVAILABLE" for p in own):
            self.call_order.note(kind, index)

    def _announce_backward(self, gatherer: Any, modules: list[nn.Module]) -> None:
        """Announce what the engine's `gatherer` gathers in a backward too."""
        indices, gather = {module: i for i, module in enumerate(modules)}, gatherer.pre_sub_module_backward_function

        def announced(module: nn.Module) -> None:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    "training_step takes the gradient of a gradient (create_graph=True), but ZeRO-3 frees parameters "
                    "after the first backward; use strategy='deepspeed_stage_2', 'fsdp' or 'ddp'"
                )
            if module in indices:
                self._announce(GATHER_FOR_BACKWARD, indices[module], module)
            gather(module)

        free = gatherer.post_sub_module_backward_function

        def checked(module: nn.Module) -> None:
            self.partitions.refuse_written(module, trains=True)
            free(module)

        gatherer.pre_sub_module_backward_function = announced
        gatherer.post_sub_module_backward_function = checked

    def _refuse_written(self, module: nn.Module, *_: Any) -> None:
        self.partitions.refuse_written(module, trains=torch.is_grad_enabled())

    def _end_forward(self) -> None:
        if self.call_order is not None:
            self.call_order.note(END_FORWARD)

    def _note_call(self, index: int | None, *_: Any) -> None:
        self.ran = True
        if index is not None:
            self.called.append(index)

    def _note_gradient(self, index: int, parameter: nn.Parameter) -> None:
        if self.access.is_users:
            raise own_backward(self.names([index]))
        if self.call_order is not None:
            self.call_order.note(REDUCE, self.num_modules + index)
        self.arrived.append(index)
        self.in_backward.add(index)
        if self.counts:
            self.used.add(index)

    def _reduce_all(self, reduce: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """In place of what ends the engine's backward under stages 1 and 2: ranks exchange a gradient for each
        parameter.

        One that this rank's samples did not use gets zeros here, as another rank may have used it.
        """
        optimizer = self.engine.optimizer
        for i, parameter in enumerate(self.trained):
            if i in self.in_backward or (
                self.stage == 1 and optimizer.get_gradient_for_reduction(parameter) is not None
            ):
                continue
            parameter.grad = torch.zeros_like(parameter)
            optimizer.process_gradients(parameter, group_of(optimizer, parameter))
        return reduce(*args, **options)

    def order(self) -> int:
        """A number below 2**32 of what this rank exchanged in the window, in its order; equal on ranks that did the
        same."""
        if self.stage == 1 and not self.engine.optimizer.overlap_comm:
            return 0  # whole gradients, reduced in the order of the parameters
        return zlib.crc32(array("q", [*self.arrived, -1, *self.called]).tobytes())

    def unused(self) -> list[int]:
        """The parameters for which no step of this rank gave a gradient."""
        return [i for i in range(len(self.trained)) if i not in self.used] if len(self.used) < len(self.trained) else []

    def names(self, indices: Iterable[int]) -> list[str]:
        """The names of trained parameters."""
        known = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return [known[id(self.trained[i])] for i in indices]

    def forget_gradients(self) -> None:
        """A window that counts nothing is not stepped: the next one must not add to it."""
        with self.access.of_engine():
            self.engine.optimizer.zero_grad()
        self.access.hides_gradients = self.has_gradients = False
        if self.stage < 3:
            self.engine.optimizer.micro_step_id = -1

    # ---- where things are ------------------------------------------------------------------------

    def named_trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that the optimizer steps, by canonical name, in the optimizer's order."""
        parameters = dict(self.model.named_parameters())
        return ((name, parameters[name]) for group in self.groups for name in group if parameters[name].requires_grad)


@contextlib.contextmanager
def no_trace(model: nn.Module, hooks: StepHooks) -> Iterator[None]:
    """Run a step whose logged values, counters and random numbers do not count."""
    with side_effect_free(model), hooks.log_scope(0):
        yield


def _nothing() -> None: ...


def _with_loss(output: Any, value: Any) -> Any:
    """What a step returned, with the loss that went through the engine's hooks in its place."""
    if output is None:
        return StandIn(value, 0)
    if isinstance(output, Loss):
        return Loss(value, output.count)
    return {**output, "loss": _with_loss(output["loss"], value)} if isinstance(output, Mapping) else value
