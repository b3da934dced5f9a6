"""The law for the forms of a scene: the same losses and maps, to the bit, from a GeoTIFF, Zarr, netCDF and DataArrays,
on any number of ranks, each of which reads a chunk once, and writes its own chunks of a map alone."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from numpy.typing import NDArray
from zarr.storage import LocalStore

import tiledseg
from tests.array_scenes import FORMS, as_array, scene, write
from tiledseg.comm.mesh import Mesh
from tiledseg.errors import OutputError
from tiledseg.geometry.box import Box

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("without_plots")]
SHAPE = 101, 120


@pytest.fixture(scope="module")
def forms(meshes: dict[str, Mesh], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, tuple[Any, Any]]]:
    """A folder of all ranks, and in it image and labels of one scene in each form. Collective."""
    mesh = meshes["gloo"]
    folder = Path(mesh.communicator.broadcast_object(str(tmp_path_factory.mktemp("forms"))))
    pixels, labels = scene((3, *SHAPE), "int16"), scene(SHAPE, "uint8", seed=1) % 3
    pairs = (("reflectance", pixels, 7), ("classes", labels, None))

    def made(form: str) -> tuple[Any, Any]:
        image, truth = (write(folder, form, values, name, nodata) for name, values, nodata in pairs)
        return image, truth

    files = mesh.on_root(lambda: {form: made(form) for form in FORMS if form not in ("memory", "dask")})
    return folder, {form: files.get(form) or made(form) for form in FORMS}


def losses(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if "loss" in key or "accuracy" in key} for row in rows]


def train(folder: Path, form: str, image: Any, labels: Any) -> Path:
    return tiledseg.train_network(
        {
            "data": {"images": image, "labels": labels, "val_images": [image], "val_labels": [labels], "classes": 3},
            "tiling": {"grid": [3, 2]},
            "model": {"levels": 2, "convs_per_level": 1, "base_channels": 3},
            "train": {"epochs": 2, "tiles_per_step": 4, "tiles_per_batch": 1, "seed": 3},
            "run": {"output": str(folder / f"run-{form}"), "verbosity": 0},
        }
    )


def mapped(run: Path, image: Any, path: Path) -> NDArray:
    if isinstance(image, str):
        tiledseg.predict_raster(run, image, path, grid=(3, 2))
        with rasterio.open(path) as dataset:
            return dataset.read(1)
    found = tiledseg.predict_raster(run, image, grid=(3, 2))
    place = as_array(np.zeros(SHAPE, np.uint8))
    assert found.x.equals(place.x)
    assert found.y.equals(place.y)
    assert found.spatial_ref.attrs == place.spatial_ref.attrs
    assert found.attrs["_FillValue"] == 255
    return found.values


def test_losses_and_maps_are_those_of_the_geotiff(
    forms: tuple[Path, dict[str, Any]], meshes: dict[str, Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, (folder, sources) = meshes["gloo"], forms
    get, reads = LocalStore.get, Counter[str]()

    async def counted(store: Any, key: str, *more: Any) -> Any:
        reads.update([key] if key.startswith("reflectance/") and key[-1].isdigit() else [])
        return await get(store, key, *more)

    monkeypatch.setattr(LocalStore, "get", counted)
    expected = None
    for form, (image, labels) in sources.items():
        run = train(folder, form, image, labels)
        reads.clear()
        classes_HW = mapped(run, image, folder / f"{form}.tif")
        assert not reads or set(reads.values()) == {1}, form
        assert bool(reads) == (form in ("zarr2", "zarr3")), form
        if expected is None:
            expected = losses(run), classes_HW
        assert losses(run) == expected[0], form
        assert np.array_equal(classes_HW, expected[1]), form
        mesh.communicator.barrier()
    assert expected is not None
    assert len(expected[0]) > 2
    assert len(np.unique(expected[1])) > 1


def test_a_store_is_written_chunk_by_chunk(
    forms: tuple[Path, dict[str, Any]], meshes: dict[str, Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Classes and probabilities hold what a GeoTIFF of them holds, and no two ranks write one chunk."""
    mesh, (folder, sources) = meshes["gloo"], forms
    put, written = LocalStore.set, Counter[str]()

    async def counted(store: Any, key: str, *more: Any) -> None:
        written.update([f"{store.root}/{key}"] if key[-1].isdigit() and key[0] in "cp" else [])
        await put(store, key, *more)

    monkeypatch.setattr(LocalStore, "set", counted)
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
