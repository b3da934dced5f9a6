"""The rasters of a run: facts of their files, how they are read, and how each is cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce

import numpy as np

from tiledseg.config.data import IMAGENET, DataConfig, read_split
from tiledseg.config.run import Config
from tiledseg.config.words import augmentation
from tiledseg.errors import ConfigError
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.tiling import Tiling
from tiledseg.planning.run.question import Extent
from tiledseg.planning.run.spread import measuring, norm_words
from tiledseg.raster.composed import Inside, masked_reader
from tiledseg.raster.finding import as_list, check_assets, pair_sources
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.raster.labels.pair_reading import PairReading, area_reader
from tiledseg.raster.lists import HELD_OUT, HELD_OUT_ALONE, LEARNT, Parts, SourceRules, has_validation
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.raster.reader import KnownReader
from tiledseg.raster.samples.content import SplitPart, split_images
from tiledseg.raster.samples.dataset import check_cut, layout_warning
from tiledseg.raster.statistics import check_alike


@dataclass(frozen=True)
class RasterSet:
    """A set of images with their labels: facts and paths of the files, how they are read, and how each is cut.
    `tilings`: one for each image; none before the cut, and where windows are drawn. Pixels count inside the polygons of
    the file `area` and inside `parts`, one for each image; empty: everywhere. A file is opened at its first read."""

    infos: tuple[RasterInfo, ...]
    label_infos: tuple[RasterInfo, ...]
    images: tuple[str, ...]
    labels: tuple[str, ...]
    reading: PairReading
    tilings: tuple[Tiling, ...] = ()
    area: str | None = None
    parts: tuple[SplitPart, ...] = ()

    @property
    def extents(self) -> tuple[Extent, ...]:
        return tuple(Extent(info.shape, info.tiling.grid if info.tiling else None) for info in self.infos)

    def cut(self, tilings: tuple[Tiling, ...], area: str | None, parts: tuple[SplitPart, ...]) -> RasterSet:
        """Return the set with its tilings. Raises RasterError for a tile store with another grid."""
        for image, label, tiling in zip(self.infos, self.label_infos, tilings, strict=bool(tilings)):
            check_cut(image, tiling)
            check_cut(label, tiling)
        return replace(self, tilings=tilings, area=area, parts=parts)

    def open_image(self, number: int) -> RasterReader:
        info = self.infos[number]
        return KnownReader(info, lambda: self.reading.open_image(self.images[number]))

    def open_counted(self, number: int) -> RasterReader:
        """Open an image for statistics: its pixels are valid only where labels may count."""
        return self._masked(self.open_image(number), number)

    def open_labels(self, number: int) -> RasterReader:
        opened = partial(self.reading.open_labels, self.labels[number], self.infos[number])
        return self._masked(KnownReader(self.label_infos[number], opened), number)

    def _masked(self, reader: RasterReader, number: int) -> RasterReader:
        inside, areas = self._counting(number)
        return reader if inside is None else masked_reader(reader, inside, areas)

    def _counting(self, number: int) -> tuple[Inside | None, Sequence[RasterReader]]:
        """Return the mask of an image's pixels that count (None: all), and the readers that it reads."""
        areas = [area_reader(self.area, self.infos[number])] if self.area else []
        masks: list[Inside] = [self.parts[number].inside] if self.parts else []
        masks += [lambda box, area=area: area.read(box)[0][0] == 1 for area in areas]  # type: ignore[misc]
        return (lambda box: reduce(np.logical_and, [mask(box) for mask in masks])) if masks else None, areas

    def kept(self, tilings: Sequence[Tiling]) -> tuple[tuple[int, ...], ...] | None:
        """Return each image's tiles in which pixels may count; None: all. Raises ConfigError if an image has none."""
        if not self.area and not self.parts:
            return None
        kept = []
        for number, tiling in enumerate(tilings):
            inside, _ = self._counting(number)
            assert inside is not None, "only a part counts"
            kept.append(tuple(at for at, tile in enumerate(tiling.tiles) if inside(tile.core).any()))
            if not kept[-1]:
                keys = [f"data.area {self.area}"] * bool(self.area) + ["data.split"] * bool(self.parts)
                raise ConfigError(
                    f"{' with '.join(keys)} leaves no pixel of {self.infos[number].path} to learn from; leave the "
                    "image out, or change the key"
                )
        return tuple(kept)


def inspect_files(data: DataConfig, label_map: LabelMap) -> tuple[RasterSet, RasterSet | None]:
    """Read the headers of all images and labels; return the training set and the validation set, None without one.
    Raises RasterError, LabelError or ConfigError for the first faulty pair."""
    reading = PairReading(label_map, **data.reading)

    def inspect(keys: tuple[str, str], parts: Parts) -> RasterSet:
        images, labels = data.joined(getattr(data, keys[0]), f"data.{keys[0]}"), as_list(getattr(data, keys[1]))
        names = f"data.{keys[0]}", f"data.{keys[1]}"
        paths = pair_sources(images, labels, names, SourceRules(*data.composing, parts))
        return RasterSet(*reading.inspect(*paths), *paths, reading)

    learnt, held_out = inspect(("images", "labels"), LEARNT), None
    reading.check_used(learnt.labels)
    check_assets(data.assets, learnt.images)
    image = learnt.infos[0]
    if data.normalize == IMAGENET and (image.dtype != "uint8" or image.bands < 3):
        raise ConfigError(
            f"data.normalize is imagenet, for red, green and blue of 8 bits, but {image.path} has {image.bands} bands "
            f"of {image.dtype}; set the key to true, or select such bands with data.bands"
        )
    if data.split:
        held_out = learnt
    elif data.val_images:
        held_out = inspect(("val_images", "val_labels"), HELD_OUT_ALONE)
    elif has_validation(data.joined(data.images, "data.images")):
        held_out = inspect(("images", "labels"), HELD_OUT)
    if held_out:
        check_alike([learnt.infos[0], *held_out.infos])
    return learnt, held_out


def layout_notes(infos: Sequence[RasterInfo], tilings: Sequence[Tiling]) -> list[str]:
    """Return the warnings on files, and on layouts that are slow to read by these tilings; equal ones share a line."""
    alike: dict[str, list[str]] = {}
    for info in infos:
        for note in info.notes:
            alike.setdefault(note.removeprefix(info.path), []).append(note)
    slow = [w for info, tiling in zip(infos, tilings, strict=bool(tilings)) if (w := layout_warning(info, tiling))]
    groups = [*alike.values(), *([slow] if slow else [])]
    return [group[0] + (f" (and {len(group) - 1} more files)" if len(group) > 1 else "") for group in groups]


def split_of(
    config: Config, graph: Graph, halo: int, infos: Sequence[RasterInfo]
) -> tuple[tuple[SplitPart, ...], tuple[SplitPart, ...], tuple[str, ...]]:
    """Split the images into blocks by `data.split`; return the training part and the validation part of each image, and
    notes for the user; all empty without a split. `halo`: of the network, in pixels. Raises ConfigError if a layer sees
    whole images, because no gap separates the blocks then; `parallel.exact: false` accepts it."""
    split, reach = read_split(config.data.split), augmentation(config.train.augment).reach
    if split is None:
        return (), (), ()
    seeing, keyed = measuring(graph), config.model.build is None
    if seeing and config.parallel.exact:
        raise ConfigError(
            f"data.split is {split.blocks}, but {norm_words(seeing[0], keyed)}: its statistics over an image hold "
            f"pixels that are validated on; use {'model.norm none or pixel, ' if keyed else ''}data.val_images, or "
            "accept it: parallel.exact false"
        )
    notes: tuple[str, ...] = ()
    if seeing:
        notes += (f"data.split: {norm_words(seeing[0], keyed)}, and sees all blocks of an image",)
    auto = math.ceil(halo * reach) + (reach != 1)  # pixels of the raster: augmentation may scale or rotate the halo
    gap = auto if isinstance(split.gap, str) else split.gap
    if gap < auto:
        notes += (f"data.split: gap is {split.gap}, below {auto} px: validation outputs see training pixels",)
    return *split_images([info.shape for info in infos], split.cut(), gap, split.share, split.seed), notes
