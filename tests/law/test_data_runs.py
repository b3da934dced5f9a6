"""Polygons as labels, an area and a split into blocks: one loss line and one validation, whatever the ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import rasterio
import shapely

from tests.law.test_training_steps import alone, configuration, losses, run
from tests.raster.polygons_drawn import write_vectors
from tiledseg.comm.mesh import Mesh
from tiledseg.config.run import Config, ParallelConfig, RunConfig

pytestmark = pytest.mark.usefixtures("small_views")


def write_polygons(folder: Path) -> None:
    """Roofs and ponds as boxes of the image, and the area as a lozenge of it."""
    with rasterio.open(folder / "image.tif") as dataset:
        place, height, width, crs = dataset.transform, dataset.height, dataset.width, dataset.crs.to_string()

    def box(top: float, left: float, bottom: float, right: float) -> shapely.Polygon:
        rows, cols = (top * height, bottom * height), (left * width, right * width)
        xs, ys = [place.c + place.a * col for col in cols], [place.f + place.e * row for row in rows]
        return shapely.box(min(xs), min(ys), max(xs), max(ys))

    boxes = [box(0.07 * k, 0.9 - 0.08 * k, 0.07 * k + 0.3, 1.03 - 0.08 * k) for k in range(10)]
    write_vectors(folder / "labels.gpkg", boxes, crs, kind=["roof", "pond"] * 5)
    middle = box(0.2, 0.2, 0.8, 0.8).centroid
    radius = 0.45 * min(width * abs(place.a), height * abs(place.e))
    write_vectors(folder / "area.gpkg", [middle.buffer(radius, quad_segs=1)], crs)


def data_config(shared: Path, name: str, parallel: ParallelConfig) -> Config:
    config = configuration(shared, shared / name, "fp64", "adamw", None)
    classes = [{"name": "ground"}, {"name": "roof"}, {"name": "pond"}]
    polygons = {"labels": [str(shared / "labels.gpkg")], "label_attribute": "kind", "background": "ground"}
    held_out = {"val_images": [], "val_labels": [], "split": [3, 2], "split_gap": 3, "area": str(shared / "area.gpkg")}
    return replace(
        config,
        data=replace(config.data, classes=classes, **polygons, **held_out),
        train=replace(config.train, epochs=4, validate_every=2),
        parallel=parallel,
        run=RunConfig(output=str(shared / name), verbosity=0),
    )


@pytest.mark.mpi
def test_losses_and_scores_do_not_depend_on_ranks_and_modes(shared: Path, meshes: dict[str, Mesh]) -> None:
    mesh = meshes["gloo"]
    mesh.on_root(lambda: write_polygons(shared))
    expected = mesh.on_root(lambda: run(data_config(shared, "alone", ParallelConfig()), alone()))
    assert len(losses(expected)) == 4
    assert len({line["loss"] for line in expected if "loss" in line}) == 4
    for mode in ("read", "layer"):
        found = run(data_config(shared, f"data-{mode}", ParallelConfig(halo=mode)), mesh)
        assert losses(found) == pytest.approx(losses(expected), rel=1e-10)
        assert [line["pixels"] for line in found if "loss" in line] == [
            line["pixels"] for line in expected if "loss" in line
        ]
        scores, wanted = ([line["val"] for line in of if "val" in line] for of in (found, expected))
        assert len(scores) == len(wanted) == 2
        for ours, theirs in zip(scores, wanted, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-10)
            assert ours["iou"] == pytest.approx(theirs["iou"], nan_ok=True)
