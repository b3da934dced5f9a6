"""Files that name other files or servers: what GDAL would follow, whatever their own names say."""

from pathlib import Path
from xml.etree import ElementTree as Xml
from xml.sax.saxutils import escape

import rasterio.shutil


def vrt(source: str, side: int, dtype: str = "Byte") -> str:
    """A virtual raster of one band that shows band 1 of `source`; it will also do as a mask."""
    return (
        f'<VRTDataset rasterXSize="{side}" rasterYSize="{side}">'
        '<Metadata><MDI key="INTERNAL_MASK_FLAGS_1">2</MDI></Metadata>'
        f'<VRTRasterBand dataType="{dtype}" band="1">'
        f'<SimpleSource><SourceFilename relativeToVRT="0">{escape(source)}</SourceFilename><SourceBand>1</SourceBand>'
        "</SimpleSource></VRTRasterBand></VRTDataset>"
    )


def raw_vrt(source: str, side: int) -> str:
    """A virtual raster that shows the bytes of any file as pixels."""
    return (
        f'<VRTDataset rasterXSize="{side}" rasterYSize="{side}"><VRTRasterBand dataType="Byte" band="1" '
        f'subClass="VRTRawRasterBand"><SourceFilename relativeToVRT="0">{escape(source)}</SourceFilename>'
        f"<ImageOffset>0</ImageOffset><PixelOffset>1</PixelOffset><LineOffset>{side}</LineOffset></VRTRasterBand>"
        "</VRTDataset>"
    )


def tile_map(address: str) -> str:
    """A tiled web map at `address`."""
    return (
        f'<GDAL_WMS><Service name="TMS"><ServerUrl>http://{address}/${{z}}/${{x}}/${{y}}.png</ServerUrl></Service>'
        "<DataWindow><UpperLeftX>0</UpperLeftX><UpperLeftY>1</UpperLeftY><LowerRightX>1</LowerRightX>"
        "<LowerRightY>0</LowerRightY><TileLevel>2</TileLevel></DataWindow><Projection>EPSG:4326</Projection>"
        "<BandsCount>3</BandsCount></GDAL_WMS>"
    )


def overview_elsewhere(url: str) -> str:
    """A PAM file (`image.tif.aux.xml`) that names a URL as the raster's overview."""
    return (
        f'<PAMDataset><Metadata domain="OVERVIEWS"><MDI key="OVERVIEW_FILE">{escape(url)}</MDI></Metadata></PAMDataset>'
    )


def category_names(path: Path) -> list[str | None]:
    """The names of the categories of the first band, as GDAL copies them into a VRT."""
    copy = path.with_name("meaning.vrt")
    rasterio.shutil.copy(path, copy, driver="VRT")
    root = Xml.parse(copy).getroot()
    copy.unlink()
    return [name.text for name in root.iter("Category")]
