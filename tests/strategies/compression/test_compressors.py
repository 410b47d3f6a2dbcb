"""Compressors against the papers, and what holds for each of them in every step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lockstep.strategies import DDP, Compressor, Encoding
from lockstep.strategies.checkpoint_state import State, Whole
from lockstep.strategies.sync.compression.compression import Compression, Layout
from lockstep.strategies.sync.compression.names import compressor
from lockstep.strategies.sync.compression.sparse import TopK, smallest_of_largest
from tests.strategies.compression import papers

SHAPES = {"wide": (5, 12), "tall": (9, 4), "kernel": (3, 2, 3, 3), "vector": (7,), "long": (700,), "number": ()}
SPECIFIED: dict[str, Callable[..., Tensor]] = {
    "topk=0.3": functools.partial(papers.top_k, share=0.3),
    "topk=0.3,momentum=0.9": functools.partial(papers.deep_gradient_compression, share=0.3, momentum=0.9),
    "topk=0.3,momentum=0.9,start=2": functools.partial(
        papers.deep_gradient_compression, share=0.3, momentum=0.9, start=2
    ),
    "randomk=0.3": functools.partial(papers.random_k, share=0.3),
    "sign": papers.sign,
    "int8": papers.int8,
    "fp16": functools.partial(papers.half, dtype=torch.float16),
    "bf16": functools.partial(papers.half, dtype=torch.bfloat16),
    "qsgd=4": functools.partial(papers.qsgd, bits=4),
    "qsgd=7": functools.partial(papers.qsgd, bits=7),
    "terngrad": papers.terngrad,
    "powersgd=2": functools.partial(papers.power_sgd, rank=2),
    "powersgd=2,start=2": functools.partial(papers.power_sgd, rank=2, start=2),
}
UNBIASED = ("qsgd=4", "qsgd=7", "terngrad")


class Stepper:
    """Steps every parameter, as the optimizer that residuals wait for."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.param_groups = [{"params": list(parameters)}]


class Run:
    """`shares` shares of a model with these parameters, all in this process."""

    def __init__(self, name: str | Compressor, shapes: dict[str, tuple[int, ...]], shares: int) -> None:
        self.model = nn.Module()
        for n, shape in shapes.items():
            self.model.register_parameter(n, nn.Parameter(torch.zeros(shape, dtype=torch.float64)))
        self.compression = Compression(compressor(name), Layout(tuple(range(shares)), shares), seed=11)
        self.compression.watch(self.model)
        self.parameters = list(self.model.parameters())

    def step(self, grads: list[list[Tensor | None]], commit: bool = True) -> list[Tensor | None]:
        self.compression.reduce_into(self.parameters, grads, 1 / len(grads))
        if commit:
            self.compression.commit(Stepper(self.parameters))  # type: ignore[arg-type]
        return [p.grad for p in self.parameters]

    def mean_residual(self, name: str) -> Tensor | float:
        return _mean(self.compression.residuals.get(name, {}))

    def mean_velocity(self, name: str) -> Tensor | float:
        return _mean(self.compression.velocities.get(name, {}))


def _mean(of_share: dict[int, Tensor]) -> Tensor | float:
    return sum(of_share.values()) / len(of_share) if of_share else 0.0


def gradients(shapes: dict[str, tuple[int, ...]], shares: int, seed: int) -> list[list[Tensor]]:
    made = torch.Generator().manual_seed(seed)
    return [[torch.randn(s, generator=made, dtype=torch.float64) for s in shapes.values()] for _ in range(shares)]


def draws(name: str, step: int) -> papers.Draw:
    def draw(kind: str, size: Any, worker: int | None) -> Tensor:
        encoding = Encoding(name, (), torch.float64, torch.device("cpu"), 11, step, worker or 0)
        generator = encoding.generator(common=worker is None)
        if kind == "permutation":
            return torch.randperm(size, generator=generator)
        made = torch.rand if kind == "uniform" else torch.randn
        return made(size, generator=generator, dtype=torch.float64)

    return draw


@pytest.mark.unit
@pytest.mark.parametrize("shares", [1, 3, 4])
@pytest.mark.parametrize("name", SPECIFIED)
def test_it_computes_what_the_paper_says(name: str, shares: int) -> None:
    run, states = Run(name, SHAPES, shares), {shape: {} for shape in SHAPES}
    for step in range(4):
        grads = gradients(SHAPES, shares, step)
        found = run.step([*grads])
        for i, shape in enumerate(SHAPES):
            stacked = torch.stack([of_share[i] for of_share in grads])
            expected = SPECIFIED[name](states[shape], stacked, draws(shape, step))
            torch.testing.assert_close(found[i], expected, rtol=0, atol=1e-12)


@pytest.mark.unit
@pytest.mark.parametrize("name", [name for name in SPECIFIED if name not in UNBIASED])
@given(seed=st.integers(0, 10**6), shares=st.integers(1, 5), scale=st.sampled_from([1e-6, 1.0, 1e5]))
@settings(max_examples=8, deadline=None)
def test_nothing_is_lost(name: str, seed: int, shares: int, scale: float) -> None:
    """What is sent and what is kept for later are together the gradient, or the velocity of momentum correction."""
    run = Run(name, SHAPES, shares)
    for step in range(3):
        before = [run.mean_residual(shape) for shape in SHAPES]
        slowed = [run.mean_velocity(shape) * run.compression.compressor.momentum for shape in SHAPES]
        grads = [[g * scale for g in of_share] for of_share in gradients(SHAPES, shares, seed + step)]
        sent = run.step([*grads])
        for i, shape in enumerate(SHAPES):
            mean = sum(of_share[i] for of_share in grads) / shares + slowed[i]
            kept = run.mean_residual(shape) - before[i]
            assert float((sent[i] + kept - mean).abs().max()) <= 1e-12 * max(scale, 1.0)


@pytest.mark.unit
@pytest.mark.parametrize("name", UNBIASED)
def test_what_is_rounded_at_random_is_right_on_average(name: str) -> None:
    run, grads = Run(name, {"w": (64,)}, 1), gradients({"w": (64,)}, 1, 0)
    found = torch.stack([run.step([*grads])[0] for _ in range(600)])  # type: ignore[arg-type]
    assert not run.compression.residuals["w"]
    (exact,) = grads[0]
    step = exact.abs().max() / run.compression.compressor.levels  # type: ignore[attr-defined]
    assert 0 < float((found - exact).abs().max()) <= step
    assert ((found.mean(0) - exact).abs() <= 5 * (step / 2) / 600**0.5).all()


@pytest.mark.unit
@pytest.mark.parametrize("name", ["topk=1", "randomk=1", "powersgd=12", "qsgd=48", "sign,start=3"])
def test_what_sends_all_is_the_mean(name: str) -> None:
    run = Run(name, SHAPES, 4)
    for step in range(3):
        grads = gradients(SHAPES, 4, step)
        for found, *own in zip(run.step([*grads]), *grads, strict=True):
            torch.testing.assert_close(found, sum(own) / 4, rtol=0, atol=1e-13)


@pytest.mark.unit
def test_what_sends_all_with_momentum_is_that_of_sgd() -> None:
    run = Run("topk=1,momentum=0.9", SHAPES, 4)
    weights = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in SHAPES.values()]
    optimizer, found = torch.optim.SGD(weights, lr=0.1, momentum=0.9), [w.detach().clone() for w in weights]
    for step in range(5):
        grads = gradients(SHAPES, 4, step)
        for weight, *own in zip(weights, *grads, strict=True):
            weight.grad = sum(own) / 4  # type: ignore[assignment]
        optimizer.step()
        for weight, sent in zip(found, run.step([*grads]), strict=True):
            weight.sub_(0.1 * sent)  # type: ignore[operator]
    for one, other in zip(found, weights, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=0, atol=1e-12)


@pytest.mark.unit
def test_ties_are_broken_by_position() -> None:
    run = Run("topk=0.5", {"w": (2, 3)}, 1)
    (found,) = run.step([[torch.tensor([[1.0, -1.0, 1.0], [2.0, 1.0, -1.0]], dtype=torch.float64)]])
    assert found is not None and found.tolist() == [[1.0, -1.0, 0.0], [2.0, 0.0, 0.0]]


@pytest.mark.unit
def test_a_warm_up_sends_less_and_less() -> None:
    run, seen = Run("topk=0.01,warmup=6", {"w": (20, 50)}, 2), []
    for step in range(9):
        before = run.mean_residual("w")
        grads = gradients({"w": (20, 50)}, 2, step)
        sent = run.step([*grads])[0]
        kept = run.mean_residual("w") - before
        mean = sum(of_share[0] for of_share in grads) / 2
        assert float((sent + kept - mean).abs().max()) <= 1e-12  # type: ignore[arg-type]
        zeros = [int((run.compression.residuals["w"][share] == 0).sum()) for share in range(2)]
        assert zeros[0] == zeros[1]
        seen.append(zeros[0])
    assert seen == [250, 250, 63, 63, 16, 16, 10, 10, 10]
    assert [TopK(1.0, 9).share_of(0), TopK(0.25, 9).share_of(0), TopK(0.1, 9).share_of(8)] == [1.0, 0.25, 0.25]


@pytest.mark.unit
def test_the_threshold_is_found_in_what_a_sample_says_is_large() -> None:
    made = torch.Generator().manual_seed(0)
    for magnitude in (torch.rand(100_003, generator=made), torch.zeros(70_000), torch.arange(70_000.0) % 7):
        for count in (1, 50, 5000):
            assert smallest_of_largest(magnitude, count) == magnitude.sort(descending=True).values[count - 1]


@pytest.mark.unit
def test_what_float16_cannot_hold_is_sent_later() -> None:
    run, big = Run("fp16", {"w": (1,)}, 1), torch.tensor([100000.0], dtype=torch.float64)
    assert run.step([[big]])[0].item() == 65504.0  # type: ignore[union-attr]
    assert run.step([[big * 0]])[0].item() == pytest.approx(100000.0 - 65504.0, rel=1e-3)  # type: ignore[union-attr]


@pytest.mark.unit
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name", ["topk=0.3", "topk=0.3,momentum=0.9", "randomk=0.01", "sign", "int8", "fp16", "qsgd=4", "powersgd=2"]
)
def test_a_gradient_that_is_not_finite_is_seen_and_leaves_nothing(name: str, bad: float) -> None:
    shapes = {"wide": (5, 12), "vector": (7,)}
    run = Run(name, shapes, 2)
    run.step([*gradients(shapes, 2, 0)])
    before = {n: {s: r.clone() for s, r in left.items()} for n, left in run.compression.residuals.items()}
    moving = {n: {s: v.clone() for s, v in own.items()} for n, own in run.compression.velocities.items()}
    grads = gradients(shapes, 2, 1)
    grads[1][0][3, 2] = bad
    wide, vector = run.step([*grads], commit=False)
    assert wide is not None and wide.isnan().all() and vector is not None and vector.isfinite().all()
    run.step([*gradients(shapes, 2, 2)], commit=False)  # what was not taken over is forgotten
    run.step([[None, None], [None, None]])
    after = run.compression.residuals
    assert all(torch.equal(before[n][s], after[n][s]) for n in before for s in before[n])
    after = run.compression.velocities
    assert all(torch.equal(moving[n][s], after[n][s]) for n in moving for s in moving[n])
    assert any(moving.values()) == bool(run.compression.compressor.momentum)


@pytest.mark.unit
def test_parameters_without_gradient() -> None:
    shapes = {"a": (1, 4), "b": (1, 4)}
    run, ones = Run("topk=0.25", shapes, 2), torch.arange(1.0, 5.0, dtype=torch.float64).view(1, 4)
    a, b = run.step([[ones, None], [None, None]])
    assert b is None and a is not None and a.tolist() == [[0.0, 0.0, 0.0, 2.0]]
    run.parameters[1].requires_grad_(False)
    a, b = run.step([[None, None], [ones * 0, None]])
    assert b is None and a is not None and a.tolist() == [[0.0, 0.0, 1.5, 0.0]]
    assert "b" not in run.compression.residuals


@pytest.mark.unit
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex128])
def test_dtypes(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.zeros(4, 6, dtype=dtype))
    for name in SPECIFIED:
        compression = Compression(compressor(name), Layout((0, 1), 2), seed=1)
        compression.watch(nn.ParameterDict({"w": parameter}))
        total = torch.zeros(4, 6, dtype=torch.complex128 if dtype.is_complex else torch.float64)
        grads = [torch.randn(4, 6).to(dtype) for _ in range(2)]
        for _ in range(2):
            compression.reduce_into([parameter], [[g] for g in grads], 0.5)
            compression.commit(Stepper([parameter]))  # type: ignore[arg-type]
            assert parameter.grad is not None and parameter.grad.dtype == dtype
            total += parameter.grad
        left = compression.residuals["w"]
        if left and dtype.is_complex and not compression.compressor.momentum:
            kept = torch.view_as_complex(sum(left.values()) / 2)
            torch.testing.assert_close(total + kept, sum(grads), rtol=0, atol=1e-12)


@pytest.mark.unit
@pytest.mark.parametrize(
    "name", ["topk=0.3", "topk=0.01,warmup=5", "topk=0.1,momentum=0.9", "powersgd=2", "powersgd=2,start=3", "qsgd=4"]
)
def test_a_saved_state_continues_to_the_bit_and_keeps_the_mean_on_other_shares(name: str) -> None:
    run, again = Run(name, SHAPES, 4), Run(name, SHAPES, 4)
    for step in range(2):
        run.step([*gradients(SHAPES, 4, step)])
    state = State()
    run.compression.save(state)
    saved = Whole({n: shard.tensor.clone() for n, shard in state.tensors.items()}, state.meta)
    assert all(n.startswith("strategy/") for n in saved.tensors)
    again.compression.load(saved)
    for found, expected in zip(
        again.step([*gradients(SHAPES, 4, 5)]), run.step([*gradients(SHAPES, 4, 5)]), strict=True
    ):
        assert found is not None and expected is not None and torch.equal(found, expected)
    fewer = Run(name, SHAPES, 2)
    fewer.compression.load(saved)
    for shape in SHAPES:
        for kind, found in (("residual", fewer.mean_residual(shape)), ("velocity", fewer.mean_velocity(shape))):
            whole = saved.tensors.get(f"strategy/compression/{kind}/{shape}")
            assert (whole is None) == isinstance(found, float)
            if whole is not None:
                torch.testing.assert_close(found, whole.mean(0), rtol=0, atol=1e-12)


class Halving(Compressor):
    """One of a user's own: half of each element."""

    def encode(self, tensor: Tensor, encoding: Encoding) -> Sequence[Tensor]:
        return (tensor / 2,)

    def decode(self, payload: Sequence[Tensor], encoding: Encoding) -> Tensor:
        return payload[0]


class Growing(Halving):
    def encode(self, tensor: Tensor, encoding: Encoding) -> Sequence[Tensor]:
        return (tensor[tensor != 0],)


@pytest.mark.unit
def test_a_compressor_of_ones_own() -> None:
    run = Run(Halving(), {"w": (2,)}, 1)
    ones = torch.ones(2, dtype=torch.float64)
    found = [run.step([[ones]])[0] for _ in range(3)]
    assert torch.stack(found).tolist() == [[0.5] * 2, [0.75] * 2, [0.875] * 2]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Growing\(\) encodes a gradient of shape \[2\] as \[2\] float64"):
        Run(Growing(), {"w": (2,)}, 1).step([[ones]])


class Counting(Halving):
    def __init__(self) -> None:
        self.calls = 0

    def encode(self, tensor: Tensor, encoding: Encoding) -> Sequence[Tensor]:
        self.calls += 1
        return (tensor / self.calls,)


class Momentum(Halving):
    """What came before is first there in the second step."""

    def __init__(self) -> None:
        self.before: dict[str, Tensor] = {}

    def encode(self, tensor: Tensor, encoding: Encoding) -> Sequence[Tensor]:
        self.before[encoding.name] = tensor + self.before.get(encoding.name, 0.0)
        return (self.before[encoding.name],)


class Drawing(Halving):
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def encode(self, tensor: Tensor, encoding: Encoding) -> Sequence[Tensor]:
        return (tensor * torch.rand((), generator=self.generator, dtype=tensor.dtype),)


class DrawingByNumpy(Halving):
    def __init__(self) -> None:
        self.generator = np.random.RandomState(0)

    def encode(self, tensor: Tensor, encoding: Encoding) -> Sequence[Tensor]:
        return (tensor * self.generator.rand(),)


class DrawingAnywhere(Halving):
    def decode(self, payload: Sequence[Tensor], encoding: Encoding) -> Tensor:
        return payload[0] * torch.rand((), dtype=torch.float64)


class OfItsClass(Halving):
    seen: list[int] = []

    def decode(self, payload: Sequence[Tensor], encoding: Encoding) -> Tensor:
        self.seen.append(encoding.step)
        return payload[0] / len(self.seen)


class InPlace(Halving):
    def encode(self, tensor: Tensor, encoding: Encoding) -> Sequence[Tensor]:
        return (tensor.div_(2),)


class ThroughPayload(Halving):
    linear = True

    def encode(self, tensor: Tensor, encoding: Encoding) -> Sequence[Tensor]:
        return (tensor,)

    def decode(self, payload: Sequence[Tensor], encoding: Encoding) -> Tensor:
        return payload[0].div_(2)


class OwnMemory(Halving):
    def encode(self, tensor: Tensor, encoding: Encoding) -> Sequence[Tensor]:
        encoding.memory["before"] = tensor.clone()
        return (tensor / 2,)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Counting, "Counting changed calls while it encoded or decoded.* let decode keep it in encoding.memory"),
        (Momentum, r"Momentum changed before\['w'\] while"),
        (Drawing, "Drawing changed generator while"),
        (DrawingByNumpy, "DrawingByNumpy changed generator while"),
        (DrawingAnywhere, "DrawingAnywhere drew from torch's own random numbers"),
        (OfItsClass, "OfItsClass changed seen"),
        (InPlace, "InPlace.encode changed the tensor that is encoded in place"),
        (ThroughPayload, "ThroughPayload.decode changed the tensor that is encoded in place"),
        (OwnMemory, "OwnMemory.encode has put into encoding.memory what only its own share has"),
    ],
)
def test_what_no_checkpoint_has_is_refused(kind: type[Compressor], message: str) -> None:
    run = Run(kind(), {"w": (2,)}, 2)
    with pytest.raises(RuntimeError, match=message):
        _ = [run.step([*gradients({"w": (2,)}, 2, step)]) for step in range(2)]


class Remembering(Halving):
    def __init__(self, linear: bool, method: str, key: Any, value: Any) -> None:
        self.linear, self.method, self.item = linear, method, (key, value)

    def encode(self, tensor: Tensor, encoding: Encoding) -> Sequence[Tensor]:
        if self.method == "encode":
            encoding.memory.update([self.item])
        return super().encode(tensor, encoding)

    def decode(self, payload: Sequence[Tensor], encoding: Encoding) -> Tensor:
        if self.method == "decode":
            encoding.memory.update([self.item])
        return super().decode(payload, encoding)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("key", "value"), [("steps", 1), ("means", [torch.ones(1)]), (1, torch.ones(1)), ("a/b", torch.ones(1))]
)
def test_memory_that_a_checkpoint_would_lose_is_refused(key: Any, value: Any) -> None:
    for linear in (False, True):
        for method in ("encode", "decode"):
            run = Run(Remembering(linear, method, key, value), {"w": (2,)}, 2)
            with pytest.raises(TypeError, match=rf"Remembering has put encoding.memory\[{key!r}\], of type"):
                run.step([*gradients({"w": (2,)}, 2, 0)])


class Returning(Halving):
    def __init__(self, linear: bool, encoded: Any, decoded: Any = lambda tensor: tensor) -> None:
        self.linear, self.encoded, self.decoded = linear, encoded, decoded

    def encode(self, tensor: Tensor, encoding: Encoding) -> Sequence[Tensor]:
        return self.encoded(tensor)

    def decode(self, payload: Sequence[Tensor], encoding: Encoding) -> Tensor:
        return self.decoded(payload[0])


@pytest.mark.unit
@pytest.mark.parametrize("linear", [False, True])
def test_what_a_compressor_returns_is_checked(linear: bool) -> None:
    def step(encoded: Any, decoded: Any = lambda tensor: tensor) -> list[Tensor | None]:
        return Run(Returning(linear, encoded, decoded), {"w": (2, 3)}, 2).step([*gradients({"w": (2, 3)}, 2, 0)])

    with pytest.raises(TypeError, match="encode must return a tuple or list of tensors, but returned Tensor"):
        step(lambda tensor: tensor)
    with pytest.raises(TypeError, match="decode must return a tensor, but returned list"):
        step(lambda tensor: (tensor,), lambda tensor: [tensor])
    with pytest.raises(ValueError, match=r"a tensor of encoding.shape=\[2, 3\], but returned one of \[6\]"):
        step(lambda tensor: (tensor,), torch.flatten)
    if linear:
        with pytest.raises(TypeError, match="linear = True.* encode returned a tensor of torch.int8"):
            step(lambda tensor: (tensor.sign().to(torch.int8),))
    expected = step(lambda tensor: (tensor.float(),))
    for found in (
        step(lambda tensor: (tensor.float().t(),), torch.t),  # not contiguous
        step(lambda tensor: (tensor.float(),), lambda tensor: tensor.float()),  # of another dtype
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)


class Cached(Halving):
    """Makes what it needs of a shape once, and keeps a sum in memory, changed in place."""

    linear = True

    def __init__(self) -> None:
        self.of_shape: dict[tuple[int, ...], Tensor] = {}
        self.made: Tensor | None = None

    def encode(self, tensor: Tensor, encoding: Encoding) -> Sequence[Tensor]:
        self.made = torch.ones(2) if self.made is None else self.made
        half = self.of_shape.setdefault(encoding.shape, torch.full(encoding.shape, 0.5, dtype=tensor.dtype))
        return (tensor * half,)

    def decode(self, payload: Sequence[Tensor], encoding: Encoding) -> Tensor:
        encoding.memory.setdefault("sum", torch.zeros(encoding.shape, dtype=encoding.dtype)).add_(payload[0])
        return payload[0]


@pytest.mark.unit
def test_memory_has_what_was_sent_of_all_shares_in_steps_that_were_taken() -> None:
    run, sent = Run(Cached(), {"w": (2,)}, 2), torch.zeros(2, dtype=torch.float64)
    for step in range(4):
        (mean,) = run.step([*gradients({"w": (2,)}, 2, step)], commit=step != 2)
        assert mean is not None
        sent += mean if step != 2 else 0.0
    torch.testing.assert_close(run.compression.memory["w"]["sum"], sent)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("topk", "needs the share of elements to send, such as 'topk=0.01', up to 1"),
        ("topk=2", "needs the share of elements"),
        ("powersgd=0", "needs the rank, a whole number of at least 1, such as 'powersgd=4'"),
        ("qsgd=1", "needs the bits of a number, a whole number from 2 to 48"),
        ("fp16=3", "takes none; give compress='fp16'"),
        ("topk=0.1,warm=9", "has an option that there is not, 'warm=9'; write 'topk=0.1,start=100'"),
        ("topk=0.1,momentum=1", "'topk=0.1,momentum=0.9' \\(momentum correction, below 1"),
        ("powersgd=4,momentum=0.9", "not, 'momentum=0.9'; write 'powersgd=4,start=100'"),
        ("int8,start=-1", "not, 'start=-1'; write 'int8,start=100'"),
        ("topk=0.1,start=3,start=5", "has start more than once"),
        ("topkk=0.1", "did you mean 'topk=0.01'"),
        ("zip", "must be one of fp16, bf16"),
    ],
)
def test_a_wrong_name_is_refused(given: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DDP(compress=given)


@pytest.mark.unit
def test_a_number_is_refused() -> None:
    with pytest.raises(TypeError, match="must be a name such as 'topk=0.01' or a Compressor, but compress=0.01"):
        DDP(compress=0.01)  # type: ignore[arg-type]
