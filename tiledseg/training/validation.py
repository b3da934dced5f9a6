"""Validation on whole rasters: the ranks share the tiles, the counts add up exactly.

Views are a few places of the images that the panel shows. Each rank keeps its tiles' pixels of them, and the root joins
them, so pictures do not depend on tiling, halo mode or number of ranks. A view has at most `SIDE` pixels a side: a few
hundred KiB a rank. The root writes `validation/`: figures (step-XXXXXX.json) and a panel (step-XXXXXX.png) of each
validation; and `train.best` names the best so far.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tiledseg.checkpoint.saved_state import Best
from tiledseg.comm.doing import doing, ticking
from tiledseg.comm.mesh import Mesh
from tiledseg.config.train import TrainConfig
from tiledseg.config.words import LOSS, class_of
from tiledseg.errors import installed
from tiledseg.execution.halo_modes import Piece
from tiledseg.execution.part_passes import Passes, read_ahead
from tiledseg.execution.progress import Shown, unseen
from tiledseg.execution.scores import confusion_matrix, empty_counts, reliability_counts, reliability_json, scores
from tiledseg.geometry.box import Box, Interval
from tiledseg.memory.device import asked_back, sent
from tiledseg.raster.labels.classes import ClassRecord, in_hex
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.raster.samples.dataset import Dataset, Sample
from tiledseg.raster.samples.draws import drawn_number
from tiledseg.raster.samples.sampling import Position, TileReference
from tiledseg.raster.statistics import Normalization
from tiledseg.system.files import write_whole, writing
from tiledseg.system.outputs import VALIDATION
from tiledseg.training.objective import PixelTerm
from tiledseg.training.step import logits_dtype

SIDE = 256
"""Most pixels a side of a view's picture."""
_BANDS = 3  # bands of an image in a picture
_TITLES = ("image", "labels", "map", "missed", "false")
_Places = tuple[NDArray[np.int64], ...]  # of pixels, as `numpy.ix_` gives them


@dataclass(frozen=True)
class PanelView:
    """A picture of image number `image`: every `stride`-th pixel of `box`, its first one included."""

    image: int
    box: Box
    stride: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """(height, width) of the picture."""
        return -(-self.box.height // self.stride), -(-self.box.width // self.stride)

    def part(self, core: Box) -> tuple[_Places, _Places]:
        """Return the places of the view's pixels in `core`, within the picture and within the core. Cores that cover a
        raster once fill the picture once."""
        sides = (self.box.row, core.row), (self.box.col, core.col)
        shown = [(np.arange(view.start, view.stop, self.stride), own) for view, own in sides]
        inside = [(places >= own.start) & (places < own.stop) for places, own in shown]
        within = (places[kept] - own.start for (places, own), kept in zip(shown, inside, strict=True))
        return np.ix_(*map(np.flatnonzero, inside)), np.ix_(*within)


def choose_views(
    shapes: Sequence[tuple[int, int]], count: int, seed: int, counted: Sequence[Sequence[Box]] = ()
) -> tuple[PanelView, ...]:
    """Choose at most `count` distinct views of images of these shapes (height, width): first the whole first image,
    subsampled; then windows at full resolution, drawn by the seed from each image in turn. `counted`: the boxes of each
    image whose pixels count, in or around which windows are drawn (none: the whole image)."""
    views = [PanelView(0, Box.of_shape(shapes[0]), max(1, -(-max(shapes[0]) // SIDE)))]
    generator = random.Random(drawn_number("tiledseg.views", str(seed)))
    boxes = counted or [[Box.of_shape(shape)] for shape in shapes]
    images = [image for image, own in enumerate(boxes) if own]
    for number in range(1, count):
        image = images[number % len(images)]
        box = boxes[image][int(generator.random() * len(boxes[image]))]
        sides = []
        for side, size in zip((box.row, box.col), shapes[image], strict=True):
            spare = side.size - SIDE
            start = side.start + (int(generator.random() * (spare + 1)) if spare > 0 else spare // 2)
            start = max(0, min(start, size - SIDE))
            sides.append(Interval(start, min(start + SIDE, size)))
        views.append(PanelView(image, Box(*sides)))
    return tuple(dict.fromkeys(views))


@dataclass(frozen=True)
class SeenView:
    """A view with the pixels of one validation. `image_CHW`: up to three bands, normalised, NaN without data.
    `labels_HW`, `map_HW`: classes; the ignored class for pixels that do not count or have no data."""

    view: PanelView
    image_CHW: NDArray[np.float32]
    labels_HW: NDArray[np.uint8]
    map_HW: NDArray[np.uint8]


@dataclass
class Panels:
    """The views of a run's validations, and this rank's fragments of them: (kind, view's number, places, pixels)."""

    views: Sequence[PanelView]
    ignore_index: int
    _fragments: list[tuple[str, int, _Places, NDArray]] = field(default_factory=list)

    def looking(self, samples: Iterator[Sample]) -> Iterator[Sample]:
        """Yield the samples, and keep the image pixels of the views."""
        for sample in samples:
            if sample.x_CHW.size:
                for number, to, of in self._parts(sample.image, sample.tile.core):
                    core_CHW = sample.x_CHW[:_BANDS, *sample.tile.core.relative_to(sample.tile.context).slices]
                    pixels_CHW = core_CHW[:, of[0], of[1]].astype(np.float32)
                    pixels_CHW[:, ~sample.valid_HW[of]] = np.nan
                    self._fragments.append(("image", number, to, pixels_CHW))
            yield sample

    def keep(self, sample: Sample, core: Box, labels_HW: NDArray[np.uint8], map_HW: NDArray[np.uint8]) -> None:
        """Keep the views' labels and mapped classes inside `core`, a part of the sample's core."""
        for number, to, of in self._parts(sample.image, core):
            valid_HW = sample.valid_HW[core.relative_to(sample.tile.core).slices][of]
            shown_HW = np.where(valid_HW, map_HW[of], np.uint8(self.ignore_index))
            self._fragments += [("map", number, to, shown_HW), ("labels", number, to, labels_HW[of])]

    def gather(self, mesh: Mesh) -> list[SeenView]:
        """Return the views of a validation on the root; none elsewhere. Collective."""
        if not self.views:
            return []
        fragments, self._fragments = self._fragments, []
        every = mesh.communicator.gather_objects(fragments)
        if not mesh.is_root:
            return []
        canvases: dict[tuple[str, int], NDArray] = {}
        for kind, number, to, pixels in (fragment for each in every for fragment in each):
            blank = np.nan if kind == "image" else self.ignore_index
            shape = *pixels.shape[:-2], *self.views[number].shape
            canvas = canvases.setdefault((kind, number), np.full(shape, blank, pixels.dtype))
            canvas[(..., *to)] = pixels
        kinds = "image", "labels", "map"
        return [SeenView(view, *(canvases[kind, n] for kind in kinds)) for n, view in enumerate(self.views)]

    def _parts(self, image: int, core: Box) -> Iterator[tuple[int, _Places, _Places]]:
        for number, view in enumerate(self.views):
            if view.image == image and core.clip(view.box).area:
                yield number, *view.part(core)


@dataclass(frozen=True)
class Findings:
    """The result of a validation, the same on every rank but for `views`, which the root has.

    `loss`: mean cross-entropy of the valid pixels, None without any or if it is not finite. `matrix_KK`: the confusion
    matrix. `reliability`: counts of `execution.scores`. `seconds`: wall time.
    """

    loss: float | None
    matrix_KK: NDArray[np.int64]
    reliability: NDArray[np.int64]
    seconds: float
    views: list[SeenView]

    def line(self) -> dict[str, Any]:
        """Return {loss, accuracy, mean_iou, iou: [...]} for metrics.jsonl; undefined values are None."""
        found = scores(self.matrix_KK).to_json()
        return {"loss": self.loss, **{key: found[key] for key in ("accuracy", "mean_iou", "iou")}}


def validate(
    network: nn.Module,
    dataset: Dataset,
    mesh: Mesh,
    passes: Passes,
    threads: int,
    views: Sequence[PanelView] = (),
    shown: Shown = unseen,
) -> Findings:
    """Validate the network on every valid pixel of every raster of `dataset`, and fill the `views`. Collective. The
    result does not depend on the tilings or the number of ranks."""
    begun = time.perf_counter()
    assert dataset.label_map is not None, "validation needs labels"
    classes, ignore_index = dataset.label_map.count, dataset.label_map.ignore_index
    panels = Panels(views, ignore_index)
    references = [TileReference(i, t) for i, tiling in enumerate(dataset.tilings) for t in range(len(tiling))]
    parts = passes.mode.share(references)
    totals = torch.zeros(2, dtype=torch.float64)
    matrix_KK, reliability = torch.zeros(classes, classes, dtype=torch.int64), torch.from_numpy(empty_counts(classes))
    network.eval()
    with torch.no_grad(), doing("validation"):
        samples = panels.looking(read_ahead(passes, dataset, parts, threads))
        pieces = passes.pieces(parts)
        if not pieces:  # a pipeline stage without outputs shows the progress of its reading
            samples = shown(samples, len(parts), "validation, reading")
        outputs = ticking(passes.outputs(samples, parts))
        for piece, sample in shown(outputs, pieces, "validation") if pieces else outputs:
            assert sample.y_HW is not None, "validation needs labels"
            y_HW = sample.y_HW[piece.in_part.slices]
            sums, map_HW, confidence_HW = _measured(piece, y_HW, mesh.device, ignore_index)
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
    seen = panels.gather(mesh)
    return Findings(loss, matrix, of_bins, time.perf_counter() - begun, seen)


def _measured(
    piece: Piece, y_HW: NDArray[np.uint8], device: torch.device, ignore_index: int
) -> tuple[torch.Tensor, NDArray[np.uint8], NDArray[np.floating]]:
    """Return (sum of losses, number of valid pixels) of a piece in float64, its map, and each pixel's confidence."""
    core_BKHW = piece.logits_BKHW.to(logits_dtype(piece.logits_BKHW))
    target_BHW = sent(torch.from_numpy(y_HW), device)[None]
    # Confidence is the probability of the mapped class, 1 / sum of exp(logit - largest). It is summed in float64, class
    # by class, so that counts do not depend on a pixel's place in a tile.
    largest_HW = core_BKHW[0].amax(0)
    total_HW = torch.zeros_like(largest_HW, dtype=torch.float64)
    for logits_HW in core_BKHW[0]:
        total_HW += (logits_HW - largest_HW).double().exp_()
    made = core_BKHW[0].argmax(0).to(torch.uint8), total_HW.reciprocal_()
    sums = PixelTerm(ignore_index).sums((core_BKHW,), target_BHW)
    map_HW, confidence_HW, sums = asked_back(*made, sums)()  # the host waits once for all
    return sums, map_HW.numpy(), confidence_HW.numpy()


def write_validation(
    folder: Path,
    step: int,
    epoch: int,
    findings: Findings,
    labels: LabelMap,
    images: Sequence[str],
    dtype: str,
    normalization: Normalization,
) -> NDArray[np.uint8] | None:
    """Write the files of one validation of `images`, of `dtype`; return its panel if one was drawn."""
    from tiledseg.reporting.page import as_picture, class_picture, draw_panel, error_picture, write_panel

    place, panel = folder / VALIDATION, None
    with writing(place):
        place.mkdir(exist_ok=True)
    if findings.views and installed("PIL"):
        pictures, colours = [], [colour for _, colour in labels.classes]
        for seen in findings.views:  # columns 4 and 5 show wrong pixels: the class missed, and the class mapped instead
            bands = len(seen.image_CHW)
            mean, std = (np.array(of[:bands])[:, None, None] for of in (normalization.mean, normalization.std))
            pixels_CHW = seen.image_CHW * std + mean
            if dtype == "uint8":
                pixels_CHW = np.clip(np.rint(np.nan_to_num(pixels_CHW)), 0, 255).astype(np.uint8)
            pairs = (seen.labels_HW, seen.map_HW), (seen.map_HW, seen.labels_HW)
            row = [as_picture(pixels_CHW, np.asarray(~np.isnan(seen.image_CHW).any(axis=0)))]
            row += [class_picture(classes_HW, colours) for classes_HW, _ in pairs]
            pictures.append(row + [error_picture(*pair, colours, labels.ignore_index) for pair in pairs])
        panel = draw_panel(pictures, _TITLES, labels.classes)
        write_panel(place / f"step-{step:06d}.png", panel)
    rows = [
        {
            "image": images[view.image],
            "rows": [view.box.row.start, view.box.row.stop],
            "cols": [view.box.col.start, view.box.col.stop],
            "stride": view.stride,
        }
        for view in (seen.view for seen in findings.views)
    ]
    figures = {"step": step, "epoch": epoch, **figures_of(findings, labels.classes)}
    figures["panel"] = None if panel is None else rows
    write_whole(place / f"step-{step:06d}.json", json.dumps(figures, allow_nan=False) + "\n")
    return panel


def figures_of(findings: Findings, classes: Sequence[ClassRecord]) -> dict[str, Any]:
    """Return a validation's figures for JSON: scores in all and of each class, confusion matrix, reliability."""
    matrix = findings.matrix_KK
    score: dict[str, Any] = scores(matrix).to_json()
    return {
        "loss": findings.loss,
        **{key: score[key] for key in ("accuracy", "mean_iou", "mean_f1", "pixels")},
        "seconds": findings.seconds,
        "classes": [
            {
                "name": name,
                "colour": in_hex(colour),
                **{key: score[key][k] for key in ("iou", "f1", "precision", "recall")},
                "pixels": int(matrix[k].sum()),
                "mapped": int(matrix[:, k].sum()),
            }
            for k, (name, colour) in enumerate(classes)
        ],
        "confusion_matrix": matrix.tolist(),
        "reliability": reliability_json(findings.reliability),
    }


ROUNDING = 1e-9
"""Relative difference of two losses below which they count as equal: sums in float64 depend on their order."""


class BestSoFar:
    """The best validation of a run by `train.best`, and the `best` so far."""

    def __init__(self, train: TrainConfig, label_map: LabelMap, best: Best | None) -> None:
        name = class_of(train.best)
        self._train, self._number, self.best = train, None if name is None else label_map.numbers[name], best

    def takes(self, findings: Findings, step: int, epoch: int) -> bool:
        """Return True and keep the validation as the best if it is better than the best so far."""
        score = self._train.best
        value = None if score == "none" else self._value(findings, score)
        if value is None:
            return False
        if self.best is not None:  # all ranks decide alike
            limit = self.best.value - ROUNDING * abs(self.best.value)
            if value >= limit if score == LOSS else value <= self.best.value:
                return False
        self.best = Best(score, value, step, epoch)
        return True

    def gives_up(self, position: Position) -> bool:
        """Return True at an epoch's end if the best validation is `train.early_stop` epochs ago."""
        patience, epoch = self._train.early_stop, position.epoch - 1
        if patience is None or self.best is None or position.step or position.epoch % self._train.validate_every:
            return False
        return epoch - self.best.epoch >= patience

    def _value(self, findings: Findings, score: str) -> float | None:
        """Return the value of the score; None if it is undefined."""
        if score == LOSS:
            return findings.loss
        of_matrix = scores(findings.matrix_KK)
        value = float(of_matrix.iou[self._number] if self._number is not None else getattr(of_matrix, score))
        return None if math.isnan(value) else value
