"""The rasters of a run: what their files say of themselves, how they are read, and how each is cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tiledseg.config.data import IMAGENET, DataConfig, read_split
from tiledseg.config.run import Config
from tiledseg.config.words import augmentation
from tiledseg.errors import ConfigError
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.tiling import Tiling
from tiledseg.planning.run.question import Extent
from tiledseg.planning.run.spread import measuring, said
from tiledseg.raster.composed import Inside, MaskedReader
from tiledseg.raster.finding import as_list, check_assets, pair_sources
from tiledseg.raster.info import RasterInfo, along
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.raster.labels.pair_reading import PairReading, area_reader
from tiledseg.raster.lists import HELD_OUT, HELD_OUT_ALONE, LEARNT, Composing, Parts, has_validation
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.raster.reader import KnownReader
from tiledseg.raster.samples.content import SpatialSplit, SplitCut, SplitPart
from tiledseg.raster.samples.dataset import check_cut, layout_warning
from tiledseg.raster.statistics import check_alike
from tiledseg.units import Length, blocks_of, parse_length


@dataclass(frozen=True)
class RasterSet:
    """Images and their labels, by path and as the files describe themselves, how they are read, and how each is cut (no
    tilings: not yet, or windows are drawn); a file is opened when a pixel of it is read. Pixels count within the
    polygons of the file `area` and within `parts`, one for each image (none: all)."""

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
        """Cut the pairs. Raises RasterError for a tile store that was cut otherwise."""
        for image, label, tiling in zip(self.infos, self.label_infos, tilings, strict=bool(tilings)):
            check_cut(image, tiling)
            check_cut(label, tiling)
        return replace(self, tilings=tilings, area=area, parts=parts)

    def open_image(self, number: int) -> RasterReader:
        info = self.infos[number]
        return KnownReader(info, lambda: self.reading.open_as(self.images[number], info))

    def open_counted(self, number: int) -> RasterReader:
        """Open an image whose pixels are valid where its labels may count: for statistics, not for a network."""
        return self._masked(self.open_image(number), number)

    def open_labels(self, number: int) -> RasterReader:
        path, image = self.labels[number], self.infos[number]
        reader = KnownReader(self.label_infos[number], lambda: self.reading.open_labels(path, image))
        return self._masked(reader, number)

    def _masked(self, reader: RasterReader, number: int) -> RasterReader:
        areas = [area_reader(self.area, self.infos[number])] if self.area else []
        masks: list[Inside] = [self.parts[number].inside] if self.parts else []
        masks += [lambda box, area=area: area.read(box)[0][0] == 1 for area in areas]  # type: ignore[misc]
        return MaskedReader(reader, masks, areas) if masks else reader

    def kept(self, tilings: Sequence[Tiling]) -> tuple[tuple[int, ...], ...] | None:
        """Return each image's tiles in which pixels may count; None: all. ConfigError for an image without any."""
        if not self.area and not self.parts:
            return None
        kept = []
        for number, tiling in enumerate(tilings):
            with self.open_labels(number) as labels:
                assert isinstance(labels, MaskedReader), "only a part counts"
                kept.append(tuple(at for at, tile in enumerate(tiling.tiles) if labels.counts(tile.core)))
            if not kept[-1]:
                keys = [f"data.area {self.area}"] * bool(self.area) + ["data.split"] * bool(self.parts)
                raise ConfigError(
                    f"{' with '.join(keys)} leaves no pixel of {self.infos[number].path} to learn from; leave the "
                    "image out, or change them"
                )
        return tuple(kept)


def inspect_files(data: DataConfig, label_map: LabelMap) -> tuple[RasterSet, RasterSet | None]:
    """Open each image with its labels, those to learn from and those to validate on. Raises RasterError, LabelError and
    ConfigError for the first pair that cannot be."""
    reading = PairReading(label_map, **data.reading)

    def inspect(keys: tuple[str, str], parts: Parts) -> RasterSet:
        images, labels = data.joined(getattr(data, keys[0]), f"data.{keys[0]}"), as_list(getattr(data, keys[1]))
        names = f"data.{keys[0]}", f"data.{keys[1]}"
        paths = pair_sources(images, labels, names, parts, data.references, Composing(*data.composing))
        return RasterSet(*reading.inspect(*paths), *paths, reading)

    learnt, held_out = inspect(("images", "labels"), LEARNT), None
    reading.check_used(learnt.labels)
    check_assets(data.assets, learnt.images)
    image = learnt.infos[0]
    if data.normalize == IMAGENET and (image.dtype != "uint8" or image.bands < 3):
        raise ConfigError(
            f"data.normalize is imagenet, for red, green and blue of 8 bits, but {image.path} has {image.bands} bands "
            f"of {image.dtype}; set it to true, or select such bands with data.bands"
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
    """Return the warnings on files: their own, and those whose layout is slow to read by these tilings. Files that
    differ in their names alone share a line."""
    alike: dict[str, list[str]] = {}
    for info in infos:
        for note in info.notes:
            alike.setdefault(note.removeprefix(info.path), []).append(note)
    slow = [w for info, tiling in zip(infos, tilings, strict=bool(tilings)) if (w := layout_warning(info, tiling))]
    groups = [*alike.values(), *([slow] if slow else [])]
    return [group[0] + (f" (and {len(group) - 1} more files)" if len(group) > 1 else "") for group in groups]


def split_of(
    config: Config, graph: Graph, halo: int, infos: Sequence[RasterInfo]
) -> tuple[SpatialSplit, tuple[str, ...]]:
    """Split the images into blocks that are learnt from or validated on, by `data.split`; return notes too.

    `halo`: of the network, in pixels. Raises ConfigError where a layer sees whole images, which no gap keeps apart,
    unless `parallel.exact` is false.
    """
    split, reach = read_split(config.data.split), augmentation(config.train.augment).reach
    assert split is not None, "there is a split"
    seeing, keyed = measuring(graph), config.model.build is None
    if seeing and config.parallel.exact:
        raise ConfigError(
            f"data.split is {split.blocks}, but {said(seeing[0], keyed)}: its statistics over an image hold pixels "
            f"that are validated on; use {'model.norm none or pixel, ' if keyed else ''}data.val_images, or accept it: "
            "parallel.exact false"
        )
    notes: tuple[str, ...] = ()
    if seeing:
        notes += (f"data.split: {said(seeing[0], keyed)}, and sees all blocks of an image",)
    auto = math.ceil(halo * reach) + (reach != 1)  # in pixels of the raster, where it is shown smaller or rotated
    gap = parse_length(split.gap) if isinstance(split.gap, str) else Length(split.gap)
    cuts = []
    for info in infos:
        rows, cols = (auto, auto) if gap is None else map(math.ceil, along(gap, info, "data.split: gap"))
        cuts.append(SplitCut(info.shape, _blocks(split.blocks, info), (rows, cols)))
    if min(min(cut.gap) for cut in cuts) < auto:
        notes += (f"data.split: gap is {split.gap}, below {auto} px: outputs validated on see pixels trained on",)
    return SpatialSplit(tuple(cuts), split.share, split.seed), notes


def _blocks(split: list[int] | str, info: RasterInfo) -> tuple[int, int]:
    """Return the number of blocks of an image along rows and columns."""
    if not isinstance(split, str):
        return split[0], split[1]
    side = parse_length(split)
    assert side is not None, "the configuration is checked"
    height, width = (blocks_of(*pair) for pair in zip(info.shape, along(side, info, "data.split: blocks"), strict=True))
    return height, width
