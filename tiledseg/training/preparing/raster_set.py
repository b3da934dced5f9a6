"""The rasters of a run: what their files say of themselves, how they are read, and how each is cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tiledseg.errors import ConfigError
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.tiling import Tiling
from tiledseg.planning.run.norms import measuring, said
from tiledseg.planning.run.question import Extent
from tiledseg.raster.georeferencing import along
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.labels.pair_reading import Inside, MaskedReader, PairReading, area_reader
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.raster.reading.reader import KnownReader
from tiledseg.raster.samples.layout import check_cut
from tiledseg.raster.samples.spatial_split import SpatialSplit, SplitCut, SplitPart
from tiledseg.units.quantities import Length, blocks_of, parse_length


@dataclass(frozen=True)
class RasterSet:
    """Images, their labels, how each is cut (no tilings: windows are drawn), and how they are read. `infos`,
    `label_infos`: what they say of themselves: a file is opened when a pixel of it is read. Pixels count within the
    polygons of the file `area` and within `parts`, one for each image (none: all)."""

    images: tuple[str, ...]
    labels: tuple[str, ...]
    tilings: tuple[Tiling, ...]
    reading: PairReading
    infos: tuple[RasterInfo, ...]
    label_infos: tuple[RasterInfo, ...]
    area: str | None = None
    parts: tuple[SplitPart, ...] = ()

    def open_image(self, number: int) -> RasterReader:
        info = self.infos[number]
        return KnownReader(info, lambda: self.reading.open_as(self.images[number], info))

    def open_counted(self, number: int) -> RasterReader:
        """An image whose pixels are valid where its labels may count: for statistics, not for a network."""
        return self._masked(self.open_image(number), number)

    def open_labels(self, number: int) -> RasterReader:
        path, image = self.labels[number], self.infos[number]
        reader = KnownReader(self.label_infos[number], lambda: self.reading.labels.open(path, image))
        return self._masked(reader, number)

    def _masked(self, reader: RasterReader, number: int) -> RasterReader:
        areas = [area_reader(self.area, self.infos[number])] if self.area else []
        masks: list[Inside] = [self.parts[number].inside] if self.parts else []
        masks += [lambda box, area=area: area.read(box)[0][0] == 1 for area in areas]  # type: ignore[misc]
        return MaskedReader(reader, masks, areas) if masks else reader

    def kept(self, tilings: Sequence[Tiling]) -> tuple[tuple[int, ...], ...] | None:
        """Of each image the tiles in which pixels may count; None where all may. Raises ConfigError for an image
        without any."""
        if not self.area and not self.parts:
            return None
        return tuple(self._kept(number, tiling) for number, tiling in enumerate(tilings))

    def _kept(self, number: int, tiling: Tiling) -> tuple[int, ...]:
        with self.open_labels(number) as labels:
            assert isinstance(labels, MaskedReader), "only a part counts"
            found = tuple(at for at, tile in enumerate(tiling.tiles) if labels.counts(tile.core))
        if not found:
            why = (
                f"data.area {self.area} and data.split leave"
                if self.area and self.parts
                else (f"data.area {self.area} leaves" if self.area else "data.split leaves")
            )
            raise ConfigError(f"{why} no pixel of {self.images[number]} to learn from; leave it out, or change them")
        return found


@dataclass(frozen=True)
class PairFiles:
    """What the files say of themselves."""

    images: tuple[RasterInfo, ...]
    labels: tuple[RasterInfo, ...]
    image_paths: tuple[str, ...]
    label_paths: tuple[str, ...]
    reading: PairReading

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(file for info in (*self.images, *self.labels) for file in info.files)

    @property
    def extents(self) -> tuple[Extent, ...]:
        return tuple(Extent(info.shape, info.tiling.grid if info.tiling else None) for info in self.images)

    def cut(self, tilings: tuple[Tiling, ...], area: str | None = None, parts: tuple[SplitPart, ...] = ()) -> RasterSet:
        """`area`, `parts`: as `RasterSet`. Raises RasterError for a tile store that was cut otherwise."""
        for image, label, tiling in zip(self.images, self.labels, tilings, strict=bool(tilings)):
            check_cut(image, tiling)
            check_cut(label, tiling)
        paths, infos = (self.image_paths, self.label_paths), (self.images, self.labels)
        return RasterSet(*paths, tilings, self.reading, *infos, area, parts)


def inspect(image_paths: tuple[str, ...], label_paths: tuple[str, ...], reading: PairReading) -> PairFiles:
    """Open each image with its labels. Raises RasterError, LabelError and ConfigError for the first pair that cannot
    be."""
    return PairFiles(*reading.inspect(image_paths, label_paths), image_paths, label_paths, reading)


class SplitAsked(NamedTuple):
    """As the keys of the configuration have it: [R, C] `blocks` or the side of one, the `share` of them that is
    validated on, and the `gap`: auto, pixels, or a length."""

    blocks: list[int] | str
    share: float
    gap: int | str
    seed: int


def split_of(
    asked: SplitAsked,
    graph: Graph,
    halo: int,
    reach: float,
    exact: bool,
    infos: Sequence[RasterInfo],
    keyed: bool = True,
) -> tuple[SpatialSplit, tuple[str, ...]]:
    """The split of the images into blocks, and what is to be said of it. `halo`: the network's, in pixels; `reach`: how
    many of the raster an augmentation may make of one; `keyed`: as of `norm_fault`.

    Raises ConfigError where a layer sees whole images, which no gap keeps apart, unless not `exact`.
    """
    seeing = measuring(graph)
    if seeing and exact:
        raise ConfigError(
            f"data.split is {asked.blocks}, but {said(seeing[0], keyed)}: its statistics over an image hold pixels "
            f"that are validated on; use {'model.norm none or pixel, ' if keyed else ''}data.val_images, or accept it: "
            "parallel.exact false"
        )
    notes: tuple[str, ...] = ()
    if seeing:
        notes += (f"data.split: {said(seeing[0], keyed)}, and sees all blocks of an image",)
    auto = math.ceil(halo * reach) + (reach != 1)  # in pixels of the raster, where it is shown smaller or rotated
    cuts = tuple(SplitCut(info.shape, _blocks(asked.blocks, info), _gap(asked.gap, auto, info)) for info in infos)
    if min(min(cut.gap) for cut in cuts) < auto:
        notes += (f"data.split_gap is {asked.gap}, below {auto} px: outputs validated on see pixels trained on",)
    return SpatialSplit(cuts, asked.share, asked.seed), notes


def _blocks(split: list[int] | str, info: RasterInfo) -> tuple[int, int]:
    """Return the number of blocks of an image along rows and columns."""
    if not isinstance(split, str):
        return split[0], split[1]
    side = parse_length(split)
    assert side is not None, "the configuration is checked"
    height, width = (blocks_of(*pair) for pair in zip(info.shape, along(side, info, "data.split"), strict=True))
    return height, width


def _gap(gap: int | str, auto: int, info: RasterInfo) -> tuple[int, int]:
    """In pixels, along rows and columns."""
    length = parse_length(gap) if isinstance(gap, str) else Length(gap)
    rows, cols = (auto, auto) if length is None else along(length, info, "data.split_gap")
    return math.ceil(rows), math.ceil(cols)
