"""A damaged or forged checkpoint loads bit-identical, or raises CheckpointError before a step."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.callbacks import (
    Callback,
    CommunicationLedger,
    Guard,
    LambdaCallback,
    ThroughputMonitor,
    Timer,
    WeightAveraging,
)
from lockstep.trainer.checkpoint.store import CheckpointError, is_checkpoint
from tests.trainer.checkpoint.damage import fit, replace, sign
from tests.trainer.checkpoint.folders import contents
from tests.trainer.run.test_resume import Rich
from tests.trainer.toy import loader, net, quiet


def edit_json(draw: random.Random, value: Any) -> None:
    """Change one random place of a JSON tree."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = draw.choice(keys)
        if isinstance(value[key], dict | list) and value[key] and draw.random() < 0.85:
            value = value[key]
            continue
        choice = draw.randrange(4)
        if choice == 0:
            del value[key]
        elif choice == 1:
            value[key] = draw.choice(
                [
                    None,
                    True,
                    -1,
                    0,
                    1,
                    2**40,
                    2**80,
                    1.5,
                    math.nan,
                    "",
                    "../x",
                    "float16",
                    "state.json",
                    [],
                    {},
                    [[]],
                    {"a": 1},
                    [1, 2, 3],
                ]
            )
        elif choice == 2 and isinstance(value, dict):
            value[draw.choice(["", "x", "model/x", "../x.json", "rank-00009.json", "format"])] = value.pop(key)
        elif type(value[key]) is int:
            value[key] += draw.choice([-1, 1, 7])
        return


def mutate(draw: random.Random, folder: Path) -> str:
    path = folder / draw.choice(sorted(os.listdir(folder)))
    content = bytearray(path.read_bytes())
    kind = draw.choice(
        ["flip", "flip", "flip", "cut", "grow", "swap bytes", "swap files", "delete", "empty", "json", "json", "zeros"]
    )
    if kind == "flip":
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del content[draw.randrange(len(content)) :]
    elif kind == "grow":
        content += draw.randbytes(draw.randint(1, 9))
    elif kind == "swap bytes":
        one, other, size = draw.randrange(len(content)), draw.randrange(len(content)), draw.randint(1, 8)
        content[one : one + size], content[other : other + size] = (
            content[other : other + size],
            content[one : one + size],
        )
    elif kind == "swap files":
        other = folder / draw.choice(sorted(os.listdir(folder)))
        theirs = other.read_bytes()
        other.write_bytes(content)
        content[:] = theirs
    elif kind == "empty":
        content.clear()
    elif kind == "zeros":
        start = draw.randrange(len(content))
        content[start : start + 16] = bytes(len(content[start : start + 16]))
    elif kind == "json" and path.suffix == ".json":
        tree = json.loads(content)
        edit_json(draw, tree)
        content[:] = json.dumps(tree).encode()
    path.write_bytes(content)
    if kind == "delete":
        path.unlink()
    return f"{kind} {path.name}"


@pytest.mark.long
@pytest.mark.parametrize("number", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_mutated_checkpoint_loads_bit_identical_or_raises_checkpoint_error(
    tmp_path: Path, two_ranks: Path, fitted: Path, number: int
) -> None:
    draw = random.Random(number)
    refused = 0
    for source, count in ((two_ranks, number // 2), (fitted, number - number // 2)):
        expected = contents(source)
        for i in range(count):
            folder = tmp_path / "a"
            shutil.copytree(source, folder)
            kind = mutate(draw, folder)
            is_checkpoint(folder)
            try:
                right = contents(folder) == expected
            except CheckpointError as error:
                right = str(folder) in str(error) and "\n" not in str(error)
                refused += 1
            assert right, (source, i, kind)
            shutil.rmtree(folder)
    assert refused > 0.8 * number


@pytest.mark.long
def test_mutations_that_nothing_verifies_raise_nothing_but_checkpoint_error(tmp_path: Path, two_ranks: Path) -> None:
    """A forger signs what he changed: values may differ, but no other exception and no crash comes of it."""
    draw = random.Random(1)
    outcomes = [0, 0]
    for number in range(300):
        folder = tmp_path / "a"
        shutil.copytree(two_ranks, folder)
        if number % 2:
            manifest = json.loads((folder / "manifest.json").read_text())
            edit_json(draw, manifest)
            sign(folder, manifest)
        else:
            mutate(draw, folder)
        try:
            contents(folder, verify=False)
            outcomes[0] += 1
        except CheckpointError:
            outcomes[1] += 1
        shutil.rmtree(folder)
    assert min(outcomes) > 10


class Begins(Callback):
    begun = False

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.begun = True


@pytest.mark.long
@pytest.mark.parametrize("number", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_forged_state_is_refused_or_taken_before_a_step(tmp_path: Path, fitted: Path, number: int) -> None:
    """The same for a whole run: until training begins nothing but CheckpointError comes out of any JSON with right
    checksums."""
    draw = random.Random(number)
    outcomes = Counter()
    for i in range(number):
        folder = tmp_path / "a"
        shutil.copytree(fitted, folder)
        manifest = json.loads((folder / "manifest.json").read_text())
        name = draw.choice(["state.json", "state.json", "state.json", "rank-00000.json"])
        tree = json.loads((folder / name).read_text())
        for _ in range(draw.choice([1, 1, 4])):
            edit_json(draw, tree)
        replace(folder, manifest, name, json.dumps(tree).encode())
        sign(folder, manifest)
        begins = Begins()
        calls: list[Callable[[], Any]] = [
            lambda folder=folder, begins=begins: fit(folder, begins),
            lambda folder=folder: quiet().validate(Rich(), loader(8), ckpt_path=folder, verbose=False),
            lambda folder=folder: Rich.load_from_checkpoint(folder),
        ]
        for call in calls:
            try:
                call()
                outcomes["loaded"] += 1
            except CheckpointError as error:
                assert str(folder) in str(error)
                outcomes["refused"] += 1
            except Exception:
                assert begins.begun and call is calls[0], i
                outcomes["failed in training"] += 1
        shutil.rmtree(folder)
    assert min(outcomes["loaded"], outcomes["refused"]) > number / 3
    assert outcomes["failed in training"] <= number / 20


ABSURD: list[Any] = [
    10**9,
    -1,
    math.nan,
    None,
    "x",
    [],
    {"a": 1},
    math.inf,
    True,
    2**80,
    [[1]],
    "",
    {},
    0.5,
    False,
    1e308,
]


def leaves(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all leaves of a JSON tree; of long lists those at both ends."""
    if not isinstance(tree, dict | list) or not tree:
        yield at
        return
    pairs = list(tree.items() if isinstance(tree, dict) else enumerate(tree))
    for key, value in pairs if len(pairs) < 99 or isinstance(tree, dict) else [*pairs[:2], *pairs[-2:]]:
        yield from leaves(value, (*at, key))


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("number", [1, pytest.param(len(ABSURD), marks=pytest.mark.slow)])
def test_an_absurd_value_at_any_leaf_is_refused_or_harmless(tmp_path: Path, fitted: Path, number: int) -> None:
    """Each in turn, signed again: CheckpointError, or a run to its end; a NaN that a rate brings is a
    FloatingPointError."""
    trees = {
        name: json.loads((fitted / name).read_text()) for name in ("state.json", "rank-00000.json", "manifest.json")
    }
    outcomes: Counter[str] = Counter()
    for i, (name, at) in enumerate((name, at) for name, tree in trees.items() for at in leaves(tree)):
        for j in range(number):
            value = ABSURD[(i * number + j) % len(ABSURD)]
            folder = tmp_path / "a"
            shutil.copytree(fitted, folder)
            tree = json.loads(json.dumps(trees[name]))
            inner = tree
            for key in at[:-1]:
                inner = inner[key]
            inner[at[-1]] = value
            if name == "manifest.json":
                sign(folder, tree)
            else:
                manifest = json.loads(json.dumps(trees["manifest.json"]))
                replace(folder, manifest, name, json.dumps(tree).encode())
                sign(folder, manifest)
            calls: dict[str, Callable[[], Any]] = {"fit": lambda folder=folder: fit(folder)}
            if name == "manifest.json" or at[0] == "strategy":
                calls["validate"] = lambda folder=folder: quiet().validate(
                    Rich(), loader(8), ckpt_path=folder, verbose=False
                )
                calls["load"] = lambda folder=folder: Rich.load_from_checkpoint(folder)
            for verb, call in calls.items():
                began = time.monotonic()
                try:
                    call()
                    outcomes["harmless"] += verb == "fit"
                except CheckpointError as error:
                    assert str(folder) in str(error) and len(str(error)) < 1500
                    outcomes["refused"] += 1
                except FloatingPointError:
                    outcomes["not finite"] += 1
                except Exception as error:
                    raise AssertionError(f"{verb} with {value!r} at {name}: {at}") from error
                assert time.monotonic() - began < 20, f"{verb} with {value!r} at {name}: {at}"
            shutil.rmtree(folder)
    assert min(outcomes["refused"], 5 * outcomes["harmless"]) > 100 * number and outcomes["not finite"] < 10 * number


def test_a_metric_by_another_name_is_refused(tmp_path: Path, fitted: Path) -> None:
    for value in (None, "net", "x"):
        folder = tmp_path / "a"
        shutil.copytree(fitted, folder)
        manifest = json.loads((folder / "manifest.json").read_text())
        tree = json.loads((folder / "rank-00000.json").read_text())
        assert any(entry[6] for entry in tree["sums"].values())
        for entry in tree["sums"].values():
            entry[6] = value if entry[6] else None
        replace(folder, manifest, "rank-00000.json", json.dumps(tree).encode())
        sign(folder, manifest)
        with pytest.raises(CheckpointError, match="has different metrics in sums and torchmetrics for the name"):
            fit(folder)
        shutil.rmtree(folder)


@pytest.mark.parametrize("file", ["state.json", "rank-00000.json"])
def test_a_forged_order_of_dimensions_is_refused(file: str, tmp_path: Path, fitted: Path) -> None:
    def forge(value: Any, order: Any) -> None:
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            forge(item, order)
        if isinstance(value, dict) and "$tensor" in value:
            value["order"] = order

    for order in ([7], "ab", [0] * 9, [True], {}):
        folder = tmp_path / "a"
        shutil.copytree(fitted, folder)
        manifest = json.loads((folder / "manifest.json").read_text())
        tree = json.loads((folder / file).read_text())
        forge(tree, order)
        replace(folder, manifest, file, json.dumps(tree).encode())
        sign(folder, manifest)
        with pytest.raises(CheckpointError, match=f"{file} has no valid order of the dimensions of the tensor"):
            fit(folder)
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("optimizer", "option", "is_now", "value"), [("net", "eps", 1e-8, 2**80), ("norm", "lr", 0.01, 1e308)]
)
def test_a_forged_option_that_no_step_can_compute_with_is_refused(
    tmp_path: Path, fitted: Path, optimizer: str, option: str, is_now: float, value: float
) -> None:
    folder = tmp_path / "a"
    shutil.copytree(fitted, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    tree = json.loads((folder / "state.json").read_text())
    tree["strategy"]["optimizers"][optimizer]["param_groups"][0][option] = value
    replace(folder, manifest, "state.json", json.dumps(tree).encode())
    sign(folder, manifest)
    with pytest.raises(
        CheckpointError, match=re.escape(f"optimizer {optimizer!r} has {option}={is_now}, but {value} was saved")
    ):
        fit(folder)


def test_what_numpy_refuses_of_forged_random_streams_is_refused(tmp_path: Path, fitted: Path) -> None:
    """Errors of the code of users come out unchanged; its compiled code is not theirs."""
    folder = tmp_path / "a"
    shutil.copytree(fitted, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    tree = json.loads((folder / "state.json").read_text())
    tree["rng_at_setup"]["numpy"][2] = "float16"
    replace(folder, manifest, "state.json", json.dumps(tree).encode())
    sign(folder, manifest)
    with pytest.raises(CheckpointError, match=re.escape(str(folder))):
        quiet().validate(Rich(), loader(8), ckpt_path=folder, verbose=False)


def test_forged_numbers_of_a_callback_are_refused(tmp_path: Path, fitted: Path) -> None:
    folder = tmp_path / "a"
    shutil.copytree(fitted, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    tree = json.loads((folder / "state.json").read_text())
    tree["callbacks"]["EarlyStopping[monitor=val/loss, mode=min]"]["best_score"] = []
    replace(folder, manifest, "state.json", json.dumps(tree).encode())
    sign(folder, manifest)
    with pytest.raises(CheckpointError, match=r"saved state of EarlyStopping has no valid best_score, but \[\]; load"):
        fit(folder)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (Guard, "skipped_steps", "x"),
        (Guard, "in_a_row", -1),
        (Timer, "time_elapsed", {"train": math.inf}),
        (Timer, "time_elapsed", {"train": "1"}),
        (Timer, "time_elapsed", {"other": 1.0}),
        (WeightAveraging, "num_updates", None),
        (WeightAveraging, "last_step", 0.5),
        (ThroughputMonitor, "values", {"a": "b"}),
        (CommunicationLedger, "report", {"rows": [{}]}),
    ],
)
def test_other_forged_values_of_callbacks_are_refused(
    tmp_path: Path, kind: type[Callback], name: str, value: Any
) -> None:
    folder = tmp_path / "a"
    saver = LambdaCallback(on_train_end=lambda trainer, module: trainer.save_checkpoint(folder))
    quiet(callbacks=[kind(), saver], accelerator="cpu").fit(net(), loader(16))
    manifest = json.loads((folder / "manifest.json").read_text())
    tree = json.loads((folder / "state.json").read_text())
    assert name in tree["callbacks"][kind.__name__]
    tree["callbacks"][kind.__name__][name] = value
    replace(folder, manifest, "state.json", json.dumps(tree).encode())
    sign(folder, manifest)
    with pytest.raises(CheckpointError, match=f"saved state of {kind.__name__} has no valid {name}, but "):
        quiet(max_epochs=2, callbacks=[kind()], accelerator="cpu").fit(net(), loader(16), ckpt_path=folder)


def test_a_forged_number_of_ranks_is_refused_at_once(tmp_path: Path, two_ranks: Path, fitted: Path) -> None:
    for source, ranks in ((fitted, 10**9), (fitted, 0), (fitted, 2)):
        folder = tmp_path / "a"
        shutil.copytree(source, folder)
        sign(folder, json.loads((folder / "manifest.json").read_text()) | {"world_size": ranks})
        with pytest.raises(CheckpointError, match=f"world_size is {ranks}, but there are 1 rank files"):
            fit(folder)
        shutil.rmtree(folder)
