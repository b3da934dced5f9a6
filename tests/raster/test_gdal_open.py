"""What a raster may make this machine read or ask for, and the variables that say so to GDAL and obstore."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio

from tests.raster.conftest import Listener
from tests.raster.range_server import __file__ as RANGE_SERVER  # noqa: N812
from tests.raster.range_server import running
from tests.raster.referring import vrt
from tests.small_files import write_raster
from tiledseg.errors import RasterError
from tiledseg.evaluate import main as evaluate
from tiledseg.geometry.box import Box
from tiledseg.raster.reader import open_raster
from tiledseg.raster.remote import advice, gdal_options, store_options

SIDE = 8
WHOLE = Box.of_shape((SIDE, SIDE))


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "image.tif"
    write_raster(path, np.arange(SIDE * SIDE, dtype=np.uint8).reshape(1, SIDE, SIDE), nodata=63)
    return path


def read(path: Path | str, **options: Any) -> Any:
    with open_raster(str(path), **options) as reader:
        return reader.read(WHOLE)


def test_a_mask_of_a_url_reads_nothing_else(image: Path, listener: Listener) -> None:
    """The mask of a URL is asked of the same server; a VRT in its place is refused before it is followed."""
    Path(f"{image}.msk").write_text(vrt(f"/vsicurl/http://{listener.address}/inner.tif", SIDE))
    with running(RANGE_SERVER, str(image.parent)) as server:
        url = f"http://{server}/image.tif"
        with pytest.raises(RasterError, match=r"image.tif.msk, which goes with .* is no TIFF"):
            read(url)
        Path(f"{image}.msk").unlink()
        np.testing.assert_array_equal(read(f"{url}?2")[0], read(image)[0])
    assert listener.calls() == 0


def test_masks_are_tiffs_and_pages_of_a_tiff_need_references(image: Path, listener: Listener) -> None:
    page = f"GTIFF_DIR:1:{image}"
    with pytest.raises(RasterError, match=r"does not exist; .*--references"):
        read(page)
    for found, wanted in zip(read(page, references=True), read(image), strict=True):
        np.testing.assert_array_equal(found, wanted)
    for end in (".ovr", ".msk"):
        Path(f"{image}{end}").write_text(vrt(f"/vsicurl/http://{listener.address}/a.tif", SIDE))
        with pytest.raises(RasterError, match=rf"image.tif{end}, which goes with .*image.tif, is no TIFF"):
            read(image)
    Path(f"{image}.ovr").unlink()
    with open_raster(str(image), references=True) as reader:
        assert reader.info.files == (str(image), f"{image}.msk")
        assert reader.info.references == ""
    assert listener.calls() == 0


def test_a_files_own_code_never_runs(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDAL_VRT_ENABLE_PYTHON", "YES")
    ran = image.with_name("ran")
    code = f"open({str(ran)!r}, 'w')\ndef f(a, b, *c, **d): pass"
    path = image.with_name("code.vrt")
    path.write_text(
        vrt(str(image), SIDE).replace(
            'band="1">',
            'band="1" subClass="VRTDerivedRasterBand"><PixelFunctionType>f</PixelFunctionType>'
            f"<PixelFunctionLanguage>Python</PixelFunctionLanguage><PixelFunctionCode><![CDATA[{code}]]>"
            "</PixelFunctionCode>",
        )
    )
    with pytest.raises(RasterError, match=r"cannot (open|read) "):
        read(path, references=True)
    assert not ran.exists()


def test_anything_unforeseen_is_one_line(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_raster(str(image)) as reader:
        monkeypatch.setattr(type(reader), "_read_inside", lambda *_: [][1])
        with pytest.raises(RasterError, match=r"cannot read rows 0:8, columns 0:8 of .*image.tif: IndexError: list"):
            reader.read(WHOLE)
    monkeypatch.setattr("tiledseg.raster.gdal_reader.source_files", lambda *_: 1 // 0)
    with pytest.raises(RasterError, match=r"cannot open .*image.tif: ZeroDivisionError: .*copy it again"):
        open_raster(str(image))


BLOCKS = {"tiled": True, "blockxsize": 1 << 16, "blockysize": 1 << 16}


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("side", "options", "words"),
    [
        (2_000_000, {**BLOCKS, "bigtiff": "yes"}, r"says that it is 2000000 x 2000000 px, of at most 1099511627776"),
        (SIDE, {"count": 10_000}, r"a.tif has 10000 bands, of at most 4096 read at once"),
        (1 << 16, BLOCKS, r"a.tif is stored in blocks of 65536 x 65536 px, which take 4 GiB each"),
    ],
)
def test_headers_of_no_raster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: int, options: dict[str, Any], words: str
) -> None:
    profile = {"driver": "GTiff", "count": 1, "dtype": "uint8", "sparse_ok": True, **options}
    with rasterio.open(tmp_path / "a.tif", "w", height=side, width=side, **profile):
        pass
    monkeypatch.setattr("tiledseg.raster.gdal_reader.memory_bytes", lambda: 1 << 30)
    with pytest.raises(RasterError, match=words):
        open_raster(str(tmp_path / "a.tif"))
    if "count" in options:
        with open_raster(str(tmp_path / "a.tif"), bands=[2, 9_999]) as reader:
            assert reader.info.bands == 2


def test_a_window_that_no_memory_holds(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiledseg.raster.mirrored_reader.memory_bytes", lambda: 2**34)
    with (
        open_raster(str(image)) as reader,
        pytest.raises(RasterError, match=r"1000000 x 1000000 px of .*image.tif take 931 GiB, this machine has 16 GiB"),
    ):
        reader.read(Box.of_shape((1_000_000, 1_000_000)))


def test_a_header_of_odd_bytes_prints_no_traceback(image: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """GDAL quotes them in its words, which rasterio then cannot read."""
    whole = image.read_bytes()
    refused = 0
    for at in range(8, 400, 9):
        image.write_bytes(whole[:at] + b"\xdd" + whole[at + 1 :])
        try:
            read(image)
        except RasterError:
            refused += 1
    assert refused > 2
    assert "Traceback" not in capfd.readouterr().err


def files_of(path: Path, references: bool = False) -> set[str]:
    with open_raster(str(path), references=references) as reader:
        return {Path(file).name for file in reader.info.files}


def test_the_sources_of_a_vrt_at_any_depth(image: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """So no output takes the place of one. GDAL itself names those of the outermost one only."""
    assert files_of(image) == {"image.tif"}
    write_raster(image.with_name("image.tif.msk"), np.ones((1, 8, 8), np.uint8))
    assert files_of(image) == {"image.tif", "image.tif.msk"}
    image.with_name("image.tif.msk").unlink()
    for name, inner in (("inner.vrt", image), ("outer.vrt", image.with_name("inner.vrt"))):
        image.with_name(name).write_text(vrt(str(inner), 8))
    outer, before = image.with_name("outer.vrt"), image.read_bytes()
    assert files_of(outer, references=True) == {"outer.vrt", "inner.vrt", "image.tif"}
    raster = ["--prediction", str(outer), "--labels", str(outer), "--references"]
    assert evaluate([*raster, "--plot", str(image)]) == 2
    assert f"{image}: it is the input {image}" in capfd.readouterr().err
    assert image.read_bytes() == before
    # VRTs that name each other have an end.
    one, other = image.with_name("one.vrt"), image.with_name("other.vrt")
    one.write_text(vrt(str(other), 8))
    other.write_text(vrt(str(one), 8))
    assert files_of(one, references=True) == {"one.vrt", "other.vrt"}


def test_gdal_and_obstore_are_sent_to_one_server() -> None:
    """By Amazon's variable and by GDAL's."""
    url, gdal = {"AWS_ENDPOINT_URL": "http://h:9/"}, {"AWS_S3_ENDPOINT": "h:9", "AWS_HTTPS": "NO"}
    path_style = {"AWS_VIRTUAL_HOSTING": "FALSE"}
    assert {**gdal, **path_style}.items() <= gdal_options(url).items()
    assert not any(name.startswith("AWS") for name in gdal_options(gdal))
    assert gdal_options({}, 8)["GDAL_HTTP_LOW_SPEED_TIME"] == "8"
    assert "GDAL_HTTP_LOW_SPEED_TIME" not in gdal_options({"GDAL_HTTP_LOW_SPEED_TIME": "90"}, 8), "a user's own holds"
    for environment, endpoint, by_host in (
        (url, "http://h:9", False),
        ({"AWS_ENDPOINT_URL": "h"}, "https://h", False),
        ({**url, "AWS_VIRTUAL_HOSTING": "TRUE"}, "http://b.h:9", True),
        ({**gdal, **path_style}, "http://h:9", False),
        (gdal, "http://b.h:9", True),
        ({"AWS_S3_ENDPOINT": "h", **path_style}, "https://h", False),
        ({}, None, True),
    ):
        found = store_options("b", environment, 8, 1)
        assert (found.get("endpoint"), found["virtual_hosted_style_request"]) == (endpoint, by_host), environment
    assert store_options("b", {"AWS_NO_SIGN_REQUEST": "YES"}, 8, 1)["skip_signature"]


def test_what_was_read_is_named_and_never_shown() -> None:
    said = advice(
        {"AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "r", "HOME": "/"}, "s3://b/a"
    )
    assert said.endswith(": AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION")
    said = advice({"AWS_REGION": "r"}, "/vsis3/b/a")
    assert said.startswith("set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_NO_SIGN_REQUEST, on every rank")
    assert "AWS_REGION are set" in said
    assert advice({"AWS_ACCESS_KEY_ID": "AKIA"}, "http://h/s.zarr") == "check that its server can be reached"


def test_the_first_variable_that_names_authorities_is_handed_on() -> None:
    named = {"SSL_CERT_FILE": "/o.pem", "AWS_CA_BUNDLE": "/a.pem", "CURL_CA_BUNDLE": "/c.pem"}
    assert gdal_options(named)["GDAL_CURL_CA_BUNDLE"] == "/c.pem"
    assert gdal_options({"SSL_CERT_FILE": "/o.pem", "CURL_CA_BUNDLE": ""})["GDAL_CURL_CA_BUNDLE"] == "/o.pem"
    assert "GDAL_CURL_CA_BUNDLE" not in gdal_options({**named, "GDAL_CURL_CA_BUNDLE": "/g.pem"}), "its own decides"
    known = gdal_options({}).get("GDAL_CURL_CA_BUNDLE")
    assert known is None or Path(known).read_text().count("BEGIN CERTIFICATE") > 9
    assert advice(named, "s3://b/a", "SSL error").startswith(
        "CURL_CA_BUNDLE is /c.pem; set CURL_CA_BUNDLE to the PEM file"
    )
