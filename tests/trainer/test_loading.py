"""`load_from_checkpoint` loads as the module and its layers do it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep import Module, Trainer
from lockstep.trainer.checkpoint.store import CheckpointError


class Small(Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.body(batch)).square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


class Renamed(Small):
    """As it was written later: another name of a layer, which `load_state_dict` or a hook translates."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = self.body
        del self.body


def saved(module: Module, folder: Path) -> Path:
    trainer = Trainer(max_steps=2, default_root_dir=folder, logger=False, enable_progress_bar=False)
    trainer.fit(module, DataLoader(torch.randn(8, 4), 4))
    trainer.save_checkpoint(folder / "one")
    return folder / "one"


def translated(state: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("body.", "trunk."): value for name, value in state.items()}


def test_a_load_state_dict_of_its_own_is_called(tmp_path: Path) -> None:
    asked: list[bool] = []

    class Translates(Renamed):
        def load_state_dict(self, state: Any, strict: bool = True) -> Any:  # type: ignore[override]
            asked.append(strict)
            return super().load_state_dict(translated(state), strict)

    module = Small()
    path = saved(module, tmp_path)
    loaded = Translates.load_from_checkpoint(path)
    assert torch.equal(loaded.trunk.weight, module.body.weight)
    Translates.load_from_checkpoint(path, strict=False)
    assert asked == [True, False]


def test_load_hooks_of_layers_are_called(tmp_path: Path) -> None:
    class Hooked(Renamed):
        def __init__(self) -> None:
            super().__init__()
            self.register_load_state_dict_pre_hook(self.translate)

        def translate(self, module: nn.Module, state: dict[str, Any], *_: Any) -> None:
            renamed = translated(state)
            state.clear()
            state.update(renamed)

    module = Small()
    loaded = Hooked.load_from_checkpoint(saved(module, tmp_path))
    assert torch.equal(loaded.trunk.weight, module.body.weight)


def test_layers_know_the_version_that_they_read(tmp_path: Path) -> None:
    class Turned(nn.Linear):
        """Was saved transposed by its first version."""

        _version = 2

        def _load_from_state_dict(self, state: Any, prefix: str, local: dict[str, Any], *args: Any) -> None:
            if local.get("version", 1) < 2:
                state[f"{prefix}weight"] = state[f"{prefix}weight"].T
            super()._load_from_state_dict(state, prefix, local, *args)

    class Net(Small):
        def __init__(self) -> None:
            super().__init__()
            self.body = Turned(4, 4)

    module = Net()
    loaded = Net.load_from_checkpoint(saved(module, tmp_path))
    assert torch.equal(loaded.body.weight, module.body.weight)


def test_names_that_a_layer_leaves_away_are_not_missed(tmp_path: Path) -> None:
    class Teacher(nn.Linear):
        def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
            return {}

    class Taught(Small):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = Teacher(4, 2).requires_grad_(False)

        def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
            state = super().state_dict(*args, **options)
            return {name: value for name, value in state.items() if "teacher" not in name}

    module = Taught()
    loaded = Taught.load_from_checkpoint(saved(module, tmp_path))
    assert torch.equal(loaded.body.weight, module.body.weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trunk": nn.Linear(4, 4)}, "the module it was saved of"),
        ({"head": nn.Linear(4, 3)}, r"head.* has shape \[2"),
    ],
)
def test_other_names_and_shapes_are_named(change: dict[str, nn.Module], message: str, tmp_path: Path) -> None:
    class Other(Small):
        def __init__(self) -> None:
            super().__init__()
            for name, layer in change.items():
                setattr(self, name, layer)

    with pytest.raises(CheckpointError, match=message):
        Other.load_from_checkpoint(saved(Small(), tmp_path))
