"""A trained network's maps of rasters: tile by tile in bounded memory, each pixel written once by its owner.

The law: the map is that of the network on the whole raster, for every grid and number of ranks.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from tiledseg.comm.mesh import Mesh
from tiledseg.comm.watching.doing import doing, ticking
from tiledseg.errors import RasterError
from tiledseg.execution.halos.part import Part
from tiledseg.execution.input.carrying import network_input
from tiledseg.execution.parallel_run import ParallelRun
from tiledseg.execution.passes.part_passes import Passes, read_ahead
from tiledseg.execution.precision import INPUT_DTYPES, use_one_kernel
from tiledseg.execution.progress import StepProgress
from tiledseg.geometry.box import Box
from tiledseg.geometry.tiling import Tiling
from tiledseg.inference.fetching import fetched
from tiledseg.inference.map_files import (
    NO_SHARE,
    MapFiles,
    claim_files,
    discard_files,
    file_notes,
    finish_files,
    in_bytes,
    lay_out_files,
    publish_files,
)
from tiledseg.inference.mapper import Mapper
from tiledseg.inference.own_statistics import TRAINING, own_statistics
from tiledseg.inference.request import PlannedMaps, Request, notes, plan_maps
from tiledseg.inference.staging import Stage, staged, upload
from tiledseg.inference.views.reflections import means, parts_of_views, tilings_of, views_of
from tiledseg.inference.views.shared_views import shared_means, unseen
from tiledseg.models.network import GraphNetwork
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.labels.classes import default_classes
from tiledseg.raster.labels.masked_reader import area_reader
from tiledseg.raster.maps.writer import RasterLayout, RasterWriter
from tiledseg.raster.reading.identity import identify, written_since
from tiledseg.raster.reading.known_reader import KnownReader
from tiledseg.raster.reading.reader import open_raster
from tiledseg.raster.samples.dataset import Dataset, Sample
from tiledseg.raster.samples.views import View, ViewReader
from tiledseg.raster.statistics import Normalization
from tiledseg.raster.tile_reference import TileReference
from tiledseg.user_files.machine import SOME_CPU

__all__ = ["Request", "predict", "predict_all"]

_REWRITTEN = "{} was written to while it was mapped: the map may be of old and new pixels; map it again"


@dataclass(frozen=True)
class _Share:
    """This rank's part of one map."""

    request: Request
    info: RasterInfo
    tilings: tuple[Tiling, ...]
    passes: Passes
    parts: tuple[Part, ...]
    views: tuple[View, ...]
    parallel: ParallelRun
    outside: tuple[Box, ...] = ()  # of the area, of which nothing is computed

    @property
    def pieces(self) -> int:
        """How many pieces of the map this rank makes, of each view by itself where ranks share it, or reads where
        others make them."""
        return (self.passes.pieces(self.parts) or len(self.parts)) // self.at_once

    @property
    def at_once(self) -> int:
        """The views of a piece that follow each other on this rank."""
        return 1 if self.parallel.spread.shares_images else len(self.views)


def predict(request: Request, mapper: Mapper, memory_bytes: int, mesh: Mesh) -> None:
    """`predict_all` of one request."""
    predict_all([request], mapper, memory_bytes, mesh)


def predict_all(
    requests: Sequence[Request], mapper: Mapper, memory_bytes: int, mesh: Mesh, network: str | None = None
) -> None:
    """Write the class maps (uint8, the raster's grid; ignore_index where it has no data) and, where asked for, the
    class probabilities (bands of float32, NaN without data, or of bytes), one image after the other, by one network.
    The requests differ in their files only. `network`: the line that names it, said at the end. Collective.

    Raises InputError of some kind before anything is written; an unfinished map never carries the final name. Maps for
    s3:// and https:// are put there one by one (`staging`).
    """
    with staged(requests, mesh) as stage:
        infos = _predict_all(stage, mapper, memory_bytes, mesh)
    if mesh.is_root:
        for line in filter(None, (network, _written(requests, infos))):
            _quiet_progress(requests[0]).say(line)


def _written(requests: Sequence[Request], infos: Sequence[RasterInfo]) -> str:
    """Where the maps are, and how large."""
    first, pixels = requests[0], sum(info.height * info.width for info in infos)
    if len(requests) > 1:
        return f"wrote {len(requests)} maps, {pixels:,} pixels: {os.path.dirname(first.output)}"
    files = [first.output, *(path for path in (first.probabilities, first.polygons) if path is not None)]
    sizes = [f" ({os.path.getsize(path) / 1e6:.1f} MB)" if os.path.exists(path) else "" for path in files]
    named = ", ".join(path + size for path, size in zip(files, sizes, strict=True))
    return f"wrote a map of {infos[0].height} x {infos[0].width} pixels: {named}"


def _predict_all(stage: Stage, mapper: Mapper, memory_bytes: int, mesh: Mesh) -> tuple[RasterInfo, ...]:
    requests = stage.requests
    usual = SOME_CPU if mesh.device.type == "cpu" else None
    planned: PlannedMaps = mesh.on_root(lambda: plan_maps(requests, mapper, memory_bytes, mesh.size, usual))
    _say(notes(planned), requests[0], mesh)
    named = zip(requests, planned.infos, strict=True) if mesh.is_root else ()
    images = [identify(request.image, info.beside) for request, info in named]
    use_one_kernel(True)
    plan = planned.plan
    in_blocks = None if plan.blocks is None else plan.blocks.shape
    how = requests[0].precision, plan.pipeline, in_blocks, requests[0].store
    network = mapper.build(mesh)
    verifies = network.recorded is not None and requests[0].verify
    # Stages let go of what is not theirs.
    whole = copy.deepcopy(network) if verifies and mesh.is_root and plan.pipeline is not None else network
    parallel = ParallelRun.open(plan.spread, network, mesh, *how)
    shares = [_share(parallel, mesh, *one) for one in zip(requests, planned.infos, planned.tilings, strict=True)]
    with _progress(sum(share.pieces for share in shares), mesh, requests[0]) as bar:
        for share in shares:
            suited = _suited(mapper, share, mesh)
            if verifies:
                _verify(whole, share, suited, memory_bytes, mesh)
                verifies, whole = False, network
            _make_map(share, suited, planned.classes, mesh, bar)
            _say(mesh.on_root(lambda: upload(stage)), share.request, mesh)
    _say([_REWRITTEN.format(path) for path in written_since(images)], requests[0], mesh)
    parallel.close()
    return planned.infos


def _verify(network: GraphNetwork, share: _Share, mapper: Mapper, memory_bytes: int, mesh: Mesh) -> None:
    """Compare a traced network with its module on the root's first part. Collective."""
    from tiledseg.tracing.agreement import verify_first

    def load() -> torch.Tensor | None:
        with closing(_dataset(share, mapper)) as dataset:
            part = next(iter(share.parts), None)
            return part and network_input(dataset.load(part.image, part.tile), mesh.device)

    def say(line: str) -> None:
        StepProgress(0, 0, min(share.request.verbosity, 2) and 2).say(line)

    verify_first(network, load, mesh, share.request.precision, memory_bytes, say)


def _suited(mapper: Mapper, share: _Share, mesh: Mesh) -> Mapper:
    """The mapper with the normalisation that the request asks for."""
    request = share.request
    if request.normalize == TRAINING:
        return mapper
    found = own_statistics(request.image, mapper, request.references, mesh, share.info)
    _say(found.warnings(), request, mesh)
    return replace(mapper, normalization=found)


def _share(parallel: ParallelRun, mesh: Mesh, request: Request, info: RasterInfo, tiling: Tiling) -> _Share:
    views, footprint = views_of(request.views, tiling.raster), tiling.footprint
    tilings = tilings_of(views, tiling, parallel.spread.shares_images)
    passes = parallel.over(tilings)
    # Where ranks share images they compute all of one together.
    whole = request.area is None or parallel.spread.shares_images
    inside = _area(request, info)
    wanted = tiling.tiles if whole else [tile for tile in tiling.tiles if inside(tile.core).any()]
    parts = passes.mode.share([TileReference(0, tile.index) for tile in wanted])
    left = {tile.index for tile in tiling.tiles} - {tile.index for tile in wanted}
    outside = tuple(tiling.tiles[index].core for index in sorted(left)[mesh.rank :: mesh.size])
    if len(views) > 1 and parallel.spread.shares_images:
        parts = tuple(
            part
            for at, cut in enumerate(tilings)
            for part in passes.mode.share([TileReference(at, k) for k in range(len(cut))])
        )
    elif len(views) > 1:
        parts = parts_of_views(parts, views, footprint)
    return _Share(request, info, tilings, passes, parts, views, parallel, outside)


def _area(request: Request, info: RasterInfo) -> Callable[[Box], NDArray[np.bool_]]:
    """Which pixels of a box are in the area: their centres, as polygons are drawn (`polygon_reader`)."""
    if request.area is None:
        return lambda box: np.ones(box.shape, np.bool_)
    reader = area_reader(request.area, info)
    return lambda box: reader.read(box)[0][0] == 1


def _make_map(share: _Share, mapper: Mapper, classes: int, mesh: Mesh, bar: _Bar | None) -> None:
    """One image's files, each whole or not there. Collective."""
    legend = mapper.legend or default_classes(classes)
    request, info, ignored = share.request, share.info, mapper.ignore_index
    made: list[MapFiles] = []  # of this rank's knowledge, from the moment that a file is there
    with ExitStack() as held:
        try:
            files: MapFiles = mesh.on_root(lambda: lay_out_files(request, info, legend, ignored, made))
            made[:] = [files]
            mesh.on_root(lambda: claim_files(files, held))
            _say(file_notes(files, request, info), request, mesh)
            _map_tiles(share, mapper, files.rasters, mesh, bar)
            mesh.communicator.barrier()  # every writer is closed: the map is whole
            mesh.on_root(lambda: finish_files(files, request, info, legend, ignored))
        except BaseException:
            for one in made:  # on any rank: the map cannot be finished, others may be ended unheard
                discard_files(one)
            raise
        mesh.on_root(lambda: publish_files(files))


def _say(lines: Sequence[str], request: Request, mesh: Mesh) -> None:
    if mesh.is_root:
        for line in lines:
            _quiet_progress(request).say(f"warning: {line}")


def _quiet_progress(request: Request) -> StepProgress:
    """Words alone: no bar."""
    return StepProgress(0, 0, min(request.verbosity, 2) and 2)


def _map_tiles(share: _Share, mapper: Mapper, layouts: Sequence[RasterLayout], mesh: Mesh, bar: _Bar | None) -> None:
    passes, parts, request = share.passes, share.parts, share.request
    as_bytes = request.probability_type == "uint8"
    with ExitStack() as stack:
        dataset = stack.enter_context(closing(_dataset(share, mapper)))
        writers = [stack.enter_context(RasterWriter(layout)) for layout in layouts]
        # Each rank holds the file before any can fail: the one that fails removes its name, and must be heard first.
        mesh.communicator.barrier()
        stack.enter_context(torch.inference_mode())
        stack.enter_context(doing("mapping"))
        samples = read_ahead(passes, dataset, parts, request.threads, request.prefetch)
        if bar is not None and not passes.pieces(parts):  # rank 0 is no pipeline's end: it shows what it has read
            samples = _shown(samples, bar, share.at_once)
        inside = _area(request, share.info)
        for core in share.outside:
            _write_nothing(writers, core, mapper.ignore_index)
        found, several = _found(share, samples, bar), len(share.views) > 1
        for core, classes_HW, shares_KHW, valid_HW, finite_HW in fetched(found, len(writers) > 1, several, mesh.device):
            nothing_HW = ~(valid_HW & inside(core))
            _check_finite(finite_HW | nothing_HW, core, request)
            classes_HW[nothing_HW] = mapper.ignore_index
            writers[0].write(core, classes_HW[None])
            if shares_KHW is not None:
                shares_KHW[:, nothing_HW] = np.nan
                writers[1].write(core, in_bytes(shares_KHW) if as_bytes else shares_KHW)
            if bar is not None and not _in_views(share):
                bar.mapped(core)


def _check_finite(good_HW: NDArray[np.bool_], core: Box, request: Request) -> None:
    """Raise RasterError where the network has no scores: no class is likelier than another there."""
    if good_HW.all():
        return
    row, col = np.argwhere(~good_HW)[0]
    raise RasterError(
        f"{request.image}: the network's scores of {(~good_HW).sum()} pixels are no finite numbers, the first at row "
        f"{core.row.start + row}, col {core.col.start + col}; give values that stand for no data there a tag "
        f"(gdal_edit.py -a_nodata), or another --precision than {request.precision}"
    )


def _write_nothing(writers: Sequence[RasterWriter], core: Box, ignore_index: int) -> None:
    """No data, in the classes and in the probabilities."""
    for writer, nothing in zip(writers, (ignore_index, np.nan), strict=False):
        layout = writer.layout
        fill = NO_SHARE if layout.dtype == "uint8" and nothing is np.nan else nothing
        writer.write(core, np.full((layout.bands, *core.shape), fill, layout.dtype))


def _in_views(share: _Share) -> bool:
    """Whether the ranks map one view after the other, each its block."""
    return len(share.views) > 1 and share.parallel.spread.shares_images


def _found(
    share: _Share, samples: Iterator[Sample], bar: _Bar | None
) -> Iterator[tuple[Box, torch.Tensor, NDArray[np.bool_]]]:
    """Each piece's place, its scores (mean probabilities of several views), and which pixels have data."""
    passes, parts, views = share.passes, share.parts, share.views
    if len(views) > 1:
        if _in_views(share):
            seen = unseen if bar is None else bar.mapped
            found = shared_means(passes, share.parallel.axes, samples, parts, views, seen)
        else:
            found = means(ticking(passes.outputs(samples, parts)), views)
        for mean in found:
            yield mean.core, mean.shares_KHW, mean.sample.valid_HW
        return
    for sample, piece in ticking(passes.outputs(samples, parts)):
        yield piece.core, piece.logits_BKHW[0], sample.valid_HW[piece.in_part.slices]


class _Bar:
    """Progress over all maps of a call."""

    def __init__(self, progress: StepProgress) -> None:
        self._progress = progress
        self._done = 0

    def mapped(self, core: Box) -> None:
        """A piece of a map, at its place in the raster or in a view of it."""
        self.advance(f"mapping rows {core.row.start} to {core.row.stop}")

    def advance(self, words: str) -> None:
        self._done += 1
        self._progress.advance(self._done, words)


def _shown(samples: Iterator[Sample], bar: _Bar, views: int) -> Iterator[Sample]:
    """The first of several views has the raster's own places."""
    for number, sample in enumerate(samples):
        if number % views == 0:
            bar.advance(f"read rows {sample.tile.core.row.start} to {sample.tile.core.row.stop}")
        yield sample


def _dataset(share: _Share, mapper: Mapper) -> Dataset:
    request = share.request
    how = mapper.bands, mapper.nodata, request.references
    reader = KnownReader(share.info, lambda: open_raster(request.image, *how))
    normalization = mapper.normalization or Normalization.identity(reader.info.bands)
    readers = [reader, *(ViewReader(reader, view) for view in share.views[1:])]
    return Dataset(readers, None, share.tilings, None, normalization, INPUT_DTYPES[request.precision])


@contextmanager
def _progress(total: int, mesh: Mesh, request: Request) -> Iterator[_Bar | None]:
    if not mesh.is_root or request.verbosity == 0:
        yield None
        return
    with closing(StepProgress(total, 0, request.verbosity)) as progress:
        yield _Bar(progress)
