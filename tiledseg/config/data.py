"""Rasters to learn from: the configuration's group `data`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from tiledseg.config.checks import AUTO, LARGEST_HALO, LIST_ENDINGS, Group, Need, number, shown, with_times, word
from tiledseg.errors import ConfigError

IMAGENET = "imagenet"
ClassEntry = str | int | bool | None | list[str | int | None]
"""A value in the record of a class. Text comes first: as YAML '#ff0000' is a comment, and the value null."""
CLASSES = "2 to 255 classes, a list of records {name, colour, values}, or a CSV file of them"

SPLIT = "[R, C], blocks along rows and columns, or the side of a block, as 512 px"
GAP = "auto, or a number of pixels from 0 on"
_MASK = Need("valid", "a band or a raster", lambda data: data.valid is not None)


@dataclass
class BlockSplit(Group):
    """The fields of `data.split`. `share`: of all blocks, drawn by `seed`, to validate on. `gap`: around each."""

    blocks: list[int] | str = number(None, 1, 4096, pair=True, remedy=SPLIT)
    share: float = number(0.2, 0.0, 1.0, above=True, below=True)
    gap: int | str = number(AUTO, 0, LARGEST_HALO, texts=(AUTO,), remedy=GAP)
    seed: int = number(0, 0, 2**63 - 1)

    def cut(self) -> list[int] | int:
        """Return the blocks along rows and columns, or the side of a block in pixels. Raises ConfigError."""
        if isinstance(self.blocks, list):
            return self.blocks
        match = re.fullmatch(r"\s*([1-9]\d{0,8})\s*px\s*", self.blocks)
        if match is None:
            raise ConfigError(f"data.split: blocks is {shown(self.blocks)}; give {SPLIT}")
        return int(match[1])

    def check_together(self) -> None:
        self.cut()


def read_split(given: list[Any] | str | dict[str, Any] | None) -> BlockSplit | None:
    """Return the fields of `[2, 3]`, `512 px` or `{blocks: [2, 3], share: 0.3}`; None for none. Raises ConfigError."""
    fields = given if isinstance(given, dict) else {"blocks": given}
    return None if given is None else BlockSplit.of("data.split", fields)


@dataclass
class DataConfig(Group):
    """Rasters to learn from.

    Args:
        images: paths, folders, globs or URLs of the training images, variables of Zarr stores and netCDF files
            (store.zarr:/variable), a list of them (.txt, .csv, .geojson, .gti.gpkg), STAC items (.json, .parquet), or
            one HDF5 tile store (docs/how-to/own-data.md)
        labels: the same of their labels, in the same order; or a pattern such as labels/{stem}_L.png; or polygons
            (.gpkg, .geojson, .shp, .fgb)
        val_images: images to validate on
        val_labels: their labels
        classes: number of classes, a list of {name, colour, values}, or a .csv file (docs/how-to/own-data.md)
        assets: names of the assets of a STAC item that are an image's bands, in this order
        mosaic: join the rasters of each entry of images (glob, folder, list) to one image; they share a pixel grid
        valid: mask of pixels that count, and that a map has: a band's number, an asset of STAC items, or rasters by a
            folder or a pattern such as clouds/{stem}.tif
        valid_values: values of the mask that count (default: all but 0)
        label_layer: layer of labels that are polygons (default: the file's only one)
        label_attribute: attribute of polygons that holds the class, by name or by value (default: one class alone)
        background: class of pixels in no polygon, by name or number; ignored: they count nowhere
        warp: bring labels of another grid, or CRS, to the image's: the nearest pixel
        area: polygons (.gpkg, .geojson, .shp, .fgb): pixels outside count nowhere, in training and validation
        split: hold out some blocks of each image to validate on: [R, C] blocks along rows and columns, or the side of a
            block, as 512 px; {blocks: 512 px, share: 0.2, gap: auto, seed: 0} says how many, how far apart (pixels;
            auto: the network's halo), and by which draw (docs/how-to/own-data.md)
        ignore_index: class number of pixels that count nowhere
        times: texts that replace {time} in images and val_images: an image is the rasters of all times, the bands of
            the first time first (docs/how-to/own-data.md)
        nodata: value of image pixels without data (default: what the raster says)
        bands: band numbers to read, from 1 (default: all but alpha)
        references: open formats that name further files and URLs, such as VRT and WMS (docs/explanation/security.md)
        normalize: standardise each band by its mean and deviation over the training images; imagenet: by those of
            published encoders for the first three bands, which are red, green and blue of 8 bits
        workers: reading threads a rank, each one tile ahead
    """

    images: str | list[str] = field(default_factory=list)
    labels: str | list[str] = field(default_factory=list)
    val_images: str | list[str] = field(default_factory=list)
    val_labels: str | list[str] = field(default_factory=list)
    classes: int | dict[str | int, ClassEntry | dict[str, ClassEntry]] | list[dict[str, ClassEntry]] | str = number(
        2, 0, 255, remedy=CLASSES
    )
    assets: list[str] = field(default_factory=list)
    mosaic: bool = False
    valid: int | str | None = number(None, 1, 65535)
    valid_values: list[float] = number([], -math.inf, math.inf, need=_MASK)
    label_layer: str | None = None
    label_attribute: str | None = None
    background: str | int | None = number(None, 0, 254)
    warp: bool = False
    area: str | None = None
    split: list[Any] | str | dict[str, Any] | None = None
    ignore_index: int = number(255, 0, 255, remedy="a number from 0 to 255")
    times: list[str] = field(default_factory=list)
    nodata: float | None = number(None, -math.inf, math.inf, nan=True)
    bands: list[int] | None = number(None, 1, 65535, remedy="different band numbers from 1 on")
    references: bool = False
    normalize: bool | str = word(True, "true", "false", IMAGENET)
    workers: int = number(2, 1, 256)

    @property
    def composing(self) -> tuple[tuple[str, ...], bool, int | str | None, tuple[float, ...], tuple[str, ...], bool]:
        """Return how images are made of rasters (`raster.lists.SourceRules`)."""
        return tuple(self.assets), self.mosaic, self.valid, tuple(self.valid_values), tuple(self.times), self.references

    @property
    def reading(self) -> dict[str, Any]:
        """Return how images and labels are read (`raster.labels.pair_reading.PairReading`)."""
        of_labels = "label_layer", "label_attribute", "background", "warp"
        return {name: getattr(self, name) for name in ("bands", "nodata", "references", *of_labels)}

    def check_together(self) -> None:
        if not self.images:
            raise ConfigError("data.images is empty; give at least one image")
        judged = [self.val_images] if isinstance(self.val_images, str) else self.val_images
        may_name_labels = bool(judged) and all(path.lower().endswith(LIST_ENDINGS) for path in judged)
        if bool(self.val_images) != bool(self.val_labels) and not may_name_labels:
            given, missing = ("val_images", "val_labels") if self.val_images else ("val_labels", "val_images")
            raise ConfigError(f"data.{given} is given, but data.{missing} is empty; give both or neither")
        if isinstance(self.classes, (int, float)) and not (type(self.classes) is int and 2 <= self.classes <= 255):
            raise ConfigError(f"data.classes is {shown(self.classes)}; give {CLASSES}")
        for key in ("images", "val_images"):
            self.joined(getattr(self, key), f"data.{key}")
        if self.bands is not None and (not self.bands or len(set(self.bands)) < len(self.bands)):
            raise ConfigError(f"data.bands is {self.bands}; give different band numbers from 1 on")
        if self.val_images and isinstance(self.valid, str) and "{" not in self.valid and not self.assets:
            raise ConfigError(
                f"data.valid is {shown(self.valid)}, and data.val_images are given; name the rasters of both by a "
                "pattern, as clouds/{stem}.tif"
            )
        if read_split(self.split) is not None and self.val_images:
            raise ConfigError("data.split and data.val_images are both given; validate on blocks, or on other images")

    def joined(self, paths: str | list[str], key: str) -> list[str]:
        """Return patterns with all times (`with_times`)."""
        return with_times([paths] if isinstance(paths, str) else paths, self.times, key)
