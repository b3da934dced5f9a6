"""Names and colours of a class map's numbers, beside the map, as GDAL and QGIS read them.

A GeoTIFF keeps a colour for each value, and names only as tags of our own (CLASS_0, CLASS_1, ...), by which `evaluate`
knows them. `map.tif.aux.xml` (GDAL's own) has the names of the categories and an attribute table, `map.qml` the style
by which QGIS shows the map.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as Xml

from tiledseg.raster.labels.classes import ClassRecord, Colour, in_hex

_COLUMNS = (("Value", 0, 5), ("Class", 2, 2), ("Red", 0, 6), ("Green", 0, 7), ("Blue", 0, 8))
"""Name, type (0 whole number, 2 text) and meaning of a column, by GDAL's numbers."""


def colormap(classes: Sequence[ClassRecord]) -> dict[int, Colour]:
    """Return the colour of each class number."""
    return {number: one.colour for number, one in enumerate(classes)}


def tags(classes: Sequence[ClassRecord]) -> dict[str, str]:
    """Return the names as tags of the file itself."""
    return {f"CLASS_{number}": one.name for number, one in enumerate(classes)}


def add_names(sidecar: Path, classes: Sequence[ClassRecord]) -> None:
    """Put names and attribute table into GDAL's file beside a map, of which all else stays."""
    root = Xml.Element("PAMDataset")
    with contextlib.suppress(FileNotFoundError):
        root = Xml.parse(sidecar).getroot()
    band = root.find("PAMRasterBand[@band='1']")
    if band is None:
        band = Xml.SubElement(root, "PAMRasterBand", band="1")
    names = Xml.SubElement(band, "CategoryNames")
    for one in classes:
        Xml.SubElement(names, "Category").text = one.name
    band.append(_table(classes))
    Xml.ElementTree(root).write(sidecar, encoding="utf-8")


def _table(classes: Sequence[ClassRecord]) -> Xml.Element:
    table = Xml.Element("GDALRasterAttributeTable", tableType="thematic")
    for index, (name, kind, usage) in enumerate(_COLUMNS):
        column = Xml.SubElement(table, "FieldDefn", index=str(index))
        for key, value in (("Name", name), ("Type", kind), ("Usage", usage)):
            Xml.SubElement(column, key).text = str(value)
    for number, one in enumerate(classes):
        row = Xml.SubElement(table, "Row", index=str(number))
        for value in (number, one.name, *one.colour):
            Xml.SubElement(row, "F").text = str(value)
    return table


def style_path(path: Path) -> Path:
    """Return the name under which QGIS looks for the style of a raster."""
    return path.with_suffix(".qml")


def write_style(path: Path, classes: Sequence[ClassRecord]) -> None:
    """Write QGIS's style of a class map: a colour and a name for each number."""
    root = Xml.Element("qgis", version="3.22", styleCategories="Symbology")
    pipe = Xml.SubElement(root, "pipe")
    renderer = Xml.SubElement(pipe, "rasterrenderer", type="paletted", band="1", opacity="1", alphaBand="-1")
    palette = Xml.SubElement(renderer, "colorPalette")
    for number, one in enumerate(classes):
        colour = in_hex(one.colour)
        Xml.SubElement(palette, "paletteEntry", value=str(number), label=one.name, color=colour, alpha="255")
    Xml.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)
