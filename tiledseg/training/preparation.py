"""Everything that can be known, and refused, before a run starts: files, network, and its plan.

One rank looks at the files and tells the others; nothing is written and no pixel is read.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from tiledseg.architecture.presets import build_network
from tiledseg.config import Config, DataConfig
from tiledseg.geometry.tiling import Tiling
from tiledseg.planning.run.parallelism import parallelism
from tiledseg.planning.run.plan import Extent, RunPlan, RunQuestion, plan_run
from tiledseg.raster.info import RasterInfo, reference_notes
from tiledseg.raster.labels import LabelMap, check_grids_match
from tiledseg.raster.layout import check_cut, layout_warning
from tiledseg.raster.reader import open_raster
from tiledseg.raster.sampling import Sampler
from tiledseg.raster.sources import as_list, pair_sources
from tiledseg.raster.statistics import check_alike
from tiledseg.training.first_weights import check_imagenet


@dataclass(frozen=True)
class RasterSet:
    """Images, their labels, and how each is cut."""

    images: tuple[str, ...]
    labels: tuple[str, ...]
    tilings: tuple[Tiling, ...]


@dataclass(frozen=True)
class Preparation:
    """A run that can start: a value that one rank computes and all share."""

    question: RunQuestion
    plan: RunPlan
    label_map: LabelMap
    sampler: Sampler
    training: RasterSet
    validation: RasterSet | None
    warnings: tuple[str, ...]
    files: tuple[str, ...]  # all that the rasters are read from


def prepare(config: Config, memory_bytes: int, ranks: int) -> Preparation:
    """Check a configuration against the files that it names, and plan the run on them.

    `memory_bytes` is what one rank may use; `ranks` how many there are: both change speed and memory only. Raises
    InputError of some kind for the first thing that cannot be.
    """
    config.check()
    label_map = LabelMap.from_config(class_map(config.data), config.data.ignore_index)
    found = _inspect(config.data, label_map, "images", "labels")
    check_imagenet(config.data.normalize, found.images[0])
    held_out = None
    if config.data.val_images:
        held_out = _inspect(config.data, label_map, "val_images", "val_labels")
        check_alike([found.images[0], *held_out.images])
    network = build_network(config.model, found.images[0].bands, label_map.count)
    train = config.train
    question = RunQuestion(
        network,
        found.extents,
        ranks,
        memory_bytes,
        parallelism(config.parallel),
        train.precision,
        held_out=held_out.extents if held_out else (),
        grid=config.tiling.grid_shape(),
        halo=config.tiling.halo_width(),
        tiles_per_step=train.tiles_per_step,
        images_per_step=train.images_per_step,
    )
    plan = plan_run(question)
    sampler = Sampler(tuple(map(len, plan.tilings)), train.seed, train.tiles_per_step, train.images_per_step)
    every = [part for part in (found, held_out) if part]
    notes = reference_notes([info for part in every for info in (*part.images, *part.labels)])
    return Preparation(
        question,
        plan,
        label_map,
        sampler,
        found.cut(plan.tilings),
        held_out.cut(plan.held_out) if held_out else None,
        (*notes, *_notes(found.images, plan.tilings), *plan.warnings),
        tuple(file for part in every for file in part.files),
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

    @property
    def extents(self) -> tuple[Extent, ...]:
        return tuple(Extent(info.shape, info.tiling.grid if info.tiling else None) for info in self.images)

    def cut(self, tilings: tuple[Tiling, ...]) -> RasterSet:
        """Raises RasterError for a tile store that was cut otherwise."""
        for image, label, tiling in zip(self.images, self.labels, tilings, strict=True):
            check_cut(image, tiling)
            check_cut(label, tiling)
        return RasterSet(self.image_paths, self.label_paths, tilings)


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


def class_map(data: DataConfig) -> int | Mapping[Hashable, int | None]:
    """`data.classes` as the label map takes it."""
    return data.classes if isinstance(data.classes, int) else dict(data.classes.items())


def _notes(infos: Sequence[RasterInfo], tilings: Sequence[Tiling]) -> list[str]:
    notes = [note for info in infos for note in info.notes]
    slow = [w for info, tiling in zip(infos, tilings, strict=True) if (w := layout_warning(info, tiling))]
    if len(slow) > 1:
        slow = [f"{slow[0]} (and {len(slow) - 1} more files)"]
    return notes + slow
