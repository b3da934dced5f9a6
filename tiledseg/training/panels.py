"""The pixels of a few places while a validation goes over the tiles: what the panels show.

Each rank keeps its tiles' part of the views, and the root puts them together: the same pictures for any tiling, halo
mode and number of ranks. A view has at most `views.SIDE` pixels a side, so a rank keeps a few hundred KiB of each,
whatever the size of the rasters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field

import numpy as np
from numpy.typing import NDArray

from tiledseg.comm.mesh import Mesh
from tiledseg.geometry.box import Box
from tiledseg.raster.samples.dataset import Sample
from tiledseg.records import dataclass
from tiledseg.reporting.views import View

_BANDS = 3  # of an image that a picture shows
_Fragment = tuple[str, int, tuple[slice, slice], NDArray]  # what, of which view, where in it, its pixels


@dataclass(frozen=True)
class SeenView:
    """A view as a validation found it. `image_CHW`: up to three bands, normalised, NaN without data; `labels_HW` and
    `map_HW`: classes, the ignored one where a pixel does not count, or has no data."""

    view: View
    image_CHW: NDArray[np.float32]
    labels_HW: NDArray[np.uint8]
    map_HW: NDArray[np.uint8]


@dataclass
class Panels:
    """The views of one run's validations. Images and labels do not change: they are gathered the first time only."""

    views: Sequence[View]
    ignore_index: int
    _fragments: list[_Fragment] = field(default_factory=list)
    _still: dict[tuple[str, int], NDArray] = field(default_factory=dict)  # on the root: images and labels
    _gathered: bool = False  # on every rank alike

    def looking(self, samples: Iterator[Sample]) -> Iterator[Sample]:
        """The samples, while the image's pixels of those that have some are kept."""
        for sample in samples:
            if not self._gathered and sample.pixels_CHW.size:
                self._keep_image(sample)
            yield sample

    def _keep_image(self, sample: Sample) -> None:
        tile = sample.tile
        rows, cols = tile.core.relative_to(tile.context).slices
        core_CHW = sample.x_CHW[:_BANDS, rows, cols]
        for number, to, of in self._parts(sample.image, tile.core):
            pixels_CHW = core_CHW[:, of[0], of[1]].astype(np.float32)
            pixels_CHW[:, ~sample.valid_HW[of]] = np.nan
            self._fragments.append(("image", number, to, pixels_CHW))

    def keep(self, sample: Sample, core: Box, labels_HW: NDArray[np.uint8], map_HW: NDArray[np.uint8]) -> None:
        """The labels and the mapped classes of `core`, a part of the sample's."""
        for number, to, of in self._parts(sample.image, core):
            valid_HW = sample.valid_HW[core.relative_to(sample.tile.core).slices][of]
            shown_HW = np.where(valid_HW, map_HW[of], np.uint8(self.ignore_index))
            self._fragments.append(("map", number, to, shown_HW))
            if not self._gathered:
                self._fragments.append(("labels", number, to, labels_HW[of].copy()))

    def gather(self, mesh: Mesh) -> list[SeenView]:
        """The views of a validation that is over, on the root; none elsewhere. Collective: one exchange in which every
        rank takes part, also one that has seen nothing."""
        if not self.views:
            return []
        fragments, self._fragments = self._fragments, []
        every = mesh.communicator.gather_objects(fragments)
        self._gathered = True
        if not mesh.is_root:
            return []
        canvases = {
            ("map", number): np.full(view.shape, self.ignore_index, np.uint8) for number, view in enumerate(self.views)
        }
        for what, number, to, pixels in (fragment for each in every for fragment in each):
            place = self._still if what != "map" else canvases
            canvas = place.setdefault((what, number), self._blank(what, number, pixels))
            canvas[..., to[0], to[1]] = pixels
        return [
            SeenView(view, self._still["image", n], self._still["labels", n], canvases["map", n])
            for n, view in enumerate(self.views)
        ]

    def _blank(self, what: str, number: int, pixels: NDArray) -> NDArray:
        shape = self.views[number].shape
        if what == "image":
            return np.full((len(pixels), *shape), np.nan, np.float32)
        return np.full(shape, self.ignore_index, np.uint8)

    def _parts(self, image: int, core: Box) -> Iterator[tuple[int, tuple[slice, slice], tuple[slice, slice]]]:
        for number, view in enumerate(self.views):
            part = view.part(core) if view.image == image else None
            if part is not None:
                yield number, *part
