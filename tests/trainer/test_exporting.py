"""A module after fit as a torch ExportedProgram and as an ONNX file: the same outputs, and nothing of the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.trainer.toy import Net, loader, net, quiet

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # torch's exporters'


class Normed(Net):
    """Has what differs between training and evaluation: dropout and BatchNorm; takes two inputs."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return self.net(self.norm(x)) * (1.0 if scale is None else scale)


@pytest.fixture(scope="module")
def fitted() -> Normed:
    model = Normed()
    quiet(seed=0).fit(model, loader())
    return model


def test_an_exported_program_computes_what_the_module_computes(fitted: Normed) -> None:
    fitted.train()
    trainer, x = fitted.trainer, torch.randn(5, 8)
    program = fitted.to_torch_export(x[:2], dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    assert fitted.training and fitted.norm.training and fitted.trainer is trainer
    with_scale = fitted.to_torch_export({"x": x, "scale": torch.tensor(2.0)})
    fitted.eval()
    assert torch.equal(program.module()(x), fitted(x))  # a batch of another size than that of the trace
    assert torch.equal(with_scale.module()(x=x, scale=torch.tensor(2.0)), fitted(x) * 2)
    assert {*program.state_dict} == {*fitted.state_dict()}


def test_a_trained_module_can_be_given_to_torch_export(fitted: Normed) -> None:
    x = torch.randn(5, 8)
    program = torch.export.export(fitted.eval(), (x,), strict=False)
    assert torch.equal(program.module()(x), fitted(x))


@pytest.mark.long
@pytest.mark.ranks  # the exporter asks for the platform
def test_an_onnx_file_computes_what_the_module_computes(fitted: Normed, tmp_path: Path) -> None:
    from onnx.reference import ReferenceEvaluator

    fitted.example_input_array = x = torch.randn(5, 8)
    fitted.to_onnx(tmp_path / "model.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    (found,) = ReferenceEvaluator(str(tmp_path / "model.onnx")).run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.tensor(found), fitted.eval()(x).detach())


def test_what_cannot_be_exported_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="exporting Net needs an input of forward: give input_sample, or set example_"):
        net().to_torch_export()
    with torch.device("meta"):
        empty = Net()
    with pytest.raises(RuntimeError, match="Net cannot be exported from the meta device, where it has no weights"):
        empty.to_torch_export(torch.zeros(1, 8))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"to_onnx needs the package onnx, .*pip install 'lockstep-trainer\[onnx\]'"):
        net().to_onnx(tmp_path / "model.onnx", torch.zeros(1, 8))


class Exports(Net):
    """Exports itself in a run."""

    def on_train_end(self) -> None:
        with pytest.raises(RuntimeError, match="Exports cannot be exported while its parameters are sharded over"):
            self.to_torch_export(torch.zeros(1, 8))
        self.print("refused")


@pytest.mark.long
@pytest.mark.ranks
def test_a_sharded_module_is_exported_after_fit(capfd: pytest.CaptureFixture[str]) -> None:
    model: Any = Exports()
    quiet(seed=0, strategy="fsdp", devices=2, accelerator="cpu").fit(model, loader())
    x = torch.randn(5, 8)
    assert "refused" in capfd.readouterr().out
    assert torch.equal(model.to_torch_export(x).module()(x), model.eval()(x))
