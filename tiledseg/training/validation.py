"""Validation on whole rasters: the ranks share the tiles, the counts add up exactly."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from tiledseg.comm.mesh import Mesh
from tiledseg.raster.dataset import Dataset, Sample
from tiledseg.raster.prefetch import prefetch
from tiledseg.raster.sampling import TileReference, deal
from tiledseg.training.metrics import confusion_matrix, scores
from tiledseg.training.objective import crop_to_core, cross_entropy_sums
from tiledseg.training.precision import autocast, to_network_input
from tiledseg.training.step import logits_dtype


def validate(
    network: nn.Module,
    dataset: Dataset,
    mesh: Mesh,
    classes: int,
    ignore_index: int,
    precision: str,
    threads: int,
    depth: int,
) -> dict[str, Any]:
    """{loss, accuracy, mean_iou, iou: [...]} over every valid pixel of every raster of `dataset`. Collective.

    Does not depend on the tilings or the number of ranks. Values without meaning (no valid pixel) are None.
    """
    references = [TileReference(i, t) for i, tiling in enumerate(dataset.tilings) for t in range(len(tiling))]
    shares = deal(references, mesh.size, lambda r: dataset.tilings[r.image].tiles[r.tile].context.area)
    totals = torch.zeros(2, dtype=torch.float64)
    matrix_KK = torch.zeros(classes, classes, dtype=torch.int64)
    network.eval()
    with torch.no_grad():
        for sample in prefetch(shares[mesh.rank], lambda r: dataset.load(r.image, r.tile), threads, depth):
            sums, counts_KK = _measure(network, sample, mesh, classes, ignore_index, precision)
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
    network: nn.Module, sample: Sample, mesh: Mesh, classes: int, ignore_index: int, precision: str
) -> tuple[torch.Tensor, torch.Tensor]:
    with autocast(precision, mesh.device):
        logits_BKHW = network(to_network_input(sample.x_CHW, mesh.device))
    core_BKHW = crop_to_core(logits_BKHW, sample.tile.core_in_output)
    core_BKHW = core_BKHW.to(logits_dtype(core_BKHW))
    assert sample.y_HW is not None, "validation needs labels"
    target_BHW = torch.from_numpy(sample.y_HW)[None].to(mesh.device)
    loss, weight = cross_entropy_sums(core_BKHW, target_BHW, ignore_index)
    prediction_HW = core_BKHW[0].argmax(0).to(torch.uint8).cpu().numpy()
    counts_KK = confusion_matrix(sample.y_HW, prediction_HW, classes, ignore_index)
    return torch.stack([loss, weight]).cpu(), torch.from_numpy(counts_KK)
