"""Parameters for optimizers of matrices, such as Muon, and those for another."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def split_parameters(module: nn.Module, besides: Sequence[str] = ()) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trainable matrices of `module` and its other trainable parameters, each in the order of the model.

    A parameter of two dimensions is a matrix unless it is a table of an embedding, also where a layer shares it, or is
    in a module named in `besides`, as output layers usually are. The same on every rank of every strategy. Raises
    ValueError for a name that `module` does not have, and for a model without a matrix.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    for name in besides:
        if name not in modules:
            raise ValueError(
                f"besides={list(besides)} names {name!r}, which is not a module of {type(module).__name__}; there are "
                f"{', '.join(sorted(n for n in modules if n)[:20])}"
            )
    apart = {id(p) for name in besides for p in modules[name].parameters()}
    apart |= {id(m.weight) for m in modules.values() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    trained = [p for p in module.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() == 2 and id(p) not in apart]
    if not matrices:
        raise ValueError(f"{type(module).__name__} has no trainable matrix besides embeddings and {list(besides)}")
    chosen = {id(p) for p in matrices}
    return matrices, [p for p in trained if id(p) not in chosen]
