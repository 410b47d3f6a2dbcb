"""What is saved comes back bit for bit; which checkpoint is the newest."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed.tensor
from safetensors.torch import load_file
from torch import Tensor, nn

from lockstep.trainer.checkpoint import safetensors_file
from lockstep.trainer.checkpoint.store import Checkpoint, clean, copy, is_checkpoint, newest
from tests.trainer.checkpoint.folders import flip, raw, save_alone, save_step


def awkward_tensors() -> dict[str, Tensor]:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    shared = torch.arange(10.0)
    tensors = {
        "model/transposed": base.t(),
        "model/strided": base[:, ::2],
        "model/view of.shared": shared[2:5],
        "model/rest/of-shared": shared[3:],
        "model/expanded": torch.ones(1, 3).expand(5, 3),
        "model/scalar": torch.tensor(3.5),
        "model/empty": torch.empty(0, 7),
        "model/bool": torch.tensor([True, False, True]),
        "model/parameter": nn.Parameter(torch.randn(3)),
        "model/nan": torch.tensor([math.nan, math.inf, -math.inf, -0.0]),
        "extra/complex64": torch.randn(3, 4, dtype=torch.complex64),
        "extra/complex128": torch.randn(3, 4, dtype=torch.complex128),
        "extra/conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "extra/negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "extra/complex scalar": torch.tensor(1 + 2j, dtype=torch.complex128),
        "callback/EMA/ümlaut": torch.arange(5),
    }
    for dtype in safetensors_file.CODES:
        tensors[f"dtypes/{dtype}".replace("torch.", "")] = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    return tensors


def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path: Path) -> None:
    tensors = awkward_tensors()
    loaded = Checkpoint.open(save_alone(tmp_path / "a", tensors))
    assert loaded.names() == sorted(tensors)
    assert loaded.names("extra/") == sorted(name for name in tensors if name.startswith("extra/"))
    for name, tensor in tensors.items():
        back = loaded.read(name)
        assert (back.dtype, back.shape, back.device.type) == (tensor.dtype, tensor.shape, "cpu"), name
        assert loaded.dtype(name) == tensor.dtype
        assert loaded.shape(name) == tuple(tensor.shape)
        assert raw(back) == raw(tensor), name


def test_json_state_comes_back(tmp_path: Path) -> None:
    state = {
        "progress": {"global_step": 12, "samples_seen": 2**70},
        "strategy": {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.999)}]},
        "floats": [math.inf, -math.inf, 5e-324, 0.1 + 0.2, -0.0],
        "text": 'ünï \U0001f600 \ud800 "\\\n\x00',
        "ordered": OrderedDict(b=1, a=None),
        "empty": {"": [[], {}, True]},
        "nan": math.nan,
    }
    loaded = Checkpoint.open(save_alone(tmp_path / "a", state=state, rank_state={"rng": [1, 2]}))
    assert math.isnan(loaded.state.pop("nan"))
    expected = {key: value for key, value in state.items() if key != "nan"}
    expected["strategy"] = {"param_groups": [{"lr": 0.1, "betas": [0.9, 0.999]}]}
    assert loaded.state == expected
    assert math.copysign(1, loaded.state["floats"][-1]) == -1
    assert list(loaded.state["ordered"]) == ["b", "a"]
    assert loaded.meta == expected["strategy"]
    assert loaded.global_step == 12
    assert loaded.world_size == 1
    assert loaded.rank_state(0) == {"rng": [1, 2]}
    assert loaded.rank_state(1) is None
    assert loaded.path == tmp_path / "a"
    assert loaded.versions["torch"] == torch.__version__


def test_model_file_is_a_plain_state_dict(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5)
            self.head.weight = self.embedding.weight
            self.norm = nn.BatchNorm1d(5)

    module = Tied()
    save_alone(tmp_path / "a", {f"model/{name}": tensor for name, tensor in module.state_dict().items()})
    plain = load_file(tmp_path / "a" / "model.safetensors")
    assert plain.keys() == module.state_dict().keys()
    assert all(torch.equal(plain[name], tensor) for name, tensor in module.state_dict().items())
    Tied().load_state_dict(plain)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensors_come_back_on_the_cpu(tmp_path: Path) -> None:
    tensor = torch.randn(5, 3, device="cuda").t()
    assert torch.equal(Checkpoint.open(save_alone(tmp_path / "a", {"model/w": tensor})).read("model/w"), tensor.cpu())


def test_newest_orders_by_step_then_time_and_skips_what_is_damaged(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    assert newest(tmp_path / "nowhere") is None
    for name, step in (("z", 1), ("c", 10), ("b", 10), ("y", 9)):
        save_step(tmp_path / name, step)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").write_text("")
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "z")
    assert newest(tmp_path) == tmp_path / "b"
    flip(tmp_path / "b" / "model.safetensors", -1)
    with pytest.warns(UserWarning, match=f"{tmp_path}/b cannot be used: model.safetensors has changed"):
        assert newest(tmp_path) == tmp_path / "c"
    (tmp_path / "c" / "manifest.json").write_text("{")
    with pytest.warns(UserWarning, match="cannot be used") as caught:
        assert newest(tmp_path) == tmp_path / "y"
    assert sorted(str(warning.message).split()[2] for warning in caught) == [f"{tmp_path}/b", f"{tmp_path}/c"]


def test_a_copy_that_is_being_written_is_not_cleaned_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_step(tmp_path / "one", 1)
    opens, removed = Checkpoint.open, []

    def open_beside_a_new_run(path: Path) -> Checkpoint:
        removed.extend(clean(tmp_path))
        return opens(path)

    monkeypatch.setattr(Checkpoint, "open", open_beside_a_new_run)
    copy(tmp_path / "one", tmp_path / "other")
    assert not removed and is_checkpoint(tmp_path / "other")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["one", "other"]


def test_is_checkpoint_asks_for_a_manifest_and_sizes(tmp_path: Path) -> None:
    path = save_step(tmp_path / "a", 1)
    assert is_checkpoint(path)
    assert not is_checkpoint(tmp_path)
    assert not is_checkpoint(tmp_path / "b")
    with open(path / "model.safetensors", "ab") as file:
        file.write(b"x")
    assert not is_checkpoint(path)


def test_saving_moves_no_random_stream(tmp_path: Path) -> None:
    random.seed(0)
    before = random.getstate(), torch.get_rng_state()
    save_step(tmp_path / "a", 1)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
