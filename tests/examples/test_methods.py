"""examples/continual.py and examples/multitask.py: what they compute, and what they gain."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from examples.continual import TASKS, Learner, Stream, fisher, perceptron
from examples.digits import DigitsData
from examples.multitask import Heads, MultiTask, conflicts, losses
from lockstep import Trainer
from lockstep.callbacks.loggers.tensorboard import TensorBoardLogger
from tests.examples.test_examples import metric, run

SMALL: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "num_sanity_val_steps": 0, "seed": 0}


def test_fisher_is_the_mean_over_samples_and_classes() -> None:
    torch.manual_seed(0)
    net, inputs = perceptron(5).double(), torch.rand(11, 64, dtype=torch.float64)
    expected = {name: torch.zeros_like(weight) for name, weight in net.named_parameters()}
    for sample in inputs:
        for label in range(10):
            logs = net(sample[None]).log_softmax(1)[0]
            slopes = torch.autograd.grad(logs[label], list(net.parameters()))
            for name, slope in zip(expected, slopes, strict=True):
                expected[name] += logs[label].exp().detach() * slope.square() / len(inputs)
    found = fisher(perceptron(5), dict(net.named_parameters()), inputs)
    assert all((found[name] - value).abs().max() <= 1e-12 for name, value in expected.items())


def test_the_matrix_reaches_tensorboard_and_the_penalty_is_minimized(tmp_path: Path) -> None:
    class Checked(Learner):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            before = torch.cat([weight.detach().flatten() for weight in self.net.parameters()])
            super().on_before_zero_grad(optimizer)
            after = torch.cat([weight.detach().flatten() for weight in self.net.parameters()])
            slope = self.hparams.ewc * (self.importance * after - self.pull)
            assert (after - before + self.hparams.lr * slope).abs().max() <= 1e-12  # where the proximal step ends

    module, data = Checked(width=8, ewc=50.0, fisher_samples=4), Stream(epochs=1, replay=3)
    logger = TensorBoardLogger(save_dir=tmp_path)
    loop: dict[str, Any] = {"max_epochs": TASKS, "reload_dataloaders_every_n_epochs": 1, "limit_train_batches": 3}
    trainer = Trainer(logger=logger, enable_checkpointing=False, precision="64-true", **loop, **SMALL)
    trainer.fit(module, datamodule=data)
    assert len(data.train_dataloader().dataset) == 1437 + 3 * (TASKS - 1)
    past = module.matrix
    forgotten = torch.stack([past[:, i].max() - past[-1, i] for i in range(TASKS - 1)]).mean()
    assert float(trainer.callback_metrics["continual/forgetting"]) == pytest.approx(float(forgotten))

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = tmp_path.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file), size_guidance={"images": 0})
    events.Reload()
    assert [image.step for image in events.Images("accuracy of each task")] == [3, 6, 9, 12, 15]
    table = events.Tensors("accuracy of each task/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert re.search(rf"^\| after 4 \| {past[-1, 0]:.1%} \|", table, re.MULTILINE)


def test_cosines_between_tasks() -> None:
    torch.manual_seed(0)
    net, images, labels = Heads(6).double(), torch.rand(9, 1, 8, 8, dtype=torch.float64), torch.arange(9)
    gradients = {}
    for task in ("class", "ink", "mirror"):
        loss = losses(net(images), images, labels)[task]
        gradients[task] = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.trunk.parameters()))])
    weights = {name: weight.detach() for name, weight in net.named_parameters()}
    found = conflicts(Heads(6), weights, images, labels)
    assert list(found) == ["class-ink", "class-mirror", "ink-mirror"]
    for pair, cosine in found.items():
        one, other = (gradients[task] for task in pair.split("-"))
        assert float((cosine - F.cosine_similarity(one, other, 0)).abs()) <= 1e-12


@pytest.mark.parametrize("weighting", ["equal", "uncertainty"])
def test_weights_of_losses(weighting: str) -> None:
    class Checked(MultiTask):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            found, s = losses(self.net(batch[0]), *batch), self.log_variances.tolist()
            total = super().training_step(batch, batch_idx)
            expected = sum(loss / torch.tensor(s[i]).exp() + s[i] / 2 for i, loss in enumerate(found.values()))
            assert (total - expected).abs() < 1e-6
            return total

    trainer = Trainer(max_epochs=1, limit_train_batches=4, logger=False, enable_checkpointing=False, **SMALL)
    trainer.fit(Checked(width=8, weighting=weighting), datamodule=DigitsData())
    values = trainer.callback_metrics
    assert {f"cosine/{pair}" for pair in ("class-ink", "class-mirror", "ink-mirror")} <= set(values)
    if weighting == "equal":
        assert values["weight/ink"] == values["weight/class"] == 1
    else:  # a small loss has a large weight
        assert values["weight/ink"] > 1 > values["weight/class"]


def test_another_weighting_is_refused() -> None:
    with pytest.raises(ValueError, match="weighting must be 'uncertainty' or 'equal', got 'none'"):
        MultiTask(weighting="none")


CONTINUAL = ["data.epochs=1", "data.replay=10", "module.ewc=1000", "module.width=16", "module.fisher_samples=8"]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("example", "options", "strategies"),
    [
        ("continual", CONTINUAL, "single,dp,model,ddp,fsdp,tensor,pipeline"),
        ("multitask", ["module.width=16"], "single,dp,ddp,fsdp,tensor"),
    ],
    ids=["continual", "multitask"],
)
def test_strategies_give_the_same_numbers(example: str, options: list[str], strategies: str, tmp_path: Path) -> None:
    """Over five tasks and epochs, with what the hooks change and measure."""
    compare = ["compare", f"examples/{example}.yaml", "--devices", "2", "--steps", "30", "--strategies", strategies]
    run("-m", "lockstep", *compare, "trainer.limit_train_batches=6", *options, root=tmp_path)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("options", "accuracy", "forgetting"),
    [
        ([], (0.4, 0.65), (0.4, 0.65)),
        (["module.ewc=1000"], (0.6, 1), (0, 0.35)),
        (["data.replay=50"], (0.75, 1), (0, 0.2)),
    ],
    ids=["neither", "ewc", "replay"],
)
def test_continual_as_it_comes(options: list[str], accuracy: Any, forgetting: Any, tmp_path: Path) -> None:
    output = run("-m", "lockstep", "fit", "examples/continual.yaml", *options, root=tmp_path)
    assert accuracy[0] < metric(output, "continual/accuracy") < accuracy[1]
    assert forgetting[0] < metric(output, "continual/forgetting") < forgetting[1]


@pytest.mark.slow
@pytest.mark.ranks
def test_multitask_as_it_comes(tmp_path: Path) -> None:
    output = run("-m", "lockstep", "fit", "examples/multitask.yaml", root=tmp_path)
    assert metric(output, "val/acc") > 0.93
    assert metric(output, "weight/ink") > 2
