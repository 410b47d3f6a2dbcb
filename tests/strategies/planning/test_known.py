"""Results of operators that a trial asks torch for once."""

from __future__ import annotations

import pytest
import torch

from lockstep.strategies.planning.trial_mode import TrialMode

pytestmark = pytest.mark.unit


def test_views_that_are_known_share_the_storage_and_place_of_what_they_view() -> None:
    with TrialMode(lambda *_: None) as mode:
        for _ in range(2):  # the second time they are known
            whole = torch.empty(6, 4)
            part = whole[2:]
            views = (whole.t(), whole.view(4, 6), part.detach(), *part.split(2), part.as_strided((2,), (1,), 3))
            for view, offset in zip(views, (0, 0, 8, 8, 16, 3), strict=True):
                assert view.untyped_storage()._cdata == whole.untyped_storage()._cdata
                assert view.storage_offset() == offset and view.device.type == "cpu"
            assert [tuple(view.shape) for view in views] == [(4, 6), (4, 6), (4, 4), (2, 4), (2, 4), (2,)]
            assert views[0].stride() == (1, 4)
        assert len(mode._known._results) >= 6


def test_gradients_through_views_that_are_known() -> None:
    with TrialMode(lambda *_: None):
        for _ in range(2):
            weight = torch.nn.Parameter(torch.empty(6, 4))
            a, b = (weight.t() * 2).split(3, 1)
            (a + b).sum().backward()
            assert weight.grad is not None and weight.grad.shape == (6, 4)
            view = weight.detach().view(-1)
            version = weight._version
            view.add_(1)
            assert weight._version == version + 1  # as of any view
