"""ModelPruning against torch.nn.utils.prune by hand, on ranks, and over a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import lockstep.lightning.pytorch as pl
from tests.trainer.lightning.projects import BARE, loader, net
from tests.trainer.toy import distance, weights

QUIET = BARE | {"max_epochs": 3, "devices": 1, "precision": "64-true", "split_batches": True, "seed": 0}


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = net(4, 8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0].to(self.net[0].bias.dtype)), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def fit(pruning: Any, module: Any = None, ckpt_path: Any = None, **options: Any) -> Any:
    module = module or Net()
    callbacks = [pruning, *options.pop("callbacks", [])]
    pl.Trainer(**QUIET | options, callbacks=callbacks).fit(module, loader(), loader(8), ckpt_path=ckpt_path)
    return module


def by_hand(use_global: bool, rewinds: bool) -> Any:
    """What a loop of torch trains that prunes the weights of both layers after each epoch."""
    module = Net().double()
    places = [(module.net[0], "weight"), (module.net[2], "weight")]
    start = [layer.weight.detach().clone() for layer, _ in places]
    optimizer = module.configure_optimizers()
    for _ in range(3):
        for i, batch in enumerate(loader()):
            optimizer.zero_grad()
            module.training_step(batch, i).backward()
            optimizer.step()
        module.net(torch.zeros(1, 4, dtype=torch.float64))  # computes the masked weights of now
        if use_global:
            prune.global_unstructured(places, prune.L1Unstructured, amount=0.3)
        else:
            for layer, name in places:
                prune.ln_structured(layer, name, amount=1, n=2, dim=0)
        for (layer, _), value in zip(places, start, strict=True):
            if rewinds:
                layer.weight_orig.data.copy_(value)
    for layer, name in places:
        prune.remove(layer, name)
    return module


@pytest.mark.parametrize("strategy", ["auto", pytest.param("ddp", marks=pytest.mark.ranks), "dp"])
@pytest.mark.parametrize(("use_global", "rewinds"), [(True, False), (False, True)])
def test_weights_are_those_of_torch(strategy: str, use_global: bool, rewinds: bool) -> None:
    if use_global:
        options: dict[str, Any] = {"pruning_fn": "l1_unstructured", "amount": 0.3}
    else:
        options = {"pruning_fn": "ln_structured", "amount": 1, "pruning_dim": 0, "pruning_norm": 2}
    pruning = pl.callbacks.ModelPruning(
        **options,
        parameter_names=["weight"],
        use_global_unstructured=use_global,
        use_lottery_ticket_hypothesis=rewinds,
    )
    module = fit(pruning, strategy=strategy, devices=1 if strategy == "auto" else 2)
    expected = by_hand(use_global, rewinds)
    assert sum(int((p == 0).sum()) for p in module.parameters()) > 10
    assert distance([*module.state_dict().values()], [expected.state_dict()[n] for n in module.state_dict()]) <= 1e-12


def randomly(**options: Any) -> Any:
    return pl.callbacks.ModelPruning("random_unstructured", amount=2, resample_parameters=True, **options)


@pytest.mark.parametrize(
    ("strategy", "step"), [("auto", 6), ("auto", 9), ("auto", 12), pytest.param("ddp", 9, marks=pytest.mark.ranks)]
)
def test_a_resumed_run_is_the_whole_run(strategy: str, step: int, tmp_path: Path) -> None:
    options = {"strategy": strategy, "devices": 1 if strategy == "auto" else 2}
    saver = pl.callbacks.ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    whole = fit(randomly(), callbacks=[saver], enable_checkpointing=True, **options)
    path = tmp_path / f"step={step}.ckpt"
    resumed = fit(randomly(), ckpt_path=path, **options)
    assert all(map(torch.equal, weights(resumed), weights(whole)))
    plain = Net.load_from_checkpoint(path)
    assert sum(int((p == 0).sum()) for p in plain.parameters()) == 2 * ((step - 1) // 6)
    elsewhere = fit(randomly(), ckpt_path=path)
    assert distance(weights(elsewhere), weights(whole)) <= 1e-12


def test_a_finished_run_is_trained_on_with_its_masks(tmp_path: Path) -> None:
    saver = pl.callbacks.ModelCheckpoint(dirpath=tmp_path, filename="end")
    fit(randomly(), callbacks=[saver], enable_checkpointing=True, max_epochs=2)
    on = fit(randomly(), ckpt_path=tmp_path / "end.ckpt")
    assert all(map(torch.equal, weights(on), weights(fit(randomly()))))


def test_masks_stay_if_they_are_not_made_permanent() -> None:
    once = {"apply_pruning": lambda epoch: epoch == 0, "make_pruning_permanent": False}
    module = fit(pl.callbacks.ModelPruning("l1_unstructured", **once))
    layer = module.net[0]
    module.net(torch.zeros(1, 4, dtype=torch.float64))
    assert prune.is_pruned(layer) and torch.equal(layer.weight, layer.weight_orig * layer.weight_mask)
    start = layer.weight_orig.detach().clone()
    fit(pl.callbacks.ModelPruning("l1_unstructured", amount=0.1, **once), module, max_epochs=1)
    assert torch.equal(layer.weight_orig, start)
    resampled = pl.callbacks.ModelPruning("l1_unstructured", amount=0.1, resample_parameters=True)
    fit(resampled, module, max_epochs=1)
    assert not prune.is_pruned(module) and not torch.isin(layer.weight[layer.weight != 0], start).any()


def test_a_callback_prunes_several_modules() -> None:
    pruning = pl.callbacks.ModelPruning("l1_unstructured", amount=0.3)
    folds = [fit(pruning, max_epochs=1) for _ in range(2)]
    assert all(map(torch.equal, weights(folds[0]), weights(folds[1])))


class SavesAsEpochsEnd(pl.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}")


class SavesAsValidationEnds(SavesAsEpochsEnd):
    on_train_epoch_end = None

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            super().on_train_epoch_end(trainer, module)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("saver", [SavesAsEpochsEnd, SavesAsValidationEnds])
def test_a_checkpoint_of_a_callback_at_an_end_is_resumed(saver: Any, is_first: bool, tmp_path: Path) -> None:
    callbacks = [saver(tmp_path), randomly(prune_on_train_epoch_end=saver is SavesAsEpochsEnd)]
    first, second = callbacks if is_first else reversed(callbacks)
    whole = fit(first, callbacks=[second])
    for epoch in (0, 2):
        resumed = fit(randomly(prune_on_train_epoch_end=saver is SavesAsEpochsEnd), ckpt_path=tmp_path / f"{epoch}")
        assert all(map(torch.equal, weights(resumed), weights(whole)))


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.net[2].weight = self.net[0].weight


class Unbiased(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 3, bias=False))


@pytest.mark.parametrize(
    ("module", "pruning", "options", "error"),
    [
        (Tied, {}, {}, "cannot prune net.0.weight and net.2.weight, which are one parameter"),
        (Unbiased, {"parameter_names": ["bias"]}, {}, "no layer of Unbiased has a parameter called 'bias'"),
        (
            Net,
            {"pruning_fn": "ln_structured", "use_global_unstructured": False, "pruning_dim": 0, "pruning_norm": 2},
            {},
            "ln_structured with pruning_dim=0 cannot prune bias of Linear.*has 1 dimensions; give parameter_names",
        ),
        (Net, {"amount": lambda epoch: 1.5}, {}, "amount must be a share from 0.0 to 1.0.*got 1.5"),
        (Net, {}, {"callbacks": [pl.callbacks.EMAWeightAveraging()]}, "ModelPruning and WeightAveraging both change"),
        *(
            pytest.param(Net, {}, {"strategy": strategy, "devices": 2}, error, marks=pytest.mark.ranks)
            for strategy, error in (
                ("fsdp", "ModelPruning ranks whole weights, and FSDP shards them"),
                ("tensor", "ModelPruning ranks whole weights, and TensorParallel shards them"),
                ("pipeline", "ModelPruning ranks whole weights, and Pipeline shards them"),
            )
        ),
        pytest.param(
            Net,
            {},
            {"strategy": "deepspeed_stage_2", "devices": 2, "precision": "32-true"},
            "ModelPruning keeps state beside the parameters: DeepSpeed",
            marks=pytest.mark.ranks,
        ),
        pytest.param(
            Net,
            {"make_pruning_permanent": False},
            {"strategy": "ddp", "devices": 2},
            "leaves masks in the module, which DDP cannot bring back",
            marks=pytest.mark.ranks,
        ),
    ],
)
def test_what_is_not_exact_is_refused(module: Any, pruning: Any, options: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        fit(pl.callbacks.ModelPruning(**{"pruning_fn": "l1_unstructured"} | pruning), module(), **options)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"pruning_fn": "l1_unstructured", "parameter_names": ["scale"]}, "parameter_names must be.*got 'scale'"),
        ({"pruning_fn": "l2"}, "pruning_fn must be 'ln_structured'.*got 'l2'"),
        ({"pruning_fn": "ln_structured", "use_global_unstructured": False}, "needs pruning_dim and pruning_norm"),
        ({"pruning_fn": "random_structured", "pruning_dim": 0}, "give use_global_unstructured=False"),
        ({"pruning_fn": prune.L1Unstructured, "use_global_unstructured": False}, "give use_global_unstructured=True"),
        ({"pruning_fn": "l1_unstructured", "amount": "half"}, "amount must be a number.*got 'half'"),
        ({"pruning_fn": "l1_unstructured", "amount": 1.5}, "amount must be a share from 0.0 to 1.0.*got 1.5"),
        ({"pruning_fn": "l1_unstructured", "amount": -1}, "amount must be a share from 0.0 to 1.0.*got -1"),
        ({"pruning_fn": "l1_unstructured", "verbose": 3}, "verbose must be 0, 1 or 2, got 3"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, error: str) -> None:
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match=error):
        pl.callbacks.ModelPruning(**arguments)
