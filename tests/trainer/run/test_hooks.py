"""How often, and in which order, every hook fires."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch

from lockstep import Module
from lockstep.callbacks import Callback, base
from tests.trainer.toy import Net, loader, quiet

HOOKS = ["setup", "teardown", *[name for name in vars(Callback) if name.startswith("on_")]]


def recorder(name: str, log: list[str], prefix: str) -> Any:
    def hook(self: Any, *args: Any, **kwargs: Any) -> None:
        log.append(prefix + name)

    return hook


def spies(log: list[str]) -> tuple[type[Net], type[Callback]]:
    module = type("Spy", (Net,), {name: recorder(name, log, "module.") for name in HOOKS})
    return module, type("SpyCallback", (Callback,), {name: recorder(name, log, "callback.") for name in HOOKS})


def test_every_hook_fires_as_often_as_the_loop_says() -> None:
    log: list[str] = []
    module, callback = spies(log)
    trainer = quiet(max_epochs=2, accumulate_grad_batches=2, num_sanity_val_steps=1, callbacks=[callback()])
    trainer.fit(module(), loader(40, 8), loader(24, 8))  # 5 batches: 3 windows an epoch; 3 validation batches
    expected = {
        **dict.fromkeys(
            (
                "setup",
                "teardown",
                "on_fit_start",
                "on_fit_end",
                "on_sanity_check_start",
                "on_sanity_check_end",
                "on_train_start",
                "on_train_end",
            ),
            1,
        ),
        **dict.fromkeys(("on_train_epoch_start", "on_train_epoch_end"), 2),
        **dict.fromkeys(("on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_after_backward"), 10),
        **dict.fromkeys(("on_before_optimizer_step", "on_before_zero_grad"), 6),
        **dict.fromkeys(
            ("on_validation_start", "on_validation_end", "on_validation_epoch_start", "on_validation_epoch_end"), 3
        ),
        **dict.fromkeys(("on_validation_batch_start", "on_validation_batch_end"), 1 + 2 * 3),
    }
    for who in ("module.", "callback."):
        counted = Counter(entry.removeprefix(who) for entry in log if entry.startswith(who))
        assert counted == expected
    for first, second in zip(log[::2], log[1::2], strict=True):
        assert first.removeprefix("module.") == second.removeprefix("callback.") or "epoch_end" in first + second, (
            "the module first, then the callbacks"
        )


def test_a_fit_after_one_that_failed_starts_its_epoch() -> None:
    class Sums(Net):
        def __init__(self, fails: bool) -> None:
            super().__init__()
            self.fails = fails

        def on_train_epoch_start(self) -> None:
            self.total = 0.0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.fails:
                raise MemoryError("too large")
            loss = super().training_step(batch, batch_idx)
            self.total += float(loss.detach())
            return loss

    trainer, mended = quiet(), Sums(False)
    with pytest.raises(MemoryError):
        trainer.fit(Sums(True), loader(8))
    trainer.fit(mended, loader(8))
    assert mended.total > 0


def test_order_within_a_step_is_the_documented_one() -> None:
    log: list[str] = []
    module, _ = spies(log)
    quiet(accumulate_grad_batches=2).fit(module(), loader(16, 8))
    begin = log.index("module.on_train_batch_start")
    assert [entry.removeprefix("module.") for entry in log[begin : log.index("module.on_train_epoch_end")]] == [
        *("on_train_batch_start", "on_before_backward", "on_after_backward", "on_train_batch_end"),
        *(
            "on_train_batch_start",
            "on_before_backward",
            "on_after_backward",
            "on_before_optimizer_step",
            "on_before_zero_grad",
            "on_train_batch_end",
        ),
    ]


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluation_hooks(stage: str) -> None:
    log: list[str] = []
    module, callback = spies(log)
    module.test_step = Net.validation_step  # type: ignore[attr-defined]
    getattr(quiet(callbacks=[callback()]), stage)(module(), loader(24, 8))
    name = {"validate": "validation"}.get(stage, stage)
    counted = Counter(entry.removeprefix("callback.") for entry in log if entry.startswith("callback."))
    moments = {"start": 1, "end": 1, "epoch_start": 1, "epoch_end": 1, "batch_start": 3, "batch_end": 3}
    assert counted == {"setup": 1, "teardown": 1, **{f"on_{name}_{moment}": times for moment, times in moments.items()}}


def test_the_docstring_names_every_hook() -> None:
    named = set(re.findall(r"on_\w+", base.__doc__ or ""))
    documented = {name for name in HOOKS if name.startswith("on_")}
    shared = {name.replace("validation", kind) for name in named for kind in ("test", "predict")}
    assert documented <= named | shared


def test_module_and_callback_have_the_same_hooks() -> None:
    assert all(hasattr(Module, name) for name in HOOKS)


class Oops(Exception):
    pass


@pytest.mark.ranks
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_batch_end", "on_validation_epoch_end", "on_train_end"])
def test_exceptions_in_hooks_come_out_as_themselves(hook: str, devices: int) -> None:
    seen = []

    class Failing(Net):
        def on_exception(self, exception: BaseException) -> None:
            seen.append(exception)

    def fail(self: Any, *args: Any) -> None:
        raise Oops(hook)

    setattr(Failing, hook, fail)
    with pytest.raises(Oops, match=hook):
        quiet(devices=devices).fit(Failing(), loader(16), loader(8))
    assert devices > 1 or [type(error) for error in seen] == [Oops]


def test_hooks_with_fewer_arguments_work() -> None:
    """As users write them: without the arguments that they do not need."""
    seen: list[Any] = []

    class Short(Net):
        def on_train_batch_start(self, batch: Any) -> None:  # type: ignore[override]
            seen.append(len(batch))

        def on_train_batch_end(self, *args: Any) -> None:  # type: ignore[override]
            seen.append(args[2])

        def on_before_zero_grad(self, *_: Any) -> None:
            seen.append(all(p.grad is not None for p in self.parameters()))

    quiet().fit(Short(), loader(8))
    assert seen == [2, True, 0]


def test_outputs_of_batches_reach_the_end_hook_without_their_graph() -> None:
    outputs = []

    class Keeps(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": super().training_step(batch, batch_idx), "index": batch_idx}

        def on_train_batch_end(self, outputs_: Any, batch: Any, batch_idx: int) -> None:
            outputs.append(outputs_)
            assert isinstance(batch[0], torch.Tensor)

    quiet(accumulate_grad_batches=2).fit(Keeps(), loader(24))
    assert [output["index"] for output in outputs] == [0, 1, 2]
    assert not any(output["loss"].requires_grad for output in outputs)


def test_a_run_that_fails_in_its_set_up_does_not_call_the_hooks_of_an_earlier_one() -> None:
    heard: list[str] = []

    class Listening(Net):
        def on_exception(self, exception: BaseException) -> None:
            heard.append(str(exception))

    class Broken(Net):
        def setup(self, stage: str) -> None:
            raise Oops("in set-up")

    trainer = quiet()
    trainer.fit(Listening(), loader(8))
    trainer.max_epochs = 2
    with pytest.raises(Oops, match="in set-up"):
        trainer.fit(Broken(), loader(8))
    assert heard == []
