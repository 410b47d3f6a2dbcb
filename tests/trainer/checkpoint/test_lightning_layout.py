"""Files in Lightning's layout: written so that torch's restricted unpickler opens them, and read."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file

from lockstep import CheckpointError, DataModule
from lockstep.trainer.checkpoint.store import Checkpoint
from lockstep.trainer.cli.main import main
from tests.trainer.toy import Net, equal, loader, net, quiet, weights


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(
            [{"params": self.net[3].parameters()}, {"params": self.net[0].parameters()}], lr=0.01
        )
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["extra"] = {"where": Path("a"), "tensor": torch.ones(2)}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Scheduled, Path]:
    torch.manual_seed(0)
    module, trainer = Scheduled(width=6), quiet(accelerator="cpu", devices=1)
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "c")
    assert main(["checkpoint", "export", str(tmp_path / "c"), str(tmp_path / "c.ckpt")]) == 0
    return module, tmp_path / "c.ckpt"


def test_torch_opens_an_export(saved: tuple[Scheduled, Path]) -> None:
    module, path = saved
    content = torch.load(path, weights_only=True)
    assert (content["epoch"], content["global_step"], content["pytorch-lightning_version"]) == (1, 7, "2.6.0")
    assert content["hyper_parameters"]["width"] == 6
    assert content["lr_schedulers"][0]["last_epoch"] == 1
    assert content["extra"]["where"] == "a"
    other = Scheduled(width=6)
    other.load_state_dict(content["state_dict"])
    assert equal(weights(other), weights(module))
    (optimizer,), _ = other.configure_optimizers()
    optimizer.load_state_dict(content["optimizer_states"][0])
    first = optimizer.param_groups[0]["params"][0]
    reader = Checkpoint.open(path.with_suffix(""))
    assert torch.equal(optimizer.state[first]["exp_avg"], reader.read("optimizer/0/net.3.weight/exp_avg"))


@pytest.mark.parametrize("opened", [False, True])
def test_a_module_is_loaded_from_a_file(saved: tuple[Scheduled, Path], opened: bool) -> None:
    module, path = saved
    source: Any = io.BytesIO(path.read_bytes()) if opened else path
    loaded = Scheduled.load_from_checkpoint(source, map_location="cpu")
    assert equal(weights(loaded), weights(module)) and loaded.hparams.width == 6
    with pytest.raises(RuntimeError, match="size mismatch"):
        Scheduled.load_from_checkpoint(path, width=7)


def test_a_file_of_another_module_is_named(tmp_path: Path) -> None:
    save_file(Net(width=6).state_dict(), tmp_path / "own.safetensors")
    torch.save(Net(width=6).state_dict(), tmp_path / "own.ckpt")
    message = r"checkpoint .*own\.{}: its weights are not those of Net: size mismatch for .*; build the module with"
    for kind in ("safetensors", "ckpt"):
        with pytest.raises(CheckpointError, match=message.format(kind)) as raised:
            Net.load_from_checkpoint(tmp_path / f"own.{kind}", width=7)
        assert "\n" not in str(raised.value)


class OfTheUser:
    pass


def test_a_file_that_would_run_code_is_read_only_if_it_is_trusted(tmp_path: Path) -> None:
    module, path = net(), tmp_path / "own.ckpt"
    torch.save({"state_dict": module.state_dict(), "hyper_parameters": {}, "own": OfTheUser()}, path)
    refused = r"holds more than tensors and plain data.*\(Unsupported global: .*OfTheUser .*weights_only=False"
    with pytest.raises(CheckpointError, match=refused) as error:
        Net.load_from_checkpoint(path)
    assert "\x1b" not in str(error.value)
    with open(path, "rb") as file:
        assert equal(weights(Net.load_from_checkpoint(file, weights_only=False)), weights(module))


def test_a_file_that_torch_did_not_write_is_named(tmp_path: Path) -> None:
    file = tmp_path / "notes.py"
    file.write_text("from torch import nn\n")
    with pytest.raises(
        CheckpointError, match=r"notes\.py: it is not a file of tensors and plain data from torch\.save"
    ):
        Net.load_from_checkpoint(file)


@pytest.mark.parametrize("given", [None, 3, ["c"]])
def test_what_is_neither_a_path_nor_a_file_is_named(given: Any) -> None:
    with pytest.raises(TypeError, match=r"checkpoint_path must be a path or an open file, but it is (None|3|\['c'\])"):
        Net.load_from_checkpoint(given)


class Activated(Net):
    """Has an argument that is not saved, and a config."""

    def __init__(self, cfg: Any = None, activation: Any = torch.relu) -> None:
        super().__init__(width=cfg.model.width)
        self.save_hyperparameters()
        self.activation = activation


class Sized(DataModule):
    def __init__(self, size: int = 8, collate: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.size, self.seen = size, 0

    def train_dataloader(self) -> Any:
        return loader(16, self.size)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 5}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    trainer = quiet(accelerator="cpu", devices=1)
    module = Activated(OmegaConf.create({"model": {"width": 6}}), torch.tanh)
    trainer.fit(module, datamodule=Sized(4, collate=torch.stack))
    trainer.save_checkpoint(tmp_path / "c")
    assert main(["checkpoint", "export", str(tmp_path / "c"), str(tmp_path / "c.ckpt")]) == 0
    torch.load(tmp_path / "c.ckpt", weights_only=True)
    return tmp_path


def test_an_export_names_what_was_not_saved(exported: Path) -> None:
    arguments = ["checkpoint", "import", "--trust-pickle", str(exported / "c.ckpt"), str(exported / "again")]
    assert main(arguments) == 0
    for path in (exported / "c", exported / "c.ckpt", exported / "again"):
        with pytest.raises(TypeError, match="Activated needs activation, which checkpoint .* does not hold"):
            Activated.load_from_checkpoint(path)
        assert Activated.load_from_checkpoint(path, activation=torch.tanh).net[0].out_features == 6


class Nested(Net):
    def __init__(self, options: Any = None, several: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_configs_within_hyperparameters_stay_configs(tmp_path: Path) -> None:
    config = OmegaConf.create({"width": 6, "deep": {"er": [1]}})
    trainer = quiet(accelerator="cpu", devices=1)
    trainer.fit(Nested({"model": config, "n": 2}, [config, 3]), loader(16, 4))
    trainer.save_checkpoint(tmp_path / "c")
    assert main(["checkpoint", "export", str(tmp_path / "c"), str(tmp_path / "c.ckpt")]) == 0
    arguments = ["checkpoint", "import", "--trust-pickle", str(tmp_path / "c.ckpt"), str(tmp_path / "again")]
    assert main(arguments) == 0
    for path in (tmp_path / "c", tmp_path / "c.ckpt", tmp_path / "again"):
        found = Nested.load_from_checkpoint(path).hparams
        assert found.options["model"].deep.er == [1] and found.options["n"] == 2, path
        assert found.several[0].width == 6 and found.several[1] == 3, path


def test_an_export_has_the_datamodule(exported: Path) -> None:
    for path in (exported / "c", exported / "c.ckpt"):
        with pytest.raises(TypeError, match="Sized needs collate, which checkpoint .* does not hold"):
            Sized.load_from_checkpoint(path)
        found = Sized.load_from_checkpoint(path, collate=torch.stack)
        assert (found.size, found.seen) == (4, 5)


@pytest.mark.parametrize("note", [5, {"unsaved": 5, "configs": None}, {"unsaved": [1], "datamodule": []}])
def test_a_note_of_another_program_is_not_read(exported: Path, note: Any) -> None:
    content = torch.load(exported / "c.ckpt", weights_only=True)
    torch.save(content | {"lockstep": note}, exported / "other.ckpt")
    assert Sized.load_from_checkpoint(exported / "other.ckpt").size == 4
