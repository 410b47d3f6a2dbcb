"""The probe: what an optimizer checks decides what it may be stepped on, whatever it is called."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, Adam, AdamW, Muon, Optimizer, RMSprop, SparseAdam
from torch.optim import sgd as sgd_module
from torch.optim.lr_scheduler import LambdaLR

from lockstep.strategies.optimizers.copies import duplicate
from lockstep.strategies.optimizers.probe import PLAIN, is_plain, probe


def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 160), nn.LayerNorm(160), nn.Conv2d(3, 4, 3))


class Rule(Optimizer):
    """Steps by a function of (parameters with their gradients, a group)."""

    def __init__(self, params: Any, rule: Callable[[list[Tensor], dict[str, Any]], None], **options: Any) -> None:
        super().__init__(params, {"lr": 0.1, **options})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            self.rule(group["params"], group)


def by_global_norm(params: list[Tensor], group: dict[str, Any]) -> None:
    norm = sum(p.grad.square().sum() for p in params) ** 0.5
    for p in params:
        p -= p.grad / norm


def clipped(params: list[Tensor], group: dict[str, Any]) -> None:
    """Couples only while the norm is above a threshold that the first step may stay below."""
    nn.utils.clip_grad_norm_(params, 1e4)
    for p in params:
        p -= 0.1 * p.grad


def by_trust_ratio(params: list[Tensor], group: dict[str, Any]) -> None:
    for p in params:
        p -= 0.1 * p.grad * p.norm() / p.grad.norm()


def by_rows(params: list[Tensor], group: dict[str, Any]) -> None:
    for p in params:
        p -= 0.1 * p.grad / (p.grad.abs().amax(-1, keepdim=True) + 1e-8)


def factored_above_128(params: list[Tensor], group: dict[str, Any]) -> None:
    for p in params:
        p -= 0.1 * (p.grad / p.grad.square().mean(0).sqrt() if p.dim() == 2 and len(p) > 128 else p.grad)


def by_count(params: list[Tensor], group: dict[str, Any]) -> None:
    for p in params:
        p -= p.grad / len(params)


def by_distance(params: list[Tensor], group: dict[str, Any]) -> None:
    """A rate that the group estimates from all of its gradients, and so far only remembers."""
    group["distance"] = group.get("distance", 0.0) + sum(p.grad.sum().item() for p in params)
    for p in params:
        p -= 0.1 * p.grad


def with_noise(params: list[Tensor], group: dict[str, Any]) -> None:
    for p in params:
        p -= 0.1 * p.grad + 0.01 * torch.randn_like(p)


def with_pythons_noise(params: list[Tensor], group: dict[str, Any]) -> None:
    for p in params:
        p -= 0.1 * p.grad * (1 + random.random())


def at_once(params: list[Tensor], group: dict[str, Any]) -> None:
    torch._foreach_add_(params, [p.grad for p in params], alpha=-0.1)


class TwoSteps(Optimizer):
    """Climbs along the gradient, evaluates again and steps with another optimizer, as sharpness-aware ones do."""

    def __init__(self, params: Any, normalized: bool) -> None:
        super().__init__(params, {"lr": 0.1})
        self.inner = SGD(self.param_groups, lr=0.1)
        self.param_groups, self.normalized = self.inner.param_groups, normalized

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None
        params = [p for group in self.param_groups for p in group["params"]]
        norm = sum(p.grad.square().sum() for p in params) if self.normalized else 1.0
        moves = [0.05 * p.grad / norm for p in params]
        for p, move in zip(params, moves, strict=True):
            p += move
        torch.enable_grad()(closure)()
        for p, move in zip(params, moves, strict=True):
            p -= move
        self.inner.step()


class Lookahead(Optimizer):
    """Wraps another optimizer, shares its groups, and keeps a list that goes with the parameters by place."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.param_groups, self.state, self.defaults = (
            inner,
            inner.param_groups,
            inner.state,
            inner.defaults,
        )
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            for p, q in zip(group["params"], slow, strict=True):
                p.copy_(q.lerp_(p, 0.5))


class TakesTheModel(Optimizer):
    """An odd constructor, state that it makes there, and a mode that must be switched on."""

    def __init__(self, model: nn.Module, label: str, *, momentum: float) -> None:
        super().__init__(model.parameters(), {})
        self.label, self.momentum, self.training = label, momentum, False
        for p in model.parameters():
            self.state[p] = {"momentum": torch.zeros_like(p), "rows": torch.zeros(p.shape[0])}

    def train(self) -> None:
        self.training = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if not self.training:
            raise RuntimeError("call train() first")
        for p in self.param_groups[0]["params"]:
            self.state[p]["rows"] += 1
            p -= 0.1 * self.state[p]["momentum"].mul_(self.momentum).add_(p.grad)


def warmed_up(net: nn.Module) -> Optimizer:
    """Its rate is zero when the run begins, and the scheduler has replaced `step` on the object."""
    optimizer = Rule(net.parameters(), by_global_norm)
    optimizer.__dict__["kept"] = LambdaLR(optimizer, lambda step: 0.0).last_epoch
    return optimizer


def replaced(net: nn.Module) -> Optimizer:
    optimizer = SGD(net.parameters(), lr=0.1)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign,assignment]
    return optimizer


def hooked(net: nn.Module) -> Optimizer:
    optimizer = SGD(net.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a copy called the hook"))
    return optimizer


def holds_a_closure(net: nn.Module) -> Optimizer:
    optimizer = SGD(net.parameters(), lr=0.1)
    optimizer.get = lambda: [*net.parameters()]  # type: ignore[attr-defined]
    return optimizer


def split(net: nn.Module) -> list[dict[str, Any]]:
    many, few = [p for p in net.parameters() if p.dim() > 1], [p for p in net.parameters() if p.dim() == 1]
    return [{"params": many}, {"params": few, "weight_decay": 0.0, "lr": torch.tensor(0.1)}]


CASES: dict[str, tuple[Callable[[nn.Module], Optimizer], str]] = {
    "sgd": (lambda m: SGD(m.named_parameters(), lr=0.1, momentum=0.9), "elementwise"),
    "adamw in groups": (lambda m: AdamW(split(m), amsgrad=True), "elementwise"),
    "rmsprop": (lambda m: RMSprop(m.parameters(), centered=True), "elementwise"),
    "state made at once": (lambda m: Adagrad(m.parameters()), "elementwise"),
    "sparse gradients": (lambda m: SparseAdam(m.parameters()), "elementwise"),
    "with hooks": (hooked, "elementwise"),
    "odd constructor": (lambda m: TakesTheModel(m, "x", momentum=0.9), "elementwise"),
    "foreach": (lambda m: Rule(m.parameters(), at_once), "elementwise"),
    "two steps": (lambda m: TwoSteps(m.parameters(), normalized=False), "elementwise"),
    "adafactor": (lambda m: Adafactor(m.parameters()), "whole_tensor"),
    "muon": (lambda m: Muon([p for p in m.parameters() if p.dim() == 2]), "whole_tensor"),
    "trust ratio": (lambda m: Rule(m.parameters(), by_trust_ratio), "whole_tensor"),
    "rows": (lambda m: Rule(m.parameters(), by_rows), "whole_tensor"),
    "large matrices": (lambda m: Rule(m.parameters(), factored_above_128), "whole_tensor"),
    "lbfgs": (lambda m: LBFGS(m.parameters()), "coupled"),
    "global norm": (lambda m: Rule(m.parameters(), by_global_norm), "coupled"),
    "norm above a threshold": (lambda m: Rule(m.parameters(), clipped), "coupled"),
    "warmup": (warmed_up, "coupled"),
    "two normalized steps": (lambda m: TwoSteps(m.parameters(), normalized=True), "coupled"),
    "number of parameters": (lambda m: Rule(m.parameters(), by_count), "coupled"),
    "estimate in a group": (lambda m: Rule(m.parameters(), by_distance), "coupled"),
    "noise": (lambda m: Rule(m.parameters(), with_noise), "coupled"),
    "python's noise": (lambda m: Rule(m.parameters(), with_pythons_noise), "coupled"),
    "list by place": (lambda m: Lookahead(AdamW(m.parameters())), "coupled"),
    "replaced step": (replaced, "unknown"),
    "closure": (holds_a_closure, "unknown"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_probe_says_what_an_optimizer_reads_and_leaves_no_trace(name: str) -> None:
    net = model()
    make, kind = CASES[name]
    optimizer = make(net)
    before = [(p.detach().clone(), p._version) for p in net.parameters()]
    entries = {id(p): {k: v.clone() for k, v in entry.items()} for p, entry in optimizer.state.items()}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    found = probe(optimizer)
    assert found.kind == kind, found
    assert bool(found.reason) == (kind != "elementwise")
    for p, (value, version) in zip(net.parameters(), before, strict=True):
        assert torch.equal(p, value) and p.grad is None and p._version == version
    assert {id(p): entry.keys() for p, entry in optimizer.state.items()} == {
        i: entry.keys() for i, entry in entries.items()
    }
    assert all(torch.equal(v, entries[id(p)][k]) for p, entry in optimizer.state.items() for k, v in entry.items())
    assert groups == [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    assert torch.equal(streams[0], torch.get_rng_state()) and streams[1] == random.getstate()
    assert streams[2] == np.random.get_state()[1].tolist()  # type: ignore[union-attr]


class Late(Optimizer):
    """Clips by the global norm from some step on, which it counts in one of several places."""

    def __init__(self, params: Any, count_in: str, begins: Callable[[int], bool]) -> None:
        self.steps, self.count_in, self.begins = 0, count_in, begins
        super().__init__(params, {"lr": 0.1, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", torch.zeros(())) + 1
            counts = {"attribute": self.steps, "group": group["steps"], "state": int(state["step"])}
            if self.begins(counts[self.count_in]):
                by_global_norm(group["params"], group)
            else:
                for p in group["params"]:
                    p -= 0.1 * p.grad


@pytest.mark.parametrize("count_in", ["attribute", "group", "state"])
@pytest.mark.parametrize(
    "begins",
    [lambda t: t > 8, lambda t: t > 500, lambda t: t % 100 == 0, lambda t: 10 < t < 30],
    ids=["late", "later", "often", "for a time"],
)
def test_what_an_optimizer_begins_late_in_a_run_is_found(count_in: str, begins: Callable[[int], bool]) -> None:
    optimizer = Late(nn.Linear(3, 3).parameters(), count_in, begins)
    assert probe(optimizer).kind == "coupled"
    assert optimizer.steps == optimizer.param_groups[0]["steps"] == 0 and not optimizer.state


class CountsTensors(SGD):
    """Of one tensor it counts steps, of more something else."""

    tensors = 0

    def step(self, closure: Any = None) -> Any:
        self.tensors += sum(len(group["params"]) for group in self.param_groups)
        return super().step(closure)


def test_a_number_that_counts_steps_of_one_tensor_only_is_left_as_it_is() -> None:
    parameters = [nn.Parameter(torch.randn(4, 4)) for _ in range(3)]
    assert probe(CountsTensors(parameters, lr=0.1, momentum=0.9)).kind == "elementwise"


def test_an_optimizer_that_fails_late_is_tried_early() -> None:
    def rule(params: list[Tensor], group: dict[str, Any]) -> None:
        group["steps"] += 1
        assert group["steps"] < 15, "trained for too long"
        for p in params:
            p -= 0.1 * p.grad

    assert probe(Rule(nn.Linear(3, 3).parameters(), rule, steps=0)).kind == "elementwise"


def test_an_optimizer_that_reads_the_number_of_dimensions_does_not_flatten() -> None:
    def decays_matrices(params: list[Tensor], group: dict[str, Any]) -> None:
        for p in params:
            p -= 0.1 * (p.grad + (0.1 * p if p.dim() > 1 else 0))

    found = probe(Rule(model().parameters(), decays_matrices))
    assert (found.kind, found.flattens) == ("elementwise", False)
    assert probe(AdamW(model().parameters())).flattens


def test_an_optimizer_that_fails_on_an_empty_group_is_named() -> None:
    assert probe(Rule(model().parameters(), at_once)).needs_all_groups.startswith("RuntimeError")
    assert not probe(SGD(model().parameters(), lr=0.1)).needs_all_groups


def test_complex_and_half_precision_parameters_are_probed() -> None:
    params = [nn.Parameter(torch.randn(3, 4, dtype=torch.complex64)), nn.Parameter(torch.randn(5).bfloat16())]
    assert probe(AdamW(params)).kind == "elementwise"
    assert probe(Rule(params, by_trust_ratio)).kind == "whole_tensor"


# ---- those that need not be tried ---------------------------------------------------------------------

KNOWN: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: SGD(p, 0.1),
    "SGD, all options": lambda p: SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01, maximize=True),
    "SGD, dampened": lambda p: SGD(p, 0.1, momentum=0.9, dampening=0.5, foreach=False),
    "Adam": lambda p: Adam(p),
    "Adam, all options": lambda p: Adam(p, 0.1, (0.8, 0.9), 1e-6, 0.01, amsgrad=True, maximize=True),
    "AdamW": lambda p: AdamW(p, weight_decay=0.1),
    "AdamW, a name and another rate": lambda p: AdamW([{"params": list(p), "name": "all", "lr": np.float64(0.3)}]),
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_need_not_be_tried_is_what_a_trial_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [
        *model().parameters(),
        nn.Parameter(torch.randn(3, dtype=torch.complex64)),
        nn.Parameter(torch.ones(())),
    ]
    optimizer = KNOWN[name](parameters)
    LambdaLR(optimizer, lambda step: 1.0)  # which wraps the step on the object
    assert is_plain(optimizer) and probe(optimizer) == PLAIN
    monkeypatch.setattr("lockstep.strategies.optimizers.probe.is_plain", lambda optimizer: False)
    assert probe(optimizer) == PLAIN


def test_what_compile_wraps_of_optimizers_is_torchs_own() -> None:
    torch.compile(torch.neg, backend="eager")(torch.ones(1))
    assert hasattr(SGD._init_group, "__wrapped__"), "it was torch.compile that wrapped it"
    assert is_plain(SGD(model().parameters(), 0.1)) and is_plain(Adam(model().parameters()))


class Scaled(SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        by_trust_ratio([p for group in self.param_groups for p in group["params"]], {})


def test_what_is_not_torchs_own_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = list(model().parameters())
    for options in ({"lr": torch.tensor(0.1)}, {"fused": True}, {"foreach": True}, {"capturable": True}):
        assert not is_plain(Adam(parameters, **options)), options
    scaled = Scaled(parameters, 0.1)
    assert not is_plain(scaled) and probe(scaled).kind == "whole_tensor"
    on_object = SGD(parameters, 0.1)
    on_object.step = lambda closure=None: None  # type: ignore[method-assign, misc, assignment]
    assert not is_plain(on_object)
    monkeypatch.setattr(SGD, "step", Scaled.step)
    assert not is_plain(SGD(parameters, 0.1)) and probe(SGD(parameters, 0.1)).kind == "whole_tensor"


def by_norm_of_all(optimizer: Optimizer, gradients: list[Tensor]) -> list[Tensor]:
    norm = torch.stack([g.norm() for g in gradients]).norm()
    return [g / norm for g in gradients]


def test_a_step_of_its_own_below_a_schedule_is_not_torchs() -> None:
    optimizer = SGD(model().parameters(), 0.1)

    def step(self: SGD, closure: Any = None) -> Any:
        return type(self).step(self, closure)

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign, assignment]
    LambdaLR(optimizer, lambda step: 1.0)
    assert not is_plain(optimizer) and "replaced on the object" in probe(optimizer).reason


def test_a_patch_that_takes_the_name_of_what_it_wraps_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = list(model().parameters())
    SGD(parameters, 0.1)  # torch itself wraps the class's step in the first one
    whole = SGD.step

    @functools.wraps(whole)
    @torch.no_grad()
    def step(self: SGD, closure: Any = None) -> Any:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p, gradient in zip(held, by_norm_of_all(self, [p.grad for p in held]), strict=True):
            p.grad = gradient
        return whole(self, closure)

    monkeypatch.setattr(SGD, "step", step)
    optimizer = SGD(parameters, 0.1)
    assert not is_plain(optimizer) and probe(optimizer).kind == "coupled"


def test_a_patch_of_what_torchs_step_calls_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = SGD(model().parameters(), 0.1)
    update = sgd_module.sgd

    def patched(params: list[Tensor], gradients: list[Tensor], *args: Any, **options: Any) -> Any:
        return update(params, by_norm_of_all(optimizer, gradients), *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(sgd_module, "sgd", patched)
        assert not is_plain(optimizer) and probe(optimizer).kind == "coupled"
    assert is_plain(optimizer)
    optimizer._init_group = lambda *args: SGD._init_group(optimizer, *args)  # type: ignore[attr-defined, method-assign]
    assert not is_plain(optimizer) and probe(optimizer).kind == "unknown"


def test_a_copy_has_the_attribute_without_which_torch_fails_on_cuda() -> None:
    """There every step of Adafactor, whose groups have no `capturable`, would end in a KeyError."""
    name = "_warned_capturable_if_run_uncaptured"
    optimizer = Adafactor(model().parameters())
    assert vars(duplicate(optimizer, {}))[name] is vars(optimizer)[name] is True
