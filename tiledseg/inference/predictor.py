"""A trained network's map of one raster: tile by tile in bounded memory, each pixel written once by its owner.

The law: the map is that of the network on the whole raster, for every grid and number of ranks.
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from tiledseg.claim import claimed
from tiledseg.comm.doing import doing, ticking
from tiledseg.comm.mesh import Mesh
from tiledseg.errors import RasterError
from tiledseg.execution.parallel_run import ParallelRun
from tiledseg.execution.passes import read_ahead
from tiledseg.execution.precision import INPUT_DTYPES, use_one_kernel
from tiledseg.execution.progress import StepProgress
from tiledseg.geometry.tiling import Tiling
from tiledseg.inference.mapper import Mapper
from tiledseg.outputs import check_outputs
from tiledseg.planning.run.parallelism import Parallelism
from tiledseg.planning.run.plan import Extent, RunPlan, RunQuestion, plan_run
from tiledseg.raster.dataset import Dataset, Sample
from tiledseg.raster.info import RasterInfo, reference_notes
from tiledseg.raster.layout import check_cut
from tiledseg.raster.reader import open_raster
from tiledseg.raster.sampling import TileReference
from tiledseg.raster.statistics import Normalization
from tiledseg.raster.writer import RasterLayout, RasterWriter, discard, lay_out, publish, raster_output

_GOLDEN = 0.61803398875  # hues a golden section apart stay distinct for any number of classes


@dataclass(frozen=True)
class Request:
    """What to map and where to. `grid` None is auto; `parallel.exact` False accepts a norm of a tile's statistics.
    No output may be one of `inputs`, the files that the request was read from."""

    image: str
    output: str
    probabilities: str | None = None
    grid: tuple[int, int] | None = None
    precision: str = "fp32"
    parallel: Parallelism = field(default_factory=Parallelism)
    references: bool = False
    inputs: tuple[str, ...] = ()
    threads: int = 2
    prefetch: int = 2
    verbosity: int = 1


@dataclass(frozen=True)
class PlannedMap:
    """A request that can start: what one rank has checked and laid out for all."""

    plan: RunPlan
    classes: RasterLayout
    probabilities: RasterLayout | None
    notes: tuple[str, ...]

    @property
    def layouts(self) -> tuple[RasterLayout, ...]:
        return (self.classes,) if self.probabilities is None else (self.classes, self.probabilities)


def predict(
    request: Request,
    mapper: Mapper,
    memory_bytes: int,
    mesh: Mesh,
) -> None:
    """Write the class map (uint8, the raster's grid; ignore_index where it has no data) and, where asked for, the
    class probabilities (float32 bands, NaN without data). Collective.

    Raises InputError of some kind before anything is written; an unfinished map never carries the final name.
    """
    made: list[RasterLayout] = []  # of this rank's knowledge, from the moment that a file is there
    with ExitStack() as held:
        try:
            planned: PlannedMap = mesh.on_root(lambda: _lay_out(request, mapper, memory_bytes, mesh.size, made))
            made[:] = planned.layouts
            mesh.on_root(lambda: _claim(planned, held))
            _say_notes(request, planned, mesh)
            _map_tiles(request, mapper, planned, mesh)
            mesh.communicator.barrier()  # every writer is closed: the map is whole
        except BaseException:
            for layout in made:  # on any rank: the map cannot be finished, others may be ended unheard
                discard(layout)
            raise
        mesh.on_root(lambda: _publish(planned))


def _say_notes(request: Request, planned: PlannedMap, mesh: Mesh) -> None:
    if mesh.is_root:
        progress = StepProgress(0, 0, min(request.verbosity, 2) and 2)
        for note in planned.notes:
            progress.say(f"warning: {note}")


def _claim(planned: PlannedMap, held: ExitStack) -> None:
    for layout in planned.layouts:
        held.enter_context(claimed(layout.temporary, layout.path))


def _publish(planned: PlannedMap) -> None:
    try:
        for layout in planned.layouts:
            publish(layout)
    except BaseException:  # a signal, say: what has its name by now keeps it
        for layout in planned.layouts:
            discard(layout)
        raise


def _lay_out(request: Request, mapper: Mapper, memory_bytes: int, ranks: int, made: list[RasterLayout]) -> PlannedMap:
    """Everything that can be refused, and then the files, which are in `made` as soon as they are there."""
    network = mapper.describe()
    with open_raster(request.image, mapper.bands, mapper.nodata, request.references) as reader:
        info = reader.info
    if info.bands != network.bands:
        raise RasterError(
            f"{info.path} has {info.bands} bands but the network was trained on {network.bands}; give an image of the "
            "same bands"
        )
    extent = Extent(info.shape, info.tiling.grid if info.tiling else None)  # a tile store has its own grid
    plan = plan_run(
        RunQuestion(
            network,
            (extent,),
            ranks,
            memory_bytes,
            request.parallel,
            request.precision,
            grid=request.grid,
            trains=False,
        )
    )
    check_cut(info, plan.tilings[0])
    _check_outputs(request, info, network.classes, mapper)
    return _lay_out_files(request, info, plan, network.classes, mapper.ignore_index, made)


def _check_outputs(request: Request, info: RasterInfo, classes: int, mapper: Mapper) -> None:
    outputs = [raster_output("--output", request.output, info, 1, "uint8")]
    if request.probabilities is not None:
        outputs.append(raster_output("--probabilities", request.probabilities, info, classes, "float32"))
    check_outputs(outputs, [info.path, *info.files, *mapper.files, *request.inputs])


def _lay_out_files(
    request: Request, info: RasterInfo, plan: RunPlan, classes: int, ignore_index: int, made: list[RasterLayout]
) -> PlannedMap:
    made.append(lay_out(request.output, info, 1, "uint8", float(ignore_index), class_colours(classes)))
    notes = (*reference_notes([info]), *made[0].notes, *plan.warnings)
    if request.probabilities is not None:
        names = [f"probability of class {k}" for k in range(classes)]
        made.append(lay_out(request.probabilities, info, classes, "float32", float("nan"), descriptions=names))
    return PlannedMap(plan, made[0], made[1] if len(made) > 1 else None, notes)


def class_colours(classes: int) -> dict[int, tuple[int, int, int]]:
    """A colour for each class number, far apart in hue, for programs that show the map."""
    colours = {}
    for k in range(classes):
        red, green, blue = colorsys.hsv_to_rgb((0.33 + k * _GOLDEN) % 1, 0.65, 0.9 - 0.3 * (k % 2))
        colours[k] = (round(255 * red), round(255 * green), round(255 * blue))
    return colours


def _map_tiles(
    request: Request,
    mapper: Mapper,
    planned: PlannedMap,
    mesh: Mesh,
) -> None:
    plan, tiling = planned.plan, planned.plan.tilings[0]
    use_one_kernel(True)
    network = mapper.build()
    parallel = ParallelRun.open(plan.spread, network, mesh, request.precision, plan.pipeline)
    passes = parallel.over([tiling])
    parts = passes.mode.share([TileReference(0, tile.index) for tile in tiling.tiles])
    with ExitStack() as stack:
        dataset = stack.enter_context(closing(_dataset(request, mapper, tiling)))
        writers = [stack.enter_context(RasterWriter(layout)) for layout in planned.layouts]
        # Each rank holds the file before any can fail: the one that fails removes its name, and must be heard first.
        mesh.communicator.barrier()
        progress = stack.enter_context(_progress(passes.pieces(parts) or len(parts), request, mesh))
        stack.enter_context(torch.inference_mode())
        stack.enter_context(doing("mapping"))
        samples = read_ahead(passes, dataset, parts, request.threads, request.prefetch)
        if progress is not None and not passes.pieces(parts):  # rank 0 is no pipeline's end: it shows what it has read
            samples = _shown(samples, progress)
        for done, (sample, piece) in enumerate(ticking(passes.outputs(samples, parts)), start=1):
            scores_KHW, valid_HW = piece.logits_BKHW[0], sample.valid_HW[piece.in_part.slices]
            classes_HW = scores_KHW.argmax(0).to(torch.uint8).cpu().numpy()
            classes_HW[~valid_HW] = mapper.ignore_index
            writers[0].write(piece.core, classes_HW[None])
            if len(writers) > 1:
                writers[1].write(piece.core, _probabilities(scores_KHW, valid_HW))
            if progress is not None:
                progress.advance(done, f"mapping rows {piece.core.row.start} to {piece.core.row.stop}")
    parallel.close()


def _shown(samples: Iterator[Sample], progress: StepProgress) -> Iterator[Sample]:
    for done, sample in enumerate(samples, start=1):
        progress.advance(done, f"read rows {sample.tile.core.row.start} to {sample.tile.core.row.stop}")
        yield sample


def _probabilities(scores_KHW: torch.Tensor, valid_HW: NDArray[np.bool_]) -> NDArray[np.float32]:
    # Over the last dim: over another one, a pixel's last bit depends on where its tile ends (vectors, then remainders).
    dtype = torch.float64 if scores_KHW.dtype == torch.float64 else None
    shares = scores_KHW.permute(1, 2, 0).contiguous().softmax(-1, dtype=dtype)
    result_KHW = shares.float().cpu().numpy().transpose(2, 0, 1)
    result_KHW[:, ~valid_HW] = np.nan
    return result_KHW


def _dataset(request: Request, mapper: Mapper, tiling: Tiling) -> Dataset:
    reader = open_raster(request.image, mapper.bands, mapper.nodata, request.references)
    normalization = mapper.normalization or Normalization.identity(reader.info.bands)
    return Dataset([reader], None, [tiling], None, normalization, INPUT_DTYPES[request.precision])


@contextmanager
def _progress(total: int, request: Request, mesh: Mesh) -> Iterator[StepProgress | None]:
    if not mesh.is_root or request.verbosity == 0:
        yield None
        return
    with closing(StepProgress(total, 0, request.verbosity)) as progress:
        yield progress
