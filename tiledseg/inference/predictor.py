"""A trained network's maps of rasters: tile by tile in bounded memory, each pixel written once by its owner.

The law: the map is that of the network on the whole raster, for every grid and number of ranks.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import count

import torch

from tiledseg.comm.mesh import Mesh
from tiledseg.comm.watching.doing import doing, ticking
from tiledseg.errors import InputError
from tiledseg.execution.input.carrying import network_input
from tiledseg.execution.parallel_run import ParallelRun
from tiledseg.execution.precision import use_one_kernel
from tiledseg.execution.progress import StepProgress
from tiledseg.inference.map_files import (
    MapFiles,
    claim_files,
    discard_files,
    file_notes,
    finish_files,
    lay_out_files,
    publish_files,
)
from tiledseg.inference.mapper import Mapper
from tiledseg.inference.mapping import ImageShare, map_windows, open_dataset, share_image
from tiledseg.inference.request import TRAINING, PlannedMaps, Request, notes, plan_maps
from tiledseg.inference.staging import Stage, staged, upload
from tiledseg.models.network import GraphNetwork
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.labels.classes import default_classes
from tiledseg.raster.reading.identity import identify, written_since
from tiledseg.raster.reading.reader import KnownReader, open_raster
from tiledseg.raster.statistics import Normalization, finish, measure, merge, statistics_blocks
from tiledseg.user_files.machine import SOME_CPU

__all__ = ["Request", "predict", "predict_all"]

_REWRITTEN = "{} was written to while it was mapped: the map may be of old and new pixels; map it again"


def predict(request: Request, mapper: Mapper, memory_bytes: int, mesh: Mesh) -> None:
    """Map one request as `predict_all` does."""
    predict_all([request], mapper, memory_bytes, mesh)


def predict_all(
    requests: Sequence[Request], mapper: Mapper, memory_bytes: int, mesh: Mesh, network: str | None = None
) -> None:
    """Write the maps of several requests, one image after the other, by one network. Collective.

    A map holds classes (uint8, the raster's grid; ignore_index without data) and, where wanted, probabilities (bands of
    float32, NaN without data, or of bytes). The requests differ in their files only. `network`: a line that names the
    network, printed at the end. Maps for s3:// and https:// are put there one by one (`staging`).

    Raises an InputError before anything is written. An unfinished map never carries the final name.
    """
    with staged(requests, mesh) as stage:
        infos = _predict_all(stage, mapper, memory_bytes, mesh)
    if mesh.is_root:
        for line in filter(None, (network, _written(requests, infos))):
            _words_only(requests[0]).say(line)


def _predict_all(stage: Stage, mapper: Mapper, memory_bytes: int, mesh: Mesh) -> tuple[RasterInfo, ...]:
    requests, first = stage.requests, stage.requests[0]
    usual = SOME_CPU if mesh.device.type == "cpu" else None
    planned: PlannedMaps = mesh.on_root(lambda: plan_maps(requests, mapper, memory_bytes, mesh.size, usual))
    _warn(notes(planned), first, mesh)
    named = zip(requests, planned.infos, strict=True) if mesh.is_root else ()
    images = [identify(request.image, info.beside) for request, info in named]
    use_one_kernel(True)
    plan = planned.plan
    network = mapper.build(mesh)
    verifies = network.recorded is not None and first.verify
    # Stages let go of what is not theirs.
    whole = copy.deepcopy(network) if verifies and mesh.is_root and plan.pipeline is not None else network
    in_blocks = None if plan.blocks is None else plan.blocks.shape
    parallel = ParallelRun.open(plan.spread, network, mesh, first.precision, plan.pipeline, in_blocks, first.store)
    triples = zip(requests, planned.infos, planned.tilings, strict=True)
    shares = [share_image(parallel, mesh, *triple) for triple in triples]
    total = sum(len(share.parts) for share in shares)
    with closing(StepProgress(total, 0, first.verbosity if mesh.is_root else 0)) as progress:
        done = count(1)
        for share in shares:
            own = mapper if first.normalize == TRAINING else _by_own_bands(share, mapper, mesh)
            if verifies:
                _verify(whole, share, own, memory_bytes, mesh)
                verifies, whole = False, network
            _make_map(share, own, planned.classes, mesh, lambda words: progress.advance(next(done), words))
            _warn(mesh.on_root(lambda: upload(stage)), first, mesh)
    _warn([_REWRITTEN.format(path) for path in written_since(images)], first, mesh)
    parallel.close()
    return planned.infos


def _verify(network: GraphNetwork, share: ImageShare, mapper: Mapper, memory_bytes: int, mesh: Mesh) -> None:
    """Compare a traced network with its module on the root's first part. Collective."""
    from tiledseg.tracing.agreement import verify_first

    def load() -> torch.Tensor | None:
        with closing(open_dataset(share, mapper)) as dataset:
            part = next(iter(share.parts), None)
            return part and network_input(dataset.load(part.image, part.tile), mesh.device)

    verify_first(network, load, mesh, share.request.precision, memory_bytes, _words_only(share.request).say)


def _by_own_bands(share: ImageShare, mapper: Mapper, mesh: Mesh) -> Mapper:
    """Return the mapper with mean and deviation of the raster's own valid pixels, those outside an area too.

    Each rank measures its share of a fixed grid, so the result has the same bits for any number of them. Collective;
    any rank's InputError is raised on all.
    """
    request, error, sums = share.request, None, None
    try:
        with (
            KnownReader(
                share.info, lambda: open_raster(request.image, mapper.bands, mapper.nodata, request.references)
            ) as reader,
            doing("taking the statistics of the bands"),
        ):
            sums = measure([reader], ticking(statistics_blocks([share.info], mesh.rank, mesh.size)))
    except InputError as met:
        error = met
    mesh.agree(error)
    parts = mesh.communicator.gather_objects(sums)
    normalization: Normalization = mesh.on_root(lambda: finish(merge(parts)))
    _warn(normalization.warnings(), request, mesh)
    return replace(mapper, normalization=normalization)


def _make_map(share: ImageShare, mapper: Mapper, classes: int, mesh: Mesh, advance: Callable[[str], object]) -> None:
    """Write one image's files, each whole or not at all. Collective."""
    legend = mapper.legend or default_classes(classes)
    request, info, ignored = share.request, share.info, mapper.ignore_index
    made: list[MapFiles] = []  # known to this rank, from the moment that a file is there
    with ExitStack() as held:
        try:
            files: MapFiles = mesh.on_root(lambda: lay_out_files(request, info, legend, ignored, made))
            made[:] = [files]
            mesh.on_root(lambda: claim_files(files, held))
            _warn(file_notes(files, request, info), request, mesh)
            map_windows(share, mapper, files.rasters, mesh, advance)
            mesh.communicator.barrier()  # every writer is closed: the map is whole
            mesh.on_root(lambda: finish_files(files, request, info, legend, ignored))
        except BaseException:
            for one in made:  # on any rank: the map cannot be finished, others may be ended unheard
                discard_files(one)
            raise
        mesh.on_root(lambda: publish_files(files))


def _written(requests: Sequence[Request], infos: Sequence[RasterInfo]) -> str:
    """Return words on the maps' paths and sizes."""
    first, pixels = requests[0], sum(info.height * info.width for info in infos)
    if len(requests) > 1:
        return f"wrote {len(requests)} maps, {pixels:,} pixels: {os.path.dirname(first.output)}"
    files = [first.output, *(path for path in (first.probabilities, first.polygons) if path is not None)]
    sizes = [f" ({os.path.getsize(path) / 1e6:.1f} MB)" if os.path.exists(path) else "" for path in files]
    named = ", ".join(path + size for path, size in zip(files, sizes, strict=True))
    return f"wrote a map of {infos[0].height} x {infos[0].width} pixels: {named}"


def _warn(lines: Sequence[str], request: Request, mesh: Mesh) -> None:
    if mesh.is_root:
        for line in lines:
            _words_only(request).say(f"warning: {line}")


def _words_only(request: Request) -> StepProgress:
    """Return a progress without a bar."""
    return StepProgress(0, 0, min(request.verbosity, 2) and 2)
