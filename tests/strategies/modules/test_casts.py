"""Casts are followed while a strategy runs, and torch is as it was afterwards."""

from __future__ import annotations

import gc
import weakref

import pytest
from torch import nn

from lockstep.strategies.modules import casts
from tests.trainer.toy import loader, net, quiet


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
def test_a_run_leaves_torch_as_it_was_and_holds_no_model(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both run in this process: threads, and a mesh of one rank."""
    monkeypatch.setenv("LOCKSTEP_FORCE_MESH", "1")
    before, module = nn.Module._apply, net()
    trainer = quiet(strategy=strategy, devices=2 if strategy == "dp" else 1, accelerator="cpu")
    trainer.fit(module, loader(16))
    assert nn.Module._apply is before and not casts._followed
    held = weakref.ref(module)
    del module, trainer
    gc.collect()
    assert held() is None


def test_a_method_that_somebody_else_has_replaced_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    original = nn.Module._apply
    monkeypatch.setattr(nn.Module, "_apply", lambda *args, **kwargs: original(*args, **kwargs))
    theirs = nn.Module._apply
    casts.watch_casts()
    layer = nn.Linear(2, 2)
    casts.follow_casts(layer.weight)
    layer.double()
    assert casts.take_casts(layer.named_parameters) == ["weight"]
    casts.forget_casts()
    assert nn.Module._apply is theirs
