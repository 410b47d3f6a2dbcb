"""A kill at any instant of a save leaves the old or the new checkpoint."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tests.trainer.checkpoint.folders import COMMON, script

AT_EVERY_CALL = (
    COMMON
    + """
def killed_at(point, action):
    # In a fork, which is killed before its call number `point` that may change a disk. True if it ended first.
    pid = os.fork()
    if pid == 0:
        left = point
        def count(frame, event, function):
            nonlocal left
            if event == "c_call" and function.__name__ in ("open", "write", "flush", "fsync", "mkdir", "rename",
                "unlink", "rmdir", "link"):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.setprofile(count)
        action()
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status == 0

def run(mode):
    folder = root / mode
    path = folder / "last"
    if mode == "fallback":
        directory.exchange = lambda one, other: False
    names = ["last", "twin"] if mode == "twins" else ["last"]
    twins = [folder / name for name in names[1:]]
    seen = set()
    for point in range(1, 1000):
        if mode == "fresh":
            checkpoint.remove(path)
            checkpoint.clean(folder)
        else:
            write(path, 2 * point, also=twins)
        action = (lambda: checkpoint.remove(path)) if mode == "remove" else (
            lambda: write(path, 2 * point + 1, also=twins))
        ended = killed_at(point, action)
        try:
            step = step_of(path)
        except checkpoint.CheckpointError as error:
            assert mode in ("fresh", "remove") and "there is no checkpoint" in str(error), error
            step = None
        allowed = {"fresh": (None, 2 * point + 1), "remove": (2 * point, None)}.get(mode, (2 * point, 2 * point + 1))
        assert step == allowed[1] if ended else step in allowed, (point, step)
        seen.add(allowed.index(step))
        found = checkpoint.newest(folder)
        assert (None if found is None else step_of(found)) == step
        checkpoint.clean(folder)
        left = os.listdir(folder) if folder.exists() else []
        assert sorted(left) == ([] if step is None else names), left
        assert all(step_of(twin) in ((step,) if ended else allowed) for twin in twins)
        assert step is None or step_of(path) == step
        if ended:
            break
    assert ended and seen == {0, 1}
    print(mode, point, flush=True)

for mode in sys.argv[2:]:
    run(mode)
"""
)


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize(
    "modes",
    [("exchange", "remove"), pytest.param(("fresh", "twins", "fallback"), marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_a_kill_before_any_change_on_the_disk_leaves_the_old_or_the_new_one(
    tmp_path: Path, modes: tuple[str, ...]
) -> None:
    # In memory where there is such a folder, as a disk would be waited for thousands of times.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        lines = script(AT_EVERY_CALL, folder, *modes, timeout_s=600).split("\n")
    points = {line.split()[0]: int(line.split()[1]) for line in lines if line}
    assert points.keys() == set(modes)
    # Fewer would mean that the kills miss something.
    assert all(number > (5 if mode == "remove" else 25) for mode, number in points.items())


AT_RANDOM = (
    COMMON
    + """
beside, rounds = sys.argv[2] == "async", int(sys.argv[3])
draw = random.Random(0)
step = acknowledged = rounds_with_progress = 0

def train(step, writer):
    'Save one checkpoint after the other, tell which are done, keep the newest three.'
    pending = None
    while True:
        step += 1
        path = root / ("last" if step % 2 else f"step={step}")  # every second one replaces
        old = [name for name in root.glob("step=*") if int(name.name[5:]) < step - 2]
        tensors = {f"{group}/weight": TensorShard.whole(torch.full((100_000,), float(step)))
            for group in ("model", "optimizer")}
        options = dict(rank=0, world_size=1, tensors=tensors, state={"progress": {"global_step": step}},
            rank_state={"step": step}, outdated=old)
        if not beside:
            checkpoint.save(path, **options)
            os.write(writer, step.to_bytes(4, "big"))
            continue
        if pending is not None:
            pending[1].finish(None, None)
            os.write(writer, pending[0].to_bytes(4, "big"))
        pending = step, checkpoint.begin(path, **options)
        for tensor in tensors.values():
            tensor.tensor.fill_(-1.0)  # training continues

for round in range(rounds):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        train(step, writer)
    os.close(writer)
    before = acknowledged
    acknowledged = int.from_bytes(os.read(reader, 4), "big")  # however slow the machine is, each round gets somewhere
    time.sleep(draw.uniform(0, 0.12))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while message := os.read(reader, 4):
        acknowledged = int.from_bytes(message, "big")
    os.close(reader)
    rounds_with_progress += acknowledged > before
    found = checkpoint.newest(root)
    step = max(step, acknowledged) if found is None else step_of(found)
    assert step >= acknowledged, (step, acknowledged)
    if round % 3 == 0:
        checkpoint.clean(root)
        assert not [name for name in os.listdir(root) if name.startswith(".")]
print(rounds_with_progress, acknowledged)
"""
)


def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """TMPDIR on another file system than the test's folder, where there is one."""
    if os.access("/dev/shm", os.W_OK):
        monkeypatch.setenv("TMPDIR", "/dev/shm")


@pytest.mark.ranks
@pytest.mark.parametrize("rounds", [5, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_random_kills_lose_no_acknowledged_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, rounds: int
) -> None:
    in_memory(monkeypatch)
    progressed, steps = map(int, script(AT_RANDOM, tmp_path, mode, rounds, timeout_s=1200).split())
    assert progressed == rounds
    assert steps >= rounds


ON_RANKS = (
    COMMON
    + """
import itertools, threading
from lockstep.strategies import FSDP
from lockstep.strategies.launch.failure import RankFailure
from lockstep.strategies.checkpoint_state import State

rounds = int(sys.argv[2])

def train(strategy, folder, beside):
    folder = Path(folder)
    strategy.setup()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 3))
    wrapped = strategy.setup_module(model)
    optimizers = strategy.setup_optimizers(wrapped, {"main": torch.optim.AdamW(model.parameters())})
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers["main"].step()
    found = checkpoint.newest(folder)
    start = 0 if found is None else Checkpoint.open(found).global_step
    start = strategy.broadcast(start)
    (folder / f"pid-{strategy.topology.rank}").write_text(str(os.getpid()))
    pending = None
    for step in itertools.count(start + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float(step))
                optimizers["main"].state[parameter]["exp_avg"].fill_(float(step))
        state = strategy.state_dict(wrapped, optimizers)
        options = dict(
            rank=strategy.topology.rank,
            world_size=strategy.topology.world_size,
            tensors={name: shard for name, shard in state.tensors.items()
                if name.startswith("model/") or name.endswith("exp_avg")},
            state={"progress": {"global_step": step}},
            rank_state={"step": step},
            broadcast=strategy.broadcast,
            outdated=[folder / f"step={step - 3}"],
        )
        path = folder / f"step={step}" if step % 2 else folder / "last"
        done = step
        if beside:
            if pending is not None:
                pending[1].finish(strategy.barrier, strategy.broadcast)
            done = None if pending is None else pending[0]
            pending = step, checkpoint.begin(path, **options)
        else:
            checkpoint.save(path, barrier=strategy.barrier, **options)
        if strategy.topology.rank == 0 and done is not None:
            with open(folder / "acknowledged", "a") as file:
                file.write(f"{done}\\n")

def acknowledged():
    try:
        return int((root / "acknowledged").read_text().split("\\n")[-2])
    except (FileNotFoundError, IndexError):
        return 0

def kill(victims, delay_s, before):
    end = time.monotonic() + 60
    while acknowledged() <= before and time.monotonic() < end:
        time.sleep(0.005)
    time.sleep(delay_s)
    for rank in victims:
        os.kill(int((root / f"pid-{rank}").read_text()), signal.SIGKILL)

draw = random.Random(0)
for round in range(rounds):
    before = acknowledged()
    strategy = FSDP()
    strategy.configure(devices=2, accelerator="cpu")
    killer = threading.Thread(target=kill, args=(draw.choice([(0,), (1,), (0, 1)]), draw.uniform(0, 0.2), before))
    killer.start()
    try:
        strategy.launch(train, strategy, str(root), round % 2 == 1)
    except RankFailure as error:
        assert error.signal == "SIGKILL", error
    killer.join()
    done = acknowledged()
    assert done > before, "each round gets somewhere"
    found = Checkpoint.open(checkpoint.newest(root))
    assert found.global_step >= done, (found.global_step, done)
    assert found.world_size == 2 and len(found.names()) == 8
    for name in found.names():
        assert (found.read(name) == found.global_step).all(), name
    assert [found.rank_state(rank)["step"] for rank in range(2)] == [found.global_step] * 2
    if round % 3 == 0:
        checkpoint.clean(root)
        assert not [name for name in os.listdir(root) if name.startswith(".")]
print(rounds)
"""
)


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("rounds", [3, pytest.param(200, marks=pytest.mark.slow)])
def test_random_kills_of_ranks_that_save_shards_lose_no_acknowledged_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    """One rank or both, every second round asynchronously."""
    in_memory(monkeypatch)
    assert script(ON_RANKS, tmp_path, rounds, timeout_s=1500).split()[-1] == str(rounds)
