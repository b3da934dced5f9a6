"""Everything that can be known, and refused, before a run starts: files, grids, tilings, network, checkpoint.

One rank looks at the files and tells the others; nothing is written and no pixel is read.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from tiledseg.architecture.presets import build_network
from tiledseg.architecture.unet import UNet
from tiledseg.config import Config, DataConfig
from tiledseg.errors import ConfigError
from tiledseg.geometry.halo import Footprint, network_footprint
from tiledseg.geometry.layer import Layer
from tiledseg.geometry.tiling import Tiling, make_tiling
from tiledseg.planning.norms import check_statistics, exact_modes, norm_fault
from tiledseg.planning.search import choose_grid
from tiledseg.raster.info import RasterInfo, reference_notes
from tiledseg.raster.labels import LabelMap, check_grids_match
from tiledseg.raster.layout import check_cut, layout_warning
from tiledseg.raster.reader import open_raster
from tiledseg.raster.sampling import Sampler
from tiledseg.raster.sources import as_list, pair_sources
from tiledseg.raster.statistics import check_alike
from tiledseg.training.halo_plan import HaloPlan, layer_memory, plan_halos, plan_notes
from tiledseg.training.pipeline_plan import MicroBatchSize, micro_batch_size
from tiledseg.widths import ACTIVATION_BYTES


@dataclass(frozen=True)
class RasterSet:
    """Images, their labels, and how each is cut."""

    images: tuple[str, ...]
    labels: tuple[str, ...]
    tilings: tuple[Tiling, ...]


@dataclass(frozen=True)
class Preparation:
    """A run that can start: a value that one rank computes and all share."""

    network: UNet
    footprint: Footprint
    halo: HaloPlan
    label_map: LabelMap
    sampler: Sampler
    training: RasterSet
    validation: RasterSet | None
    micro_batch: MicroBatchSize
    warnings: tuple[str, ...]
    files: tuple[str, ...] = ()  # all that the rasters are read from


def prepare(config: Config, memory_bytes: int, ranks: int) -> Preparation:
    """Check a configuration against the files that it names and cut them into tiles.

    `memory_bytes` is what one rank may use; `ranks` how many there are: both matter for grid auto only. Raises
    InputError of some kind for the first thing that cannot be.
    """
    config.check()
    label_map = LabelMap.from_config(class_map(config.data), config.data.ignore_index)
    found = _inspect(config.data, label_map, "images", "labels")
    infos = found.images
    network = build_network(config.model, infos[0].bands, label_map.count)
    footprint = network_footprint(network.layers(), config.tiling.halo_width(), config.parallel.exact)
    cutter = _Cutter(config, network, footprint, memory_bytes, max(1, ranks // config.parallel.stages))
    training = cutter.cut(found)
    validation = held_out = None
    notes = reference_notes((*found.images, *found.labels))
    if config.data.val_images:
        held_out = _inspect(config.data, label_map, "val_images", "val_labels")
        notes += reference_notes((*held_out.images, *held_out.labels))
        check_alike([infos[0], *held_out.images])
        validation = cutter.cut(held_out)
    tiles = tuple(len(tiling) for tiling in training.tilings)
    per_step = config.train.images_per_step
    sampler = Sampler(tiles, config.train.seed, config.train.tiles_per_step, per_step)
    tilings = (*training.tilings, *(validation.tilings if validation else ()))
    value = ACTIVATION_BYTES[config.train.precision]
    halo = plan_halos(config.parallel, network.layers(), tilings, ranks, per_step, network.bands, value)
    check_statistics(network.layers(), network.bands, tilings, halo.halo)
    needed = layer_memory(halo, network.layers(), tilings, network.bands, value)
    warnings = [
        *notes,
        *_notes(found.images, training.tilings),
        *plan_notes(halo, ranks, per_step, needed, memory_bytes),
        *_check_exact(config, network.layers(), tilings, halo),
    ]
    per_image = max(tiles)
    in_step = config.train.tiles_per_step or per_image * per_step
    largest = micro_batch_size(halo, network.layers(), tilings, in_step, per_step, value)
    files = (*found.files, *(held_out.files if held_out else ()))
    return Preparation(
        network, footprint, halo, label_map, sampler, training, validation, largest, tuple(warnings), files
    )


@dataclass(frozen=True)
class _Found:
    """What the files say of themselves."""

    images: tuple[RasterInfo, ...]
    labels: tuple[RasterInfo, ...]
    image_paths: tuple[str, ...]
    label_paths: tuple[str, ...]

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(file for info in (*self.images, *self.labels) for file in info.files)


def _inspect(data: DataConfig, label_map: LabelMap, image_key: str, label_key: str) -> _Found:
    image_paths, label_paths = pair_sources(
        as_list(getattr(data, image_key)), as_list(getattr(data, label_key)), (f"data.{image_key}", f"data.{label_key}")
    )
    images, labels = [], []
    for image_path, label_path in zip(image_paths, label_paths, strict=True):
        with (
            open_raster(image_path, data.bands, data.nodata, data.references) as image,
            open_raster(label_path, references=data.references) as label,
        ):
            check_grids_match(image.info, label.info)
            label_map.resolve(label.info)
            images.append(image.info)
            labels.append(label.info)
    check_alike(images)
    return _Found(tuple(images), tuple(labels), image_paths, label_paths)


@dataclass(frozen=True)
class _Cutter:
    config: Config
    network: UNet
    footprint: Footprint
    memory_bytes: int
    pipelines: int  # without stages: ranks

    def cut(self, found: _Found) -> RasterSet:
        tilings = tuple(make_tiling(info.shape, self._grid(info), self.footprint) for info in found.images)
        for image, label, tiling in zip(found.images, found.labels, tilings, strict=True):
            check_cut(image, tiling)
            check_cut(label, tiling)
        return RasterSet(found.image_paths, found.label_paths, tilings)

    def _grid(self, info: RasterInfo) -> tuple[int, int]:
        given = self.config.tiling.grid_shape() or (info.tiling.grid if info.tiling else None)
        if given is not None:
            return given
        parallel, layers = self.config.parallel, self.network.layers()
        if parallel.exact and parallel.halo not in exact_modes(layers, tiles=2):
            return 1, 1
        value = ACTIVATION_BYTES[self.config.train.precision]
        return choose_grid(
            info.shape, layers, self.footprint, self.memory_bytes, value, self.pipelines, bands=self.network.bands
        )


def class_map(data: DataConfig) -> int | Mapping[Hashable, int | None]:
    """`data.classes` as the label map takes it."""
    return data.classes if isinstance(data.classes, int) else dict(data.classes.items())


def _notes(infos: Sequence[RasterInfo], tilings: Sequence[Tiling]) -> list[str]:
    notes = [note for info in infos for note in info.notes]
    slow = [w for info, tiling in zip(infos, tilings, strict=True) if (w := layout_warning(info, tiling))]
    if len(slow) > 1:
        slow = [f"{slow[0]} (and {len(slow) - 1} more files)"]
    return notes + slow


def _check_exact(config: Config, layers: Sequence[Layer], tilings: Sequence[Tiling], halo: HaloPlan) -> list[str]:
    """What tiling would change: a ConfigError, or warnings where `parallel.exact` is false."""
    at_once = max(config.train.images_per_step, config.train.tiles_per_step or 1)
    if halo.halo == "layer":
        at_once = halo.mesh.replicas
    fault = norm_fault(layers, halo.halo, max(map(len, tilings)), at_once)
    if fault and config.parallel.exact:
        raise ConfigError(f"{fault}, or accept it with parallel.exact false")
    return [f"not exact: {fault}"] if fault else []
