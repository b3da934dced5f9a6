"""Texts that describe a server: every loader reads every text, under every name, and no server is asked."""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shapely
from affine import Affine

from tests.raster.conftest import Listener
from tests.raster.polygons_drawn import image_info, write_vectors
from tests.raster.referring import overview_elsewhere, tile_map, vrt
from tests.small_files import write_raster
from tiledseg.config.words import Packing
from tiledseg.errors import RasterError, TiledsegError
from tiledseg.geometry.box import Box
from tiledseg.raster.finding import expand_sources, pair_sources
from tiledseg.raster.geopackage import polygons_output
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.labels.classes import read_classes
from tiledseg.raster.labels.polygons import read_polygons
from tiledseg.raster.lists import EVERY, SourceRules, has_validation, left_out
from tiledseg.raster.map_writer import raster_output
from tiledseg.raster.reader import open_raster
from tiledseg.user_files.machine import find_machine

SIDE = 8
URL = "http://SERVER/a"
_RING = [[[0, 0], [1, 0], [1, 1], [0, 0]]]


def collection(geometry: Any = None, feature: Any = None, **more: Any) -> str:
    shape = {"type": "Polygon", "coordinates": _RING, **(geometry or {})}
    one = {"type": "Feature", "properties": {"image": URL, "label": URL}, "geometry": shape, **(feature or {})}
    return json.dumps({"type": "FeatureCollection", "features": [one], **more})


LINK = {"type": "link", "properties": {"href": URL, "type": "proj4"}}
URL_CRS = {"type": "url", "properties": {"url": URL}}
OWN_NAME = {"type": "name", "properties": {"name": URL}}
TEXTS = {
    "a CRS by link": collection(crs=LINK),
    "a CRS by url": collection(crs=URL_CRS),
    "a CRS named as a url": collection(crs=OWN_NAME),
    "a CRS given twice": collection(crs={"type": "name", "properties": {"name": "EPSG:4326"}})[:-1]
    + f', "crs": {json.dumps(LINK)}}}',
    "a geometry's CRS": collection(geometry={"crs": LINK}),
    "a feature's CRS": collection(feature={"crs": LINK}),
    "a CRS in a collection": collection({"type": "GeometryCollection", "geometries": [{"type": "Point", "crs": LINK}]}),
    "a bare geometry": json.dumps({"type": "Polygon", "coordinates": _RING, "crs": LINK}),
    "JSON-FG": collection(conformsTo=["http://www.opengis.net/spec/json-fg-1/0.2/conf/core"], coordRefSys=URL),
    "TopoJSON": json.dumps({"type": "Topology", "arcs": [], "crs": LINK, "objects": {"a": {"type": "Polygon"}}}),
    "ESRI JSON": json.dumps({"geometryType": "esriGeometryPolygon", "spatialReference": {"wkt": URL}, "features": []}),
    "GDALG": json.dumps({"type": "gdal_streamed_alg", "command_line": f"gdal vector convert {URL} --of=stream out"}),
    "STACTA": json.dumps({"stac_version": "1.0.0", "asset_templates": {"a": {"href": URL}}, "type": "Feature"}),
    "STACIT": collection(stac_version="1.0.0", links=[{"rel": "next", "href": URL}]),
    "a VRT": vrt(f"/vsicurl/{URL}", SIDE),
    "a VRT over a chain": vrt(f"/vsizip//vsicurl/{URL}.zip/a.tif", SIDE),
    "an OGR VRT": "<OGRVRTDataSource><OGRVRTLayer name='a'><SrcDataSource>/vsicurl/"
    f"{URL}</SrcDataSource></OGRVRTLayer></OGRVRTDataSource>",
    "WMS": tile_map("SERVER"),
    "WMTS": f"<GDAL_WMTS><GetCapabilitiesUrl>{URL}</GetCapabilitiesUrl></GDAL_WMTS>",
    "WCS": f"<WCS_GDAL><ServiceURL>{URL}?</ServiceURL><CoverageName>a</CoverageName></WCS_GDAL>",
    "WFS": f"<OGRWFSDataSource><URL>{URL}</URL></OGRWFSDataSource>",
    "GML": f'<?xml version="1.0"?><ogr:FeatureCollection xmlns:ogr="http://ogr" xmlns:gml="http://www.opengis.net/gml" '
    f'xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" xsi:schemaLocation="http://ogr {URL}.xsd">'
    f'<gml:featureMember srsName="{URL}"/></ogr:FeatureCollection>',
    "KML": f'<kml xmlns="http://www.opengis.net/kml/2.2"><NetworkLink><Link><href>{URL}</href></Link></NetworkLink></kml>',
    "QML": f"<!DOCTYPE qgis SYSTEM '{URL}'><qgis><pipe><rasterrenderer path='{URL}'/></pipe></qgis>",
    "an entity of XML": f'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b SYSTEM "{URL}">]><a>&b;</a>',
    "MapML": f"<mapml- ><map-link rel='x' href='{URL}'/></mapml->",
    "PAM": overview_elsewhere(f"/vsicurl/{URL}"),
    "a CRS of PAM": f"<PAMDataset><SRS>{URL}</SRS></PAMDataset>",
    "a line": URL,
    "two columns": f"{URL}\t/vsicurl/{URL}",
    "a chain": f"/vsizip//vsicurl/{URL}.zip/a.tif",
    "a subdataset": f"GTIFF_DIR:1:/vsicurl/{URL}",
    "CSV": f"image,label,split\n{URL},/vsicurl/{URL},val\n{URL},/vsicurl/{URL},train\n",
    "classes": f"name,colour,value\n{URL},{URL},{URL}\n",
    "YAML": f"images: {URL}\n",
    "a tag of YAML": f"!!python/object/apply:urllib.request.urlopen ['{URL}']\n",
    "an include of YAML": f"!include {URL}\n",
}


def loaders(path: str, info: RasterInfo) -> Iterator[Callable[[], Any]]:
    """Every loader of the text in `path`, whatever its name says."""

    def read(name: str) -> None:
        with open_raster(name) as raster:
            raster.read(Box.of_shape(raster.info.shape))

    yield lambda: [read(name) for name in expand_sources([path], "x", SourceRules(parts=EVERY))]
    yield lambda: [read(image) for image in pair_sources([path], [], ("x", "y"), SourceRules(parts=EVERY))[1]]
    yield lambda: (has_validation([path]), left_out([path], "x"))
    yield lambda: read(path)
    yield lambda: read_polygons(path, info)
    yield lambda: read_classes(path)
    yield lambda: find_machine(path)
    yield lambda: polygons_output("--polygons", path)
    yield lambda: raster_output("--output", path, info, 1, "uint8", Packing("cog", "auto"), legend=True)


ENDINGS = (
    *("tif", "tif.msk", "tif.aux.xml", "prj", "png", "jp2", "vrt", "qml", "csv", "txt", "json", "yaml", "geojson"),
    *("gpkg", "shp", "fgb", "tif.ovr", "tif.Msk", "tif.Ovr"),
)


@pytest.mark.filterwarnings("ignore:GPKG")
@pytest.mark.parametrize("kind", TEXTS)
def test_no_text_makes_a_request(tmp_path: Path, listener: Listener, kind: str) -> None:
    """Under the names of rasters, of what goes with them, lists, classes, profiles and polygons."""
    info = image_info(tmp_path / "image.tif", Affine(0.1, 0, 0, 0, -0.1, 1), (SIDE, SIDE), "EPSG:4326")
    text = TEXTS[kind].replace("SERVER", listener.address)
    begins = {"": b"", "shp": b"\0\0\x27\x0a", "fgb": b"fgb\x03fgb\x01", "gpkg": b"SQLite format 3\0"}
    for ending in ENDINGS:
        for begin in {b"", begins.get(ending, b"")}:
            folder = tmp_path / f"{ending}-{len(begin)}"
            folder.mkdir()
            path = folder / f"a.{ending}"
            if ending.startswith("tif.") or ending == "prj":
                write_raster(folder / "a.tif", np.ones((1, SIDE, SIDE), np.uint8))
            path.write_bytes(begin + text.encode())
            path = folder / "a.tif" if (folder / "a.tif").exists() else path
            for load in loaders(str(path), info):
                with suppress(TiledsegError):
                    load()
                assert listener.calls() == 0, ending
    assert listener.calls() == 0


@pytest.mark.parametrize("ending", [".gpkg", ".shp", ".fgb"])
def test_no_authority_of_a_crs_makes_a_request(tmp_path: Path, listener: Listener, ending: str) -> None:
    """GDAL asks it when it transforms."""
    wkt = (
        'GEOGCS["x",DATUM["WGS_1984",SPHEROID["WGS 84",6378137,298.257223563]],PRIMEM["Greenwich",0],'
        f'UNIT["degree",0.0174532925199433],AUTHORITY["http","//{listener.address}/x"]]'
    )
    path = write_vectors(tmp_path / f"a{ending}", [shapely.box(0, 0, 1, 1)], wkt, kind=["a"])
    if ending == ".shp":
        (tmp_path / "a.prj").write_text(wkt)
    info = image_info(tmp_path / "image.tif", Affine(0.1, 0, 0, 0, -0.1, 1), (SIDE, SIDE), "EPSG:4326")
    with pytest.raises(RasterError, match=r"a\.\w+ has a CRS of the authority 'http:"):
        read_polygons(path, info)
    write_raster(tmp_path / "b.tif", np.ones((1, SIDE, SIDE), np.uint8), transform=info.transform)
    (tmp_path / "b.tif.aux.xml").write_text(f"<PAMDataset><SRS>{wkt.replace(chr(34), '&quot;')}</SRS></PAMDataset>")
    with pytest.raises(RasterError, match=r"b.tif has a CRS of the authority 'http:"):
        open_raster(str(tmp_path / "b.tif"))
    assert listener.calls() == 0


def test_the_listener_hears_what_is_allowed(tmp_path: Path, listener: Listener) -> None:
    """A format and a list that are trusted."""
    path = tmp_path / "a.tif"
    path.write_text(TEXTS["a VRT"].replace("SERVER", listener.address))
    with suppress(RasterError), open_raster(str(path), references=True) as raster:
        raster.read(Box.of_shape((SIDE, SIDE)))
    assert listener.calls() > 0
    images = tmp_path / "a.txt"
    images.write_text(URL.replace("SERVER", listener.address))
    with pytest.raises(RasterError, match=r"line 1 names http://.*is no path of a file; .*data.references true"):
        expand_sources([str(images)], "x")
    (url,) = expand_sources([str(images)], "x", SourceRules(references=True))
    with pytest.raises(RasterError):
        open_raster(url)
    assert listener.calls() > 0


def test_a_link_is_named_and_codes_are_read(tmp_path: Path) -> None:
    info = image_info(tmp_path / "image.tif", Affine(0.1, 0, 0, 0, -0.1, 1), (SIDE, SIDE), "EPSG:4326")
    path = tmp_path / "a.geojson"
    for kind, words in (
        ("a CRS by link", "links are not followed"),
        ("a geometry's CRS", "feature 0 has a CRS of its own"),
    ):
        path.write_text(TEXTS[kind])
        with pytest.raises(RasterError, match=words):
            read_polygons(str(path), info)
    for name in ("urn:ogc:def:crs:OGC:1.3:CRS84", "EPSG:4326", "urn:ogc:def:crs:EPSG:6.9:4326"):
        path.write_text(collection(crs={"type": "name", "properties": {"name": name}}))
        (shape,) = read_polygons(str(path), info).shapes
        assert shapely.bounds(shape).tolist() == pytest.approx([0, -10, 10, 0])
    path.write_text(collection(crs=None))
    with pytest.raises(RasterError, match=r"a.geojson has no CRS"):
        read_polygons(str(path), info)
