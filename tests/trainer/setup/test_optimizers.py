"""What `configure_optimizers` may return."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from tests.trainer.module_toys import Lrs, Warm
from tests.trainer.toy import Net, loader, quiet


def one(m: nn.Module) -> SGD:
    return SGD(m.parameters(), lr=1.0)


def two(m: Any) -> tuple[SGD, SGD]:
    return SGD(m.net[0].parameters(), lr=1.0), SGD(m.net[3].parameters(), lr=10.0)


def halving(optimizer: SGD) -> StepLR:
    return StepLR(optimizer, 1, gamma=0.5)


def dictionary(optimizer: SGD, **options: Any) -> dict[str, Any]:
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": halving(optimizer), **options}}


class Bare(Optimizer):
    """An optimizer around another that does not call `Optimizer.__init__`, as programs copy it from each other."""

    def __init__(self, base: Optimizer) -> None:
        self.base, self.param_groups = base, base.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


class Empty(Optimizer):
    def __init__(self) -> None: ...


CONSTANT, EPOCHWISE, STEPWISE = [[1.0]] * 4, [[1.0]] * 2 + [[0.5]] * 2, [[1.0], [0.5], [0.25], [0.125]]

FORMS: dict[str, tuple[Callable[[Any], Any], list[list[float]]]] = {
    "optimizer": (one, CONSTANT),
    "[opt]": (lambda m: [one(m)], CONSTANT),
    "of its own": (lambda m: Bare(one(m)), CONSTANT),
    "(opt, opt)": (two, [[1.0, 10.0]] * 4),
    "[opt, opt]": (lambda m: list(two(m)), [[1.0, 10.0]] * 4),
    "[opt], [sch]": (lambda m: ([o := one(m)], [halving(o)]), EPOCHWISE),
    "[[opt], [sch]]": (lambda m: [[o := one(m)], [halving(o)]], EPOCHWISE),
    "[opt], sch": (lambda m: ([o := one(m)], halving(o)), EPOCHWISE),
    "[opt], []": (lambda m: ([one(m)], []), CONSTANT),
    "[opt], [{}]": (lambda m: ([o := one(m)], [{"scheduler": halving(o), "interval": "step"}]), STEPWISE),
    "[opt], {}": (lambda m: ([o := one(m)], {"scheduler": halving(o), "interval": "step", "frequency": 1}), STEPWISE),
    "[opts], [sch]": (lambda m: (list(os := two(m)), [halving(os[1])]), [[1.0, 10.0]] * 2 + [[1.0, 5.0]] * 2),
    "{opt}": (lambda m: {"optimizer": one(m)}, CONSTANT),
    "{opt, sch}": (lambda m: {"optimizer": (o := one(m)), "lr_scheduler": halving(o)}, EPOCHWISE),
    "{opt, {sch}}": (lambda m: dictionary(one(m), interval="step"), STEPWISE),
    "{opt, sch, monitor}": (
        lambda m: {"optimizer": (o := one(m)), "lr_scheduler": halving(o), "monitor": "train/loss_epoch"},
        EPOCHWISE,
    ),
    "{opt, {sch, monitor}}": (lambda m: dictionary(one(m), monitor="not/there", strict=True, name="rate"), EPOCHWISE),
    "[{}, {}]": (lambda m: [dictionary(o) for o in two(m)], [[1.0, 10.0]] * 2 + [[0.5, 5.0]] * 2),
    "({}, {})": (lambda m: tuple(dictionary(o) for o in two(m)), [[1.0, 10.0]] * 2 + [[0.5, 5.0]] * 2),
    "{name: opt}": (lambda m: dict(zip("ab", two(m), strict=True)), [[1.0, 10.0]] * 4),
    "{name: {}}": (lambda m: {"a": dictionary(two(m)[0]), "b": two(m)[1]}, [[1.0, 10.0]] * 2 + [[0.5, 10.0]] * 2),
}


@pytest.mark.parametrize(("form", "expected"), FORMS.values(), ids=FORMS)
def test_forms_of_configure_optimizers(form: Callable[[Any], Any], expected: list[list[float]]) -> None:
    class Formed(Net):
        def configure_optimizers(self) -> Any:
            return form(self)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return dict.fromkeys(self.trainer._run.optimizers, loss) if len(self.trainer.optimizers) > 1 else loss

    lrs = Lrs()
    quiet(max_epochs=2, callbacks=lrs).fit(Formed(), loader(16))
    assert lrs.seen == expected


WRONG_FORMS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nothing": (lambda m: None, "Formed.configure_optimizers returned no optimizer"),
    "no optimizer": (lambda m: "adam", "returned str where an optimizer belongs"),
    "without groups": (lambda m: Empty(), r"Empty has no param_groups.*call super\(\).__init__\(params, defaults\)"),
    "unknown key": (lambda m: {"optimizer": one(m), "scheduler": None}, "'scheduler'"),
    "turns": (
        lambda m: [{"optimizer": one(m), "frequency": 1}, {"optimizer": one(m), "frequency": 5}],
        "gave optimizer '0' a frequency, but all optimizers step in each step",
    ),
    "unknown key of a scheduler": (lambda m: dictionary(one(m), intervall="step"), "but it has intervall"),
    "interval": (lambda m: dictionary(one(m), interval="batch"), "interval='batch'"),
    "frequency": (lambda m: dictionary(one(m), frequency=0), "frequency=0"),
    "plateau without monitor": (
        lambda m: ([o := one(m)], [ReduceLROnPlateau(o)]),
        "ReduceLROnPlateau needs the name of a metric",
    ),
    "no scheduler": (
        lambda m: {"optimizer": one(m), "lr_scheduler": {"interval": "step"}},
        "needs the key 'scheduler'",
    ),
    "stranger": (
        lambda m: ([one(m)], [Warm(one(m))]),
        "Warm is not a scheduler of torch: it has no step, so Formed needs lr_scheduler_step",
    ),
    "stateless": (lambda m: ([one(m)], [object()]), "object has no state_dict"),
}


@pytest.mark.parametrize(("form", "message"), WRONG_FORMS.values(), ids=WRONG_FORMS)
def test_invalid_forms_are_refused_by_name(form: Callable[[Any], Any], message: str) -> None:
    class Formed(Net):
        def configure_optimizers(self) -> Any:
            return form(self)

    with pytest.raises((ValueError, TypeError), match=message):
        quiet().fit(Formed(), loader(8))


class Stateless:
    """A scheduler with nothing to save, as they are written to satisfy an interface."""

    loaded: list[Any] = []

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None: ...
    def state_dict(self) -> None: ...
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded.append(state)


def test_a_scheduler_may_have_no_state(tmp_path: Path) -> None:
    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            return [optimizer := one(self)], [Stateless(optimizer)]

    trainer = quiet(max_epochs=1)
    trainer.fit(Scheduled(), loader(8))
    trainer.save_checkpoint(tmp_path / "one")
    quiet(max_epochs=2).fit(Scheduled(), loader(8), ckpt_path=tmp_path / "one")
    assert Stateless.loaded == [{}]
