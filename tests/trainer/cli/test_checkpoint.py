"""`lockstep checkpoint`: what it shows, what it finds, and weights on their way out and in."""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lockstep import CheckpointError, Module
from lockstep.trainer.checkpoint.store import Checkpoint
from lockstep.trainer.cli import checkpoint as checkpoint_command
from lockstep.trainer.cli.main import main
from tests.trainer.toy import Net, equal, loader, quiet, weights


def fitted(folder: Path, steps: int = 3, **options: Any) -> tuple[Net, Path]:
    """A trained module, and its checkpoint."""
    torch.manual_seed(0)
    module = Net(width=12)
    trainer = quiet(
        enable_checkpointing=True, max_epochs=None, max_steps=steps, default_root_dir=folder, seed=1, **options
    )
    trainer.fit(module, loader(), loader())
    return module, Path(trainer.checkpoint_callback.best_model_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Net, Path]:
    return fitted(tmp_path_factory.mktemp("trained"))


def run(*words: object) -> int:
    return main(["checkpoint", *map(str, words)])


def test_show_tells_what_a_checkpoint_holds(trained: tuple[Net, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", trained[1]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["step", "3"] in lines
    assert ["epoch", "0"] in lines
    assert ["strategy", "SingleDevice"] in lines
    assert ["ranks", "1"] in lines
    assert ["model/net.0.weight", "float32", "[12,", "8]", "384"] in lines
    files = {line[0]: int(line[1]) for line in lines if len(line) == 3 and line[0].endswith((".json", ".safetensors"))}
    assert files == {path.name: path.stat().st_size for path in trained[1].iterdir() if path.name != "manifest.json"}


def test_verify_names_the_first_wrong_file(
    trained: tuple[Net, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(trained[1], folder)
    assert run("verify", folder) == 0
    assert "all checksums match" in capsys.readouterr().out
    for name in sorted(os.listdir(folder)):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
        assert run("verify", folder) == 1
        out, err = capsys.readouterr()
        assert not out and len(err.splitlines()) == 1
        assert name in err and str(folder) in err
        (folder / name).write_bytes(content)


def test_diff_tells_what_differs(trained: tuple[Net, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("diff", trained[1], trained[1]) == 0
    assert capsys.readouterr().out == "no difference\n"
    _, other = fitted(tmp_path, steps=4)
    assert run("diff", trained[1], other) == 1
    out = capsys.readouterr().out
    one, two = Checkpoint.open(trained[1]), Checkpoint.open(other)
    a, b = one.read("model/net.0.weight"), two.read("model/net.0.weight")
    assert (
        f"tensor model/net.0.weight: {(a != b).sum()} of 96 elements differ, by up to "
        f"{float((a.double() - b.double()).abs().max()):.6g} (" in out
    )
    assert "state.progress.batches_seen: 3 and 4\n" in out
    capsys.readouterr()
    assert run("diff", trained[1], other, "--tolerance", "10") == 1
    assert "tensor" not in capsys.readouterr().out, "within tolerance; the state still differs"


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (torch.tensor([1.0, -2.0]), torch.tensor([1.0, -2.5]), (0.5, 0.25, 1)),
        (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), (0.0, 0.0, 1)),
        (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]), (0.0, 0.0, 0)),
        (torch.tensor([float("inf")]), torch.tensor([1.0]), (float("inf"), float("inf"), 1)),
        (torch.tensor([1 + 1j]), torch.tensor([1 - 1j]), (2.0, 2.0 / 2**0.5, 1)),
        (torch.tensor([], dtype=torch.int8), torch.tensor([], dtype=torch.int8), (0.0, 0.0, 0)),
        (torch.tensor(True), torch.tensor(False), (1.0, 1.0, 1)),
    ],
)
def test_distances(one: torch.Tensor, other: torch.Tensor, expected: tuple[float, float, int]) -> None:
    assert checkpoint_command._distance(one, other) == pytest.approx(expected)


def test_weights_go_out_and_come_back(
    trained: tuple[Net, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, path = trained
    assert run("export", path, tmp_path / "out" / "weights.safetensors") == 0
    exported = load_file(tmp_path / "out" / "weights.safetensors")
    assert exported.keys() == module.state_dict().keys()
    assert all(torch.equal(exported[name], value) for name, value in module.state_dict().items())
    assert os.listdir(tmp_path / "out") == ["weights.safetensors"]

    assert run("import", tmp_path / "out" / "weights.safetensors", tmp_path / "back") == 0
    assert "step 3, 4 hyperparameters" in capsys.readouterr().out
    assert run("verify", tmp_path / "back") == 0
    loaded = Net.load_from_checkpoint(tmp_path / "back")
    assert equal(weights(loaded), weights(module))
    assert loaded.hparams.width == 12
    expected = quiet().validate(module, loader(), verbose=False)
    assert quiet().validate(Net(width=12), loader(), ckpt_path=tmp_path / "back", verbose=False) == expected


@pytest.mark.parametrize("target", ["model.safetensors", "w.ckpt", "exports/w.safetensors", "../link/w.safetensors"])
def test_nothing_is_written_into_a_checkpoint(
    target: str, trained: tuple[Net, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "last"
    shutil.copytree(trained[1], path)
    (tmp_path / "link").symlink_to(path)
    shutil.copytree(path, tmp_path / "whole")
    assert run("export", path, tmp_path / "w.safetensors") == 0
    for words in (("export", path, path / target), ("import", tmp_path / "w.safetensors", path / target / "new")):
        assert run(*words) == 1
        assert f"is in the checkpoint {path}, which must not change" in capsys.readouterr().err
    trainer = quiet(enable_checkpointing=True, default_root_dir=path)
    with pytest.raises(CheckpointError, match="is in the checkpoint"):
        trainer.fit(Net(width=12), loader())
    assert trainer.global_step == 0
    assert sorted(os.listdir(path)) == sorted(os.listdir(tmp_path / "whole"))
    assert run("diff", path, tmp_path / "whole") == 0


class Odd(Module):
    """State that safetensors has no name for: extra state with a tensor in it, complex128, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("phase", torch.randn(3, dtype=torch.complex128))
        self.one = nn.Linear(2, 2)
        self.two = nn.Linear(2, 2)
        self.two.weight = self.one.weight
        self.counts: dict[str, Any] = {"words": (1, 2), "table": torch.arange(3)}

    def get_extra_state(self) -> Any:
        return self.counts

    def set_extra_state(self, state: Any) -> None:
        self.counts = state

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.two(self.one(batch[0][:, :2])).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_extra_state_and_complex_numbers_go_out_and_come_back(tmp_path: Path) -> None:
    module = Odd()
    trainer = quiet(enable_checkpointing=True, default_root_dir=tmp_path)
    trainer.fit(module, loader())
    assert run("export", trainer.checkpoint_callback.best_model_path, tmp_path / "w.safetensors") == 0
    assert run("import", tmp_path / "w.safetensors", tmp_path / "back") == 0
    back = Odd.load_from_checkpoint(tmp_path / "back")
    assert torch.equal(back.phase, module.phase)
    assert equal(weights(back), weights(module))
    assert back.counts["words"] == (1, 2) and back.counts["table"].tolist() == [0, 1, 2]


# ---- pickles -----------------------------------------------------------------------------------------


class Bomb:
    """Unpickling it makes a file in the working folder."""

    def __reduce__(self) -> Any:
        return os.system, ("touch exploded",)


def lightning_file(path: Path, **more: Any) -> Net:
    torch.manual_seed(3)
    module = Net(width=10)
    content = {
        "epoch": 2,
        "global_step": 30,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": module.state_dict(),
        "optimizer_states": [],
        "lr_schedulers": [],
        "hparams_name": "kwargs",
        "hyper_parameters": {"width": 10, "dropout": 0.0, "lr": 0.5, "optimizer": "AdamW"},
    }
    torch.save(content | more, path)
    return module


def test_a_lightning_file_needs_an_explicit_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = lightning_file(tmp_path / "a.ckpt")
    assert run("import", tmp_path / "a.ckpt", tmp_path / "b") == 1
    assert "--trust-pickle" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
    assert run("import", "--trust-pickle", tmp_path / "a.ckpt", tmp_path / "b") == 0
    out, err = capsys.readouterr()
    assert "4 tensors, step 30, 4 hyperparameters" in out
    assert err == "skipped: pytorch-lightning_version, optimizer_states, lr_schedulers\n"
    assert run("verify", tmp_path / "b") == 0
    checkpoint = Checkpoint.open(tmp_path / "b")
    assert (checkpoint.global_step, checkpoint.state["progress"]["current_epoch"]) == (30, 2)
    loaded = Net.load_from_checkpoint(tmp_path / "b")
    assert loaded.hparams.lr == 0.5
    assert equal(weights(loaded), weights(module))
    assert quiet().validate(Net(width=10), loader(), ckpt_path=tmp_path / "b", verbose=False) == quiet().validate(
        module, loader(), verbose=False
    )


def test_a_file_of_lightning_itself(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Theirs(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self, width: int = 7) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Dropout(), nn.Linear(width, 3))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    theirs = Theirs()
    trainer = lightning.Trainer(
        max_steps=3,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(theirs, loader())
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert run("import", "--trust-pickle", tmp_path / "a.ckpt", tmp_path / "b") == 0
    assert Checkpoint.open(tmp_path / "b").global_step == 3
    assert equal(weights(Net.load_from_checkpoint(tmp_path / "b")), weights(theirs))


def test_state_dicts_of_torch(tmp_path: Path) -> None:
    module = Net(width=12)
    for number, content in enumerate(
        [
            module.state_dict(),
            {"model": module.state_dict(), "optimizer": {}},
            {"model_state_dict": module.state_dict()},
        ]
    ):
        torch.save(content, tmp_path / f"{number}.pt")
        assert run("import", "--trust-pickle", tmp_path / f"{number}.pt", tmp_path / str(number)) == 0
        assert equal(weights(Net.load_from_checkpoint(tmp_path / str(number), width=12)), weights(module))
    save_file(module.state_dict(), tmp_path / "plain.safetensors")
    assert run("import", tmp_path / "plain.safetensors", tmp_path / "plain") == 0
    assert equal(weights(Net.load_from_checkpoint(tmp_path / "plain", width=12)), weights(module))


def test_code_in_a_pickle_runs_only_with_the_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lightning_file(tmp_path / "a.ckpt", callbacks=Bomb())
    (tmp_path / "raw.pkl").write_bytes(pickle.dumps(Bomb()))
    for source in ("a.ckpt", "raw.pkl"):
        assert run("import", source, "b") == 1
        for call in (quiet().validate, quiet().fit, quiet().test, quiet().predict):
            with pytest.raises(CheckpointError, match="lockstep checkpoint import"):
                call(Net(width=10), loader(), ckpt_path=source)
        with pytest.raises(CheckpointError, match="lockstep checkpoint import"):
            Net.load_from_checkpoint(source)
        assert not Path("exploded").exists()
    capsys.readouterr()
    assert run("import", "--trust-pickle", "a.ckpt", "b") == 0
    assert Path("exploded").exists(), "what the flag says"
    assert "callbacks" in capsys.readouterr().err


def test_weights_alone_cannot_be_resumed(tmp_path: Path) -> None:
    lightning_file(tmp_path / "a.ckpt")
    run("import", "--trust-pickle", "a.ckpt", "b")
    with pytest.raises(
        CheckpointError, match="has only weights, so it cannot be resumed: load them with load_from_checkpoint"
    ):
        quiet().fit(Net(width=10), loader(), ckpt_path="b")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["show"], 2, "required: path (usage: lockstep checkpoint show PATH)"),
        (["list", "x"], 2, "invalid choice: 'list'"),
        ([], 2, "required: command"),
        (["show", "nothing"], 2, "there is no checkpoint at"),
        (["verify", "empty.pt"], 1, "is not a folder"),
        (["import", "nothing", "b"], 2, "there is no checkpoint at"),
        (["import", "--trust-pickle", "empty.pt", "b"], 1, "torch cannot load it"),
        (["import", "--trust-pickle", "list.pt", "b"], 1, "it holds list, not a state dict"),
        (["import", "--trust-pickle", "none.pt", "b"], 1, "it has no tensors"),
        (["import", "cut.safetensors", "b"], 1, "not a valid safetensors file"),
        (["import", "note.safetensors", "b"], 1, "does not match its tensors"),
        (["import", "note.safetensors", "empty.pt"], 1, "it exists; choose another path"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str
) -> None:
    Path("empty.pt").touch()
    torch.save([1], "list.pt")
    torch.save({}, "none.pt")
    save_file({"w": torch.zeros(3)}, "cut.safetensors")
    Path("cut.safetensors").write_bytes(Path("cut.safetensors").read_bytes()[:-1])
    save_file({"w": torch.zeros(3)}, "note.safetensors", {"lockstep": '{"complex128": ["w"]}'})
    assert run(*words) == code
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1
    assert not Path("b").exists()
