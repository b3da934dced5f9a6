"""Pieces of a map come in their order, the same, also where the next is asked for before one is taken."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tiledseg.geometry.box import Box
from tiledseg.inference import fetching
from tiledseg.inference.fetching import Scores, fetched, one_behind

SHAPE = (5, 7)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def scores(count: int, told: list[str], device: str) -> Iterator[Scores]:
    for number in range(count):
        told.append(f"asked {number}")
        generator = torch.Generator().manual_seed(number)
        scores_KHW = torch.randn(4, *SHAPE, generator=generator).to(device)
        yield Box.of_shape(SHAPE).shift(number, 0), scores_KHW, np.full(SHAPE, number % 2 == 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("are_shares", [False, True])
@pytest.mark.parametrize("probabilities", [False, True])
def test_pieces_are_those_of_the_scores(probabilities: bool, are_shares: bool, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU on this machine")
    found = list(fetched(scores(9, [], device), probabilities, are_shares, torch.device(device)))
    assert len(found) == 9
    for piece, (core, scores_KHW, valid_HW) in zip(found, scores(9, [], "cpu"), strict=True):
        assert piece.core == core
        np.testing.assert_array_equal(piece.classes_HW, scores_KHW.numpy().argmax(0))
        np.testing.assert_array_equal(piece.valid_HW, valid_HW)
        assert piece.finite_HW.all()
        assert (piece.shares_KHW is not None) == probabilities
        if piece.shares_KHW is not None:
            expected = scores_KHW if are_shares else scores_KHW.softmax(0)
            np.testing.assert_allclose(piece.shares_KHW, expected.numpy(), rtol=1e-6)


def test_scores_that_are_no_numbers_are_known() -> None:
    """One is enough; of a class that is left out with certainty it is none."""
    scores_KHW = torch.randn(3, *SHAPE)
    scores_KHW[1, 0, 0], scores_KHW[2, 1, 1], scores_KHW[0, 2, 2] = torch.nan, torch.inf, -torch.inf
    (piece,) = fetched([(Box.of_shape(SHAPE), scores_KHW, np.ones(SHAPE, bool))], False, False, torch.device("cpu"))
    assert np.argwhere(~piece.finite_HW).tolist() == [[0, 0], [1, 1]]


@pytest.mark.parametrize(("behind", "count"), [(0, 3), (1, 3), (1, 0), (1, 1)])
def test_the_next_is_asked_for_before_one_is_taken(behind: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    asked = fetching._asked(scores(count, told, "cpu"), False, False)
    rows = []
    for piece in one_behind(asked, behind):
        rows.append(piece.core.row.start)
        told.append(f"taken {rows[-1]}")
    assert rows == list(range(count))
    for number in range(count):
        before = f"asked {min(number + behind, count - 1)}"
        assert told.index(before) < told.index(f"taken {number}")
        assert behind or f"asked {number + 1}" not in told[: told.index(f"taken {number}")]
