"""The rasters of a run: what their files say of themselves, how they are read, and how each is cut."""

from __future__ import annotations

from collections.abc import Sequence

from tiledseg.errors import ConfigError
from tiledseg.geometry.tiling import Tiling
from tiledseg.planning.run.question import Extent
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.labels.masked_reader import Inside, MaskedReader, area_reader
from tiledseg.raster.labels.pair_reading import PairReading
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.raster.reading.known_reader import KnownReader
from tiledseg.raster.samples.layout import check_cut
from tiledseg.raster.samples.spatial_split import Part
from tiledseg.records import dataclass


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
    parts: tuple[Part, ...] = ()

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
class Found:
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

    def cut(self, tilings: tuple[Tiling, ...], area: str | None = None, parts: tuple[Part, ...] = ()) -> RasterSet:
        """`area`, `parts`: as `RasterSet`. Raises RasterError for a tile store that was cut otherwise."""
        for image, label, tiling in zip(self.images, self.labels, tilings, strict=bool(tilings)):
            check_cut(image, tiling)
            check_cut(label, tiling)
        paths, infos = (self.image_paths, self.label_paths), (self.images, self.labels)
        return RasterSet(*paths, tilings, self.reading, *infos, area, parts)


def inspect(image_paths: tuple[str, ...], label_paths: tuple[str, ...], reading: PairReading) -> Found:
    """Open each image with its labels. Raises RasterError, LabelError and ConfigError for the first pair that cannot
    be."""
    return Found(*reading.inspect(image_paths, label_paths), image_paths, label_paths, reading)
