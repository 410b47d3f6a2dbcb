"""`checkpoint["state_dict"]` in hooks: whole under every strategy; what is taken out, changed, or done on one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import CheckpointError
from lockstep.callbacks import Callback
from lockstep.trainer.checkpoint.store import Checkpoint
from tests.trainer.toy import Net, equal, loader, net, quiet, weights

BASE = ["net.0.bias", "net.0.weight"]
ON_RANKS = ("fsdp", "pipeline", "ddp", "tensor", "deepspeed_stage_2", "deepspeed_stage_3", "ddp=2,pipeline=2")
ON_RANKS += ("dp", "local_sgd", "diloco", "parameter_server")
STRATEGIES = ["single", *(pytest.param(name, marks=pytest.mark.ranks) for name in ON_RANKS[:2])]
STRATEGIES += [pytest.param(name, marks=[pytest.mark.ranks, pytest.mark.slow]) for name in ON_RANKS[2:]]


def options(strategy: str) -> dict[str, Any]:
    devices = {"single": 1, "ddp=2,pipeline=2": 4}.get(strategy, 2)
    return {"strategy": strategy, "devices": devices, "accelerator": "cpu", "seed": 0}


class Frozen(Net):
    """The first layer is a base model that its code builds: not trained, and not saved."""

    def __init__(self, base: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.net[0].requires_grad_(False)
        with torch.no_grad():
            self.net[0].weight.mul_(base)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class WithoutBase(Frozen):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["sums"] = {name: float(value.double().sum()) for name, value in state.items()}
        for name in list(state):
            if name in BASE:
                del state[name]


class Saves(Callback):
    def __init__(self, path: Path, step: int = 3) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def seeded(cls: type[Net], **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return cls(**kwargs)


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_resumes_without_the_base_that_a_hook_omitted(strategy: str, tmp_path: Path) -> None:
    whole, cut = seeded(WithoutBase), seeded(WithoutBase)
    quiet(**options(strategy), callbacks=[Saves(tmp_path / "c")]).fit(whole, loader())
    checkpoint = Checkpoint.open(tmp_path / "c")
    assert checkpoint.names("model/") == ["model/net.3.bias", "model/net.3.weight"]
    sums = {name: checkpoint.state["module"]["sums"][name] for name in whole.state_dict()}
    assert all(sums[name] == pytest.approx(float(whole.state_dict()[name].double().sum())) for name in BASE)
    saved = {name: float(checkpoint.read(f"model/{name}").double().sum()) for name in ("net.3.bias", "net.3.weight")}
    assert {name: sums[name] for name in saved} == pytest.approx(saved)

    quiet(**options(strategy)).fit(cut, loader(), ckpt_path=tmp_path / "c")
    assert equal(weights(whole), weights(cut))
    with pytest.raises(
        CheckpointError, match=r"without the weights that save_trainable_only or a hook omitted.* net\.0\.we"
    ):
        quiet(**options(strategy)).fit(seeded(WithoutBase, base=2.0), loader(), ckpt_path=tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"net\.0\.weight of the module at hand are not those"):
        WithoutBase.load_from_checkpoint(tmp_path / "c", base=2.0)


class Fills(WithoutBase):
    """Gives the base back before weights are loaded, as is usual where all names must be there."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        own = self.state_dict()
        for name in BASE:
            checkpoint["state_dict"].setdefault(name, own[name])


def test_a_hook_gives_the_base_back(tmp_path: Path) -> None:
    module, cut = seeded(Fills), seeded(Fills)
    quiet(callbacks=[Saves(tmp_path / "c")], **options("single")).fit(module, loader())
    quiet(**options("single")).fit(cut, loader(), ckpt_path=tmp_path / "c")
    assert equal(weights(module), weights(cut))
    other = Fills.load_from_checkpoint(tmp_path / "c")
    torch.testing.assert_close(other.net[3].weight, Checkpoint.open(tmp_path / "c").read("model/net.3.weight"))


class Does(Net):
    """What `act` does to a checkpoint that is saved."""

    act: Callable[[Any], Any] | None = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.act is not None:
            self.act(checkpoint)


def _set(name: str, change: Callable[[Tensor], Any]) -> Callable[[Any], None]:
    def act(checkpoint: Any) -> None:
        checkpoint["state_dict"][name] = change(checkpoint["state_dict"][name])

    return act


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "scaled": (lambda c: c["state_dict"]["net.0.weight"].mul_(2), r"a hook changes net\.0\.weight in"),
    "one element by numpy": (lambda c: c["state_dict"]["net.3.bias"].numpy().fill(3), r"changes net\.3\.bias"),
    "half": (_set("net.0.bias", Tensor.half), r"a hook changes net\.0\.bias in checkpoint\['state_dict'\]"),
    "another shape": (_set("net.0.bias", lambda t: t[:1]), r"a hook changes net\.0\.bias"),
    "an average": (
        lambda c: c.update(state_dict={k: v * 0.5 for k, v in c["state_dict"].items()}),
        "changes net.*WeightAveraging",
    ),
    "a prefix": (
        lambda c: c.update(state_dict={f"m.{k}": v for k, v in c["state_dict"].items()}),
        r"changes m\.net\.0\.weight.*of their own",
    ),
    "what trains is gone": (lambda c: c["state_dict"].pop("net.0.weight"), r"removes net\.0\.weight from"),
    "all gone": (lambda c: c.pop("state_dict"), r"\['state_dict'\] cannot be removed by a hook; remove names"),
    "all cleared": (lambda c: c.clear(), r"\['state_dict'\] cannot be removed by a hook"),
    "an average by |=": (
        lambda c: c.__ior__({"state_dict": {k: v * 0.5 for k, v in c["state_dict"].items()}}),
        "a hook changes net",
    ),
    "no dict": (lambda c: c.update(state_dict=[]), "must be a dict of weights by name, but is list"),
    "optimizers gone": (lambda c: c.pop("optimizer_states", None), r"\['optimizer_states'\] cannot be removed"),
    "loops set": (lambda c: c.update(loops={}), r"\['loops'\] cannot be set by a hook"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_make_another_run_of_it_is_refused(what: str, tmp_path: Path) -> None:
    module, trainer = seeded(Does), quiet(**options("single"))
    trainer.fit(module, loader())
    module.act, said = REFUSED[what]
    with pytest.raises((ValueError, KeyError, TypeError), match=said):
        trainer.save_checkpoint(tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("pipeline", marks=pytest.mark.slow)])
@pytest.mark.parametrize("what", ["scaled", "what trains is gone"])
def test_what_would_make_another_run_of_it_is_refused_on_ranks(what: str, strategy: str, tmp_path: Path) -> None:
    module = seeded(Does)
    module.act, said = REFUSED[what]
    with pytest.raises(ValueError, match=said):
        quiet(**options(strategy), callbacks=[Saves(tmp_path / "c")]).fit(module, loader())


class OnOneRank(Frozen):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.hparams.lr < 1e-2:  # all read, one removes
            state = checkpoint["state_dict"]
            if self.trainer.is_global_zero:
                del state["net.0.bias"]
        elif self.trainer.is_global_zero:
            checkpoint["sum"] = float(checkpoint["state_dict"]["net.0.bias"].sum())


@pytest.mark.ranks
@pytest.mark.parametrize("lr", [1e-2, 1e-3])
def test_what_one_rank_does_alone_is_an_error(lr: float, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"reads or changes checkpoint\['state_dict'\] on some ranks only"):
        quiet(**options("ddp"), callbacks=[Saves(tmp_path / "c")]).fit(seeded(OnOneRank, lr=lr), loader())


def test_weights_alone_may_lack_what_trains(tmp_path: Path) -> None:
    module, trainer = seeded(Does), quiet(**options("single"))
    trainer.fit(module, loader())
    module.act = lambda checkpoint: [checkpoint["state_dict"].pop(name) for name in ("net.3.bias", "net.3.weight")]
    trainer.save_checkpoint(tmp_path / "c", weights_only=True)
    assert Checkpoint.open(tmp_path / "c").names("model/") == [f"model/{name}" for name in BASE]
    with pytest.raises(CheckpointError, match=r"it lacks net\.3\.bias, net\.3\.weight"):
        Does.load_from_checkpoint(tmp_path / "c")
    loaded = Does.load_from_checkpoint(tmp_path / "c", strict=False)
    assert torch.equal(loaded.net[0].weight, module.net[0].weight)


class Wider(Net):
    """Loads into a head of one class more, whose other rows it keeps."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.net[3] = nn.Linear(16, 4)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        for name in ("net.3.weight", "net.3.bias"):
            state[name] = torch.cat([state[name], torch.zeros_like(state[name][:1])])
        state["net.0.bias"].zero_()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    trainer = quiet(**options("single"))
    trainer.fit(net(), loader())
    trainer.save_checkpoint(tmp_path / "saved")
    return tmp_path / "saved"


def test_what_a_hook_makes_of_weights_is_loaded(saved: Path) -> None:
    loaded, checkpoint = Wider.load_from_checkpoint(saved), Checkpoint.open(saved)
    assert torch.equal(loaded.net[3].weight[:3], checkpoint.read("model/net.3.weight"))
    assert not loaded.net[3].weight[3].any() and not loaded.net[0].bias.any()
    with pytest.raises(
        CheckpointError, match=r"a hook changes .*net\.0\.bias.*with which the run would not be the one"
    ):
        quiet(**options("single")).fit(Wider(), loader(), ckpt_path=saved)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_a_hook_makes_of_weights_is_evaluated(strategy: str, saved: Path) -> None:
    expected = quiet(**options("single")).validate(Wider.load_from_checkpoint(saved), loader(), verbose=False)
    found = quiet(**options(strategy)).validate(Wider(), loader(), ckpt_path=saved, verbose=False)
    assert found[0] == pytest.approx(expected[0])


def test_a_hook_changes_what_a_file_of_lightning_holds(tmp_path: Path) -> None:
    content = {"state_dict": net().state_dict(), "hyper_parameters": {}, "pytorch-lightning_version": "2.6.0"}
    torch.save(content, tmp_path / "model.ckpt")
    loaded = Wider.load_from_checkpoint(tmp_path / "model.ckpt")
    assert torch.equal(loaded.net[3].weight[:3], content["state_dict"]["net.3.weight"])
    assert not loaded.net[0].bias.any()


class Asks(Net):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert "state_dict" in checkpoint and "epoch" in checkpoint and checkpoint.get("global_step") == 7
        assert "optimizer_states" not in checkpoint and checkpoint.get("optimizer_states", 3) == 3
        assert checkpoint.setdefault("mine", 4) == 4 == checkpoint["mine"]
        checkpoint["gone"] = 1
        del checkpoint["gone"]


def test_it_is_a_dict(tmp_path: Path) -> None:
    trainer = quiet(**options("single"))
    trainer.fit(Asks(), loader())
    trainer.save_checkpoint(tmp_path / "c")
    assert Checkpoint.open(tmp_path / "c").state["module"] == {"mine": 4}


class Remembers(Net):
    """Keeps a number in its extra state, which hooks of a checkpoint change."""

    words, saved, loaded = 1, 0, 0

    def get_extra_state(self) -> dict[str, int]:
        return {"words": self.words}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.words = state["words"]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["_extra_state"]["words"] += self.saved

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["_extra_state"]["words"] += self.loaded


def test_extra_state_is_compared_too(tmp_path: Path) -> None:
    module, trainer = Remembers(), quiet(**options("single"))
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "c")
    module.saved = 1
    with pytest.raises(ValueError, match=r"a hook changes _extra_state in checkpoint\['state_dict'\]"):
        trainer.save_checkpoint(tmp_path / "d")
    module.loaded = 1
    with pytest.raises(CheckpointError, match=r"a hook changes _extra_state in checkpoint\['state_dict'\]"):
        quiet(**options("single")).fit(module, loader(), ckpt_path=tmp_path / "c")


class ChangesOnRankZero(Net):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            checkpoint["state_dict"]["net.3.weight"].zero_()


class BuildsBase(Net):
    """A base model that `configure_model` builds, on some strategies with values on rank 0 only, and that is filled in
    as weights are loaded."""

    def configure_model(self) -> None:
        if not hasattr(self, "base"):
            self.base = nn.Linear(8, 8).requires_grad_(False)
            with torch.no_grad():
                self.base.weight.fill_(0.1)
                self.base.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.base(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name in ("base.weight", "base.bias"):
            del checkpoint["state_dict"][name]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        own = self.state_dict()
        for name in ("base.weight", "base.bias"):
            checkpoint["state_dict"].setdefault(name, own[name])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cls", [ChangesOnRankZero, BuildsBase])
def test_all_ranks_evaluate_what_the_hook_makes_on_rank_0(cls: Any, strategy: str, tmp_path: Path) -> None:
    trainer = quiet(**options("single"))
    trainer.fit(cls(), loader())
    trainer.save_checkpoint(tmp_path / "c")
    expected = quiet(**options("single")).validate(cls(), loader(), ckpt_path=tmp_path / "c", verbose=False)
    found = quiet(**options(strategy)).validate(cls(), loader(), ckpt_path=tmp_path / "c", verbose=False)
    assert found[0] == pytest.approx(expected[0])
