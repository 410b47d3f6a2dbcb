"""Models of transformers and PEFT under each strategy: equal to one process, or refused by name."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from lockstep.strategies.launch.launcher import launch
from lockstep.strategies.launch.payload import pack, unpack
from tests.integrations.hugging_face import MODELS, NEEDS_PEFT, FineTuning, Result, on_ranks, train

pytestmark = [NEEDS_PEFT, pytest.mark.ranks, pytest.mark.timeout(400)]

STRATEGIES = ("ddp", "fsdp", "tensor", "deepspeed_stage_2", "pipeline")
DAILY: dict[str, Sequence[str]] = {
    "tensor": ("GPT-2", "Llama, tied", "Qwen3", "Llama with LoRA"),
    "fsdp": ("BERT",),
    "pipeline": ("GPT-2", "Llama, tied"),
}
REFUSED: dict[tuple[str, str], str] = {}
"""What a strategy does not train today, and what it says. Every other cell is equal to one process."""


@functools.cache
def expected(kind: str, precision: str) -> Result:
    """What one process computes: it has changed what is trained, and nothing else."""
    found = train(kind, "single", precision=precision)
    before: dict[str, Any] = dict(FineTuning(kind).named_parameters())
    moved = {name: float((found.weights[name] - value.detach()).abs().max()) for name, value in before.items()}
    trained = [name for name, parameter in before.items() if parameter.requires_grad]
    assert sum(moved[name] > 1e-6 for name in trained) > 0.7 * len(trained)  # the bias of keys has no gradient
    assert not any(moved[name] for name in before if name not in trained)
    return found


def check(kind: str, strategy: str, found: Result) -> None:
    if sentence := REFUSED.get((strategy, kind)):
        assert sentence in found.error
        return
    assert not found.error
    precision, tolerance = ("32-true", 1e-5) if "deepspeed" in strategy else ("64-true", 1e-12)
    wanted = expected(kind, precision)
    largest = max(float(value.abs().max()) for value in wanted.weights.values())
    assert found.weights.keys() == wanted.weights.keys()
    for name, value in wanted.weights.items():
        assert float((found.weights[name] - value.detach()).abs().max()) <= tolerance * largest, name
    assert found.loss == pytest.approx(wanted.loss, rel=1e-6)  # transformers computes it in float32


@pytest.mark.long
@pytest.mark.parametrize("strategy", DAILY)
def test_models_of_transformers_are_trained_as_on_one_process(strategy: str) -> None:
    found = on_ranks(DAILY[strategy], strategy)
    assert set(found) == set(DAILY[strategy])
    for kind, result in found.items():
        check(kind, strategy, result)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_model_under_every_strategy(strategy: str) -> None:
    for kind, result in on_ranks(list(MODELS), strategy).items():
        check(kind, strategy, result)


def count_recorded(*models: Any) -> list[int]:
    tokens = torch.zeros(1, 4, dtype=torch.long)
    return [len(model(tokens, output_hidden_states=True).hidden_states) for model in models]


@pytest.mark.slow
def test_started_ranks_record_hidden_states() -> None:
    fresh, used = MODELS["Llama"](), MODELS["Llama"]()
    assert count_recorded(used) == [3]
    assert launch(count_recorded, (fresh, used), 1) == [3, 3]


def test_a_model_that_has_recorded_hidden_states_can_be_sent_to_ranks() -> None:
    model = MODELS["Llama"]()
    count_recorded(model)
    descriptor = pack(model)
    sent = unpack(descriptor)
    os.close(descriptor)
    assert count_recorded(sent) == [3]
