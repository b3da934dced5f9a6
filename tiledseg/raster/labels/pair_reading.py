"""The opening of an image with its labels on one grid: rasters, warped if asked, or polygons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiledseg.config.checks import shown
from tiledseg.errors import ConfigError, LabelError, RasterError
from tiledseg.raster.info import RasterInfo, check_grids_match
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.raster.places import warped_reader
from tiledseg.raster.reader import open_raster
from tiledseg.raster.remote import VECTOR_ENDINGS, is_vector
from tiledseg.raster.statistics import check_alike

if TYPE_CHECKING:
    from tiledseg.raster.labels.polygons import PolygonReader

IGNORED = "ignored"


@dataclass(frozen=True)
class PairReading:
    """The settings for reading images and their labels (group `data`). `label_map` None: labels hold class numbers."""

    label_map: LabelMap | None
    bands: Sequence[int] | None = None
    nodata: float | None = None
    references: bool = False
    label_layer: str | None = None
    label_attribute: str | None = None
    background: str | int | None = None
    warp: bool = False

    def open_image(self, path: str) -> RasterReader:
        """Open an image on its own grid."""
        return open_raster(path, self.bands, self.nodata, self.references)

    def open_labels(self, path: str, image: RasterInfo) -> RasterReader:
        """Open the labels of an image on its grid, and check their bands against the classes. Raises RasterError,
        LabelError and ConfigError."""
        if is_vector(path):
            return self._open_polygons(path, image)
        reader = open_raster(path, references=self.references)
        try:
            try:
                check_grids_match(image, reader.info)
            except RasterError as error:
                if not self.warp:
                    raise RasterError(f"{error}, or have labels warped to the image's with data.warp true") from None
                reader = warped_reader(reader, image, "data.warp")
            if self.label_map is not None:
                self.label_map.resolve(reader.info)
        except BaseException:
            reader.close()
            raise
        return reader

    def _open_polygons(self, path: str, image: RasterInfo) -> PolygonReader:
        from tiledseg.raster.labels.polygons import PolygonReader, read_polygons

        label_map = self.label_map
        if label_map is None:
            raise ConfigError("data.classes is not given, but the labels are polygons; give it")
        names = [record.name for record in label_map.classes]
        layer, attribute, given = self.label_layer, self.label_attribute, self.background
        known = {**label_map.numbers, IGNORED: label_map.ignore_index}
        background = None if given is None else known.get(str(given))
        if background is None:
            value = "null" if given is None else shown(given)
            raise ConfigError(
                f"data.background is {value}, but pixels outside the polygons of {path} need a class; give it "
                f"one of {', '.join(names[:9])}, or {IGNORED}"
            )
        polygons = read_polygons(path, image, layer, attribute)
        if polygons.values is None:
            others = [number for number in range(label_map.count) if number != background]
            if len(others) != 1:
                raise ConfigError(
                    f"data.label_attribute is null, but the polygons of {path} may be of {len(others)} "
                    "classes; name the attribute with their class"
                )
            numbers = others * len(polygons.numbers)
        else:
            numbers = []
            for value, feature in zip(polygons.values, polygons.numbers, strict=True):
                number = label_map.class_of(value)
                if number is None:
                    raise LabelError(
                        f"{path}, feature {feature} has {attribute} {shown(value)!r}, outside the classes "
                        f"({', '.join(names[:9])}); add it to the values of a class, or of one that is ignored"
                    )
                numbers.append(number)
        return PolygonReader(path, image, polygons, numbers, background, names)

    def check_used(self, paths: Sequence[str]) -> None:
        """Raise ConfigError if keys of polygons are given, but no labels are polygons."""
        keys = ("label_layer", "label_attribute", "background")
        used = [key for key in keys if getattr(self, key) is not None]
        if used and not any(map(is_vector, paths)):
            raise ConfigError(
                f"data.{used[0]} is given, but no labels are polygons; leave it out, or give a vector file"
            )

    def inspect(
        self, image_paths: Sequence[str], label_paths: Sequence[str]
    ) -> tuple[tuple[RasterInfo, ...], tuple[RasterInfo, ...]]:
        """Return the infos of the images and of their labels; no labels without paths. Raises RasterError, LabelError
        or ConfigError for the first fault."""
        images, labels, counts = [], [], []
        for number, image_path in enumerate(image_paths):
            with self.open_image(image_path) as image:
                images.append(image.info)
            if label_paths:
                with self.open_labels(label_paths[number], image.info) as label:
                    labels.append(label.info)
                    counts += [label.count] if is_vector(label_paths[number]) else []  # type: ignore[attr-defined]
        check_any_polygon(label_paths, counts)
        check_alike(images)
        return tuple(images), tuple(labels)


def check_any_polygon(paths: Sequence[str], counts: Sequence[int]) -> None:
    """Raise RasterError if polygons were read, and none lies in any image."""
    if counts and not any(counts):
        raise RasterError(f"{paths[0]} has no polygon in the image, nor in any other; check its CRS and its place")


def area_reader(path: str, image: RasterInfo, key: str = "data.area") -> PolygonReader:
    """Open a mask on the grid of an image: 1 inside the polygons of a vector file, 0 elsewhere."""
    from tiledseg.raster.labels.polygons import PolygonReader, read_polygons

    if not is_vector(path):
        raise ConfigError(f"{key} is {path}; give a file of polygons ({', '.join(VECTOR_ENDINGS)})")
    polygons = read_polygons(path, image)
    return PolygonReader(path, image, polygons, [1] * len(polygons.numbers), 0)
