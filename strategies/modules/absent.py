"""Stand-ins for values that this rank does not hold: `Absent` has the shape and dtype of a parameter or buffer of
another rank and refuses what needs its values; `Refusing` stands for an attribute and refuses any use."""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

_aten = torch.ops.aten
_LIKE = {
    getattr(_aten, name)
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    )
}
"""Operations that make a tensor of the same shape from none of the values."""
_RESHAPING = {getattr(_aten, name) for name in ("resize_", "resize_as_", "set_")}
_kinds: dict[Any, str] = {}


class Absent(Tensor):
    """Stands for a parameter or buffer of the model that another rank holds.

    Shape, strides, dtype, device, `requires_grad`, `detach`, views and tensors made like it are those of the real one.
    What only writes to it (`clamp_`, `copy_`, `zero_`, an assignment to `data` or `grad`) does nothing here: the rank
    that holds the real one runs the same code. All else raises RuntimeError naming it.
    """

    # Beside `__dict__`, which holds what users set on the parameter and may name `path` or `stage`.
    __slots__ = ("_is_param", "absent_path", "absent_stage")

    absent_path: str
    """Its name in the model."""
    absent_stage: int
    _is_param: bool

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type[Absent], like: Tensor, path: str, stage: int, device: torch.device, is_parameter: bool = False
    ) -> Absent:
        made = Tensor._make_wrapper_subclass(
            cls,
            like.size(),
            strides=like.stride(),
            dtype=like.dtype,
            device=device,
            requires_grad=is_parameter and like.requires_grad,
        )
        made.absent_path, made.absent_stage, made._is_param = path, stage, is_parameter
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Absent))
        kind = _kinds.get(func) or _kinds.setdefault(func, _kind(func))
        if kind == "like" and isinstance(args[0], Absent):
            kwargs = {**kwargs, "device": kwargs.get("device") or first.device}
            return func(_shape_of(first), *args[1:], **kwargs)
        if kind == "view" and isinstance(args[0], Absent):
            outputs = func(*tree_map_only(Absent, _shape_of, args), **kwargs)
            return tree_map_only(
                Tensor, lambda view: Absent(view, first.absent_path, first.absent_stage, first.device), outputs
            )
        if kind in ("write", "draw"):
            written = [value for value in _written(func, args, kwargs) if value is not None]
            if all(isinstance(value, Absent) for value in written):
                if kind == "draw":  # as the rank that holds it does, so that the streams stay alike
                    func(torch.empty(first.shape, dtype=first.dtype, device=first.device), *args[1:], **kwargs)
                return written[0]
        if kind == "write many" and any(isinstance(tensor, Absent) for tensor in args[0]):
            count, real = len(args[0]), [i for i, t in enumerate(args[0]) if not isinstance(t, Absent)]
            chosen = [[a[i] for i in real] if isinstance(a, (list, tuple)) and len(a) == count else a for a in args]
            if real:
                func(*chosen, **kwargs)
            return None
        first._refuse(f"{func.overloadpacket.__name__} needs its values")

    def _refuse(self, why: str) -> NoReturn:
        raise RuntimeError(
            f"{self.absent_path} is on stage {self.absent_stage} of the pipeline, on another rank, and {why}; in a "
            "hook use `with trainer.whole(module): ...` to see whole weights and gradients, or module.grad_norm(); "
            "if a step needs it, use another strategy"
        )

    @property
    def grad(self) -> Tensor | None:
        if sys._getframe(1).f_code in _PASSING:
            return None
        self._refuse("its gradient is there")

    @grad.setter
    def grad(self, value: Tensor | None) -> None: ...

    @property
    def data(self) -> Tensor:
        return Absent(_shape_of(self), self.absent_path, self.absent_stage, self.device)  # torch notes no write to it

    @data.setter
    def data(self, value: Tensor) -> None: ...

    @property
    def _local_tensor(self) -> Tensor:
        """What this rank holds of it."""
        return torch.empty(0, dtype=self.dtype, device=self.device)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Absent({self.absent_path!r}, shape={list(self.shape)}, dtype={self.dtype}, stage={self.absent_stage})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse("a copy needs its values")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse("saving or sending it needs its values")

    def _without_values(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("its memory is there")

    numpy = tolist = __array__ = storage = untyped_storage = data_ptr = __dlpack__ = share_memory_ = _without_values


class Refusing:
    """In place of an attribute that has no value here: any use raises RuntimeError with this sentence."""

    def __init__(self, sentence: str) -> None:
        self._sentence = sentence

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(vars(self)["_sentence"])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Refusing))._refuse()


for _verb in (
    "add radd iadd sub rsub mul rmul truediv rtruediv pow matmul rmatmul neg lt le gt ge bool float int len iter "
    "getitem setitem contains call array eq ne"
).split():
    setattr(Refusing, f"__{_verb}__", Refusing._refuse)


def is_here(tensor: Tensor) -> bool:
    """Whether this rank holds the tensor, or a part of it."""
    return not isinstance(tensor, Absent)


def _shape_of(absent: Absent) -> Tensor:
    return torch.empty_strided(absent.size(), absent.stride(), dtype=absent.dtype, device="meta")


def _kind(func: Any) -> str:
    """What an operation does with its first tensor."""
    schema = func._schema
    if func.overloadpacket in _LIKE:
        return "like"
    if func.overloadpacket in _RESHAPING or torch.Tag.inplace_view in func.tags:
        return "read"
    if schema.is_mutable:
        if schema.name.startswith("aten::_foreach_"):
            return "write many"
        return "draw" if torch.Tag.nondeterministic_seeded in func.tags else "write"
    returns = schema.returns
    return "view" if returns and all(value.alias_info is not None for value in returns) else "read"


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    found = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(kwargs.get(argument.name) if argument.kwarg_only or i >= len(args) else args[i])
    return found


def _code(function: Any) -> CodeType:
    return getattr(function, "__wrapped__", function).__code__


_PASSING = {_code(function) for function in (nn.Module.zero_grad, nn.Module._apply, Optimizer.zero_grad)}
"""Code that reads a gradient only to drop or move it."""
