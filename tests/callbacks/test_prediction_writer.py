"""PredictionWriter: files that hold what predict returns, in its order, from any number of ranks."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lockstep.callbacks import PredictionWriter
from tests.trainer.toy import Net, data, loader, quiet


class Predicts(Net):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        logits = self(batch[0])
        return {"logits": logits, "class": logits.argmax(1)}


def predict(folder: Path, loaders: Any, **options: Any) -> dict[str, np.ndarray]:
    torch.manual_seed(0)
    trainer = quiet(callbacks=[PredictionWriter(folder)], precision="64-true", **options)
    assert trainer.predict(Predicts(), loaders, return_predictions=False) is None
    return {str(path.relative_to(folder)): np.load(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def test_files_hold_the_predictions(tmp_path: Path) -> None:
    written = predict(tmp_path, loader())
    torch.manual_seed(0)
    module = Predicts().double()
    with torch.no_grad():
        logits = torch.cat([module(x.double()) for x, _ in loader()]).numpy()
    assert set(written) == {"class.npy", "logits.npy"}
    assert np.array_equal(written["logits.npy"], logits)
    assert np.array_equal(written["class.npy"], logits.argmax(1))


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "devices", "size"),
    [
        ("ddp", 3, 8),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("ddp", 2, 4), ("tensor", 2, 8))),
        ("pipeline", 2, 8),
    ],
)
def test_the_order_is_the_same_on_several_ranks(strategy: str, devices: int, size: int, tmp_path: Path) -> None:
    """Also with a batch that not every rank has a sample of: 50 samples on three ranks."""
    one = predict(tmp_path / "one", loader())
    several = predict(tmp_path / "several", loader(batch_size=size), strategy=strategy, devices=devices)
    assert set(several) == set(one)
    for name, expected in one.items():
        np.testing.assert_allclose(several[name], expected, rtol=1e-12)


@pytest.mark.long
@pytest.mark.ranks
def test_the_order_is_kept_where_a_rank_has_no_sample_of_a_batch(tmp_path: Path) -> None:
    def split(name: str, devices: int) -> dict[str, np.ndarray]:
        batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9, 10], [12]]
        loader = DataLoader(data(13), batch_sampler=batches)
        return predict(tmp_path / name, loader, devices=devices, accelerator="cpu", split_batches=True)

    one, two = split("one", 1), split("two", 2)
    for name, expected in one.items():
        np.testing.assert_allclose(two[name], expected, rtol=1e-12)


@pytest.mark.long
@pytest.mark.ranks
def test_the_order_is_kept_where_ranks_run_every_other_share(tmp_path: Path) -> None:
    """`fsdp` gives rank 0 the shares 0 and 2 of each batch, and rank 1 the shares 1 and 3."""
    one = predict(tmp_path / "one", loader(batch_size=3), virtual_ranks=4)
    two = predict(tmp_path / "two", loader(batch_size=3), virtual_ranks=4, strategy="fsdp", devices=2)
    for name, expected in one.items():
        assert np.array_equal(two[name], expected), name


def test_any_key_and_any_floats_are_written(tmp_path: Path) -> None:
    class Kinds(Net):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self(batch[0])
            turned = torch.complex(logits, logits).conj()
            return {"layout": logits, "turned": turned, "imag": turned.imag, "small": logits.to(torch.float8_e5m2)}

    torch.manual_seed(0)
    quiet(callbacks=[PredictionWriter(tmp_path)]).predict(Kinds(), loader(), return_predictions=False)
    files = {path.stem: np.load(path) for path in tmp_path.iterdir()}
    logits = files["layout"]
    assert logits.shape == (50, 3)
    assert np.array_equal(files["turned"], logits - 1j * logits)
    assert np.array_equal(files["imag"], -logits)
    np.testing.assert_allclose(files["small"], logits, rtol=0.2, atol=1e-4)


def test_several_loaders_and_a_second_run(tmp_path: Path) -> None:
    predict(tmp_path, [loader(16), loader(8)])
    written = predict(tmp_path, [loader(24), loader(8)])
    assert {name: len(value) for name, value in written.items()} == {
        "dataloader_0/class.npy": 24,
        "dataloader_0/logits.npy": 24,
        "dataloader_1/class.npy": 8,
        "dataloader_1/logits.npy": 8,
    }


@pytest.mark.parametrize(
    ("outputs", "error", "message"),
    [
        (lambda x, i: ["a"], TypeError, "but predict_step returned list"),
        (lambda x, i: {"a": 1}, TypeError, "a dict with a: int"),
        (lambda x, i: x.sum(), ValueError, "must have the samples of the batch as first dimension"),
        (lambda x, i: {"a": x, "b": x[1:]}, ValueError, "must have the samples of the batch"),
        (lambda x, i: x[:, : i + 1], ValueError, "pad them to one shape"),
        (lambda x, i: {"../a": x}, ValueError, "cannot be a file name"),
        (
            lambda x, i: {"a": x} | ({"b": x} if i else {}),
            ValueError,
            r"returned \['a', 'b'\] for batch 1, but \['a'\]",
        ),
        (lambda x, i: {"a": x} | ({} if i else {"b": x}), ValueError, "return the same keys for every batch"),
    ],
)
def test_what_cannot_be_written_is_named(outputs: Any, error: Any, message: str, tmp_path: Path) -> None:
    class Odd(Net):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return outputs(batch[0], batch_idx)

    with pytest.raises(error, match=message):
        quiet(callbacks=[PredictionWriter(tmp_path)]).predict(Odd(), loader())
    assert not list(tmp_path.iterdir())


class Padded(Net):
    """Rows as long as the longest sample of the rank's part of the batch."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0][:, : int(batch[0][:, 0].max())]


@pytest.mark.long
@pytest.mark.ranks
def test_rows_that_differ_between_ranks_are_named(tmp_path: Path) -> None:
    np.save(tmp_path / "predictions.npy", np.zeros(3))
    rows = torch.tensor([8, 5, 6, 7, 3, 2, 3, 1]).view(8, 1).expand(8, 8)
    options: dict[str, Any] = {"devices": 2, "accelerator": "cpu", "split_batches": True}
    with pytest.raises(ValueError, match=r"\[8\]\) on rank 0, but of \('<f4', \[3\]\) on rank 1.*; pad them"):
        quiet(callbacks=[PredictionWriter(tmp_path)], **options).predict(
            Padded(), DataLoader(TensorDataset(rows.float()), batch_size=8), return_predictions=False
        )
    assert np.array_equal(np.load(tmp_path / "predictions.npy"), np.zeros(3))  # of an earlier run


class FailsLate(Predicts):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        if batch_idx == 2 and self.trainer.global_rank == self.trainer.world_size - 1:
            raise ValueError("no prediction")
        return super().predict_step(batch, batch_idx)


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_that_fails_leaves_nothing(devices: int, tmp_path: Path) -> None:
    """Also not what a killed run has left: on as many ranks, or on more."""
    (tmp_path / "of the user.rank-0").touch()
    for rank in (0, 5, "all"):
        (tmp_path / f".0.logits.rank-{rank}").write_bytes(b"killed")
    with pytest.raises(ValueError, match="no prediction"):
        quiet(callbacks=[PredictionWriter(tmp_path)], devices=devices, accelerator="cpu").predict(FailsLate(), loader())
    assert [path.name for path in tmp_path.iterdir()] == ["of the user.rank-0"]


class Wide(Net):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.full((len(batch[0]), 2**18 // 8), float(batch_idx))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_flat(tmp_path: Path) -> None:
    """128 MiB of predictions, a MiB each batch, written and merged."""

    def resident(name: str) -> int:
        return int(re.findall(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) // 1024

    def predict(batches: int) -> None:
        trainer = quiet(callbacks=[PredictionWriter(tmp_path)])
        trainer.predict(Wide(), loader(8 * batches, batch_size=8), return_predictions=False)

    predict(4)  # what is imported and allocated once
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of what follows
    predict(128)
    assert resident("VmHWM") - before < 48
    assert np.load(tmp_path / "predictions.npy", mmap_mode="r").shape == (1024, 2**15)
