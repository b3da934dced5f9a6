"""Vector files for tests, with what they must mean: which polygon, the last of the file, holds a pixel's centre."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
import shapely
from numpy.typing import NDArray

from tiledseg.raster.info import RasterInfo


def write_vectors(path: Path, shapes: Sequence[Any], crs: str | None, **fields: Sequence[Any]) -> str:
    """Geometries with attributes, in a file of whatever kind its ending says."""
    import pyogrio.raw  # what imports this file may need no vector file

    wkb = np.array([None if shape is None else shapely.to_wkb(shape) for shape in shapes], object)
    names = list(fields)
    values = [np.array(list(fields[name]), object if isinstance(fields[name][0], str) else None) for name in names]
    kind = "MultiPolygon" if any(shape is not None and shape.geom_type == "MultiPolygon" for shape in shapes) else None
    first = next(shape for shape in shapes if shape is not None)
    driver = {".gpkg": "GPKG", ".geojson": "GeoJSON", ".shp": "ESRI Shapefile", ".fgb": "FlatGeobuf"}[path.suffix]
    more = {"SPATIAL_INDEX": "NO"} if path.suffix == ".fgb" else {}
    pyogrio.raw.write(path, wkb, values, names, crs=crs, geometry_type=kind or first.geom_type, driver=driver, **more)
    return str(path)


def image_info(path: Path, transform: Any, shape: tuple[int, int], crs: Any) -> RasterInfo:
    return RasterInfo(str(path), *shape, 3, "uint8", crs=rasterio.crs.CRS.from_user_input(crs), transform=transform)


def expected(shapes: Sequence[Any], values: Sequence[int], background: int, info: RasterInfo) -> NDArray[np.uint8]:
    """Point by point by shapely: the value of the last shape, in the image's CRS, that holds the pixel's centre."""
    rows, cols = np.mgrid[: info.height, : info.width]
    a, b, c, d, e, f = tuple(info.transform)[:6]
    xs, ys = a * (cols + 0.5) + b * (rows + 0.5) + c, d * (cols + 0.5) + e * (rows + 0.5) + f
    found = np.full(info.shape, background, np.uint8)
    for shape, value in zip(shapes, values, strict=True):
        if shape is not None:
            found[shapely.contains_xy(shape, xs, ys)] = value
    return found
