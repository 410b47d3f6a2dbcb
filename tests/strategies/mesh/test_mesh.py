"""Meshes: their strings, the arithmetic of their errors, and several axes at once on real ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.strategies import FSDP, MeshParallel, SingleDevice, Strategy, build
from lockstep.strategies.mesh.mesh import AXES, parse, resolve
from lockstep.trainer.checkpoint.store import Checkpoint
from tests.strategies import contract
from tests.strategies.contract import Plan, difference, reference, saved_weights
from tests.strategies.mesh.test_fsdp import fit, seeded
from tests.strategies.odd import Odd, tokens
from tests.trainer.toy import distance, weights

pytestmark = pytest.mark.ranks


def test_axes_come_out_in_the_stated_order() -> None:
    assert list(parse("tensor=2, ddp=3").items()) == [("ddp", 3), ("tensor", 2)]
    assert list(parse("tensor=2,fsdp,pipeline=4").items()) == [("pipeline", 4), ("fsdp", None), ("tensor", 2)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "ddp=2,tensr=2",
            r"a mesh has the axes pipeline, ddp, fsdp, tensor, but strategy='ddp=2,tensr=2' names 'tensr'; "
            r"did you mean 'tensor'\?",
        ),
        ("ddp=2,ddp=2", "names 'ddp' twice"),
        ("ddp=0", "whole number of at least 1, but strategy='ddp=0' has ddp=0"),
        ("ddp=two", "has ddp=two"),
        ("ddp=", "has ddp=nothing"),
        ("ddp,tensor", "has ddp and tensor; give all but one a size"),
        ("ddp=2,", "names ''"),
        ("pipeline=2,ddp=2,ddp", "twice"),
    ],
)
def test_an_invalid_mesh_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("text", "ranks", "message"),
    [
        (
            "ddp=2,tensor=3",
            4,
            r"the mesh ddp=2 × tensor=3 = 6 ranks is not the number of ranks, 4; the nearest mesh that fits is "
            r"strategy='ddp=2,tensor=2'",
        ),
        ("fsdp=4,tensor=4", 8, r"= 16 ranks is not the number of ranks, 8; .*'fsdp=2,tensor=4'"),
        (
            "ddp,tensor=3",
            8,
            r"the mesh tensor=3 = 3 ranks does not divide the number of ranks, 8; .*'ddp=4,tensor=2'|'ddp=2,tensor=4'",
        ),
    ],
)
def test_an_impossible_product_is_refused_with_its_arithmetic(text: str, ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(parse(text), ranks)


@given(st.dictionaries(st.sampled_from(AXES), st.integers(1, 12), min_size=1), st.integers(1, 64))
def test_the_mesh_that_an_error_offers_fits(sizes: dict[str, int], ranks: int) -> None:
    text = ",".join(f"{name}={size}" for name, size in sizes.items())
    try:
        found = resolve(parse(text), ranks)
    except ValueError as error:
        found = resolve(parse(str(error).rpartition("strategy=")[2].strip("'")), ranks)
    assert math.prod(found.values()) == ranks and list(found) == [name for name in AXES if name in sizes]


def test_a_mesh_is_named_as_a_strategy() -> None:
    strategy, _ = build("tensor=2,fsdp=2", accelerator="cpu")
    assert isinstance(strategy, MeshParallel) and strategy.starts_ranks, "its sizes say how many ranks to start"
    strategy, _ = build("ddp=2,fsdp=2", accelerator="cpu", virtual_ranks=4)
    assert strategy.starts_ranks and strategy.expected_topology.world_size == 4, "with virtual ranks too"
    strategy, _ = build("fsdp,tensor=2", devices=4, accelerator="cpu")
    assert strategy._sizes == {"fsdp": 2, "tensor": 2}
    with pytest.raises(
        ValueError,
        match=r"ddp=2 × tensor=2 = 4 ranks is not the number of ranks, 3; .*'ddp=1,tensor=3'|'ddp=3,tensor=1'",
    ):
        build("ddp=2,tensor=2", devices=3, accelerator="cpu")
    with pytest.raises(ValueError, match=r"ddp=3 = 3 ranks does not divide the number of ranks, 4"):
        FSDP(replicas=3).configure(devices=4, accelerator="cpu")


def places(strategy: Strategy) -> list[list[int]]:
    strategy.setup()
    try:
        return strategy.all_gather(
            torch.tensor(
                [strategy.topology.data_rank, strategy.topology.data_size, int(strategy.topology.is_reporting_rank)]
            )
        ).tolist()
    finally:
        strategy.teardown()


def test_ranks_are_numbered_with_tensor_innermost() -> None:
    strategy = MeshParallel("ddp=2,tensor=2")
    strategy.configure(accelerator="cpu")
    assert strategy.launch(places, strategy) == [[0, 2, 1], [0, 2, 0], [1, 2, 1], [1, 2, 0]]


@pytest.mark.slow
def test_three_axes_on_eight_ranks(tmp_path: Path) -> None:
    """ddp × fsdp × tensor, saved there, and continued on one process and under another mesh."""
    half = Plan(epochs=1, accumulate=2, clip=0.1)
    contract.run(MeshParallel("ddp=2,fsdp=2,tensor=2"), 8, half, tmp_path / "eight")
    model, kept = reference(half)
    assert difference(saved_weights(tmp_path / "eight"), model) < 1e-11
    expected, _ = reference(half, model, kept["optimizer"])
    second_half = Plan(epochs=1, accumulate=2, clip=0.1, start_from=str(tmp_path / "eight"))
    contract.run(SingleDevice(), 1, second_half, tmp_path / "one")
    assert difference(saved_weights(tmp_path / "one"), expected) < 1e-11
    contract.run(
        MeshParallel("tensor=2,fsdp=2"), 4, Plan(epochs=0, start_from=str(tmp_path / "eight")), tmp_path / "four"
    )
    first, second = Checkpoint.open(tmp_path / "eight"), Checkpoint.open(tmp_path / "four")
    assert first.names() == second.names() and all(
        torch.equal(first.read(name), second.read(name)) for name in first.names()
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "mesh",
    ["fsdp=2,tensor=2", *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ("ddp=2,tensor=2", "ddp=2,fsdp=2"))],
)
def test_an_odd_module_trains_as_on_one_process(mesh: str) -> None:
    one, cut = seeded(Odd, bypass="tensor" not in mesh), seeded(Odd, bypass="tensor" not in mesh)
    kept = fit("single", 1, one, tokens(22), tokens(9, 4, False), accumulate_grad_batches=2, gradient_clip_val=0.2)
    found = fit(mesh, "auto", cut, tokens(22), tokens(9, 4, False), accumulate_grad_batches=2, gradient_clip_val=0.2)
    assert distance(weights(one), weights(cut)) < 1e-12
    expected = {name: float(value) for name, value in kept.callback_metrics.items()}
    assert {name: float(value) for name, value in found.callback_metrics.items()} == pytest.approx(expected, rel=1e-12)
