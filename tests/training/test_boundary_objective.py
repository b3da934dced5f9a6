"""The boundary loss against scipy's exact distances, and over tiles."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import ndimage

from tests.training.test_edge_objective import IGNORED, K, dataset, labels_HW, outputs
from tiledseg.training.losses.edge_objective import BoundaryObjective, signed_distances


def phi_KHW(labels_HW: NDArray[np.uint8], radius: int) -> NDArray[np.float64]:
    """Of the whole raster, by scipy, class by class as the published code computes it."""
    edt = ndimage.distance_transform_edt
    found = []
    for k in range(K):
        inside_HW, others_HW = labels_HW == k, (labels_HW != k) & (labels_HW != IGNORED)
        out_HW, in_HW = (
            np.minimum(edt(~here_HW), radius) if here_HW.any() else np.full(here_HW.shape, float(radius))
            for here_HW in (inside_HW, others_HW)
        )
        found.append(np.where(inside_HW, -(in_HW - 1), out_HW))
    return np.stack(found)


@pytest.mark.parametrize("radius", [1, 4, 30])
def test_distances_are_those_of_scipy(radius: int) -> None:
    y_HW = labels_HW()
    y_HW[:, 20:] = np.where(y_HW[:, 20:] == 2, 0, y_HW[:, 20:])  # a class that is far from some
    padded = torch.from_numpy(np.pad(y_HW.astype(np.int16), radius, constant_values=-1))[None]
    found_KHW = signed_distances(padded, K, radius, IGNORED)[0].numpy()
    known_HW = y_HW != IGNORED
    assert np.allclose(found_KHW[:, known_HW], phi_KHW(y_HW, radius)[:, known_HW], rtol=1e-6, atol=0)
    assert found_KHW.max() == radius or radius == 30
    assert found_KHW.min() < 0 or radius == 1


def test_a_class_that_is_nowhere_is_far() -> None:
    found_KHW = signed_distances(torch.zeros(1, 9, 9, dtype=torch.int16), 2, 2, IGNORED)[0]
    assert found_KHW.tolist() == [[[-1.0] * 5] * 5, [[2.0] * 5] * 5]


def test_tiles_add_up_to_the_raster() -> None:
    """Sums and gradients, against probabilities times distances of the whole raster."""
    objective, (scores_BKHW, *_) = BoundaryObjective(IGNORED, 0.5, 6), outputs(2)
    known_HW = torch.from_numpy(labels_HW() != IGNORED)
    phi = torch.from_numpy(phi_KHW(labels_HW(), 6))
    expected = 0.5 * (scores_BKHW[0].softmax(0) * phi).sum(0)[known_HW].sum()
    (gradient,) = torch.autograd.grad(expected, scores_BKHW)
    found, loss, weight = dataset((5, 3), objective.margin), 0.0, 0.0
    for tile in found.tilings[0].tiles:
        target_BHW = torch.from_numpy(found.load(0, tile).labels(tile.core, objective.margin))[None]
        own_loss, own_weight = objective.sums((scores_BKHW[(..., *tile.core.slices)],), target_BHW)
        own_loss.backward()
        loss, weight = loss + own_loss.item(), weight + own_weight.item()
    assert loss == pytest.approx(expected.item(), rel=1e-6)  # distances are float32
    assert weight == known_HW.sum()
    assert scores_BKHW.grad is not None
    assert torch.allclose(scores_BKHW.grad, gradient, rtol=1e-6, atol=1e-8)
