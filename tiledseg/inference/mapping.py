"""The loop of a map: read a window, run the network, crop, write; and the mean of probabilities over views.

A view is a reflection, or a quarter turn, of the raster. Each view is mapped like the whole changed raster, and its
probabilities are turned back. One rank maps a tile's pixels in every view, and sums are float64 in the order of the
views, so the mean does not depend on grid or ranks, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from functools import partial

import numpy as np
import torch
from affine import Affine
from numpy.typing import NDArray

from tiledseg.comm.doing import doing, tick
from tiledseg.comm.mesh import Mesh
from tiledseg.config.words import NO_VIEWS, TURNS
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
from tiledseg.raster.map_writer import RasterLayout, Write, raster_writer
from tiledseg.raster.mirrored_reader import prefetch
from tiledseg.raster.places import View, view_reader
from tiledseg.raster.reader import KnownReader, RasterReader, open_raster
from tiledseg.raster.samples.dataset import Dataset, Sample
from tiledseg.raster.samples.sampling import TileReference
from tiledseg.raster.statistics import Normalization
from tiledseg.tracing.crops import kept_between_tiles

Window = tuple[Box, torch.Tensor, NDArray]
"""A box of the raster, its scores or probabilities (K, H, W), and the validity of its pixels (H, W)."""
_Computed = tuple[Box, NDArray[np.bool_], Callable[[], Sequence[torch.Tensor]]]
"""A box of the raster, the validity of its pixels, and a function that returns what is written of it (`to_host`)."""
PANEL = 4096  # px: tiles of crops run in columns of this width, so that scores kept for the tiles below do not grow


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
    # Softmax over the last dim: over another one, vectorised kernels make the last bit depend on the tile's size.
    return scores_KHW.permute(1, 2, 0).contiguous().softmax(-1).permute(2, 0, 1)


def windows_of(
    passes: Passes, samples: Iterator[Sample], parts: Sequence[Part], views: Sequence[View]
) -> Iterator[Window]:
    """Yield each window's scores; with several `views`, the mean of its probabilities over them."""
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
    """Return values of a box of a view, turned back to the raster's order of pixels."""
    if view.is_transposed:
        values_KHW = values_KHW.transpose(1, 2)
    down, across, _, up, right, _ = view.to_raster[:6]
    dims = [dim for dim, step in ((1, down + across), (2, up + right)) if step < 0]
    return values_KHW.flip(dims) if dims else values_KHW


class ImageShare:
    """A rank's share of the map of one image. Each of the `views` is an image of its own, and a tile of the raster is a
    part in every view. `inside`: mask of the area (None: everywhere); `outside`: cores beyond it, which are filled
    without computing."""

    def __init__(self, parallel: ParallelRun, mesh: Mesh, request: Request, info: RasterInfo, tiling: Tiling) -> None:
        self.request, self.info = request, info
        self.views = views_of(request.views, tiling.raster)
        turned = make_tiling(tiling.raster[::-1], tiling.grid[::-1], tiling.footprint)
        same = turned if tiling.raster != tiling.raster[::-1] else tiling
        self.tilings = tuple(same if view.is_transposed else tiling for view in self.views)
        self.passes = parallel.over(self.tilings)
        mode, cores = self.passes.mode, [tile.core for tile in tiling.tiles]
        path = request.config.data.area
        area = None if path is None else area_reader(path, info)
        self.inside: Inside | None = None if area is None else lambda box: area.read(box)[0][0] == 1
        wanted = set(range(len(cores)))
        if self.inside is not None and not parallel.spread.shares_images:  # ranks that share an image compute all of it
            wanted = {number for number, core in enumerate(cores) if self.inside(core).any()}
        left = [core for number, core in enumerate(cores) if number not in wanted]
        self.outside = left[mesh.rank :: mesh.size]
        columns = tiling.grid[1]
        panel = max(1, PANEL * columns // tiling.raster[1]) if mode.network.graph.is_untraced else columns
        ordered = sorted(wanted, key=lambda number: (tiling.tiles[number].position[1] // panel, number))
        self.parts = mode.share([TileReference(0, number) for number in ordered])
        if len(self.views) > 1:
            self.parts = tuple(
                Part(number, tile_around(_core_in(view, part.tile.core), view.shape, tiling.footprint))
                for part in self.parts
                for number, view in enumerate(self.views)
            )

    def open_image(self, mapper: Mapper) -> RasterReader:
        """Return a reader of the image, which opens the file at its first read."""
        request = self.request
        return KnownReader(
            self.info, lambda: open_raster(request.image, mapper.bands, mapper.nodata, request.config.data.references)
        )


def _core_in(view: View, core: Box) -> Box:
    """Return the box in a view of a box of the raster."""
    ends = view.find(core.row.start, core.col.start), view.find(core.row.stop - 1, core.col.stop - 1)
    return Box(*(Interval(int(min(side)), int(max(side)) + 1) for side in zip(*ends, strict=True)))


def open_dataset(share: ImageShare, mapper: Mapper) -> Dataset:
    """Return the image and its views as a dataset of tiles."""
    reader = share.open_image(mapper)
    normalization = mapper.normalization or Normalization.identity(reader.info.bands)
    readers = [reader, *(view_reader(reader, view) for view in share.views[1:])]
    dtype = INPUT_DTYPES[share.request.config.train.precision]
    return Dataset(readers, None, share.tilings, None, normalization, dtype)


def map_windows(
    share: ImageShare, mapper: Mapper, layouts: Sequence[RasterLayout], mesh: Mesh, advance: Callable[[str], object]
) -> None:
    """Write this rank's pixels of a map into its laid-out files: classes, and probabilities if there are two.

    `advance` is called with a line for each computed window. Collective if the passes are.
    """
    config, passes = share.request.config, share.passes
    with ExitStack() as stack:
        dataset = stack.enter_context(closing(open_dataset(share, mapper)))
        writers = [stack.enter_context(raster_writer(layout)) for layout in layouts]
        # All ranks open the files before any can fail: a rank that fails removes their names.
        mesh.communicator.barrier()
        stack.enter_context(torch.inference_mode())
        stack.enter_context(doing("mapping"))
        for core in share.outside:
            for layout, write, fill in zip(layouts, writers, (mapper.ignore_index, np.nan), strict=False):
                write(core, np.full((layout.bands, *core.shape), fill, layout.dtype))
        overlaps = is_gpu(mesh.device) or passes.mode.network.graph.is_untraced  # compute while a window is written
        # Reading is fast beside an untraced network's crops.
        threads = min(2, config.data.workers) if passes.mode.network.graph.is_untraced else config.data.workers
        samples = read_ahead(passes, dataset, share.parts, threads)

        def computed() -> Iterator[_Computed]:
            for core, scores_KHW, valid_HW in windows_of(passes, samples, share.parts, share.views):
                tick()
                advance(f"mapping rows {core.row.start} to {core.row.stop}")
                yield core, valid_HW, to_host(scores_KHW, len(layouts) > 1, len(share.views) > 1)
                del scores_KHW  # the GPU needs its memory for the next window

        # The writing thread has one of its own, which torch would give to later threads too.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        keep = partial(_write, writers=writers, share=share, ignore_index=mapper.ignore_index)
        for _ in prefetch(computed(), keep, 1, 1 + overlaps):
            pass


def _write(computed: _Computed, writers: Sequence[Write], share: ImageShare, ignore_index: int) -> None:
    """Write a window's classes and probabilities once they are on the host. Raise RasterError if a score is not
    finite."""
    core, valid_HW, returning = computed
    torch.set_num_threads(1)  # of this thread: the network has the others
    with torch.inference_mode():
        classes_HW, finite_HW, *shares = (tensor.numpy() for tensor in returning())
    nothing_HW = ~valid_HW if share.inside is None else ~(valid_HW & share.inside(core))
    bad_HW = ~(finite_HW | nothing_HW)
    if bad_HW.any():
        row, col = np.argwhere(bad_HW)[0]
        raise RasterError(
            f"{share.info.path}: the network's scores of {bad_HW.sum()} pixels are not finite, the first at row "
            f"{core.row.start + row}, col {core.col.start + col}; mark values without data "
            f"(gdal_edit.py -a_nodata), or use another --precision than {share.request.config.train.precision}"
        )
    classes_HW[nothing_HW] = ignore_index
    writers[0](core, classes_HW[None])
    for shares_KHW in shares:
        shares_KHW[:, nothing_HW] = np.nan
        writers[1](core, shares_KHW)


def to_host(scores_KHW: torch.Tensor, probabilities: bool, are_shares: bool) -> Callable[[], Sequence[torch.Tensor]]:
    """Return a function that returns a window's classes, a mask of finite scores, and `probabilities` if wanted, on the
    host: a GPU begins with them now, and the function waits for their copies. `are_shares`: the scores are
    probabilities already."""

    def values() -> Sequence[torch.Tensor]:
        best_HW, number_HW = scores_KHW.max(0)  # like `argmax`, which is slower on a CPU
        finite_HW = best_HW.isfinite()  # the largest is NaN if any is
        shares = [(scores_KHW if are_shares else shares_of(scores_KHW)).float()] if probabilities else []
        return number_HW.to(torch.uint8), finite_HW, *shares

    return asked_back(*values()) if is_gpu(scores_KHW.device) else values
