"""Parameters and buffers that user code holds apart from the model, as in a list that `__init__` made: where a strategy
puts other tensors in their place, those follow."""

from __future__ import annotations

import dis
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.strategies.launch.program.functions import codes_of, is_users_class, variables_of
from lockstep.strategies.modules.parameter_hooks import ATTRIBUTES
from lockstep.trainer.kept.fields import dict_of, fields
from lockstep.trainer.kept.values import slots
from lockstep.trainer.metrics.groups import fix_groups
from lockstep.trainer.shares.search import is_theirs

if TYPE_CHECKING:
    from lockstep.trainer.run.state import RunState

_MANY, _DEPTH, _ALL = 10_000, 30, 200_000
"""Items of a container, levels, and objects that are searched: a dataset in memory is not, to its end."""
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_HOLDERS = (*_CONTAINERS, Tensor, nn.Module, Optimizer, LRScheduler, partial, MethodType, weakref.ref)
_OF_MODULES = ("_parameters", "_modules", "_buffers", "trainer", "_trainer")
"""Attributes of the model's own modules that are not searched."""

Put = Callable[[Any, Any], None]
"""Puts the second, in a place that holds the first."""


class _Place(NamedTuple):
    name: str
    what: str
    """It holds: a parameter, a buffer, or a view of a parameter."""
    key: str
    """The name of that in the model."""
    held: Tensor
    put: Put | None
    """None where nothing can be put."""


def set_up(run: RunState, module: nn.Module) -> None:
    """Let the strategy wrap the model, and what user code holds of it follow. Every rank calls it."""
    fix_groups(module)
    with following(run, module):
        run.wrapped = run.strategy.setup_module(module)


@contextmanager
def following(run: RunState, module: nn.Module, refuses: bool = True) -> Iterator[None]:
    """While it lasts the strategy may replace parameters and buffers of `module`; afterwards the module, its callbacks
    and its DataModule, and globals that their methods use, hold the new ones wherever they held the old ones.

    If it `refuses`, raises ValueError for a place that cannot be changed, such as a method of a parameter or a view of
    its memory: before anything is done where the strategy shards parameters, else when it has replaced that one.
    """
    places = _Search(module).places(run)
    fixed = [place for place in places if place.put is None] if refuses else []
    if fixed and getattr(run.strategy, "cuts_gradients", False) and not getattr(run.strategy, "single_process", False):
        raise _stays(fixed[0], run)
    yield
    now = _named(module) if places else {}
    for place in places:
        new = now.get(place.key, place.held)
        if new is not place.held and place.put is not None:
            place.put(place.held, new)
        elif new is not place.held and refuses:
            raise _stays(place, run)


def _stays(place: _Place, run: RunState) -> ValueError:
    return ValueError(
        f"{place.name} holds {place.what} {place.key}, in whose place strategy {run.strategy.name} puts another "
        "tensor; take it from the module where it is used"
    )


class _Search:
    """Goes to each container and object once."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = {id(tensor): name for name, tensor in reversed(_named(model).items())}
        self._at = {place: (name, p) for name, p in model.named_parameters() if (place := _memory(p))}
        self._seen = {id(part) for part in model.modules()}
        self._found: list[_Place] = []
        self._depth = self._visited = 0

    def places(self, run: RunState) -> list[_Place]:
        for prefix, part in self._model.named_modules():
            self._attributes(part, prefix or type(part).__name__, _OF_MODULES)
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    self._view(buffer, f"{prefix}.{name}".lstrip("."))
        for name, parameter in self._model.named_parameters():
            for kind in ATTRIBUTES:
                self._visit(getattr(parameter, kind, None), f"a hook of {name}", None)
        for owner in (*run.callbacks, run.datamodule):
            if owner is not None:
                self._attributes(owner, type(owner).__name__, _OF_MODULES)
        return self._found

    def _attributes(self, owner: Any, name: str, skipped: tuple[str, ...] = ()) -> None:
        own = dict_of(owner)
        parameters = own.get("_parameters", ())
        for key, value in [*own.items()]:
            if key not in skipped and f"{key}_orig" not in parameters:  # torch.nn.utils computes it in each forward
                self._visit(value, f"{name}.{key}", partial(_set_item, own, key))
        for kind in filter(is_users_class, type(owner).__mro__):
            for key, value in [*vars(kind).items()]:
                if isinstance(value, FunctionType):
                    self._visit(value, f"{kind.__name__}.{key}", None)
                elif isinstance(value, (Tensor, list, tuple, dict, set, deque)) and not key.startswith("__"):
                    self._visit(value, f"{kind.__name__}.{key}", partial(_set_attribute, kind, key))
        of_class: Any = type(owner)
        for key in sorted(slots(of_class).keys() & fields(owner).keys()):
            self._visit(fields(owner)[key], f"{name}.{key}", partial(_set_attribute, owner, key))

    def _visit(self, value: Any, name: str, put: Put | None) -> None:
        if type(value) in _PLAIN or (isinstance(value, _CONTAINERS) and not value):
            return
        if id(value) in self._names:
            kind = "the parameter" if isinstance(value, nn.Parameter) else "the buffer"
            self._found.append(_Place(name, kind, self._names[id(value)], value, put))
            return
        if isinstance(value, Tensor):
            self._view(value, name)
            return
        self._visited += 1
        if id(value) in self._seen or self._depth == _DEPTH or self._visited > _ALL:
            return
        if not isinstance(value, (tuple, frozenset, weakref.ref)):  # which are replaced in each place that holds them
            self._seen.add(id(value))
        self._depth += 1
        self._parts(value, name, put)
        self._depth -= 1

    def _view(self, tensor: Tensor, name: str) -> None:
        if parameter := self._at.get(_memory(tensor)):
            self._found.append(_Place(name, "a view of the memory of the parameter", *parameter, None))

    def _parts(self, value: Any, name: str, put: Put | None) -> None:
        if isinstance(value, dict):
            for key, item in [*islice(value.items(), _MANY)]:
                self._visit(key, f"a key of {name}", partial(_rename, value))
                self._visit(item, f"{name}[{_shown(key)}]", partial(_set_item, value, key))
        elif isinstance(value, (list, deque)):
            for i, item in enumerate(islice(value, _MANY)):
                self._visit(item, f"{name}[{i}]", partial(_set_item, value, i))
        elif isinstance(value, set):
            for item in [*islice(value, _MANY)]:
                self._visit(item, f"an item of {name}", partial(_exchange, value))
        elif isinstance(value, (tuple, frozenset)):
            self._items(value, name, put)
        elif isinstance(value, FunctionType):
            self._function(value, name)
        elif isinstance(value, weakref.ref):
            to_new = None if put is None else lambda held, new: put(value, weakref.ref(new))
            self._visit(value(), name, to_new)
        elif isinstance(value, partial):
            self._visit(value.func, name, None)
            self._items(value.args, name, partial(_set_arguments, value))
            self._visit(value.keywords, name, None)
        elif isinstance(value, MethodType):
            self._visit(value.__self__, name, None)
            self._visit(value.__func__, name, None)
        elif issubclass(type(value), Optimizer):
            self._attributes(value, name, ("state",))
            if type(value.state) in (dict, defaultdict):  # and is not in the hands of a strategy
                self._visit(value.state, f"{name}.state", None)
        elif isinstance(value, (nn.Module, LRScheduler)) or (
            not isinstance(value, type) and is_users_class(type(value))
        ):
            self._attributes(value, name)

    def _items(self, value: Any, name: str, put: Put | None) -> None:
        """Of what cannot be changed itself, but be replaced by another of its kind."""
        current = [value]

        def put_item(held: Any, new: Any) -> None:
            before = current[0]
            items = [new if item is held else item for item in before]
            current[0] = before._make(items) if hasattr(before, "_make") else type(before)(items)
            put(before, current[0])  # type: ignore[misc]

        for item in islice(value, _MANY):
            self._visit(item, f"an item of {name}", None if put is None else put_item)

    def _function(self, function: Any, name: str) -> None:
        for key, cell, held in variables_of(function):
            self._visit(held, f"{key}, which {name} closes over,", partial(_set_attribute, cell, "cell_contents"))
        if function.__defaults__:
            self._items(function.__defaults__, name, partial(_set_attribute, function, "__defaults__"))
        for key, value in _globals_of(function).items() if is_theirs(function) else ():
            self._visit(value, f"{function.__module__}.{key}", partial(_set_item, function.__globals__, key))
        self._visit(function.__kwdefaults__, name, None)
        self._visit(vars(function), name, None)
        self._visit(getattr(function, "__wrapped__", None), name, None)


def _named(model: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _memory(tensor: Tensor) -> int:
    """Where its memory is, 0 for none."""
    return tensor.untyped_storage().data_ptr() if type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta else 0


def _globals_of(function: FunctionType) -> dict[str, Any]:
    """What a function uses that may hold tensors; of other functions those of its file."""
    codes, found = codes_of(function), dict[str, Any]()
    for code in codes:
        for key in code.co_names:  # of attributes too
            value = function.__globals__.get(key)
            if isinstance(value, FunctionType):
                if value.__module__ == function.__module__:
                    found[key] = value
            elif isinstance(value, _HOLDERS) or (
                type(value) not in _PLAIN and not isinstance(value, (type, ModuleType)) and is_users_class(type(value))
            ):
                found[key] = value
    if all(isinstance(value, FunctionType) for value in found.values()):  # no need to know which are attributes
        return found
    used = {each.argval for code in codes for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    return {key: value for key, value in found.items() if key in used}


def _shown(key: Any) -> str:
    """A key in a name: of other objects than these a representation may be long, or end in an error."""
    return repr(key) if type(key) in _PLAIN else f"a key of class {type(key).__name__}"


def _set_item(container: Any, key: Any, held: Any, new: Any) -> None:
    if container[key] is held:  # a layer such as nn.LSTM may have followed by itself
        container[key] = new


def _set_attribute(owner: Any, key: str, held: Any, new: Any) -> None:
    (type.__setattr__ if isinstance(owner, type) else object.__setattr__)(owner, key, new)


def _set_arguments(function: Any, held: Any, new: Any) -> None:
    function.__setstate__((function.func, new, function.keywords, vars(function)))


def _exchange(container: set[Any], held: Any, new: Any) -> None:
    container.remove(held)
    container.add(new)


def _rename(container: dict[Any, Any], held: Any, new: Any) -> None:
    items = [(new if key is held else key, value) for key, value in container.items()]
    container.clear()
    container.update(items)
