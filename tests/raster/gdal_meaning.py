"""What GDAL itself reads of a class map and rasterio does not show: names of categories and the attribute table."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import rasterio  # noqa: F401  (loads the library)


@cache
def _gdal() -> ctypes.CDLL:
    """The library that rasterio has loaded, its own or the system's."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    found = min((line.split()[-1] for line in maps if "libgdal" in line), key=lambda path: "rasterio" not in path)
    gdal = ctypes.CDLL(found)
    for name in ("GDALOpen", "GDALGetRasterBand", "GDALGetRasterCategoryNames", "GDALGetDefaultRAT"):
        getattr(gdal, name).restype = ctypes.c_void_p
    gdal.GDALRATGetValueAsString.restype = ctypes.c_char_p
    gdal.GDALAllRegister()
    return gdal


def meaning(path: Path) -> tuple[list[str], list[list[str]]]:
    """(names of the categories, rows of the attribute table) of the first band."""
    gdal = _gdal()
    dataset = ctypes.c_void_p(gdal.GDALOpen(str(path).encode(), 0))
    band = ctypes.c_void_p(gdal.GDALGetRasterBand(dataset, 1))
    # The table first: the driver reads what lies beside a file when it is asked for one, and not for names.
    table = ctypes.c_void_p(gdal.GDALGetDefaultRAT(band))
    rows, columns = (gdal.GDALRATGetRowCount(table), gdal.GDALRATGetColumnCount(table)) if table else (0, 0)
    values = [[gdal.GDALRATGetValueAsString(table, i, j).decode() for j in range(columns)] for i in range(rows)]
    names = ctypes.cast(gdal.GDALGetRasterCategoryNames(band), ctypes.POINTER(ctypes.c_char_p))
    found = []
    while names and names[len(found)]:
        found.append(names[len(found)].decode())
    gdal.GDALClose(dataset)
    return found, values
