"""Maps of rasters by a trained network: tile by tile in bounded memory, each pixel written once by its owner.

The law: a map equals that of the network on the whole raster, for every grid and number of ranks.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np

from tiledseg.comm.doing import doing, tick, ticking
from tiledseg.comm.mesh import Mesh
from tiledseg.config.map_formats import ZARR
from tiledseg.execution.carrying import use_one_kernel
from tiledseg.execution.parallel_run import ParallelRun
from tiledseg.execution.progress import StepProgress
from tiledseg.geometry.layers.declared import Crops
from tiledseg.inference.mapping import ImageShare, map_windows, open_dataset, share_image
from tiledseg.inference.request import IMAGE, Request, chosen_classes, plan_maps, staged, upload
from tiledseg.inference.trained import Mapper
from tiledseg.raster.geopackage import begin, publish_polygons, write_polygons
from tiledseg.raster.info import RasterInfo, code_notes, is_placed, reference_notes
from tiledseg.raster.labels.classes import ClassRecord, default_classes
from tiledseg.raster.map_writer import RasterLayout, begin_chunks, lay_out, pack_layout, publish
from tiledseg.raster.reader import identify, written_since
from tiledseg.raster.statistics import Normalization, Sums, finish, measure, statistics_blocks
from tiledseg.raster.zarr_writer import write_chunks
from tiledseg.system.files import writing
from tiledseg.system.run_lock import UnfinishedFile, claimed
from tiledseg.units import size
from tiledseg.user_files.machine import SOME_CPU

_REWRITTEN = "{} was written to while it was mapped: the map may be of old and new pixels; map it again"


def predict_all(
    requests: Sequence[Request],
    mapper: Mapper,
    memory_bytes: int,
    mesh: Mesh,
    network: str | None = None,
    ends: bool = True,
) -> None:
    """Write the maps of several requests, one image after the other, by one network. Collective.

    A map holds classes (uint8, on the raster's grid; ignore_index without data) and, if wanted, probabilities (a band a
    class, float32 with NaN without data). The requests differ in their files only. `ends`: at the end, print
    `network`, a line on the network, and a line on the files. Maps for s3:// are uploaded one by one (`staged`).

    Raise an InputError before anything is written. An unfinished map never has the final name.
    """
    words = StepProgress(0, 0, min(requests[0].verbosity, 2) and 2)  # without a bar

    def warn(lines: Sequence[str]) -> None:
        for line in lines if mesh.is_root else ():
            words.say(f"warning: {line}")

    with staged(requests, mesh) as (local, folder):
        infos = _map_all(local, folder, mapper, memory_bytes, mesh, words.say, warn)
    if not (mesh.is_root and ends):
        return
    first, pixels = requests[0], sum(info.height * info.width for info in infos)
    written = f"wrote {len(requests)} maps, {pixels:,} pixels: {os.path.dirname(first.output)}"
    if len(requests) == 1:
        style = f"{os.path.splitext(first.output)[0]}.qml", f"{first.output}.aux.xml"
        files = [first.output, first.probabilities, first.polygons, *filter(os.path.isfile, style)]
        sizes = {path: f" ({size(os.path.getsize(path))})" for path in files if path and os.path.isfile(path)}
        named = ", ".join(f"{path}{sizes.get(path, '')}" for path in files if path)
        written = f"wrote a map of {infos[0].height} x {infos[0].width} pixels: {named}"
    for line in filter(None, (network, written)):
        words.say(line)


def _map_all(
    requests: Sequence[Request],
    folder: str | None,
    mapper: Mapper,
    memory_bytes: int,
    mesh: Mesh,
    log: Callable[[str], None],
    warn: Callable[[Sequence[str]], None],
) -> tuple[RasterInfo, ...]:
    """Plan all maps, and make one after the other; return the information on each image. `folder`: holds maps that are
    uploaded (None: no map is)."""
    first = requests[0]
    usual = SOME_CPU if mesh.device.type == "cpu" else None
    plan, infos, classes = mesh.on_root(lambda: plan_maps(requests, mapper, memory_bytes, mesh.size, usual))
    notes = [note for info in infos for note in info.notes]
    warn((*reference_notes(infos), *code_notes(infos), *notes, *plan.warnings))
    pairs = zip(requests, infos, strict=True) if mesh.is_root else ()
    images = [identify(request.image, info.beside) for request, info in pairs]
    if plan.blocks is not None and mesh.is_root:
        less = "" if plan.blocks.in_file else "; memory.store, a folder on a local disk, would keep them in a file"
        log(f"blocks: {plan.blocks.in_words}{less}")
    use_one_kernel(True)
    network = mapper.build(mesh)
    for grid in [layer.grid for layer in network.graph.layers if isinstance(layer, Crops) and layer.grid]:
        if mesh.is_root:
            log(f"blended of {grid.in_words}")
    verifies = network.recorded is not None and first.verify
    # A pipeline stage drops the layers of the others, so the root keeps a copy for the check.
    whole = copy.deepcopy(network) if verifies and mesh.is_root and plan.pipeline is not None else network
    in_blocks = None if plan.blocks is None else plan.blocks.shape
    parallel = ParallelRun.open(plan.spread, network, mesh, first.precision, plan.pipeline, in_blocks, first.store)
    triples = zip(requests, infos, plan.tilings, strict=True)
    shares = [share_image(parallel, mesh, *triple) for triple in triples]
    total, done = sum(share.passes.pieces(share.parts) // len(share.views) for share in shares), count(1)
    with closing(StepProgress(total, 0, first.verbosity if mesh.is_root else 0)) as progress:

        def advance(line: str) -> None:
            number = next(done)
            if number == 1:
                progress.restart(number)  # leave the check, and all but the last segment, out of the rate
            progress.advance(number, line)

        for share in shares:
            own = mapper
            if first.normalize == IMAGE:
                own = replace(mapper, normalization=_statistics(share, mapper, mesh))
                warn(own.normalization.warnings() if own.normalization else ())
            if verifies:  # compare the traced network with its module
                from tiledseg.tracing.compare import verify_first

                most = memory_bytes if plan.blocks is None else min(memory_bytes, max(plan.blocks.memory, 2**29))
                with closing(open_dataset(share, own)) as dataset:
                    verify_first(whole, dataset, share.parts, share.tilings, mesh, first.precision, most, log)
                verifies, whole = False, network
            _make_map(share, own, classes, mesh, warn, advance)
            warn(mesh.on_root(lambda: upload(folder)))
    warn([_REWRITTEN.format(path) for path in written_since(images)])
    parallel.close()
    return infos


def _statistics(share: ImageShare, mapper: Mapper, mesh: Mesh) -> Normalization:
    """Return mean and deviation of all valid pixels of the raster, also outside the area.

    Each rank measures its share of a fixed grid, so the result has the same bits for any number of ranks. Collective;
    an InputError of one rank is raised on all.
    """

    def sums() -> Sums:
        with share.open_image(mapper) as reader, doing("taking the statistics of the bands"):
            return measure([reader], ticking(statistics_blocks([share.info], mesh.rank, mesh.size)))

    parts = mesh.communicator.gather_objects(mesh.on_all(sums))
    return mesh.on_root(lambda: finish(np.concatenate(parts), share.info.times))


def _make_map(
    share: ImageShare,
    mapper: Mapper,
    classes: int,
    mesh: Mesh,
    warn: Callable[[Sequence[str]], None],
    advance: Callable[[str], object],
) -> None:
    """Write one image's files, each whole or not at all. Collective."""
    legend = mapper.legend or default_classes(classes)
    request, info, ignored = share.request, share.info, mapper.ignore_index
    made: list[UnfinishedFile] = []  # the files that exist, known to this rank as soon as one does
    with ExitStack() as held:
        try:
            made[:] = mesh.on_root(lambda: _lay_out_files(request, info, legend, ignored, made))
            rasters = [file for file in made if isinstance(file, RasterLayout)]
            for file in made:  # no other process writes them
                mesh.on_root(partial(held.enter_context, claimed(file.temporary, file.path)))
            warn(rasters[0].notes)  # on georeferencing that a map cannot keep
            for layout in rasters:
                if layout.takes_style and layout.style is None:
                    style = f"the style beside {layout.path} stays as it was; remove it for one of this map's classes"
                    warn([style])
            if request.polygons is not None and not is_placed(info.transform):
                warn([f"polygons of {info.path}, which has no transform, are in pixels (col, row) without a CRS"])
            map_windows(share, mapper, rasters, mesh, advance)
            mesh.communicator.barrier()  # every writer is closed: all pixels are written
            if request.packing.format == ZARR:
                for layout in rasters:
                    mesh.on_root(partial(begin_chunks, layout))
                    with doing("writing the map's chunks"), writing(layout.path):
                        write_chunks(layout.temporary, layout.whole, mesh.rank, mesh.size, tick)
                mesh.communicator.barrier()
            mesh.on_root(lambda: _finish(request, info, legend, ignored, made))
        except BaseException:  # on any rank: other ranks may be killed without a chance to clean up
            for file in made:  # files that have their names by now keep them
                file.discard()
            raise


def _lay_out_files(
    request: Request, info: RasterInfo, legend: Sequence[ClassRecord], ignore_index: int, made: list[UnfinishedFile]
) -> list[UnfinishedFile]:
    """Create the empty files of a map: classes, then probabilities and polygons if they are wanted. `made` holds those
    created so far, for the clean-up after a failure."""
    nodata, packing = float(ignore_index), request.packing
    made.append(lay_out(request.output, info, 1, "uint8", nodata, legend, packing=packing))
    if request.probabilities is not None:
        names, kind = [f"probability of {one.name}" for one in legend], ("float32", float("nan"))
        packing = packing.of_shares()
        made.append(lay_out(request.probabilities, info, len(legend), *kind, descriptions=names, packing=packing))
    if request.polygons is not None:
        made.append(begin(request.polygons))
    return made


def _finish(
    request: Request,
    info: RasterInfo,
    legend: Sequence[ClassRecord],
    ignore_index: int,
    made: Sequence[UnfinishedFile],
) -> None:
    """Make the final files from the ranks' pixels, and give them their names. On one rank, with all of its cores."""
    rasters = [file for file in made if isinstance(file, RasterLayout)]
    polygons = [file for file in made if not isinstance(file, RasterLayout)]
    with doing("outlining the map's polygons"):
        classes = chosen_classes(request.polygons_classes, legend) - {ignore_index}
        for file in polygons:
            write_polygons(file, rasters[0].temporary, info, legend, classes, tick)
    with doing("packing the map"):
        for layout in rasters:
            pack_layout(layout, len(os.sched_getaffinity(0)), tick)
    for layout in rasters:
        publish(layout)
    for file in polygons:
        publish_polygons(file)
