"""LambdaCallback: hooks given as functions."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.callbacks import LambdaCallback
from tests.trainer.toy import loader, net, quiet


def test_functions_are_called_at_their_hooks() -> None:
    seen: list[Any] = []
    callback = LambdaCallback(
        setup=lambda trainer, module, stage: seen.append(stage),
        on_train_epoch_end=lambda trainer: seen.append(trainer.current_epoch),
        on_train_batch_end=lambda trainer, module, outputs, batch, batch_idx: seen.append(("batch", batch_idx)),
    )
    quiet(callbacks=[callback], limit_train_batches=2).fit(net(), loader())
    assert seen == ["fit", ("batch", 0), ("batch", 1), 0]


@pytest.mark.parametrize(
    ("hooks", "message"),
    [({"on_train_epok_end": print}, "has no hook 'on_train_epok_end'"), ({"on_fit_end": 3}, "must be a function")],
)
def test_what_is_not_a_hook_is_refused(hooks: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        LambdaCallback(**hooks)
