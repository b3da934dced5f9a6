"""Opening an image with its labels, on one grid: as they lie, or where asked, one brought to the other's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tiledseg.errors import ConfigError, RasterError
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.labels.label_map import check_grids_match
from tiledseg.raster.labels.label_sources import LabelReading
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.raster.names import is_vector
from tiledseg.raster.reading.reader import open_raster
from tiledseg.raster.statistics import check_alike


@dataclass(frozen=True)
class PairReading:
    """How images are read, as `open_raster` has it, and how their `labels` are. `warps_images`: those of another grid
    than their labels are brought to it."""

    bands: Sequence[int] | None
    nodata: float | None
    references: bool
    labels: LabelReading
    warps_images: bool = False

    def open_image(self, path: str) -> RasterReader:
        """As it lies."""
        return open_raster(path, self.bands, self.nodata, self.references)

    @contextmanager
    def open_pair(self, image_path: str, label_path: str) -> Iterator[tuple[RasterReader, RasterReader]]:
        """Both on one grid, for a look at what they say. Raises RasterError, LabelError and ConfigError."""
        with self._on_labels(image_path, label_path) as image, self.labels.open(label_path, image.info) as label:
            yield image, label

    def open_as(self, path: str, seen: RasterInfo) -> RasterReader:
        """An image as `open_pair` has shown it."""
        reader = self.open_image(path)
        if not self.warps_images or _one_grid(reader.info, seen):
            return reader
        from tiledseg.raster.labels.warped_reader import BlendedReader

        return BlendedReader(reader, seen)

    def inspect(
        self, image_paths: Sequence[str], label_paths: Sequence[str]
    ) -> tuple[tuple[RasterInfo, ...], tuple[RasterInfo, ...]]:
        """What the images, and their labels (none: no paths), say of themselves. Raises RasterError, LabelError and
        ConfigError for the first that cannot be."""
        images, labels, counts = [], [], []
        for image_path in image_paths if not label_paths else ():
            with self.open_image(image_path) as image:
                images.append(image.info)
        for image_path, label_path in zip(image_paths, label_paths, strict=bool(label_paths)):
            with self.open_pair(image_path, label_path) as (image, label):
                images.append(image.info)
                labels.append(label.info)
                counts += [_polygons_in(label)] if is_vector(label_path) else []
        if counts:
            from tiledseg.raster.labels.polygon_reader import check_any

            check_any(label_paths, counts)
        check_alike(images)
        return tuple(images), tuple(labels)

    def _on_labels(self, image_path: str, label_path: str) -> RasterReader:
        if not self.warps_images:
            return self.open_image(image_path)
        if is_vector(label_path):
            raise ConfigError(
                f"data.warp_images is true, but the labels {label_path} are polygons, which have no grid; leave it "
                "out: they are drawn on the image's"
            )
        with open_raster(label_path, references=self.references) as label:
            return self.open_as(image_path, label.info)


def _polygons_in(labels: RasterReader) -> int:
    from tiledseg.raster.labels.polygon_reader import PolygonReader

    assert isinstance(labels, PolygonReader), "vector files are polygons"
    return labels.count


def _one_grid(image: RasterInfo, label: RasterInfo) -> bool:
    try:
        check_grids_match(image, label)
    except RasterError:
        return False
    return True
