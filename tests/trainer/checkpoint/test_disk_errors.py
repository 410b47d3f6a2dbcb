"""An error of the disk at any call keeps the previous checkpoint and is raised."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from lockstep.trainer.checkpoint.store import CheckpointError
from tests.trainer.checkpoint.folders import COMMON, save_step, script

FAILING_AT_EVERY_CALL = (
    COMMON
    + """
import errno, threading

def failing_at(point, number, action):
    # With an error in place of its call number `point` that may change a disk; returns how many calls were left, and
    # what came out.
    left = point
    def count(frame, event, function):
        nonlocal left
        if event == "c_call" and function.__name__ in ("open", "write", "flush", "fsync", "mkdir", "rename",
            "unlink", "rmdir", "link"):
            left -= 1
            if left == 0:
                raise OSError(number, os.strerror(number))
    threading.setprofile(count)
    sys.setprofile(count)
    try:
        action()
        raised = None
    except Exception as error:
        raised = error
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return left, raised

def sync(path, step, **more):
    write(path, step, **more)

def beside(path, step, size=64, **more):
    tensors = {f"{group}/weight": TensorShard.whole(torch.full((size,), float(step)))
        for group in ("model", "optimizer")}
    state = {"progress": {"global_step": step}}
    checkpoint.begin(path, rank=0, world_size=1, tensors=tensors, state=state, rank_state={"step": step},
        **more).finish(None, None)

for mode, number in ((sync, errno.EIO), (beside, errno.ENOSPC)):
    folder = root / f"{mode.__name__}-{errno.errorcode[number]}"
    refused = 0
    for point in range(1, 1000):
        old, new = 2 * point, 2 * point + 1
        mode(folder / "last", old)
        mode(folder / "older", old - 1)
        left, error = failing_at(point, number,
            lambda: mode(folder / "last", new, also=[folder / "also"], outdated=[folder / "older"]))
        step = step_of(folder / "last")
        newest = step_of(checkpoint.newest(folder))
        assert newest >= step >= old, (point, newest, step)
        if error is None:
            assert step == step_of(folder / "also") == new and not (folder / "older").exists(), point
        else:
            assert type(error) is checkpoint.CheckpointError, repr(error)
            assert f"{folder}/" in str(error) and errno.errorcode[number] in str(error), error
            assert "\\n" not in str(error), error
            refused += 1
            if "remove" not in str(error):
                assert " of its 512 bytes; " in str(error), error
                assert step_of(folder / "older") == old - 1, "what is older goes last"
        checkpoint.remove(folder / "also")
        checkpoint.clean(folder)
        if left > 0:
            break
    assert left > 0 and refused > 20, (left, refused)
    print(folder.name, point, refused)
"""
)


@pytest.mark.slow  # the full disk below is the case that happens
@pytest.mark.ranks
def test_an_error_of_the_disk_in_any_call_keeps_a_whole_checkpoint_and_names_the_bytes(tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        assert len(script(FAILING_AT_EVERY_CALL, folder).splitlines()) == 2


FULL_DISK = (
    COMMON
    + """
import subprocess, threading
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", root], check=True)
path = root / "runs" / "last"
write(path, 1)
before = sorted(os.listdir(path))

def refused(call):
    try:
        call()
    except checkpoint.CheckpointError as error:
        assert str(path) in str(error) and "No space left on device (ENOSPC)" in str(error), error
        assert step_of(path) == 1 and os.listdir(path.parent) == ["last"] and sorted(os.listdir(path)) == before
        return str(error)
    raise AssertionError("a full disk was not noticed")

print(refused(lambda: write(path, 2, 1_000_000)))
large = {"model/w": TensorShard.whole(torch.zeros(1_000_000))}
refused(lambda: checkpoint.begin(path, rank=0, world_size=1, tensors=large, state={}).finish(None, None))

barrier, slot, errors = threading.Barrier(2, timeout=20), [None], [None, None]
def rank(number):
    def broadcast(value):
        if number == 0:
            slot[0] = value
        barrier.wait()
        received = slot[0]
        barrier.wait()
        time.sleep(0.3 * number)  # rank 0 has written its few bytes before rank 1 fills the disk
        return received
    try:
        shard = TensorShard(torch.zeros(1_000_000 if number else 1), (1_000_001,), (number,))
        checkpoint.save(path, rank=number, world_size=2, tensors={"model/w": shard}, state={}, barrier=barrier.wait,
            broadcast=broadcast)
    except checkpoint.CheckpointError as error:
        errors[number] = error
threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
for error in errors:
    def again():
        raise error
    assert "rank 1" in refused(again)

write(path, 3)
assert step_of(path) == 3

subprocess.run(["mount", "-o", "remount,ro", root], check=True)
try:
    write(path, 4)
except checkpoint.CheckpointError as error:
    assert str(path) in str(error) and "Read-only file system (EROFS)" in str(error), error
    assert "that you can write" in str(error), error
else:
    raise AssertionError("written where that is impossible")
assert step_of(path) == 3
subprocess.run(["mount", "-o", "remount,rw", root], check=True)

os.chdir(sys.argv[2])
Path("large.py").write_text('''
import torch
from torch.utils.data import DataLoader, TensorDataset
from lockstep import Module

class Large(Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1000, 100)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(8, 1000)))

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
''')
saver = "{class: ModelCheckpoint, filename: '{step}', every_n_train_steps: 1, async_save: true}"
words = ["module.class=large.Large", f"trainer.callbacks=[{saver}]", "max_steps=4", "logger=false"]
words += [f"default_root_dir={root}/fit", "strategy=single"]
done = subprocess.run([sys.executable, "-m", "lockstep", "fit", *words, "enable_progress_bar=false"],
    capture_output=True, text=True)
(kept,) = (root / "fit/Large/version_0/checkpoints").iterdir()
assert done.returncode == 1 and kept.name == "step=1", (done, kept)
assert Checkpoint.open(kept).global_step == 1
last = done.stderr.splitlines()[-1]
assert "step=2: No space left on device (ENOSPC) at " in last and " of its " in last, done.stderr
assert "Traceback" not in done.stderr, done.stderr
"""
)


@pytest.mark.long
@pytest.mark.ranks
def test_a_full_disk_raises_and_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    unshare = ("unshare", "-Urm")
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("unshare -Urm is not permitted here")
    (tmp_path / "disk").mkdir()
    message = script(FULL_DISK, tmp_path / "disk", tmp_path, prefix=unshare)
    assert "bytes; make room or choose another folder" in message


FORBIDDEN = (
    COMMON
    + """
os.chmod(root, 0o755)
write(root / "a", 1)
os.chmod(root, 0o555)
if os.getuid() == 0:
    os.setuid(65534)
for path in (root / "a", root / "new" / "b"):
    try:
        write(path, 2)
    except checkpoint.CheckpointError as error:
        assert str(path) in str(error) and "Permission denied (EACCES)" in str(error), error
        assert "that you can write" in str(error), error
    else:
        raise AssertionError("written where that is forbidden")
try:
    checkpoint.remove(root / "a")
except checkpoint.CheckpointError as error:
    assert "Permission denied (EACCES)" in str(error)
assert step_of(root / "a") == 1 and os.listdir(root) == ["a"]
"""
)


@pytest.mark.long
@pytest.mark.ranks
def test_a_forbidden_folder_raises_and_changes_nothing() -> None:
    # Not below tmp_path, whose parents only its owner may enter.
    folder = tempfile.mkdtemp()
    try:
        script(FORBIDDEN, folder)
    finally:
        os.chmod(folder, 0o755)
        shutil.rmtree(folder)


def test_a_path_below_a_file_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/file/a: .* after rank 0 had written 0 of its 32 bytes"):
        save_step(tmp_path / "file" / "a", 1)
    assert os.listdir(tmp_path) == ["file"]
