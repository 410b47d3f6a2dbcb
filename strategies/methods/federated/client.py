"""The part of one client in a round: local steps from the server's weights, on the client's own samples."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.base import StepFn, StepHooks
from lockstep.strategies.data.permutation import mix
from lockstep.strategies.data.sharded_loader import MicroBatch, Window
from lockstep.strategies.launch import fault_injection
from lockstep.strategies.launch.rng import seed_streams
from lockstep.strategies.losses import detach
from lockstep.strategies.methods.federated.control import Control
from lockstep.strategies.methods.federated.copy import FreshOptimizers, RefusedOnClient, ServerCopy
from lockstep.strategies.methods.federated.loader import NotRead, Participant, Round, of_workers
from lockstep.strategies.modules.model_changes import gradient_marks, own_backward, remarked, shortened
from lockstep.strategies.modules.side_effect_free import Numbers, changed_numbers, numbers, put_back_numbers
from lockstep.strategies.spmd import SPMDStrategy
from lockstep.strategies.step import weighted_losses


@dataclass
class RoundRun:
    """What this rank has done of a round."""

    model: nn.Module
    step_fn: StepFn
    hooks: StepHooks
    server: ServerCopy
    window: Round
    held: set[int]
    """`id` of the parameters that optimizers step."""
    scale: float
    """A power of two by which weights are multiplied, so that fixed point holds them."""
    counted: float = 0.0
    notes: list[dict[str, Any]] = field(default_factory=list)
    """Of clients that raised ("error"), or whose weights are not finite ("bad")."""
    errors: dict[int, Exception] = field(default_factory=dict)
    """By client, as long as each one of this rank has raised."""
    trained: bool = False
    unowned: set[int] = field(default_factory=set)
    """`id` of the parameters that a gradient has reached but no optimizer steps."""


class ClientSteps(SPMDStrategy):
    """Base of `Federated`: runs the participants of this rank, one after the other."""

    _mu = 0.0
    """Of FedProx."""
    _control: Control | None = None
    """Of SCAFFOLD."""
    _optimizers: list[Optimizer]
    _fresh: FreshOptimizers

    def _run_clients(self, run: RoundRun) -> None:
        """Train all participants of this rank; leaves the model as the last of them has made it."""
        own = [participant for participant in run.window.participants if participant.steps]
        self._fresh.begin()
        for participant in own:
            part = Window(
                participant.micro_batches,
                participant.num_samples,
                num_batches=len(participant.micro_batches),
                more=participant is not own[-1],
            )
            run.server.put()
            self._fresh.reset()
            if self._control is not None:
                self._control.begin_client(participant.client)
            seed_streams(participant.seed)
            for name, stream in (run.hooks.streams or {}).items():
                stream.manual_seed(mix(participant.seed, zlib.crc32(name.encode())))
            prepared = _each(part.micro_batches if run.hooks.prepare is None else run.hooks.prepare(part))
            before = numbers(run.model), [(p, p.requires_grad) for p in run.model.parameters()]
            try:
                counted, total = self._train_client(run, participant, prepared)
            except (RefusedOnClient, NotRead, MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                if of_workers(error):
                    raise
                _put_back(run.model, *before)
                prepared.close()  # raises RefusedOnClient for what else the client has changed, and left
                if not run.trained:  # else it need not be raised, and would keep what its frames hold
                    run.errors[participant.client] = error
                note = {"client": participant.client, "name": participant.name, "error": _shown(error)}
                run.notes.append(note)
                continue
            finally:
                with suppress(RefusedOnClient):  # after an error that ends the run
                    prepared.close()  # where the client has raised, what it has logged does not count
                self._clear_gradients(run)
                participant.steps = []
            run.trained = True
            run.errors.clear()
            bad = run.server.add(counted * run.scale, total * run.scale)
            if bad is not None:
                run.notes.append({"client": participant.client, "name": participant.name, "bad": bad})
                continue
            if self._control is not None:
                self._control.add(participant.client, participant.num_samples * run.scale)
            run.counted += counted

    def _train_client(
        self, run: RoundRun, participant: Participant, prepared: Iterator[MicroBatch]
    ) -> tuple[float, float]:
        """Run a client's local steps; return what its losses counted and their sum."""
        before, streams = numbers(run.model), set(run.hooks.streams or ())
        calls = self._agreement.num_calls() if self._agreement is not None else 0
        counted, total = 0.0, 0.0
        marks = _versions(self._watched)
        for step in participant.steps:
            count, loss = self._local_step(run, step, prepared, marks)
            counted, total = counted + count, total + loss
            marks[:] = _versions(self._watched)
        if next(prepared, None) is not None:
            raise RuntimeError("a client was given more micro-batches than it has")
        self._refuse_changed(run, marks)
        if counts := changed_numbers(run.model, before):
            raise RefusedOnClient(
                f"training changed {shortened(counts, 5)} of the model on a client, which would depend on the clients "
                "that a rank runs; use trainer.global_step, self.log or a registered buffer of floating point, which "
                "is averaged"
            )
        if calls != (self._agreement.num_calls() if self._agreement is not None else 0):
            raise RefusedOnClient(
                "training_step or a hook of a batch called a collective of torch.distributed, but each client trains "
                "on one rank; call it in a hook of the epoch"
            )
        if added := set(run.hooks.streams or ()) - streams:
            raise RefusedOnClient(
                f"random_stream({sorted(added)[0]!r}) was first asked for while a client trained, so its first numbers "
                "would depend on the rank; ask for it in on_fit_start"
            )
        return counted, total

    def _local_step(
        self, run: RoundRun, step: list[MicroBatch], prepared: Iterator[MicroBatch], marks: list[tuple[int, bool]]
    ) -> tuple[float, float]:
        """One step of the client's optimizers; return what the losses counted and their sum."""
        hooks, asked = run.hooks, sum(micro_batch.num_samples for micro_batch in step)
        alone, count, total = len(step) == 1, 0.0, 0.0
        last = max((i for i, micro_batch in enumerate(step) if micro_batch.num_samples), default=0)
        for i in range(len(step)):
            micro_batch = next(prepared)
            self._refuse_changed(run, marks)
            if not micro_batch.num_samples:  # the collate function kept none
                continue
            before = gradient_marks(self._watched)
            with self.precision.autocast(self.topology.device):
                output = run.step_fn(micro_batch.batch, micro_batch.batch_idx)
            if before != gradient_marks(self._watched):
                raise RefusedOnClient(*own_backward(remarked(run.model.named_parameters(), before)).args)
            losses, counted = weighted_losses(
                output, micro_batch.num_samples, None if alone else 1 / asked, hooks.parameters
            )
            count += counted
            total += sum(float(value.detach()) for value, *_ in losses) * (counted if alone else asked)
            micro_batch.output = detach(output)
            if fault_injection.plan is not None:
                fault_injection.fault("backward")
            for j, (value, inputs, returned, _) in enumerate(losses):
                if hooks.before_backward is not None:
                    hooks.before_backward(returned)
                if inputs is None or inputs:
                    value.backward(retain_graph=j < len(losses) - 1, inputs=inputs)
                if hooks.after_backward is not None and (i < last or j < len(losses) - 1):
                    hooks.after_backward()
            marks[:] = _versions(self._watched)  # the step itself may change parameters
        if count:
            self._step_client(run, 1.0 if alone else asked / count)
        self._clear_gradients(run)
        return count, total

    def _step_client(self, run: RoundRun, scale: float) -> None:
        """Complete the gradients of a local step, and step the client's optimizers."""
        if scale != 1.0 and (gradients := [p.grad for p in self._watched if p.grad is not None]):
            torch._foreach_mul_(gradients, scale)
        if self._parameter_hooks.taken:
            self._run_parameter_hooks(run.model)
        server = run.server
        with torch.no_grad():
            for i in server.trained if self._mu else ():
                parameter = server.named[i][1]
                _add_gradient(parameter, (parameter - server.values[i]).mul_(self._mu))
            for parameter, correction in self._control.correct() if self._control is not None else ():
                _add_gradient(parameter, correction)
        if run.hooks.after_backward is not None:  # for the last backward, with the gradient that the optimizer gets
            run.hooks.after_backward()
        for optimizer in self._optimizers:
            if run.hooks.step is not None:
                run.hooks.step(optimizer)
            else:
                optimizer.step()

    def _clear_gradients(self, run: RoundRun) -> None:
        for parameter in run.model.parameters():
            if parameter.grad is not None and parameter.requires_grad and id(parameter) not in run.held:
                run.unowned.add(id(parameter))
            parameter.grad = None

    def _refuse_changed(self, run: RoundRun, marks: list[tuple[int, bool]]) -> None:
        """Raise RefusedOnClient if a hook has changed parameters since `marks` were taken."""
        if marks == _versions(self._watched):
            return
        named = list(run.model.named_parameters())
        changed = [
            name for (name, _), was, now in zip(named, marks, _versions(self._watched), strict=False) if was != now
        ]
        raise RefusedOnClient(
            f"a hook of a batch changed the parameters {shortened(changed)} or their requires_grad while a client "
            "trained, where the last batch of a rank would differ from the others; change them in training_step or in "
            "on_before_zero_grad, which is called once a round"
        )


def _each(batches: Iterable[MicroBatch]) -> Generator[MicroBatch, None, None]:
    yield from batches


def _put_back(model: nn.Module, before: Numbers, trained: list[tuple[nn.Parameter, bool]]) -> None:
    """Undo what a client that has raised has changed: numbers and modes of the model, and what is trained."""
    put_back_numbers(model, before)
    for parameter, requires_grad in trained:
        if parameter.requires_grad != requires_grad:
            parameter.requires_grad_(requires_grad)


def _versions(parameters: Iterable[nn.Parameter]) -> list[tuple[int, bool]]:
    return [(p._version, p.requires_grad) for p in parameters]


def _add_gradient(parameter: nn.Parameter, value: Tensor) -> None:
    parameter.grad = value.to(parameter.dtype) if parameter.grad is None else parameter.grad.add_(value)


def _shown(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
