"""The state and the parameters of an optimizer whose parts are on several ranks, as user code finds them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from lockstep.strategies.modules.model_changes import shortened


class HiddenState(defaultdict[Tensor, Any]):
    """Stands for `optimizer.state` where user code runs. It may be cleared, as on every rank; all else raises
    RuntimeError.

    `why`: why this rank does not have all of it, as a clause with {} for the optimizer's class.
    """

    def __init__(self, optimizer: Optimizer, why: str) -> None:
        super().__init__(dict)
        self.held: Any = optimizer.state
        self.times_cleared = 0
        self._why = why.format(type(optimizer).__name__)

    def clear(self) -> None:
        self.times_cleared += 1
        self.held.clear()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            f"{self._why}; read it from a checkpoint (trainer.save_checkpoint), which holds all of it, or use "
            "strategy='ddp'"
        )

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = __bool__ = __eq__ = __or__ = _refuse
    __missing__ = __repr__ = __reduce__ = __copy__ = __deepcopy__ = __reversed__ = __ior__ = _refuse
    get = keys = values = items = pop = popitem = setdefault = update = copy = _refuse


class StateOfShards(defaultdict[Tensor, Any]):
    """Stands for `optimizer.state` while modules hold other parameters than the optimizer, which has parts of them: to
    ask it for one of the former, of which `others` are the ids, raises RuntimeError.

    `why`: the sentence, with {} for the optimizer's class.
    """

    def __init__(self, optimizer: Optimizer, others: Collection[int], why: str) -> None:
        super().__init__(dict, optimizer.state)
        self.held, self._others, self._why = optimizer.state, others, why.format(type(optimizer).__name__)

    def check(self, key: Any) -> None:
        if id(key) in self._others:
            raise RuntimeError(self._why)

    def put_back(self, optimizer: Optimizer) -> None:
        optimizer.state = self.held
        self.held.clear()
        self.held.update(self)


def _checked(name: str) -> Callable[..., Any]:
    method = getattr(defaultdict, name)

    def checked(self: StateOfShards, key: Any, *args: Any) -> Any:
        self.check(key)
        return method(self, key, *args)

    return checked


for _name in ("__getitem__", "__setitem__", "__delitem__", "__contains__", "get", "pop", "setdefault"):
    setattr(StateOfShards, _name, _checked(_name))


_WITHIN_WHOLE = (
    "within whole() the state of {} was asked for a whole parameter, of which it has that of shards; ask outside of "
    "the block, where parameters and state are sharded alike, or use strategy='ddp'"
)


@contextmanager
def of_shards(optimizers: Iterable[Optimizer], whole: Collection[int]) -> Iterator[None]:
    """While it lasts no optimizer's state is asked for the parameters with the ids `whole`."""
    guarded = [optimizer for optimizer in optimizers if not isinstance(optimizer.state, HiddenState)]
    states: dict[int, StateOfShards] = {}  # by `id` of a state, which an optimizer may share with one that it wraps
    for optimizer in guarded:
        held = id(optimizer.state)
        optimizer.state = states.setdefault(held, StateOfShards(optimizer, whole, _WITHIN_WHOLE))
    try:
        yield
    finally:
        for optimizer in guarded:
            if isinstance(optimizer.state, StateOfShards):
                optimizer.state.put_back(optimizer)


def check_held(key: str, optimizer: Optimizer, names: Mapping[int, str]) -> None:
    """Raise ValueError where `optimizer` has state of a parameter that it no longer holds: torch cannot save it."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    left = [p for p in optimizer.state if isinstance(p, Tensor) and id(p) not in held]
    if left:
        which = shortened([names.get(id(p), f"a parameter of shape {list(p.shape)}") for p in left])
        raise ValueError(
            f"optimizer {key!r} ({type(optimizer).__name__}) has state of {which}, but none of its parameter groups "
            "has them, so a checkpoint cannot hold it; drop it with the group (optimizer.state.pop(parameter, None))"
        )


def others_of(key: str, optimizer: Optimizer, saved: dict[str, Any], is_spread: bool) -> dict[str, Any]:
    """What the `state_dict` of a class, or a hook of it, has besides state and parameter groups; as "state" what state
    it has that is of no parameter.

    Raises ValueError where it lacks these, and where `is_spread`, as each rank steps other parameters.
    """
    others = {name: value for name, value in saved.items() if name not in ("state", "param_groups")}
    whose = f"the state_dict of optimizer {key!r} ({type(optimizer).__name__})"
    if len(saved) - len(others) < 2:
        raise ValueError(
            f"{whose} has the keys {sorted(map(str, saved))}, but a checkpoint needs 'state' and 'param_groups' among "
            "them; add to what super().state_dict() returns"
        )
    if of_none := {key: value for key, value in saved["state"].items() if not isinstance(key, int)}:
        others["state"] = of_none
    if others and is_spread:
        names = [*(str(name) for name in others if name != "state"), *(f"state[{key!r}]" for key in of_none)]
        raise ValueError(
            f"{whose} has {shortened(sorted(names))} besides state and param_groups, which each rank has of the "
            "parameters that it steps; keep it in the state of parameters or in param_groups, or use strategy='ddp'"
        )
    return others


class ModelParameters(list[Tensor]):
    """Stands for `params` in a group of an optimizer that steps other tensors, `held`, in place of these parameters of
    the model. To change the list calls `refuse`."""

    def __init__(self, parameters: Iterable[Tensor], held: list[Tensor], refuse: Callable[..., NoReturn]) -> None:
        super().__init__(parameters)
        self.held, self._refuse_change = held, refuse

    def _change(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse_change()

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _change
    append = extend = insert = remove = pop = clear = sort = reverse = _change


def held_by(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    """What optimizers step on this rank."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from getattr(group["params"], "held", group["params"])
