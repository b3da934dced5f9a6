"""The loop of a map: read a window, run the network, crop, write; and the mean of probabilities over views.

A view is a reflection, or a quarter turn, of the raster. Each view is mapped as the whole changed raster would be, and
brought back. One rank maps a tile's pixels in every view, so the mean depends on no grid and no number of ranks, to the
last bit. Sums are float64, in the order of the views.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from affine import Affine
from numpy.typing import NDArray

from tiledseg.comm.doing import doing, tick
from tiledseg.comm.mesh import Mesh
from tiledseg.config.map_formats import NO_VIEWS, TURNS
from tiledseg.errors import RasterError
from tiledseg.execution.carrying import INPUT_DTYPES
from tiledseg.execution.halo_modes import Part
from tiledseg.execution.parallel_run import ParallelRun
from tiledseg.execution.part_passes import Passes, read_ahead
from tiledseg.geometry.box import Box, Interval
from tiledseg.geometry.tiling import Tiling, make_tiling, tile_around
from tiledseg.inference.request import Request
from tiledseg.inference.trained import Mapper
from tiledseg.memory.device import asked_back, is_gpu
from tiledseg.raster.composed import Inside
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.labels.pair_reading import area_reader
from tiledseg.raster.map_writer import RasterLayout, RasterWriter
from tiledseg.raster.places import View, view_reader
from tiledseg.raster.reader import KnownReader, RasterReader, open_raster
from tiledseg.raster.samples.dataset import Dataset, Sample
from tiledseg.raster.samples.sampling import TileReference
from tiledseg.raster.statistics import Normalization
from tiledseg.tracing.crops import kept_between_tiles

Window = tuple[Box, torch.Tensor, NDArray]
"""A place of the raster, each class's score or probability there (K, H, W), and which pixels have data."""


def views_of(kind: str, shape: tuple[int, int]) -> tuple[View, ...]:
    """Return the views of a raster of `shape` (height, width), the unchanged one first."""
    lines = [[(1, 0), (-1, size - 1)] if kind != NO_VIEWS else [(1, 0)] for size in shape]
    pairs = [(row, col) for row in lines[0] for col in lines[1]]
    views = [View(shape, Affine(down, 0, row, 0, right, col)) for (down, row), (right, col) in pairs]
    if kind == TURNS:
        views += [View(shape[::-1], Affine(0, down, row, right, 0, col)) for (down, row), (right, col) in pairs]
    return tuple(views)


def shares_of(scores_KHW: torch.Tensor) -> torch.Tensor:
    """Return each class's probability, in the dtype of the scores."""
    # Over the last dim: over another one, a pixel's last bit depends on where its tile ends (vectors, then remainders).
    return scores_KHW.permute(1, 2, 0).contiguous().softmax(-1).permute(2, 0, 1)


def windows_of(
    passes: Passes, samples: Iterator[Sample], parts: Sequence[Part], views: Sequence[View]
) -> Iterator[Window]:
    """Yield each window's scores, or, of several `views`, the mean of its probabilities (`share_image`)."""
    outputs = passes.outputs(samples, parts)
    with kept_between_tiles(passes.mode.network) if len(views) == 1 else nullcontext():
        for piece, sample in outputs:
            scores_KHW = piece.logits_BKHW[0]
            if len(views) > 1:
                scores_KHW = shares_of(scores_KHW).double()
                for view in views[1:]:
                    scores_KHW += _back(view, shares_of(next(outputs)[0].logits_BKHW[0]))
                scores_KHW /= len(views)
            yield piece.core, scores_KHW, sample.valid_HW[piece.in_part.slices]
            del piece, scores_KHW  # the GPU needs the memory for the next window


def _back(view: View, values_KHW: torch.Tensor) -> torch.Tensor:
    """Return values of a box of a view in the order of the raster's pixels."""
    if view.is_transposed:
        values_KHW = values_KHW.transpose(1, 2)
    down, across, _, up, right, _ = view.to_raster[:6]
    dims = [dim for dim, step in ((1, down + across), (2, up + right)) if step < 0]
    return values_KHW.flip(dims) if dims else values_KHW


WHOLE_SHARE, NO_SHARE = 254, 255
"""Bytes of probabilities: the one that means 1, and the one that means no data."""


@dataclass(frozen=True)
class ImageShare:
    """A rank's share of one map. `inside`: the pixels of the area (None: all); `outside`: cores beyond it, of which
    nothing is computed."""

    request: Request
    info: RasterInfo
    tilings: tuple[Tiling, ...]
    passes: Passes
    parts: tuple[Part, ...]
    views: tuple[View, ...]
    inside: Inside | None = None
    outside: tuple[Box, ...] = ()

    def open_image(self, mapper: Mapper) -> RasterReader:
        """Return the image, opened at its first read."""
        request = self.request
        return KnownReader(
            self.info, lambda: open_raster(request.image, mapper.bands, mapper.nodata, request.references)
        )


def share_image(parallel: ParallelRun, mesh: Mesh, request: Request, info: RasterInfo, tiling: Tiling) -> ImageShare:
    """Return this rank's share of the map of one image. Its parts are pixels of the raster in each view, which is the
    image of its number."""
    views = views_of(request.views, tiling.raster)
    turned = make_tiling(tiling.raster[::-1], tiling.grid[::-1], tiling.footprint)
    same = turned if tiling.raster != tiling.raster[::-1] else tiling
    tilings = tuple(same if view.is_transposed else tiling for view in views)
    passes = parallel.over(tilings)
    area = None if request.area is None else area_reader(request.area, info)
    inside = None if area is None else lambda box: area.read(box)[0][0] == 1
    cores = [tile.core for tile in tiling.tiles]
    wanted = set(range(len(cores)))
    if inside is not None and not parallel.spread.shares_images:  # else ranks compute all of the image together
        wanted = {number for number, core in enumerate(cores) if inside(core).any()}
    left = [core for number, core in enumerate(cores) if number not in wanted]
    parts = passes.mode.share([TileReference(0, number) for number in sorted(wanted)])
    if len(views) > 1:
        parts = tuple(
            Part(number, tile_around(_core_in(view, part.tile.core), view.shape, tiling.footprint))
            for part in parts
            for number, view in enumerate(views)
        )
    return ImageShare(request, info, tilings, passes, parts, views, inside, tuple(left[mesh.rank :: mesh.size]))


def _core_in(view: View, core: Box) -> Box:
    """Return the place in a view of a box of the raster."""
    ends = view.find(core.row.start, core.col.start), view.find(core.row.stop - 1, core.col.stop - 1)
    return Box(*(Interval(int(min(side)), int(max(side)) + 1) for side in zip(*ends, strict=True)))


def open_dataset(share: ImageShare, mapper: Mapper) -> Dataset:
    """Return the image and its views, cut into tiles."""
    reader = share.open_image(mapper)
    normalization = mapper.normalization or Normalization.identity(reader.info.bands)
    readers = [reader, *(view_reader(reader, view) for view in share.views[1:])]
    return Dataset(readers, None, share.tilings, None, normalization, INPUT_DTYPES[share.request.precision])


def map_windows(
    share: ImageShare, mapper: Mapper, layouts: Sequence[RasterLayout], mesh: Mesh, advance: Callable[[str], object]
) -> None:
    """Write this rank's pixels of a map into its laid-out files: classes, and probabilities where there are two.

    `advance` is called with words for each window that is computed. Collective as the passes are.
    """
    request, passes = share.request, share.passes
    with ExitStack() as stack:
        dataset = stack.enter_context(closing(open_dataset(share, mapper)))
        writers = [stack.enter_context(RasterWriter(layout)) for layout in layouts]
        # Each rank holds the file before any can fail: the one that fails removes its name, and must be heard first.
        mesh.communicator.barrier()
        stack.enter_context(torch.inference_mode())
        stack.enter_context(doing("mapping"))
        for core in share.outside:
            for writer, nothing in zip(writers, (mapper.ignore_index, np.nan), strict=False):
                layout = writer.layout
                fill = NO_SHARE if layout.dtype == "uint8" and nothing is np.nan else nothing
                writer.write(core, np.full((layout.bands, *core.shape), fill, layout.dtype))
        # Crops take so much longer than a tile's pixels.
        threads = 1 if passes.mode.network.graph.is_untraced else request.threads
        samples = read_ahead(passes, dataset, share.parts, threads)
        waiting: list[HostWindow] = []
        for core, scores_KHW, valid_HW in windows_of(passes, samples, share.parts, share.views):
            tick()
            advance(f"mapping rows {core.row.start} to {core.row.stop}")
            waiting.append(to_host(core, scores_KHW, valid_HW, len(layouts) > 1, len(share.views) > 1))
            del scores_KHW  # the GPU needs its memory for the next window, which it computes while this one is written
            if len(waiting) > int(is_gpu(mesh.device)):
                _write(waiting.pop(0), writers, share, mapper.ignore_index)
        for window in waiting:
            _write(window, writers, share, mapper.ignore_index)


def _write(window: HostWindow, writers: Sequence[RasterWriter], share: ImageShare, ignore_index: int) -> None:
    """Write a window's classes and probabilities. Raise RasterError where a score is no finite number: no class is
    likelier than another there."""
    classes_HW, shares_KHW, finite_HW = window.arrays()
    core, request = window.core, share.request
    nothing_HW = ~window.valid_HW if share.inside is None else ~(window.valid_HW & share.inside(core))
    bad_HW = ~(finite_HW | nothing_HW)
    if bad_HW.any():
        row, col = np.argwhere(bad_HW)[0]
        raise RasterError(
            f"{share.info.path}: the network's scores of {bad_HW.sum()} pixels are no finite numbers, the first at row "
            f"{core.row.start + row}, col {core.col.start + col}; give values that stand for no data there a tag "
            f"(gdal_edit.py -a_nodata), or another --precision than {request.precision}"
        )
    classes_HW[nothing_HW] = ignore_index
    writers[0].write(core, classes_HW[None])
    if shares_KHW is not None:
        shares_KHW[:, nothing_HW] = np.nan
        if request.probability_type == "float32":
            writers[1].write(core, shares_KHW)
            return
        with np.errstate(invalid="ignore"):  # NaN, which is set after; rounded half to even, so they need not add up
            bytes_KHW = np.rint(shares_KHW.astype(np.float64) * WHOLE_SHARE).astype(np.uint8)
        bytes_KHW[np.isnan(shares_KHW)] = NO_SHARE
        writers[1].write(core, bytes_KHW)


class HostWindow(NamedTuple):
    """A window's classes, probabilities (or None) and finite scores on their way to the host."""

    core: Box
    valid_HW: NDArray[np.bool_]
    returning: Callable[[], Sequence[torch.Tensor]]

    def arrays(self) -> tuple[NDArray[np.uint8], NDArray[np.float32] | None, NDArray[np.bool_]]:
        """Return the tensors as arrays, once they are there."""
        classes_HW, finite_HW, *shares = (tensor.numpy() for tensor in self.returning())
        return classes_HW, shares[0] if shares else None, finite_HW


def to_host(
    core: Box, scores_KHW: torch.Tensor, valid_HW: NDArray[np.bool_], probabilities: bool, are_shares: bool
) -> HostWindow:
    """Send a window's classes, and its `probabilities` if wanted, to the host. `are_shares`: the scores are these."""
    best_HW, number_HW = scores_KHW.max(0)  # the first of the largest, as `argmax`, which is slower on a CPU
    finite_HW = best_HW.isfinite()  # the largest is not a number where any is none
    shares = [(scores_KHW if are_shares else shares_of(scores_KHW)).float()] if probabilities else []
    return HostWindow(core, valid_HW, asked_back(number_HW.to(torch.uint8), finite_HW, *shares))
