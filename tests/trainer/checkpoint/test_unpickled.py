"""Nothing that a run reads is unpickled, imported or run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.trainer.checkpoint.damage import replace, sign
from tests.trainer.checkpoint.folders import script

UNTOUCHED = """
import sys
from pathlib import Path
from tests.trainer.checkpoint import damage
from tests.trainer.run.test_resume import Rich
from tests.trainer.toy import loader, quiet

def everything():
    damage.fit(Path(sys.argv[1]))
    quiet().validate(Rich(), loader(8), ckpt_path=sys.argv[1], verbose=False)
    quiet().test(Tested(), loader(8), ckpt_path=sys.argv[1], verbose=False)
    quiet().predict(Tested(), loader(8), ckpt_path=sys.argv[1])
    Rich.load_from_checkpoint(sys.argv[1])

class Tested(Rich):
    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        return self.net(self.norm(batch[0]))

everything()  # whatever is imported where it is first used
events = []
sys.addaudithook(lambda event, args: events.append((event, str(args)[:200])) if watched else None)
watched = True
everything()
watched = False
assert any(event == "open" and "manifest.json" in args for event, args in events), "the hook hears"
executing = ("pickle.", "marshal.", "import", "exec", "compile", "os.system", "os.exec", "os.posix_spawn",
    "subprocess.", "ctypes.", "socket.", "code.")
print([event for event in events if event[0].startswith(executing)])
"""


@pytest.mark.long
@pytest.mark.ranks
def test_nothing_is_unpickled_imported_or_run_for_what_a_run_reads(tmp_path: Path, fitted: Path) -> None:
    """fit, validate, test, predict and load_from_checkpoint, of a checkpoint full of names of code."""
    folder = tmp_path / "a"
    shutil.copytree(fitted, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    state = json.loads((folder / "state.json").read_text())
    planted = tmp_path / "planted.py"
    planted.write_text("open('exploded', 'w')")
    code = {
        "class": "planted.Bomb",
        "__reduce__": "os.system",
        "_target_": "planted",
        "py/object": "planted.Bomb",
        "!!python/object": "planted.Bomb",
    }
    state["hyperparameters"] = state["more"] = code
    state["versions"]["lockstep"] = "planted"
    state["callbacks"]["planted.Bomb"] = code
    replace(folder, manifest, "state.json", json.dumps(state).encode())
    sign(folder, manifest)
    assert script(UNTOUCHED, folder) == "[]\n"
    assert not Path("exploded").exists()
