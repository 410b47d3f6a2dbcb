"""`split_parameters`: the matrices of a model, and the rest."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep import split_parameters

pytestmark = pytest.mark.unit


def test_embeddings_heads_and_frozen_parameters_stay_beside() -> None:
    model = nn.ModuleDict({"token": nn.Embedding(9, 4), "body": nn.Linear(4, 8), "conv": nn.Conv1d(2, 2, 1)})
    model["head"], model["tied"], model["frozen"] = nn.Linear(8, 9), nn.Linear(4, 9, bias=False), nn.Linear(4, 4)
    model["tied"].weight = model["token"].weight
    model["frozen"].requires_grad_(False)
    matrices, others = split_parameters(model, besides=["head"])
    names = {id(p): name for name, p in model.named_parameters()}
    assert [names[id(p)] for p in matrices] == ["body.weight"]
    expected = ["token.weight", "body.bias", "conv.weight", "conv.bias", "head.weight", "head.bias"]
    assert [names[id(p)] for p in others] == expected
    torch.optim.Muon(matrices)


def test_wrong_names_and_models_without_a_matrix() -> None:
    with pytest.raises(ValueError, match=r"names 'heads', which is not a module of Sequential; there are 0"):
        split_parameters(nn.Sequential(nn.Linear(2, 2)), besides=["heads"])
    with pytest.raises(ValueError, match="Embedding has no trainable matrix besides embeddings and"):
        split_parameters(nn.Embedding(3, 3))
