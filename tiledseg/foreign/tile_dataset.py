"""Tiles of rasters for a user's own training loop: a dataset of `torch.utils.data`, and a sampler that deals its tiles
to ranks in the order of `raster.samples.sampling`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import data

from tiledseg.comm.launch import detect
from tiledseg.config.checks import MOST, Range, checked, one_of
from tiledseg.config.data import DataConfig
from tiledseg.config.run import TilingConfig
from tiledseg.errors import ConfigError, explained, renamed
from tiledseg.foreign.spread import Halo
from tiledseg.geometry.box import Box
from tiledseg.geometry.halo import Footprint
from tiledseg.geometry.tiling import Tile, make_tiling
from tiledseg.raster.array_names import arrays_of, restore_arrays, takes_arrays
from tiledseg.raster.finding import as_list, check_assets, expand_sources, pair_sources
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.labels.classes import read_classes
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.raster.labels.pair_reading import PairReading
from tiledseg.raster.lists import SourceRules
from tiledseg.raster.reader import KnownReader
from tiledseg.raster.samples.dataset import Dataset
from tiledseg.raster.samples.sampling import Sampler
from tiledseg.raster.statistics import Normalization, given_normalization

IGNORED = 255
Paths = str | Path | Sequence[str | Path]


class TileDataset(data.Dataset[dict[str, Any]]):
    """A dataset of the tiles of `images`, image after image, tiles row by row. Items:

    - `image`: the tile's context, float32 (bands, height, width), the network's input. It ends at the raster's border,
      mirrored to a multiple of the alignment, where the network's own padding begins; for unpadded networks it is
      mirrored beyond;
    - `mask` (with labels): int64, of the shape of the network's output on `image`: the class of each pixel of the
      tile's core, `ignore_index` in the halo and where label or image is not valid. So each pixel counts once an epoch,
      and sums of a loss over the masks equal those over the rasters;
    - `core`: int64, first row, last row, first column, last column (half-open) of the core in the output;
    - `bounds`: float64, left, bottom, right, top of `image` in `crs` (text; empty without one); `transform`: float64,
      the six numbers of rasterio's `Affine` of its first pixel.

    Images and labels are paths, or xarray.DataArrays with x and y. Tiles at a raster's border are smaller, so use
    `batch_size=None` or 1. Of a list, images of split `train` or without a split are used, as in `data.images`.

    `halo`: the result of `tiledseg.halo`, or pixels a side of a network without strides. `grid`: Q, (rows, cols), or
    None for tile stores, which have their own. `classes`: any form of `data.classes`, or a file of them. Labels may be
    polygons: `label_layer`, `label_attribute`, `background`, as in `data`; `warp`: accept labels on another grid.
    `assets`, `mosaic`, `valid`, `valid_values`: images of several rasters, as in `data`. `normalize`: (means,
    deviations) by band, or a `Normalization`; None: pixels unchanged, 0 where they are not valid. Each process opens
    its own files: workers of a DataLoader share no handle.

    Raises InputError for images or labels that cannot be used, before a pixel is read.
    """

    @takes_arrays
    @renamed({f"data.{each.name}": each.name for each in fields(DataConfig)})
    @checked
    def __init__(
        self,
        images: Paths,
        labels: Paths | None = None,
        *,
        halo: Halo | int,
        grid: int | tuple[int, int] | None = None,
        classes: int | Mapping[Any, Any] | Sequence[Mapping[str, Any]] | str = IGNORED,
        ignore_index: int = IGNORED,
        bands: Sequence[int] | None = None,
        nodata: float | None = None,
        normalize: Normalization | tuple[Sequence[float], Sequence[float]] | None = None,
        references: bool = False,
        label_layer: str | None = None,
        label_attribute: str | None = None,
        background: str | int | None = None,
        warp: bool = False,
        assets: Sequence[str] = (),
        mosaic: bool = False,
        valid: int | str | None = None,
        valid_values: Sequence[float] = (),
    ) -> None:
        if not isinstance(halo, Halo):
            Range(0, MOST, remedy="0 or more pixels, or the result of tiledseg.halo").check("halo", halo)
            footprint = Footprint(1, halo, halo)
        elif halo.asks_place:
            what = "the network depends on the position in the whole image (align_corners=True, positions)"
            raise ConfigError(f"{what}; train it by model.build or parallelize, or do without")
        elif halo.whole_image:
            what = f"'{halo.whole_image[0]}' needs values of the whole image, but sees those of a tile"
            raise ConfigError(f"{what}; train with parallelize or parallel.halo layer, or give the halo as a number")
        else:
            footprint = halo.footprint
        of_labels = ("warp", warp, False), ("classes", classes, IGNORED), ("ignore_index", ignore_index, IGNORED)
        for key, value, usual in of_labels:
            if labels is None and value != usual:
                raise ConfigError(f"{key} is {value}, but labels are not given; give them, or leave {key} out")
        image_list, label_list = (as_list(_text(paths)) for paths in (images, labels or ()))
        rules = SourceRules(tuple(assets), mosaic, valid, tuple(valid_values), references=references)
        self._labels: tuple[str, ...] = ()
        if labels is None:
            self._images = expand_sources(image_list, "images", rules)
        else:
            self._images, self._labels = pair_sources(image_list, label_list, ("images", "labels"), rules)
        check_assets(assets, self._images)
        label_map = None if labels is None else LabelMap.from_config(read_classes(classes), ignore_index)
        own = None if bands is None else list(bands), nodata, references
        self._reading = PairReading(label_map, *own, label_layer, label_attribute, background, warp)
        self._reading.check_used(self._labels)
        self._infos, self._label_infos = self._reading.inspect(self._images, self._labels)
        self.tilings = tuple(make_tiling(info.shape, _grid(grid, info), footprint) for info in self._infos)
        self.tiles_per_image = tuple(map(len, self.tilings))
        with explained(self._infos[0].notes):
            self._normalization = given_normalization(normalize, self._infos[0].bands)
        self._places = [(image, tile) for image, tiling in enumerate(self.tilings) for tile in tiling.tiles]
        self._opened: tuple[int, Dataset] | None = None
        self._inherited: tuple[int, Dataset] | None = None  # the parent's handles after a fork; only the parent closes
        self._open()  # check that all files fit together

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, tile = self._places[index]
        sample = self._dataset().load(image, tile)
        core = tile.core_in_output
        item: dict[str, Any] = {
            "image": torch.from_numpy(sample.x_CHW),
            "core": torch.tensor([core.row.start, core.row.stop, core.col.start, core.col.stop]),
            **place(self._infos[image], tile.context),
        }
        if sample.y_HW is not None and self._reading.label_map is not None:
            mask_HW = torch.full(tile.output.shape, self._reading.label_map.ignore_index)
            mask_HW[core.slices] = torch.from_numpy(sample.y_HW).long()
            item["mask"] = mask_HW
        return item

    def where(self, index: int) -> tuple[int, Tile]:
        """Return the number of an item's image, and its tile."""
        return self._places[index]

    def close(self) -> None:
        """Close this process's handles; the next item opens them again."""
        if self._opened is not None and self._opened[0] == os.getpid():
            self._opened[1].close()
        self._opened = None

    def __getstate__(self) -> dict[str, Any]:
        arrays = arrays_of((*self._images, *self._labels))
        return {**self.__dict__, "_opened": None, "_inherited": None, "_arrays": arrays}

    def __setstate__(self, state: dict[str, Any]) -> None:
        restore_arrays(state["_arrays"])
        self.__dict__.update(state)

    def _dataset(self) -> Dataset:
        """Return this process's open files. Files inherited by a fork stay open for the parent."""
        if self._opened is None or self._opened[0] != os.getpid():
            self._inherited = self._opened
            self._opened = os.getpid(), self._open()
        return self._opened[1]

    def _open(self) -> Dataset:
        """Return the tiles, whose files are opened at their first reads."""
        reading = self._reading
        pairs = zip(self._images, self._infos, strict=True)
        images = [KnownReader(info, partial(reading.open_image, path)) for path, info in pairs]
        rows = zip(self._labels, self._infos, self._label_infos, strict=bool(self._labels))
        labels = [KnownReader(info, partial(reading.open_labels, path, image)) for path, image, info in rows]
        return Dataset(images, labels or None, self.tilings, reading.label_map, self._normalization)


def place(info: RasterInfo, window: Box) -> dict[str, Any]:
    """Return `bounds`, `crs` and `transform` of a window of a raster."""
    from rasterio import Affine  # slow to import, and named here alone
    from rasterio.transform import array_bounds

    own = info.transform if info.transform is not None else Affine.identity()
    transform = own @ Affine.translation(window.col.start, window.row.start)
    return {
        "bounds": torch.tensor(array_bounds(*window.shape, transform), dtype=torch.float64),
        "crs": "" if info.crs is None else info.crs.to_string(),
        "transform": torch.tensor(tuple(transform)[:6], dtype=torch.float64),
    }


def _text(paths: Paths) -> str | list[str]:
    return os.fspath(paths) if isinstance(paths, str | Path) else [os.fspath(path) for path in paths]


def _grid(given: int | tuple[int, int] | None, info: RasterInfo) -> tuple[int, int]:
    if given is None:
        if info.tiling is None:
            raise ConfigError(f"{info.path} is no tile store, so it has no grid; give grid=Q or (rows, cols)")
        return info.tiling.grid
    tiling = TilingConfig(list(given) if isinstance(given, tuple | list) else given)
    tiling.check()
    shape = tiling.grid_shape()
    if shape is None:
        raise ConfigError("tiling.grid is auto, which needs a known memory; give Q or (rows, cols)")
    return shape


class TileSampler(data.Sampler[int]):
    """A sampler of the indices of a `TileDataset` for one rank of `size`, shuffled by (seed, epoch) alone.

    The law: the order of tiles does not depend on `size`; tiles are dealt to ranks in turn. So each tile occurs once an
    epoch, and a step of B tiles has the same ones for every number of ranks that divides B: those of `tiledseg train`
    with this seed and `train.tiles_per_step` B.

    `rank` and `size`: by default those of torch's process group, or else of the launcher. `uneven`: if `size` does not
    divide the number of tiles, `refuse` raises ConfigError; `drop` leaves out the last few of an epoch, others each
    time; `differ` gives some ranks one tile more (a loop that communicates at every step then deadlocks without torch's
    Join).

    Raises ConfigError for an impossible rank, and for uneven tiles.
    """

    @checked
    def __init__(
        self,
        dataset: TileDataset,
        seed: int = 0,
        rank: int | None = None,
        size: int | None = None,
        uneven: str = "refuse",
    ) -> None:
        joined = dist.is_available() and dist.is_initialized()
        launch = detect(os.environ)
        place = (dist.get_rank(), dist.get_world_size()) if joined else (launch.rank, launch.size)
        self.rank, self.size = place[0] if rank is None else rank, place[1] if size is None else size
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank is {self.rank} of {self.size}; ranks count from 0, and are fewer than size")
        one_of("uneven", uneven, ("refuse", "drop", "differ"))
        count = len(dataset)
        dealt, more = f"{count} tiles are dealt to {self.size} ranks", count % self.size
        if uneven == "refuse" and more:
            raise ConfigError(f"{dealt}, {more} of which get one more; give another grid, or uneven drop or differ")
        if uneven == "drop" and count < self.size:
            raise ConfigError(f"{dealt}, and uneven drop leaves none; cut finer")
        self.epoch = 0
        self._stop = count - more if uneven == "drop" else count
        counts = dataset.tiles_per_image
        self._first = [sum(counts[:image]) for image in range(len(counts))]
        self._sampler = Sampler(tuple(map(range, counts)), seed, tiles_per_step=1)

    @checked
    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, from 0, for the next iteration's order. Call it on every rank before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(range(self.rank, self._stop, self.size))

    def __iter__(self) -> Iterator[int]:
        steps = self._sampler.steps(self.epoch)
        order = [self._first[one.image] + one.tile for (one,) in steps]  # type: ignore[operator]  # numbers
        return iter(order[self.rank : self._stop : self.size])
