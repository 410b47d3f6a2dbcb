"""What hooks change in the parts of sharded tensors and in the state of optimizers has the effect of one process, or is
refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import Module
from lockstep.strategies.optimizers.hidden_state import of_shards
from tests.trainer.toy import Net, distance, loader, quiet, weights

pytestmark = pytest.mark.ranks
SHARDED = ["fsdp", "tensor"]


class Edits(Net):
    """Calls a function of the module in two steps."""

    def __init__(self, edit: Callable[[Any], Any]) -> None:
        super().__init__()
        self.edit = edit

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step in (2, 4):
            with torch.no_grad():
                self.edit(self)


def trained(edit: Callable[[Any], Any], strategy: str, devices: int) -> Module:
    torch.manual_seed(0)
    module = Edits(edit)
    run = quiet(
        strategy=strategy,
        devices=devices,
        split_batches=True,
        precision="32-true" if "deepspeed" in strategy else "64-true",
        seed=0,
    )
    run.fit(module, loader(48, 8))
    return module


def state_of(module: Any) -> Any:
    return module.trainer.optimizers[0].state[module.net[0].weight]


def row(module: Any) -> None:
    module.net[0].weight[0].zero_()


def rows_of_data(module: Any) -> None:
    module.net[0].weight.data[2:5].mul_(0.5)


def a_row_is_assigned(module: Any) -> None:
    module.net[0].weight[0] = module.net[0].weight[1]


def the_first_elements(module: Any) -> None:
    module.net[0].weight.view(-1)[:5] += 1


def row_of_the_state(module: Any) -> None:
    state_of(module)["exp_avg"][0].zero_()


def by_functions(module: Any) -> None:
    weight, average = module.net[0].weight, state_of(module)["exp_avg"]
    writes: list[Callable[[], Any]] = [
        lambda: torch.relu_(weight[1]),
        lambda: torch.clamp_(weight[:2], -0.1, 0.1),
        lambda: torch.add(weight[0], 1, out=weight[1]),
        lambda: torch._foreach_mul_([weight, weight[0], weight[1]], 2),
        lambda: nn.init.zeros_(weight[0]),
        lambda: nn.functional.hardtanh_(weight.data[0]),
        lambda: nn.functional.silu(weight[0], inplace=True),
        lambda: Tensor.__setitem__(weight, (0, torch.tensor([0, 1])), 0.0),
        lambda: torch.mul(average[0], 2, out=average[0]),
    ]
    for write in writes:
        with pytest.raises(RuntimeError, match=r"was to change a part"):
            write()
    Tensor.zero_(weight[0])


@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize(
    "edit", [row, rows_of_data, a_row_is_assigned, the_first_elements, row_of_the_state, by_functions]
)
def test_a_part_that_other_ranks_hold_is_not_changed_in_a_copy(edit: Callable[[Any], Any], strategy: str) -> None:
    with pytest.raises(RuntimeError, match=r"was to change a part, of shape .* that is sharded over ranks, and would"):
        trained(edit, strategy, 2)


def columns(module: Any) -> None:
    module.net[0].weight[:, 1:3].mul_(0.5)
    module.net[0].weight.t()[0] += 1


def momentum_is_halved(module: Any) -> None:
    state_of(module)["exp_avg"].mul_(0.5)
    state_of(module)["exp_avg_sq"][:, 0].mul_(0.5)


def the_state_is_dropped(module: Any) -> None:
    module.trainer.optimizers[0].state.pop(module.net[0].weight)


@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize("edit", [columns, momentum_is_halved, the_state_is_dropped])
def test_what_each_rank_holds_is_changed_as_on_one_process(edit: Callable[[Any], Any], strategy: str) -> None:
    expected, found = trained(edit, "single", 1), trained(edit, strategy, 2)
    assert distance(weights(found), weights(expected)) < 1e-11
    assert distance(weights(expected), weights(trained(lambda module: None, "single", 1))) > 1e-3


def dropped_within_whole(module: Any) -> None:
    with module.trainer.whole(module):
        module.trainer.optimizers[0].state.pop(module.net[0].weight, None)


def asked_within_whole(module: Any) -> None:
    with module.trainer.whole(module):
        module.trainer.optimizers[0].state.get(module.net[0].weight)


@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize("edit", [dropped_within_whole, asked_within_whole])
def test_the_state_of_shards_is_not_asked_for_whole_parameters(edit: Callable[[Any], Any], strategy: str) -> None:
    with pytest.raises(RuntimeError, match="within whole.* the state of AdamW was asked for a whole parameter"):
        trained(edit, strategy, 2)


def halved_by_groups_within_whole(module: Any) -> None:
    optimizer = module.trainer.optimizers[0]
    with module.trainer.whole(module):
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            optimizer.state[parameter]["exp_avg"].mul_(0.5)


def test_the_state_of_what_an_optimizer_holds_is_there_within_whole() -> None:
    edit = halved_by_groups_within_whole
    assert distance(weights(trained(edit, "fsdp", 2)), weights(trained(edit, "single", 1))) < 1e-11


def test_optimizers_that_share_a_state_share_it_within_whole_too() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    inner, outer = (torch.optim.SGD([parameter]) for _ in range(2))
    state = outer.state = inner.state
    with of_shards([inner, outer], ()):
        inner.state[parameter]["seen"] = 1
        assert outer.state[parameter]["seen"] == 1
    assert inner.state is outer.state is state and state[parameter] == {"seen": 1}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("edit", [the_state_is_dropped, asked_within_whole])
def test_the_state_that_deepspeed_keeps_in_flat_parts_is_refused(edit: Callable[[Any], Any], stage: int) -> None:
    with pytest.raises(RuntimeError, match="state of AdamW was asked for a parameter of the model, but DeepSpeed's"):
        trained(edit, f"deepspeed_stage_{stage}", 2)


def scaled_by_groups(module: Any) -> None:
    (params,) = [group["params"] for group in module.trainer.optimizers[0].param_groups]
    torch._foreach_mul_(params, 0.9)
    module.log("norm", float(sum(parameter.double().square().sum() for parameter in params)))


@pytest.mark.parametrize("stage", [1, 3])
def test_groups_of_deepspeed_have_the_parameters_of_the_model(stage: int) -> None:
    expected, found = trained(scaled_by_groups, "single", 1), trained(scaled_by_groups, f"deepspeed_stage_{stage}", 2)
    assert distance(weights(found), weights(expected)) < 1e-6
    norms = [module.trainer.callback_metrics["norm"] for module in (expected, found)]
    assert float(norms[1]) == pytest.approx(float(norms[0]), rel=1e-5)


class EditsBeforeSteps(Net):
    def __init__(self, edit: Callable[[Any], Any]) -> None:
        super().__init__()
        self.edit = edit

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.edit(optimizer)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda optimizer: optimizer.load_state_dict(optimizer.__getstate__()), "state_dict of AdamW was read or load"),
        (lambda optimizer: optimizer.state_dict(), "state_dict of AdamW was read or loaded during the run"),
        (lambda optimizer: optimizer.zero_grad(), r"zero_grad was called before the optimizer's step, but the gradien"),
        (lambda optimizer: optimizer.param_groups[0]["params"].pop(), "the parameters of an optimizer's group were ch"),
        (lambda optimizer: optimizer.param_groups[0].update(params=[]), "the parameters of an optimizer's group were"),
    ],
)
def test_what_deepspeed_would_lose_of_an_optimizer_is_refused(edit: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        quiet(strategy="deepspeed_stage_2", devices=1, precision="32-true").fit(EditsBeforeSteps(edit), loader(8, 8))
