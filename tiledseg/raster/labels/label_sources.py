"""Opening the labels of an image, whatever they are kept in: a raster on its grid, or polygons."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiledseg.config.checks import shown
from tiledseg.errors import ConfigError, LabelError, RasterError
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.labels.label_map import LabelMap, check_grids_match
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.raster.names import is_vector
from tiledseg.raster.reading.reader import open_raster

if TYPE_CHECKING:
    from tiledseg.raster.labels.polygon_reader import PolygonReader

IGNORED = "ignored"


@dataclass(frozen=True)
class LabelReading:
    """How labels are read. `references` as `open_raster`. Of polygons: the file's `layer` (None: its only one), the
    `attribute` that names the class (None: there is but one), and the class of pixels in no polygon, `background`: a
    name or a number, or "ignored"; None: not said. `warp`: labels of another grid are brought to the image's.
    `label_map` None: rasters hold class numbers. `key`: how messages name what the user gives."""

    label_map: LabelMap | None
    references: bool = False
    layer: str | None = None
    attribute: str | None = None
    background: str | int | None = None
    warp: bool = False
    key: str = "data.{}"

    def open(self, path: str, image: RasterInfo) -> RasterReader:
        """The labels of an image, on its grid, checked against the classes. Raises RasterError, LabelError and
        ConfigError."""
        if is_vector(path):
            return self._open_polygons(path, image)
        reader = open_raster(path, references=self.references)
        try:
            reader = self._on_grid(reader, image)
            if self.label_map is not None:
                self.label_map.resolve(reader.info)
        except BaseException:
            reader.close()
            raise
        return reader

    def _on_grid(self, reader: RasterReader, image: RasterInfo) -> RasterReader:
        try:
            check_grids_match(image, reader.info)
        except RasterError as error:
            if self.warp:
                from tiledseg.raster.labels.warped_reader import WarpedReader

                return WarpedReader(reader, image)
            key = self._key("warp") if self.key.startswith("--") else f"{self._key('warp')} true"
            raise RasterError(f"{error}, or have labels brought to the image's with {key}") from None
        return reader

    def _key(self, name: str) -> str:
        return self.key.format(name.replace("_", "-") if self.key.startswith("--") else name)

    @property
    def _classes(self) -> LabelMap:
        if self.label_map is None:
            raise ConfigError(f"{self._key('classes')} is not given, but the labels are polygons; give it")
        return self.label_map

    def _open_polygons(self, path: str, image: RasterInfo) -> PolygonReader:
        from tiledseg.raster.labels.polygon_reader import PolygonReader
        from tiledseg.raster.labels.polygons import read_polygons

        background = self._class_of_background(path)
        polygons = read_polygons(path, image, self.layer, self.attribute)
        if polygons.values is None:
            drawn = [self._only_class(path, background)] * len(polygons.numbers)
        else:
            numbered = zip(polygons.values, polygons.numbers, strict=True)
            drawn = [self._class_of(value, f"{path}, feature {number}") for value, number in numbered]
        names = [record.name for record in self._classes.classes]
        return PolygonReader(path, image, polygons, drawn, background, names, self._how)

    @property
    def _how(self) -> str:
        """All that the numbers of polygons follow from, beside their file."""
        label_map = self._classes
        values = label_map.pairs, label_map.texts, label_map.ignore_index
        return json.dumps([self.layer, self.attribute, self.background, *values])

    def _class_of_background(self, path: str) -> int:
        names = [record.name for record in self._classes.classes]
        if self.background == IGNORED:
            return self._classes.ignore_index
        if self.background in names:
            return names.index(str(self.background))
        text = str(self.background)
        if text.isdecimal() and int(text) < len(names):
            return int(text)
        given = "null" if self.background is None else shown(self.background)
        raise ConfigError(
            f"{self._key('background')} is {given}, and {path} says nothing of pixels in no polygon; give it one of "
            f"{', '.join(names[:9])}, or {IGNORED}"
        )

    def _only_class(self, path: str, background: int) -> int:
        others = [number for number in range(self._classes.count) if number != background]
        if len(others) != 1:
            raise ConfigError(
                f"{self._key('label_attribute')} is null, but the polygons of {path} may be of {len(others)} classes; "
                "name the attribute that tells them apart"
            )
        return others[0]

    def _class_of(self, value: Any, feature: str) -> int:
        """The class of an attribute's value: one of the classes' values, or a class's name."""
        number = self._classes.class_of(value)
        if number is None:
            names = ", ".join(record.name for record in self._classes.classes[:9])
            raise LabelError(
                f"{feature} has {self.attribute} {shown(value)!r}, outside the classes ({names}); add it to the values "
                "of a class, or of one that is ignored"
            )
        return number


def check_used(reading: LabelReading, paths: Sequence[str]) -> None:
    """Raise ConfigError for what is said of polygons where no labels are."""
    said = {"layer": "label_layer", "attribute": "label_attribute", "background": "background"}
    given = [key for name, key in said.items() if getattr(reading, name) is not None]
    if given and not any(map(is_vector, paths)):
        key = reading._key(given[0])
        raise ConfigError(f"{key} is given, but no labels are polygons; leave it out, or give a vector file")
