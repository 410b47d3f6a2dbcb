"""What user code changes in a model while a run is on: which parameters learn, and which there are."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

if TYPE_CHECKING:
    from lockstep.strategies.base import MicroBatch, StepHooks, Window

_GRADIENT, _TRAINED = operator.attrgetter("grad"), operator.attrgetter("requires_grad")


class ModelChanges:
    """Watches one wrapped model until it is closed. Costs nothing in a step."""

    def __init__(self, model: nn.Module, trained: Collection[str]) -> None:
        """`trained`: names of the parameters that were trainable when the model was wrapped."""
        self.model = model
        self._modules = {id(module) for module in model.modules()}
        self.parameters = dict(model.named_parameters())
        """The wrapped parameters by name."""
        self._flags = [name in trained for name in self.parameters]
        self._places: list[tuple[str, dict[str, nn.Parameter | None], str]] | None = None
        """Where `current` finds the parameters; None if that has changed."""
        self.in_step: Callable[[], Iterable[tuple[str, Tensor]]] = tuple
        """Gives by name what an engine has put in the place of parameters within a step."""
        self.gradients_apart: Callable[[], AbstractContextManager[None]] = nullcontext
        """Takes from these, while it lasts, the gradients of the parameters, for a backward that would add to them."""
        self.retrained: list[str] = []
        """The names of parameters whose `requires_grad` was changed, which the strategy has not taken over yet."""
        self.begin_step: Callable[[], None] | None = None
        """Takes that over, where ranks meet for it. Every rank calls it once the first hooks of a step have run."""
        self.in_step_hooks = False
        """Whether hooks run that come after that, before the last micro-batch's forward."""
        self.pending = False
        """Whether a parameter or module was registered in the model since the last call of `added`."""
        self.set_buffers: dict[tuple[nn.Module, str], None] = {}
        """The places in the model in which buffers were registered or replaced since it was emptied."""
        self._homes: dict[tuple[nn.Module, str], str] = {}
        self._moved: dict[tuple[nn.Module, str], str] = {}
        self._remember_places()
        self._hooks = [
            register_module_parameter_registration_hook(self._note),
            register_module_module_registration_hook(self._note),
            register_module_buffer_registration_hook(self._note_buffer),
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def added(self) -> list[str]:
        """The names of parameters that the model has now and had not when it was wrapped, and of those that it has no
        longer."""
        held = map(dict.get, self._tables, self._keys)
        if not self.pending and not any(map(operator.is_, held, itertools.repeat(None))):
            return []
        self.pending = False
        now = dict(self.model.named_parameters(remove_duplicate=False))
        known = {id(p) for _, p in self.hookable()}  # an engine may hold a layer that ran twice until the step ends
        ids = set(map(id, now.values()))
        names = [name for name, p in now.items() if id(p) not in known]
        if self._homes:
            return [*dict.fromkeys(names + self._displaced())]
        self._remember_places()
        return names + [name for name, p in self.parameters.items() if name not in now and id(p) not in ids]

    def _remember_places(self) -> None:
        """Where parameters are now, for `added` to see one that is set to None or deleted."""
        found = self._found()
        found = {place: held for place, held in found.items() if isinstance(place[0]._parameters, dict)}  # not scripted
        self._tables = [module._parameters for module, _ in found]
        self._keys = [key for _, key in found]

    def hold_places(self) -> None:
        """From here on `added` gives the names of parameters too that user code ties, moves or takes out of the model:
        for an engine that puts each of them back to where it found it."""
        names = {id(p): name for name, p in self.parameters.items()}
        self._homes = {place: names.get(id(p), name) for place, (name, p) in self._found().items()}
        _ = [*self.in_step()]  # an engine learns the names of what it holds while it is in the model

    def trainability(self) -> list[str]:
        """The names of parameters whose `requires_grad` differs from the last call."""
        flags = [*map(_TRAINED, self.parameters.values())]
        if flags == self._flags:
            return []
        changed = [name for name, new, old in zip(self.parameters, flags, self._flags, strict=True) if new != old]
        self._flags = flags
        return changed

    def hookable(self) -> Iterator[tuple[str, Tensor]]:
        """By name, each tensor on which a user may have registered a hook for the gradient of a parameter."""
        yield from self.parameters.items()
        yield from self.in_step()

    def current(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that are in the model now, by name: an engine's, while those stand for the wrapped ones."""
        if self._places is None:
            self._places, found = [], set()
            for name, module in self.model.named_modules():
                self._modules.add(id(module))
                for key, parameter in module._parameters.items():
                    if parameter is not None and parameter not in found:
                        found.add(parameter)
                        self._places.append((f"{name}.{key}" if name else key, module._parameters, key))
        return [(name, p) for name, place, key in self._places if (p := place.get(key)) is not None]

    def _note(self, module: nn.Module, name: str, value: object) -> None:
        if id(module) not in self._modules:
            return
        self.pending, self._places = True, None
        if (module, name) in self._homes:
            own = self._homes[module, name]
            same = value is module._parameters.get(name)
            if same or any(value is p for known, p in self.hookable() if known == own):
                self._moved.pop((module, name), None)
            else:  # within a step the engine may have undone it before `added` looks
                self._moved[module, name] = own

    def _note_buffer(self, module: nn.Module, name: str, _: object) -> None:
        if id(module) in self._modules:
            self.set_buffers[module, name] = None

    def _found(self) -> dict[tuple[nn.Module, str], tuple[str, nn.Parameter]]:
        """Where the model has parameters now: modules and keys, with names that tied ones do not share."""
        return {
            (module, key): (f"{name}.{key}" if name else key, p)
            for name, module in self.model.named_modules()
            for key, p in module._parameters.items()
            if p is not None
        }

    def _displaced(self) -> list[str]:
        """The names of parameters in whose place others were put, that are gone, or that are in a place besides."""
        found = self._found()
        new = [name for place, (name, _) in found.items() if place not in self._homes]
        gone = [name for place, name in self._homes.items() if place not in found]
        return [*self._moved.values(), *new, *gone]


def prepared(window: Window, hooks: StepHooks, changes: ModelChanges | None) -> Iterator[MicroBatch]:
    """The micro-batches of a window as hooks prepare them; before the first one the step begins."""
    micro_batches = window.micro_batches if hooks.prepare is None else hooks.prepare(window)
    if changes is None or changes.begin_step is None:
        yield from micro_batches
        return
    changes.in_step_hooks, has_begun = False, False  # the step before may have left its last micro-batches
    try:
        for micro_batch in micro_batches:
            if not has_begun:
                changes.begin_step()
                changes.in_step_hooks = has_begun = True
            yield micro_batch
    finally:
        changes.in_step_hooks = False


def gradient_marks(parameters: Iterable[Tensor]) -> list[int | None]:
    """What changes when a backward adds to the gradients of these parameters: nothing, or how often each was
    written."""
    return [None if gradient is None else gradient._version for gradient in map(_GRADIENT, parameters)]


def remarked(named: Iterable[tuple[str, Tensor]], marks: list[int | None]) -> list[str]:
    """The names of those parameters whose gradients differ from `marks`, which were taken of them before."""
    return [name for (name, p), mark in zip(named, marks, strict=False) if [mark] != gradient_marks([p])]


def own_backward(names: list[str]) -> RuntimeError:
    """The error of a step that ran a backward of its own, which nobody weighs by this rank's share of the batch."""
    return RuntimeError(
        f"training_step changed gradients by itself ({', '.join(names[:3])}{', …' if len(names) > 3 else ''}), which "
        "automatic "
        "optimization cannot weigh by the samples of a rank or micro-batch; add the losses and return their sum, or "
        "set "
        "automatic_optimization = False and call self.manual_backward"
    )


def refuse_embeddings(model: nn.Module, data_size: int, strategy: str) -> None:
    """Raise ValueError for an embedding that changes its weight in the forward, or weighs gradients, by the samples
    that this rank sees."""
    if data_size == 1:
        return
    refuse_unready(model, strategy)
    for name, module in model.named_modules():
        refuse_frequencies(name, module, strategy)
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ValueError(
                f"{name or type(model).__name__} has max_norm={module.max_norm}, which changes its weight in the "
                "forward for the "
                f"samples that a rank sees, so ranks of {strategy} would drift apart; leave max_norm out and normalize "
                "the weight in "
                "on_train_batch_end"
            )


def refuse_unready(model: nn.Module, strategy: str) -> None:
    """Raise ValueError for a layer that cannot be sent to ranks or copied, or whose parameters are not made yet."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{name or type(model).__name__} is scripted or traced by torch.jit, and {strategy} cannot send or "
                "copy such a layer; give the layer that it was made of (compile=True makes it fast), and script it "
                "after fit"
            )
        held = (*module._parameters.values(), *module._buffers.values())
        if any(isinstance(tensor, UninitializedParameter | UninitializedBuffer) for tensor in held):
            raise ValueError(
                f"{name or type(model).__name__} is a {type(module).__name__} without parameters yet, which {strategy} "
                "needs before the first step; call the model with a batch, without gradients, in __init__ or "
                "configure_model, or give the layer its sizes"
            )


def refuse_frequencies(name: str, module: nn.Module, strategy: str) -> None:
    """Raise ValueError for an embedding whose gradient depends on how often a row is in what one forward sees."""
    if (
        isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        and module.scale_grad_by_freq
        and module.weight.requires_grad
    ):
        raise ValueError(
            f"{name or type(module).__name__} has scale_grad_by_freq=True, which divides gradients by how often a row "
            f"is in a forward, and a forward of {strategy} sees a part of the batch; leave it out, or divide in "
            "on_after_backward by counts of the whole batch"
        )


def refuse_sparse(model: nn.Module, strategy: str) -> None:
    """Raise ValueError for an embedding whose gradient is sparse, which cannot be sharded, and as `refuse_unready`."""
    refuse_unready(model, strategy)
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise ValueError(
                f"{name or type(model).__name__} has sparse=True, and {strategy} cannot shard a sparse gradient; give "
                "it sparse=False and an optimizer of dense gradients, or use strategy='ddp'"
            )


def refuse_shared_memory(model: nn.Module, strategy: str) -> None:
    """Raise ValueError for parameters that have elements in common, which would be apart once each has been moved."""
    held: dict[int, list[tuple[str, Tensor]]] = {}
    for name, p in model.named_parameters():
        if type(p) is nn.Parameter and p.layout == torch.strided and not p.is_meta:
            held.setdefault(p.untyped_storage().data_ptr(), []).append((name, p.detach()))
    held.pop(0, None)  # what has no memory
    for together in held.values():
        spans = sorted(map(_span, (p for _, p in together)))
        if all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)):
            continue
        owner = torch.full((together[0][1].untyped_storage().nbytes(),), -1, dtype=torch.int32)
        for i, (name, tensor) in enumerate(together):
            size = tensor.element_size()
            strides = (*(size * n for n in tensor.stride()), 1)
            places = owner.as_strided((*tensor.shape, size), strides, size * int(tensor.storage_offset()))
            if int(places.max()) >= 0:
                raise ValueError(
                    f"{name} and {together[int(places.max())][0]} are two parameters that share memory, and {strategy} "
                    "moves each by itself; make them one, as by head.weight = embedding.weight, or use strategy='ddp'"
                )
            places.fill_(i)


def _span(tensor: Tensor) -> tuple[int, int]:
    """From where to where its elements are in its storage, in bytes."""
    size, first = tensor.element_size(), int(tensor.storage_offset())
    length = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * size, (first + length) * size


def partial_gradient(why: str) -> RuntimeError:
    """What to raise for a user's `on_after_backward` that would be called with the gradient of a part of a step."""
    return RuntimeError(
        "on_after_backward is overridden, but before the last backward of a step it would see the gradient of some "
        f"samples only, because {why}; override on_before_optimizer_step, or train without accumulation and with one "
        "loss for all optimizers"
    )


def written_gradient(name: str, engine: str) -> RuntimeError:
    """The refusal of a gradient that would be lost."""
    return RuntimeError(
        f"the step has written the gradient of {name}, which {engine} makes whole only while it computes; call "
        "self.manual_backward(loss), which leaves gradients where they are stepped with"
    )


def replaced(names: Sequence[str], strategy: str) -> RuntimeError:
    """The error for parameters that user code put into a model, moved in it or took out of it during a run."""
    return RuntimeError(
        f"parameters were added, replaced or removed during the run ({shortened(names)}), which {strategy} cannot "
        "take over; create them in __init__, setup or configure_model, or copy values into the existing ones"
    )


def renamed(names: Sequence[str], strategy: str) -> RuntimeError:
    """The error for a model whose `state_dict` has names at the end of a run that it had not before, or lacks some."""
    return RuntimeError(
        f"the model has other parameters or buffers after the run than before it ({shortened(names)}), which "
        f"{strategy} cannot bring back; rename, add or delete them once fit has returned, or in __init__, setup or "
        "configure_model"
    )


def late_hooks(names: Sequence[str], strategy: str) -> RuntimeError:
    """The error for hooks on the gradients of these parameters that a step has registered."""
    return RuntimeError(
        f"hooks were registered on {shortened(names)} within a step, where {strategy} calls them with a part of the "
        "gradient; register them before, as in __init__ or on_train_start, from where on they get the whole one"
    )


def changed_within_window(names: Sequence[str], strategy: str) -> RuntimeError:
    """The error for `requires_grad` of these parameters, if it changed after the first micro-batch of a window."""
    return RuntimeError(
        f"requires_grad of {shortened(names)} changed between the micro-batches of an accumulation window, whose "
        f"gradients {strategy} reduces as one; change it before the first of them (on_train_epoch_start, or "
        "on_train_batch_end of the last)"
    )


def shortened(names: Sequence[str], most: int = 10) -> str:
    """The first names of a list, and how many there are besides."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def refuse_sync_batch_norm(model: nn.Module, why: str) -> None:
    """Raise ValueError for a SyncBatchNorm layer under a strategy that runs parts of a step by themselves."""
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise ValueError(
                f"{name} is a SyncBatchNorm, whose statistics are those of all ranks, and {why}; use BatchNorm"
            )
