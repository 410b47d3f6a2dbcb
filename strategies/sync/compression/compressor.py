"""What turns a gradient into fewer bytes and back: the base class of compressors."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Encoding:
    """What a compressor knows of the gradient that it encodes or decodes: one for each parameter and step."""

    name: str
    """Of the parameter, as in `named_parameters`."""
    shape: tuple[int, ...]
    """Of the tensor that is encoded; complex numbers have become pairs in a last dimension of 2."""
    dtype: torch.dtype
    """Of that tensor: float32, or float64 where the parameter is."""
    device: torch.device
    seed: int = 0
    step: int = 0
    """Gradients that were reduced before this one."""
    share: int = 0
    """Whose gradient is encoded: of a rank, or with `virtual_ranks` of a share."""
    means: list[Sequence[Tensor]] = field(default_factory=list)
    """With several `rounds`: what was encoded in those before this one, as means over shares."""
    memory: dict[str, Tensor] = field(default_factory=dict)
    """What the compressor keeps of this parameter from step to step, equal on all ranks; in checkpoints. What `decode`
    puts here is dropped if the step is skipped."""

    @classmethod
    def of(cls, name: str, parameter: Tensor, seed: int, step: int, memory: Mapping[str, Tensor]) -> Encoding:
        like = real(parameter)
        dtype = torch.promote_types(like.dtype, torch.float32)
        return cls(name, tuple(like.shape), dtype, like.device, seed, step, memory=dict(memory))

    def generator(self, *, common: bool = False) -> torch.Generator:
        """A generator on the CPU that follows from seed, step, name and share; with `common` the same for all shares.

        Draw from nothing else: what torch's own streams give depends on the number of ranks.
        """
        key = f"{self.seed} {self.step} {'' if common else self.share} {self.name}"
        number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
        return torch.Generator().manual_seed(number >> 1)


class Compressor(ABC):
    """Encodes the gradient of one parameter into tensors that ranks exchange, and decodes it from them.

    Derive from it and give an instance to `DDP(compress=…)`. It runs under `no_grad`, with the same result for the
    same tensor on every rank, and keeps nothing but options, which is checked: what it remembers belongs into
    `Encoding.memory`.
    """

    linear = False
    """True if the payloads of shares may be averaged before they are decoded, which costs an all-reduce in place of an
    all-gather. Payloads are then floating-point tensors."""
    rounds = 1
    """How often `encode` is called in a step, if it is linear: from the second time on with the means of before."""
    feedback = True
    """Whether what was not sent of a gradient is added to the next one (error feedback), without which a biased
    compressor diverges. False only if what is decoded is on average what was encoded."""
    start: int = 0
    """Gradients at the beginning that are sent as they are, by an all-reduce."""
    momentum: float = 0.0
    """With momentum correction each share adds up a velocity of its gradients before they are encoded, in place of the
    optimizer's momentum (Lin et al., "Deep Gradient Compression", 2018)."""

    @abstractmethod
    def encode(self, tensor: Tensor, encoding: Encoding) -> Sequence[Tensor]:
        """The payload of a finite tensor, which stays as it is.

        The shapes and dtypes of its tensors must follow from those of the tensor that is encoded, and from
        `encoding.step`.
        """

    @abstractmethod
    def decode(self, payload: Sequence[Tensor], encoding: Encoding) -> Tensor:
        """The tensor of `encoding.shape` and `encoding.dtype` that a payload stands for; it may share its memory."""

    def places(self, payload: Sequence[Tensor], encoding: Encoding) -> Tensor | None:
        """Which elements of the flat tensor a payload sends, int64; None if it stands for all of them.

        With `momentum` the velocity of these starts over.
        """
        return None

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({options})"


def real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs in a last dimension of 2."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class Exact(Compressor):
    """Sends everything: what others do in their first `start` gradients."""

    linear = True

    def encode(self, tensor: Tensor, encoding: Encoding) -> Sequence[Tensor]:
        return (tensor,)

    def decode(self, payload: Sequence[Tensor], encoding: Encoding) -> Tensor:
        return payload[0]
