"""Views: a few places of the validation images, whose pixels are kept while a validation goes over the tiles.

Each rank keeps its tiles' part of the views, and the root joins them: the pictures are the same for any tiling, halo
mode and number of ranks. A view has at most `SIDE` pixels a side, so a rank keeps a few hundred KiB of each.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tiledseg.comm.mesh import Mesh
from tiledseg.geometry.box import Box, Interval
from tiledseg.raster.samples.dataset import Sample

SIDE = 256
"""Most pixels a side of a view's picture."""
_BANDS = 3  # of an image that a picture shows
_Slices = tuple[slice, slice]


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

    def part(self, core: Box) -> tuple[_Slices, _Slices] | None:
        """Return the place of the pixels of `core`, of the same image, in the picture and in the core; None if there
        are none. Cores that cover a raster once fill the picture once."""
        rows = _side(self.box.row, core.row, self.stride)
        cols = _side(self.box.col, core.col, self.stride)
        return None if rows is None or cols is None else ((rows[0], cols[0]), (rows[1], cols[1]))


def _side(view: Interval, core: Interval, stride: int) -> _Slices | None:
    common = core.clip(view)
    first, stop = -(-(common.start - view.start) // stride), -(-(common.stop - view.start) // stride)
    if first >= stop:
        return None
    begin = view.start + first * stride - core.start
    return slice(first, stop), slice(begin, begin + (stop - first - 1) * stride + 1, stride)


def choose_views(shapes: Sequence[tuple[int, int]], count: int, seed: int) -> tuple[PanelView, ...]:
    """Choose at most `count` distinct views of images of these shapes (height, width): the whole first image, thinned,
    then windows of every pixel, drawn by the seed, from each image in turn."""
    if count < 1:
        return ()
    views = [PanelView(0, Box.of_shape(shapes[0]), max(1, -(-max(shapes[0]) // SIDE)))]
    digest = hashlib.sha256(f"tiledseg.views {seed}".encode()).digest()
    generator = random.Random(int.from_bytes(digest[:8], "big"))
    for number in range(1, count):
        image = number % len(shapes)
        starts = [int(generator.random() * (max(0, size - SIDE) + 1)) for size in shapes[image]]
        sides = (Interval(a, a + min(size, SIDE)) for a, size in zip(starts, shapes[image], strict=True))
        views.append(PanelView(image, Box(*sides)))
    return tuple(dict.fromkeys(views))


@dataclass(frozen=True)
class SeenView:
    """A view with the pixels of one validation. `image_CHW`: up to three bands, normalised, NaN without data;
    `labels_HW` and `map_HW`: classes, the ignored one where a pixel does not count, or has no data."""

    view: PanelView
    image_CHW: NDArray[np.float32]
    labels_HW: NDArray[np.uint8]
    map_HW: NDArray[np.uint8]


@dataclass
class Panels:
    """The views of one run's validations, and this rank's pixels of them: kind, number of the view, place, pixels."""

    views: Sequence[PanelView]
    ignore_index: int
    _fragments: list[tuple[str, int, _Slices, NDArray]] = field(default_factory=list)

    def looking(self, samples: Iterator[Sample]) -> Iterator[Sample]:
        """Pass the samples on, and keep the image's pixels that a view shows."""
        for sample in samples:
            if sample.x_CHW.size:
                for number, to, of in self._parts(sample.image, sample.tile.core):
                    core_CHW = sample.x_CHW[:_BANDS, *sample.tile.core.relative_to(sample.tile.context).slices]
                    pixels_CHW = core_CHW[:, of[0], of[1]].astype(np.float32)
                    pixels_CHW[:, ~sample.valid_HW[of]] = np.nan
                    self._fragments.append(("image", number, to, pixels_CHW))
            yield sample

    def keep(self, sample: Sample, core: Box, labels_HW: NDArray[np.uint8], map_HW: NDArray[np.uint8]) -> None:
        """Keep the labels and the mapped classes of `core`, a part of the sample's."""
        for number, to, of in self._parts(sample.image, core):
            valid_HW = sample.valid_HW[core.relative_to(sample.tile.core).slices][of]
            shown_HW = np.where(valid_HW, map_HW[of], np.uint8(self.ignore_index))
            self._fragments += [("map", number, to, shown_HW), ("labels", number, to, labels_HW[of].copy())]

    def gather(self, mesh: Mesh) -> list[SeenView]:
        """Return the views after a validation, on the root; none elsewhere. Collective: every rank takes part."""
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
            canvas[..., to[0], to[1]] = pixels
        kinds = "image", "labels", "map"
        return [SeenView(view, *(canvases[kind, n] for kind in kinds)) for n, view in enumerate(self.views)]

    def _parts(self, image: int, core: Box) -> Iterator[tuple[int, _Slices, _Slices]]:
        for number, view in enumerate(self.views):
            part = view.part(core) if view.image == image else None
            if part is not None:
                yield number, *part
