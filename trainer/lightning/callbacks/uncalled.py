"""Methods that Lightning's callbacks call on themselves, and ours do not."""

from __future__ import annotations

from typing import Any

from lockstep.trainer.lightning_names import UNCALLED


class Uncalled:
    """Base of callbacks that refuse a subclass with a method that would never be called."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for base in cls.__mro__[1:]:
            for name, instead in UNCALLED.get(base.__name__, {}).items():
                if name in vars(cls):
                    raise TypeError(
                        f"{cls.__name__} overrides {name}, which {base.__name__} of lockstep.lightning does not call; "
                        f"{instead}"
                    )
