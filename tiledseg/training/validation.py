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

from tiledseg.comm.doing import doing, ticking
from tiledseg.comm.mesh import Mesh
from tiledseg.execution.halo_modes import Piece
from tiledseg.execution.part_passes import Passes, read_ahead
from tiledseg.execution.progress import Shown, unseen
from tiledseg.execution.scores import confusion_matrix, empty_counts, reliability_counts, scores
from tiledseg.models.sending import asked_back, sent
from tiledseg.raster.samples.dataset import Dataset, Sample
from tiledseg.raster.samples.sampling import TileReference
from tiledseg.training.objective import cross_entropy_sums
from tiledseg.training.panels import Panels, SeenView
from tiledseg.training.step_loss import logits_dtype


@dataclass(frozen=True)
class Findings:
    """The result of a validation, the same on every rank but for `views`, which the root has.

    `loss`: mean cross-entropy of the valid pixels, None where there is none or it is no number; `matrix_KK`: the
    confusion matrix; `reliability`: counts of `execution.scores`; `seconds`: that it took.
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
    matrix_KK, reliability = torch.zeros(classes, classes, dtype=torch.int64), torch.from_numpy(empty_counts(classes))
    network.eval()
    with torch.no_grad(), doing("validation"):
        samples = panels.looking(read_ahead(passes, dataset, parts, threads, depth))
        pieces = passes.pieces(parts)
        if not pieces:  # no pipeline's end: what it reads is shown
            samples = shown(samples, len(parts), "validation, reading")
        outputs = ticking(passes.outputs(samples, parts))
        for sample, piece in shown(outputs, pieces, "validation") if pieces else outputs:
            sums, map_HW, confidence_HW = _measured(piece, sample, mesh.device, ignore_index)
            y_HW = _labels(piece, sample)
            valid_HW = y_HW != ignore_index
            mapped_P, right_P = map_HW[valid_HW], (map_HW == y_HW)[valid_HW]
            totals += sums
            matrix_KK += torch.from_numpy(confusion_matrix(y_HW, map_HW, classes, ignore_index))
            reliability += torch.from_numpy(reliability_counts(confidence_HW[valid_HW], mapped_P, right_P, classes))
            panels.keep(sample, piece.core, y_HW, map_HW)
    network.train()
    counts = [tensor.to(mesh.device) for tensor in (totals, matrix_KK, reliability)]
    for work in [mesh.communicator.all_reduce_sum(tensor) for tensor in counts]:
        work.wait()
    loss_sum, pixels = counts[0].tolist()
    loss = loss_sum / pixels if pixels and math.isfinite(loss_sum) else None
    matrix, of_bins = (tensor.cpu().numpy() for tensor in counts[1:])
    views = panels.gather(mesh)
    return Findings(loss, matrix, of_bins, time.perf_counter() - begun, views)


def _labels(piece: Piece, sample: Sample) -> NDArray[np.uint8]:
    assert sample.y_HW is not None, "validation needs labels"
    return sample.y_HW[piece.in_part.slices]


def _measured(
    piece: Piece, sample: Sample, device: torch.device, ignore_index: int
) -> tuple[torch.Tensor, NDArray[np.uint8], NDArray[np.floating]]:
    """Return (sum of losses, number of valid pixels) of a piece, float64, its map and the confidence of each pixel."""
    core_BKHW = piece.logits_BKHW.to(logits_dtype(piece.logits_BKHW))
    target_BHW = sent(torch.from_numpy(_labels(piece, sample)), device)[None]
    made = core_BKHW[0].argmax(0).to(torch.uint8), _confidence(core_BKHW[0])
    sums = cross_entropy_sums(core_BKHW, target_BHW, ignore_index)
    map_HW, confidence_HW, sums = (asked_back(tensor) for tensor in (*made, sums))
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # once for all
    return sums, map_HW.numpy(), confidence_HW.numpy()


def _confidence(logits_KHW: torch.Tensor) -> torch.Tensor:
    """Return the probability of the class that a pixel is mapped as, (H, W): 1 / sum of exp(logit - largest). In
    float64, class by class, so that counts do not depend on a pixel's place in a tile."""
    largest_HW = logits_KHW.amax(0)
    total_HW = torch.zeros_like(largest_HW, dtype=torch.float64)
    for logits_HW in logits_KHW:
        total_HW += (logits_HW - largest_HW).double().exp_()
    return total_HW.reciprocal_()
