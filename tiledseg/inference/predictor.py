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

from tiledseg.comm.doing import doing, tick
from tiledseg.comm.mesh import Mesh
from tiledseg.config.words import ZARR
from tiledseg.execution.carrying import use_one_kernel
from tiledseg.execution.parallel_run import ParallelRun
from tiledseg.execution.progress import StepProgress
from tiledseg.execution.survey import band_statistics
from tiledseg.geometry.layers.declared import Crops
from tiledseg.inference.mapping import ImageShare, map_windows, open_dataset
from tiledseg.inference.request import IMAGE, Request, chosen_classes, plan_maps, staged, upload
from tiledseg.inference.trained import Mapper
from tiledseg.raster.geopackage import JOURNALS, write_polygons
from tiledseg.raster.info import RasterInfo, code_notes, is_placed, reference_notes
from tiledseg.raster.labels.classes import default_classes
from tiledseg.raster.map_writer import RasterLayout, begin_chunks, pack_layout, publish
from tiledseg.raster.reader import identify, written_since
from tiledseg.raster.zarr_writer import write_chunks
from tiledseg.system.files import writing
from tiledseg.system.outputs import Unfinished, unfinished
from tiledseg.units import size

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
    words = StepProgress(0, 0, min(requests[0].config.run.verbosity, 2) and 2)  # without a bar

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
    first, config = requests[0], requests[0].config
    precision, on_cpu = config.train.precision, mesh.device.type == "cpu"
    plan, infos = mesh.on_root(lambda: plan_maps(requests, mapper, memory_bytes, mesh.size, on_cpu))
    notes = [note for info in infos for note in info.notes]
    warn((*reference_notes(infos), *code_notes(infos), *notes, *plan.warnings))
    pairs = zip(requests, infos, strict=True) if mesh.is_root else ()
    images = [identify(request.image, info.beside) for request, info in pairs]
    if plan.blocks is not None and mesh.is_root:
        less = "" if plan.blocks.in_file else "; memory.store, a folder on a local disk, would keep them in a file"
        log(f"blocks: {plan.blocks.in_words}{less}")
    mapper = replace(mapper, legend=mapper.legend or default_classes(plan.network.classes))
    use_one_kernel(True)
    network = mapper.build(mesh)
    for grid in [layer.grid for layer in network.graph.layers if isinstance(layer, Crops) and layer.grid]:
        if mesh.is_root:
            log(f"blended of {grid.in_words}")
    verifies = network.recorded is not None and config.model.verify
    # A pipeline stage drops the layers of the others, so the root keeps a copy for the check.
    whole = copy.deepcopy(network) if verifies and mesh.is_root and plan.pipeline is not None else network
    in_blocks = None if plan.blocks is None else plan.blocks.shape
    parallel = ParallelRun(plan.spread, network, mesh, precision, plan.pipeline, in_blocks, config.memory.store)
    triples = zip(requests, infos, plan.tilings, strict=True)
    shares = [ImageShare(parallel, mesh, *triple) for triple in triples]
    total, done = sum(share.passes.pieces(share.parts) // len(share.views) for share in shares), count(1)
    with closing(StepProgress(total, 0, config.run.verbosity if mesh.is_root else 0)) as progress:

        def advance(line: str) -> None:
            number = next(done)
            if number == 1:
                progress.restart(number)  # leave the check, and all but the last segment, out of the rate
            progress.advance(number, line)

        for share in shares:
            own = mapper
            if first.normalize == IMAGE:  # of all valid pixels, also outside the area
                with share.open_image(mapper) as reader:
                    own = replace(mapper, normalization=band_statistics(mesh, [reader]))
                warn(own.normalization.warnings() if own.normalization else ())
            if verifies:  # compare the traced network with its module
                from tiledseg.tracing.compare import verify_first

                most = memory_bytes if plan.blocks is None else min(memory_bytes, max(plan.blocks.memory, 2**29))
                with closing(open_dataset(share, own)) as dataset:
                    verify_first(whole, dataset, share.parts, share.tilings, mesh, precision, most, log)
                verifies, whole = False, network
            _make_map(share, own, mesh, warn, advance)
            warn(mesh.on_root(lambda: upload(folder)))
    warn([_REWRITTEN.format(path) for path in written_since(images)])
    parallel.close()
    return infos


def _make_map(
    share: ImageShare,
    mapper: Mapper,
    mesh: Mesh,
    warn: Callable[[Sequence[str]], None],
    advance: Callable[[str], object],
) -> None:
    """Write one image's files, each whole or not at all. Collective."""
    request, info = share.request, share.info
    with ExitStack() as held:  # on the root: the claims of the outputs
        rasters, polygons = mesh.on_root(lambda: _lay_out(share, mapper, held))
        try:
            warn(rasters[0].notes)  # on georeferencing that a map cannot keep
            if polygons is not None and not is_placed(info.transform):
                warn([f"polygons of {info.path}, which has no transform, are in pixels (col, row) without a CRS"])
            map_windows(share, mapper, rasters, mesh, advance)
            mesh.communicator.barrier()  # every writer is closed: all pixels are written
            if request.packing.format == ZARR:
                for layout in rasters:
                    mesh.on_root(partial(begin_chunks, layout))
                    with doing("writing the map's chunks"), writing(layout.path):
                        write_chunks(layout.plain, layout.output.file(), mesh.rank, mesh.size, tick)
                mesh.communicator.barrier()
            mesh.on_root(lambda: _finish(rasters, polygons, share, mapper))
        except BaseException:  # on any rank: the root may be killed without a chance to clean up
            for output in (*(layout.output for layout in rasters), *filter(None, [polygons])):
                output.discard()  # one that has its name by now keeps it
            raise


def _lay_out(share: ImageShare, mapper: Mapper, held: ExitStack) -> tuple[list[RasterLayout], Unfinished | None]:
    """Lay out a map's raster of classes, and that of probabilities and the polygons if wanted. Claim them until `held`
    ends."""
    request, info, legend = share.request, share.info, mapper.legend or ()
    output, packing = held.enter_context(unfinished(request.output)), request.packing
    rasters = [RasterLayout(output, info, 1, "uint8", float(mapper.ignore_index), legend, packing=packing)]
    if request.probabilities is not None:
        output, packing = held.enter_context(unfinished(request.probabilities)), packing.of_shares()
        names, kind = [f"probability of {one.name}" for one in legend], ("float32", float("nan"))
        rasters.append(RasterLayout(output, info, len(legend), *kind, descriptions=names, packing=packing))
    return rasters, None if request.polygons is None else held.enter_context(unfinished(request.polygons))


def _finish(rasters: Sequence[RasterLayout], polygons: Unfinished | None, share: ImageShare, mapper: Mapper) -> None:
    """Make the final files from the ranks' pixels, and give them their names. On one rank, with all of its cores."""
    if polygons is not None:
        with doing("outlining the map's polygons"):
            plain, legend = rasters[0].plain, mapper.legend or ()
            classes = chosen_classes(share.request.polygons_classes, legend) - {mapper.ignore_index}
            write_polygons(polygons, plain, share.info, legend, classes, tick)
    with doing("packing the map"):
        for layout in rasters:
            pack_layout(layout, len(os.sched_getaffinity(0)), tick)
    for layout in rasters:
        publish(layout)
    if polygons is not None:
        polygons.publish(JOURNALS)
