"""Validation on whole rasters: the ranks share the tiles, the counts add up exactly."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tiledseg.comm.mesh import Mesh
from tiledseg.comm.watching.doing import doing, ticking
from tiledseg.execution.halos.part import Piece
from tiledseg.execution.passes.part_passes import Passes, read_ahead
from tiledseg.execution.progress import Shown, unseen
from tiledseg.execution.scores.metrics import confusion_matrix, scores
from tiledseg.execution.scores.reliability import empty_counts, reliability_counts
from tiledseg.models.sending import asked_back, sent
from tiledseg.raster.samples.dataset import Dataset, Sample
from tiledseg.raster.samples.sampling import TileReference
from tiledseg.training.losses.objective import cross_entropy_sums
from tiledseg.training.panels import Panels, SeenView
from tiledseg.training.steps.step_loss import logits_dtype


@dataclass(frozen=True)
class Findings:
    """The result of a validation, the same on every rank but for `views`, which the root has.

    `loss`: mean cross-entropy of the valid pixels, None where there is none or it is no number; `matrix_KK`: the
    confusion matrix; `reliability`: counts of `execution.scores.reliability`; `seconds`: that it took.
    """

    loss: float | None
    matrix_KK: NDArray[np.int64]
    reliability: NDArray[np.int64]
    seconds: float
    views: list[SeenView]

    def line(self) -> dict[str, Any]:
        """Return {loss, accuracy, mean_iou, iou: [...]} as in metrics.jsonl; None where a value has no meaning."""
        found = scores(self.matrix_KK).to_json()
        return {"loss": self.loss, **{key: found[key] for key in ("accuracy", "mean_iou", "iou")}}


def validate(
    network: nn.Module,
    dataset: Dataset,
    mesh: Mesh,
    passes: Passes,
    classes: int,
    ignore_index: int,
    threads: int,
    depth: int,
    panels: Panels | None = None,
    shown: Shown = unseen,
) -> Findings:
    """Validate the network on every valid pixel of every raster of `dataset`, and on the `panels`. Collective.

    Does not depend on the tilings or the number of ranks.
    """
    begun = time.perf_counter()
    panels = panels or Panels((), ignore_index)
    references = [TileReference(i, t) for i, tiling in enumerate(dataset.tilings) for t in range(len(tiling))]
    parts = passes.mode.share(references)
    totals = torch.zeros(2, dtype=torch.float64)
    counted = _Counted(np.zeros((classes, classes), np.int64), empty_counts(classes))
    network.eval()
    with torch.no_grad(), doing("validation"):
        samples = panels.looking(read_ahead(passes, dataset, parts, threads, depth))
        pieces = passes.pieces(parts)
        if not pieces:  # no pipeline's end: what it reads is shown
            samples = shown(samples, len(parts), "validation, reading")
        outputs = ticking(passes.outputs(samples, parts))
        for sample, piece in shown(outputs, pieces, "validation") if pieces else outputs:
            totals += _measure(piece, sample, mesh, ignore_index, counted, panels)
    network.train()
    totals, counts = totals.to(mesh.device), counted.flat().to(mesh.device)
    works = [mesh.communicator.all_reduce_sum(totals), mesh.communicator.all_reduce_sum(counts)]
    for work in works:
        work.wait()
    views = panels.gather(mesh)
    loss_sum, pixels = totals.tolist()
    loss = loss_sum / pixels if pixels else math.nan
    matrix_KK, reliability = counted.split(counts)
    seconds = time.perf_counter() - begun
    return Findings(loss if math.isfinite(loss) else None, matrix_KK, reliability, seconds, views)


@dataclass(frozen=True)
class _Counted:
    """Whole numbers, which add up exactly over tiles and ranks."""

    matrix_KK: NDArray[np.int64]
    reliability: NDArray[np.int64]

    def flat(self) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([self.matrix_KK.ravel(), self.reliability.ravel()]))

    def split(self, flat: torch.Tensor) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Split the numbers that `flat` has joined."""
        first, second = np.split(flat.cpu().numpy(), [self.matrix_KK.size])
        return first.reshape(self.matrix_KK.shape), second.reshape(self.reliability.shape)


def _measure(
    piece: Piece, sample: Sample, mesh: Mesh, ignore_index: int, counted: _Counted, panels: Panels
) -> torch.Tensor:
    """Return (sum of losses, number of valid pixels) of a piece, float64; add its counts to `counted`, and keep the
    pixels that the panels show."""
    core_BKHW = piece.logits_BKHW.to(logits_dtype(piece.logits_BKHW))
    assert sample.y_HW is not None, "validation needs labels"
    y_HW = sample.y_HW[piece.in_part.slices]
    target_BHW = sent(torch.from_numpy(y_HW), mesh.device)[None]
    made = core_BKHW[0].argmax(0).to(torch.uint8), _confidence(core_BKHW[0])
    sums = torch.stack(cross_entropy_sums(core_BKHW, target_BHW, ignore_index))
    found = [asked_back(tensor) for tensor in (*made, sums)]
    if mesh.device.type == "cuda":
        torch.cuda.current_stream(mesh.device).synchronize()  # once for all
    map_HW, confidence_HW = found[0].numpy(), found[1].numpy()
    classes = len(counted.matrix_KK)
    counted.matrix_KK[:] += confusion_matrix(y_HW, map_HW, classes, ignore_index)
    valid_HW = y_HW != ignore_index
    mapped_P = map_HW[valid_HW]
    counted.reliability[:] += reliability_counts(confidence_HW[valid_HW], mapped_P, mapped_P == y_HW[valid_HW], classes)
    panels.keep(sample, piece.core, y_HW, map_HW)
    return found[2]


def _confidence(logits_KHW: torch.Tensor) -> torch.Tensor:
    """Return the probability of the class that a pixel is mapped as, (H, W): 1 / sum of exp(logit - largest). In
    float64, class by class, so that counts do not depend on a pixel's place in a tile."""
    largest_HW = logits_KHW.amax(0)
    total_HW = torch.zeros_like(largest_HW, dtype=torch.float64)
    for logits_HW in logits_KHW:
        total_HW += (logits_HW - largest_HW).double().exp_()
    return total_HW.reciprocal_()
