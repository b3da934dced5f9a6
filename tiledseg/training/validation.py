"""Validation on whole rasters: the ranks share the tiles, the counts add up exactly."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from tiledseg.comm.doing import doing, ticking
from tiledseg.comm.mesh import Mesh
from tiledseg.execution.halo_modes import Piece
from tiledseg.execution.metrics import confusion_matrix, scores
from tiledseg.execution.passes import Passes, read_ahead
from tiledseg.raster.dataset import Dataset, Sample
from tiledseg.raster.sampling import TileReference
from tiledseg.training.objective import cross_entropy_sums
from tiledseg.training.step import logits_dtype


def validate(
    network: nn.Module,
    dataset: Dataset,
    mesh: Mesh,
    passes: Passes,
    classes: int,
    ignore_index: int,
    threads: int,
    depth: int,
) -> dict[str, Any]:
    """{loss, accuracy, mean_iou, iou: [...]} over every valid pixel of every raster of `dataset`. Collective.

    Does not depend on the tilings or the number of ranks. Values without meaning (no valid pixel) are None.
    """
    references = [TileReference(i, t) for i, tiling in enumerate(dataset.tilings) for t in range(len(tiling))]
    parts = passes.mode.share(references)
    totals = torch.zeros(2, dtype=torch.float64)
    matrix_KK = torch.zeros(classes, classes, dtype=torch.int64)
    network.eval()
    with torch.no_grad(), doing("validation"):
        samples = read_ahead(passes, dataset, parts, threads, depth)
        for sample, piece in ticking(passes.outputs(samples, parts)):
            sums, counts_KK = _measure(piece, sample, mesh, classes, ignore_index)
            totals += sums
            matrix_KK += counts_KK
    network.train()
    totals, matrix_KK = totals.to(mesh.device), matrix_KK.to(mesh.device)
    works = [mesh.communicator.all_reduce_sum(totals), mesh.communicator.all_reduce_sum(matrix_KK)]
    for work in works:
        work.wait()
    loss_sum, pixels = totals.tolist()
    found = scores(matrix_KK.cpu().numpy()).to_json()
    loss = loss_sum / pixels if pixels else None
    return {
        "loss": loss if loss is None or math.isfinite(loss) else None,
        **{key: found[key] for key in ("accuracy", "mean_iou", "iou")},
    }


def _measure(
    piece: Piece, sample: Sample, mesh: Mesh, classes: int, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    core_BKHW = piece.logits_BKHW.to(logits_dtype(piece.logits_BKHW))
    assert sample.y_HW is not None, "validation needs labels"
    y_HW = sample.y_HW[piece.in_part.slices]
    target_BHW = torch.from_numpy(y_HW)[None].to(mesh.device)
    loss, weight = cross_entropy_sums(core_BKHW, target_BHW, ignore_index)
    prediction_HW = core_BKHW[0].argmax(0).to(torch.uint8).cpu().numpy()
    counts_KK = confusion_matrix(y_HW, prediction_HW, classes, ignore_index)
    return torch.stack([loss, weight]).cpu(), torch.from_numpy(counts_KK)
