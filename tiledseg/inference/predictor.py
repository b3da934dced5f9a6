"""A trained network's map of one raster: tile by tile in bounded memory, each pixel written once by its owner.

The law: the map is that of the network on the whole raster, for every grid and number of ranks.
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tiledseg.architecture.unet import UNet
from tiledseg.claim import claimed
from tiledseg.comm.doing import doing, ticking
from tiledseg.comm.mesh import Mesh
from tiledseg.config import ParallelConfig
from tiledseg.errors import ConfigError, RasterError
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.tiling import Tiling, make_tiling
from tiledseg.models.unet import FlatNetwork, build_unet
from tiledseg.outputs import check_outputs
from tiledseg.planning.norms import check_statistics, exact_modes, norm_fault
from tiledseg.planning.search import choose_grid
from tiledseg.raster.dataset import Dataset, Sample
from tiledseg.raster.info import RasterInfo, reference_notes
from tiledseg.raster.layout import check_cut
from tiledseg.raster.prefetch import prefetch
from tiledseg.raster.reader import open_raster
from tiledseg.raster.sampling import TileReference
from tiledseg.raster.writer import RasterLayout, RasterWriter, discard, lay_out, publish, raster_output
from tiledseg.training.checkpoint import Checkpoint, checkpoint_files, load_network
from tiledseg.training.halo_plan import HaloPlan, plan_halos
from tiledseg.training.parallel_run import ParallelRun
from tiledseg.training.pipeline_plan import PipelinePlan, micro_batch_size, plan_pipeline
from tiledseg.training.precision import INPUT_DTYPES, PARAMETER_DTYPES, use_one_kernel
from tiledseg.training.progress import StepProgress
from tiledseg.widths import ACTIVATION_BYTES

_GOLDEN = 0.61803398875  # hues a golden section apart stay distinct for any number of classes


@dataclass(frozen=True)
class Request:
    """What to map and where to. `grid` None is auto; `parallel.exact` False accepts a norm of a tile's statistics."""

    image: str
    output: str
    probabilities: str | None = None
    grid: tuple[int, int] | None = None
    precision: str = "fp32"
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    references: bool = False
    threads: int = 2
    prefetch: int = 2
    verbosity: int = 1


class Plans(NamedTuple):
    """How the raster is cut, and how the work is spread."""

    tiling: Tiling
    halo: HaloPlan
    pipeline: PipelinePlan | None


@dataclass(frozen=True)
class Mapping:
    """A request that can start: what one rank has checked and laid out for all."""

    plans: Plans
    classes: RasterLayout
    probabilities: RasterLayout | None
    notes: tuple[str, ...]

    @property
    def layouts(self) -> tuple[RasterLayout, ...]:
        return (self.classes,) if self.probabilities is None else (self.classes, self.probabilities)


def predict(request: Request, checkpoint: Checkpoint, memory_bytes: int, mesh: Mesh) -> None:
    """Write the class map (uint8, the raster's grid; ignore_index where it has no data) and, where asked for, the
    class probabilities (float32 bands, NaN without data). Collective.

    Raises InputError of some kind before anything is written; an unfinished map never carries the final name.
    """
    unet = checkpoint.saved.network
    made: list[RasterLayout] = []  # of this rank's knowledge, from the moment that a file is there
    with ExitStack() as held:
        try:
            mapping: Mapping = mesh.on_root(lambda: _lay_out(request, checkpoint, unet, memory_bytes, mesh.size, made))
            made[:] = mapping.layouts
            mesh.on_root(lambda: _claim(mapping, held))
            _say_notes(request, mapping, mesh)
            _map_tiles(request, checkpoint, unet, mapping, mesh)
            mesh.communicator.barrier()  # every writer is closed: the map is whole
        except BaseException:
            for layout in made:  # on any rank: the map cannot be finished, others may be ended unheard
                discard(layout)
            raise
        mesh.on_root(lambda: _publish(mapping))


def _say_notes(request: Request, mapping: Mapping, mesh: Mesh) -> None:
    if mesh.is_root:
        progress = StepProgress(0, 0, min(request.verbosity, 2) and 2)
        for note in mapping.notes:
            progress.say(f"warning: {note}")


def _claim(mapping: Mapping, held: ExitStack) -> None:
    for layout in mapping.layouts:
        held.enter_context(claimed(layout.temporary, layout.path))


def _publish(mapping: Mapping) -> None:
    try:
        for layout in mapping.layouts:
            publish(layout)
    except BaseException:  # a signal, say: what has its name by now keeps it
        for layout in mapping.layouts:
            discard(layout)
        raise


def _lay_out(
    request: Request, checkpoint: Checkpoint, unet: UNet, memory_bytes: int, ranks: int, made: list[RasterLayout]
) -> Mapping:
    """Everything that can be refused, and then the files, which are in `made` as soon as they are there."""
    data = checkpoint.saved.config.data
    with open_raster(request.image, data.bands, data.nodata, request.references) as reader:
        info = reader.info
    if info.bands != unet.bands:
        raise RasterError(
            f"{info.path} has {info.bands} bands but the network was trained on {unet.bands}; give an image of the "
            "same bands"
        )
    layers = unet.layers()
    footprint = network_footprint(layers)
    parallel = request.parallel
    grid = request.grid or (info.tiling.grid if info.tiling else None)  # a tile store has its own
    if grid is None and parallel.exact and parallel.halo not in exact_modes(layers, 2, trains=False):
        grid = (1, 1)
    value = ACTIVATION_BYTES[request.precision]
    if grid is None:
        pipelines = max(1, ranks // parallel.stages)
        grid = choose_grid(info.shape, layers, footprint, memory_bytes, value, pipelines, bands=unet.bands)
    tiling = make_tiling(info.shape, grid, footprint)
    check_cut(info, tiling)
    fault = norm_fault(layers, parallel.halo, len(tiling), 1, trains=False)
    if fault and parallel.exact:
        raise ConfigError(f"{fault}, or accept it with parallel.exact false")
    halo = plan_halos(parallel, layers, [tiling], ranks, 1, unet.bands, value)
    check_statistics(layers, unet.bands, [tiling], halo.halo, trains=False)
    largest = micro_batch_size(halo, layers, [tiling], len(tiling), 1, value)
    pipeline = plan_pipeline(parallel, layers, unet.bands, largest, None)
    _check_outputs(request, info, unet.classes, checkpoint)
    return _lay_out_files(request, info, Plans(tiling, halo, pipeline), unet.classes, data.ignore_index, made)


def _check_outputs(request: Request, info: RasterInfo, classes: int, checkpoint: Checkpoint) -> None:
    outputs = [raster_output("--output", request.output, info, 1, "uint8")]
    if request.probabilities is not None:
        outputs.append(raster_output("--probabilities", request.probabilities, info, classes, "float32"))
    check_outputs(outputs, [info.path, *info.files, *checkpoint_files(checkpoint)])


def _lay_out_files(
    request: Request, info: RasterInfo, plans: Plans, classes: int, ignore_index: int, made: list[RasterLayout]
) -> Mapping:
    made.append(lay_out(request.output, info, 1, "uint8", float(ignore_index), class_colours(classes)))
    notes = (*reference_notes([info]), *made[0].notes)
    if request.probabilities is not None:
        names = [f"probability of class {k}" for k in range(classes)]
        made.append(lay_out(request.probabilities, info, classes, "float32", float("nan"), descriptions=names))
    return Mapping(plans, made[0], made[1] if len(made) > 1 else None, notes)


def class_colours(classes: int) -> dict[int, tuple[int, int, int]]:
    """A colour for each class number, far apart in hue, for programs that show the map."""
    colours = {}
    for k in range(classes):
        red, green, blue = colorsys.hsv_to_rgb((0.33 + k * _GOLDEN) % 1, 0.65, 0.9 - 0.3 * (k % 2))
        colours[k] = (round(255 * red), round(255 * green), round(255 * blue))
    return colours


def _map_tiles(request: Request, checkpoint: Checkpoint, unet: UNet, mapping: Mapping, mesh: Mesh) -> None:
    network = load_trained(checkpoint, unet)
    tiling, halo, pipeline = mapping.plans
    parallel = ParallelRun.open(halo, network, mesh, request.precision, pipeline)
    passes = parallel.over([tiling])
    parts = passes.mode.share([TileReference(0, tile.index) for tile in tiling.tiles])
    with ExitStack() as stack:
        dataset = stack.enter_context(closing(_dataset(request, checkpoint, tiling)))
        writers = [stack.enter_context(RasterWriter(layout)) for layout in mapping.layouts]
        # Each rank holds the file before any can fail: the one that fails removes its name, and must be heard first.
        mesh.communicator.barrier()
        progress = stack.enter_context(_progress(passes.pieces(parts) or len(parts), request, mesh))
        stack.enter_context(torch.inference_mode())
        stack.enter_context(doing("mapping"))
        loaded, pixels = parts if passes.loads else (), passes.loads_pixels
        samples = prefetch(loaded, lambda p: dataset.load(p.image, p.tile, pixels), request.threads, request.prefetch)
        if progress is not None and not passes.pieces(parts):  # rank 0 is no pipeline's end: it shows what it has read
            samples = _shown(samples, progress)
        ignore_index = checkpoint.saved.config.data.ignore_index
        for done, (sample, piece) in enumerate(ticking(passes.outputs(samples, parts)), start=1):
            scores_KHW, valid_HW = piece.logits_BKHW[0], sample.valid_HW[piece.in_part.slices]
            classes_HW = scores_KHW.argmax(0).to(torch.uint8).cpu().numpy()
            classes_HW[~valid_HW] = ignore_index
            writers[0].write(piece.core, classes_HW[None])
            if len(writers) > 1:
                writers[1].write(piece.core, _probabilities(scores_KHW, valid_HW))
            if progress is not None:
                progress.advance(done, f"mapping rows {piece.core.row.start} to {piece.core.row.stop}")
    parallel.close()


def load_trained(checkpoint: Checkpoint, unet: UNet) -> FlatNetwork:
    """The checkpoint's network, ready to map, on the CPU, in the dtype that it was trained in: no digit is lost."""
    use_one_kernel(True)
    network = build_unet(unet).to(PARAMETER_DTYPES[checkpoint.state["config"]["train"]["precision"]])
    load_network(checkpoint, network)
    network.eval()
    return network


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


def _dataset(request: Request, checkpoint: Checkpoint, tiling: Tiling) -> Dataset:
    data = checkpoint.saved.config.data
    reader = open_raster(request.image, data.bands, data.nodata, request.references)
    return Dataset([reader], None, [tiling], None, checkpoint.saved.normalization, INPUT_DTYPES[request.precision])


@contextmanager
def _progress(total: int, request: Request, mesh: Mesh) -> Iterator[StepProgress | None]:
    if not mesh.is_root or request.verbosity == 0:
        yield None
        return
    with closing(StepProgress(total, 0, request.verbosity)) as progress:
        yield progress
