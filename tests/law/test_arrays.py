"""The law for the forms of a scene: the same losses and maps, to the bit, from a GeoTIFF, Zarr, netCDF, DataArrays,
STAC items and mosaics, on any number of ranks, each of which reads a chunk once, and writes its own chunks alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from zarr.storage import LocalStore

import tiledseg
from tests.array_scenes import CRS, FORMS, PARTS, TRANSFORM, as_array, scene, write, write_parts
from tests.conftest import NIGHTLY
from tests.small_files import read_raster, write_raster
from tiledseg import tile
from tiledseg.comm.mesh import Mesh
from tiledseg.errors import OutputError
from tiledseg.geometry.box import Box
from tiledseg.raster.finding import find_sources
from tiledseg.raster.zarr_writer import check_zarr

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2), pytest.mark.usefixtures("without_plots")]
SHAPE = 101, 120
SOME = ("tif", "zarr2", "memory", "items of pieces")  # on one rank and on four


@pytest.fixture(scope="module")
def forms(meshes: dict[str, Mesh], common: Path) -> tuple[Path, dict[str, tuple[Any, Any]]]:
    """A folder of all ranks, and in it image and labels of one scene in each form. Collective."""
    mesh, folder = meshes["gloo"], common
    pixels, labels = scene((3, *SHAPE), "int16"), scene(SHAPE, "uint8", seed=1) % 3
    pairs = (("reflectance", pixels, 7), ("classes", labels, None))

    def made(form: str) -> tuple[Any, Any]:
        image, truth = (write(folder, form, values, name, nodata) for name, values, nodata in pairs)
        return image, truth

    def written() -> dict[str, tuple[Any, Any]]:
        parts = {form: write_parts(folder, form, pixels, labels, 7) for form in PARTS}
        return parts | {form: made(form) for form in FORMS if form not in ("memory", "dask")}

    files = mesh.on_root(written)
    return folder, {form: files.get(form) or made(form) for form in (*FORMS, *PARTS)}


def losses(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in ("loss", "val") if key in row} for row in rows]


def train(folder: Path, form: str, image: Any, labels: Any, **more: Any) -> Path:
    data = {"images": image, "labels": labels, "val_images": [image], "val_labels": [labels], "classes": 3}
    return tiledseg.train_network(
        {
            "data": {**data, **PARTS.get(form, {}), **more},
            "tiling": {"grid": [3, 2]},
            "model": {"levels": 2, "convs_per_level": 1, "base_channels": 3},
            "train": {"epochs": 1, "tiles_per_step": 4, "tiles_per_batch": 1, "seed": 3},
            "run": {"output": str(folder / f"run-{form}"), "verbosity": 0},
        }
    )


def mapped(run: Path, image: Any, path: Path, **how: Any) -> NDArray:
    if isinstance(image, str):
        tiledseg.predict_raster(run, image, path, grid=(3, 2), **how)
        return read_raster(path)[0]
    found = tiledseg.predict_raster(run, image, grid=(3, 2))
    place = as_array(np.zeros(SHAPE, np.uint8))
    assert found.x.equals(place.x)
    assert found.y.equals(place.y)
    assert found.spatial_ref.attrs == place.spatial_ref.attrs
    assert found.attrs["_FillValue"] == 255
    return found.values


def counted(monkeypatch: pytest.MonkeyPatch, method: str, counts: Callable[[str], bool]) -> Counter[str]:
    """Count how often a store's method is called for each key that `counts`."""
    plain, calls = getattr(LocalStore, method), Counter[str]()

    async def counting(store: Any, key: str, *more: Any) -> Any:
        calls.update([f"{store.root}/{key}"] if counts(key) else [])
        return await plain(store, key, *more)

    monkeypatch.setattr(LocalStore, method, counting)
    return calls


@pytest.mark.ranks(1, 2, 4)
def test_losses_and_maps_are_those_of_the_geotiff(
    forms: tuple[Path, dict[str, Any]], meshes: dict[str, Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, (folder, sources) = meshes["gloo"], forms
    reads = counted(monkeypatch, "get", lambda key: key.startswith("reflectance/") and key[-1].isdigit())
    expected = None

    def seen(chunk: Any, block_info: Any = None) -> Any:
        reads.update([str(block_info[0]["chunk-location"])] if block_info else [])
        return chunk

    for form in sources if mesh.size == 2 or NIGHTLY else SOME:
        image, labels = sources[form]
        if form == "dask":
            image = image.copy(data=image.data.map_blocks(seen, dtype=image.dtype, meta=image.data._meta))
        run = train(folder, form, image, labels)
        reads.clear()
        classes_HW = mapped(run, image, folder / f"{form}.tif")  # assets and mosaics are those of the training
        assert not reads or set(reads.values()) == {1}, form
        assert bool(reads) == (form in ("zarr2", "zarr3", "dask")), form
        if expected is None:
            expected = losses(run), classes_HW
        assert losses(run) == expected[0], form
        assert np.array_equal(classes_HW, expected[1]), form
        mesh.communicator.barrier()
    assert expected is not None
    assert len(expected[0]) > 2
    assert len(np.unique(expected[1])) > 1


def test_what_tile_has_cut_into_zarr_trains_and_maps_as_its_rasters(
    forms: tuple[Path, dict[str, Any]], meshes: dict[str, Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks, names of classes and the place are kept, and ranks write chunks of their own."""
    mesh, (folder, sources) = meshes["gloo"], forms
    written = counted(monkeypatch, "set", lambda key: key[-1].isdigit() and "/c/" in key and key.startswith("0/"))
    image, labels = sources["tif"]
    store = folder / "tiles.zarr"
    words = ["--images", image, "--labels", labels, "--grid", "3", "2", "--format", "zarr", "--output", str(store)]
    options = tile.build_parser().parse_args(words)
    tile.cut(tile.resolve(options), str(store), [], False, mesh, options.format)
    parts = mesh.communicator.broadcast_object(mesh.communicator.gather_objects(written))
    chunks = {key: number for key, number in sum(parts, Counter[str]()).items() if "images" in key or "labels" in key}
    assert set(chunks.values()) == {1}
    assert len(chunks) == 3 * 6
    assert min(len(part) for part in parts) > 0
    assert [one.path for one in find_sources([str(store)], "data.images")] == [f"{store}:/0/images"]
    found = []
    for name, data in (("whole", (image, labels)), ("cut", (str(store), []))):
        run = train(folder, name, *data, val_images=[data[0]], val_labels=[labels])
        found.append((losses(run), mapped(run, data[0], folder / f"{name}-map.tif")))
    assert found[0][0] == found[1][0]
    np.testing.assert_array_equal(found[0][1], found[1][1])
    with pytest.raises(OutputError, match="is there; remove it"):
        check_zarr("--output", store)


def test_pixels_under_clouds_are_those_without_data(
    forms: tuple[Path, dict[str, Any]], meshes: dict[str, Mesh]
) -> None:
    """Losses, scores and maps are those of a file that has no data there, whatever the pixels under the clouds are."""
    mesh, (folder, sources) = meshes["gloo"], forms
    clouds_HW = scene(SHAPE, "int16", seed=2)
    clear_HW = clouds_HW % 5 != 0

    def raster(name: str, bands: NDArray) -> str:
        return write_raster(folder / name, bands, crs=CRS, transform=TRANSFORM, nodata=7)

    def written() -> tuple[str, ...]:
        pixels_CHW = read_raster(sources["tif"][0])
        classes_HW = np.where(clear_HW, 4, 9).astype(np.int16)
        raster("clouds.tif", classes_HW[None])
        bands_CHW = np.concatenate([pixels_CHW, classes_HW[None]])
        return raster("burnt.tif", np.where(clear_HW, pixels_CHW, 7)), raster("banded.tif", bands_CHW)

    burnt, banded = mesh.on_root(written)
    by_raster = {"valid": f"{folder.parent}/{{parent}}/clouds.tif", "valid_values": [4]}
    found = []
    for name, image, how in (
        ("burnt", burnt, {}),
        ("by band", banded, {"valid": 4, "valid_values": [4]}),
        ("by raster", sources["tif"][0], by_raster),
    ):
        run = train(folder, name, image, sources["tif"][1], **how)
        found.append((losses(run), mapped(run, image, folder / f"{name}-map.tif")))
        mesh.communicator.barrier()
    for one, classes_HW in found[1:]:
        assert one == found[0][0]
        np.testing.assert_array_equal(classes_HW, found[0][1])
    assert (found[0][1][~clear_HW] == 255).all()
    assert (found[0][1][clear_HW] != 255).mean() > 0.9
    assert len(np.unique(found[0][1])) > 2
    whole_HW = mapped(run, image, folder / "whole.tif", valid="none")
    assert (whole_HW[~clear_HW] != 255).mean() > 0.9


def test_a_store_is_written_chunk_by_chunk(
    forms: tuple[Path, dict[str, Any]], meshes: dict[str, Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Classes and probabilities hold what a GeoTIFF of them holds, and no two ranks write one chunk."""
    mesh, (folder, sources) = meshes["gloo"], forms
    written = counted(monkeypatch, "set", lambda key: key[-1].isdigit() and key[0] in "cp")
    monkeypatch.setattr("tiledseg.raster.zarr_writer.BLOCK", 32)
    run, names = folder / "run-tif", ("map", "shares")
    for kind in ("tif", "zarr"):
        target, shares = (folder / f"{name}.{kind}" for name in names)
        how = {"format": kind} if kind == "zarr" else {}
        tiledseg.predict_raster(run, sources["tif"][0], target, grid=(3, 2), probabilities=shares, **how)
    for name in names:
        with (
            tiledseg.open_raster(folder / f"{name}.tif") as expected,
            tiledseg.open_raster(folder / f"{name}.zarr") as found,
        ):
            box = Box.of_shape(expected.info.shape)
            assert np.array_equal(found.read(box)[0], expected.read(box)[0], equal_nan=name == "shares")
            assert np.array_equal(found.read(box)[1], expected.read(box)[1])
            assert found.info.class_names == expected.info.class_names
            assert (found.info.crs, found.info.transform) == (expected.info.crs, expected.info.transform)
    parts = mesh.communicator.gather_objects(written)
    every = sum(mesh.communicator.broadcast_object(parts), Counter[str]())
    assert set(every.values()) == {1}
    assert len(every) == (1 + 3) * 4 * 4
    assert not list(folder.glob(".*")), "nothing unfinished"
    with pytest.raises(OutputError, match="is there; remove it"):
        tiledseg.predict_raster(run, sources["tif"][0], folder / "map.zarr", format="zarr")
