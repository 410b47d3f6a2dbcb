"""Lightning's module paths and names, mapped onto Lockstep's: `import lockstep.lightning as L` for code that says
`import lightning as L`, and `import lockstep.lightning.pytorch as pl` for `import pytorch_lightning as pl`.

Renames and adapters of arguments only; the engine, and what docs/migrating/lightning.md lists as different, are
Lockstep's. `lockstep migrate FILE…` rewrites the imports of a program. A name of Lightning that is not offered raises
ImportError, which says what to write instead.
"""

from typing import Any

from lockstep.trainer.lightning.install import install

__path__: list[str] = []
install(__name__)


def __getattr__(name: str) -> Any:
    from lockstep.trainer.lightning.install import find

    return find(__name__, "", name)
