"""Losses of steps: the objective that a run has, and the formula on the whole raster that its mean is."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional

from tests.law.cases import IGNORED
from tests.law.steps import Formula
from tiledseg.training.objective import BoundaryTerm, EdgesTerm, Objective, OverlapTerm, PixelTerm

WEIGHTS = (0.5, 3.0, 0.0)
K = len(WEIGHTS)


def focal(scores_PK: torch.Tensor, target_P: torch.Tensor) -> torch.Tensor:
    shares_P = scores_PK.softmax(1)[range(len(target_P)), target_P]
    weights_P = torch.tensor(WEIGHTS, dtype=torch.float64)[target_P]
    return (-weights_P * (1 - shares_P) ** 1.5 * shares_P.log()).sum() / weights_P.sum()


def tversky(scores_PK: torch.Tensor, target_P: torch.Tensor, alpha: float = 0.2, beta: float = 0.9) -> torch.Tensor:
    shares_PK, indices = scores_PK.softmax(1), []
    for k in range(K):
        right = shares_PK[target_P == k, k].sum()
        wrongly_in, wrongly_out = shares_PK[target_P != k, k].sum(), (1 - shares_PK[target_P == k, k]).sum()
        indices.append(right / (right + alpha * wrongly_in + beta * wrongly_out))
    return 1 - sum(w * index for w, index in zip(WEIGHTS, indices, strict=True)) / sum(WEIGHTS)


def smoothed(scores_PK: torch.Tensor, target_P: torch.Tensor) -> torch.Tensor:
    weights_K = torch.tensor(WEIGHTS, dtype=torch.float64)
    return functional.cross_entropy(scores_PK, target_P, weights_K, label_smoothing=0.2)


def both(scores_PK: torch.Tensor, target_P: torch.Tensor) -> torch.Tensor:
    return 2 * smoothed(scores_PK, target_P) + 0.5 * tversky(scores_PK, target_P, 0.5, 0.5)


SMOOTHED = PixelTerm(IGNORED, weights=WEIGHTS, smoothing=0.2)
LOSSES: dict[str, tuple[Objective, Formula | None]] = {
    "smoothed": (Objective((SMOOTHED,)), smoothed),
    "focal": (Objective((PixelTerm(IGNORED, weights=WEIGHTS, gamma=1.5),)), focal),
    "tversky": (Objective((OverlapTerm(IGNORED, 1.0, WEIGHTS, K, 0.2, 0.9),)), tversky),
    "both": (Objective((replace(SMOOTHED, factor=2.0), OverlapTerm(IGNORED, 0.5, WEIGHTS, K))), both),
    "edges": (Objective((PixelTerm(IGNORED, attention=1.0), EdgesTerm(IGNORED, radius=4))), None),
    # Distances are held to scipy's elsewhere.
    "boundary": (Objective((PixelTerm(IGNORED, weights=WEIGHTS), BoundaryTerm(IGNORED, 0.3, radius=5))), None),
    "all": (
        Objective(
            (
                PixelTerm(IGNORED, weights=WEIGHTS, attention=2.0),
                OverlapTerm(IGNORED, 0.5, WEIGHTS, K),
                BoundaryTerm(IGNORED, 0.2, radius=3),
                EdgesTerm(IGNORED, radius=4),
            )
        ),
        None,
    ),
}
