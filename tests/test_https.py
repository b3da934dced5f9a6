"""Maps onto a web server: https:// as an output, against a real server on this machine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests import http_server
from tests.crash.runs import Material
from tests.raster.range_server import running
from tests.small_files import write_raster
from tests.tls import OPENSSL, VARIABLES, make_certificates
from tiledseg.predict import main as predict
from tiledseg.raster.reading.reader import open_raster
from tiledseg.raster.remote import RemoteName, parse_http
from tiledseg.train import main as train

USER = "ann:the-secret"


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    found = Material.make(tmp_path_factory.mktemp("files"))
    run = ["--config", str(found.root / "run.yaml"), "--run.output", str(found.root / "run"), "--train.epochs", "1"]
    assert train(run) == 0
    return found


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where maps lie until they go up."""
    folder = tmp_path / "waiting"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    for name in (*VARIABLES, "GDAL_HTTP_USERPWD", "GDAL_HTTP_BEARER"):
        monkeypatch.delenv(name, raising=False)
    return folder


def predict_from(material: Material, output: str, *options: str) -> int:
    image = str(material.root / "held-out.tif")
    words = ["--checkpoint", str(material.root / "run"), "--output", output, "--verbosity", "0", *options]
    return predict(words if "--image" in options else [*words, "--image", image])


def one_error(capsys: pytest.CaptureFixture[str]) -> str:
    err = capsys.readouterr().err
    assert err.startswith("error: "), err
    assert err.count("\n") == 1, err
    assert "the-secret" not in err
    return err


@pytest.mark.skipif(OPENSSL is None, reason="no openssl to make certificates with")
def test_a_map_goes_up_whole_by_tls_and_with_a_password(
    material: Material, waiting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte as a file, with all beside it; what described an older map goes, a style stays."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    certificates = make_certificates(tmp_path)
    monkeypatch.setenv("CURL_CA_BUNDLE", str(certificates.authority))
    monkeypatch.setenv("GDAL_HTTP_USERPWD", USER)
    assert predict_from(material, str(tmp_path / "here" / "a map.tif")) == 0
    (tmp_path / "there" / "a map.tif.ovr").write_bytes(b"old")
    with running(
        http_server.__file__, str(tmp_path / "there"), USER, str(certificates.server), str(certificates.key)
    ) as server:
        assert predict_from(material, f"https://{server}/a map.tif") == 0
        wanted = {path.name: path.read_bytes() for path in (tmp_path / "here").iterdir()}
        assert {path.name: path.read_bytes() for path in (tmp_path / "there").iterdir()} == wanted
        (tmp_path / "there" / "a map.qml").write_bytes(b"mine")
        assert predict_from(material, f"https://{server}/a map.tif") == 0
        assert (tmp_path / "there" / "a map.qml").read_bytes() == b"mine"
    assert not list(waiting.iterdir())


def test_a_map_is_read_where_it_was_written_and_folders_take_many(
    material: Material, waiting: Path, tmp_path: Path
) -> None:
    (tmp_path / "maps").mkdir()
    images = [str(material.root / f"{name}.tif") for name in ("one", "two")]
    with running(http_server.__file__, str(tmp_path)) as server:
        assert predict_from(material, f"http://{server}/maps/", "--image", *images) == 0
        with open_raster(f"http://{server}/maps/two.tif") as read:
            assert read.info.class_names
    assert {path.name for path in (tmp_path / "maps").glob("*.tif")} == {"one.tif", "two.tif"}
    assert not list(waiting.iterdir())


def test_what_is_wrong_is_one_line(
    material: Material,
    waiting: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before any work, but for a folder that is missing, which only the upload shows: there the map is kept."""
    write_raster(tmp_path / "there.tif", np.zeros((1, 8, 8), np.uint8))
    with running(http_server.__file__, str(tmp_path), USER) as server:
        assert predict_from(material, f"http://{server}/m.tif") == 2
        assert f"cannot write http://{server}/m.tif: the server said 401 Unauthorized; GDAL_HTTP" in one_error(capsys)
        monkeypatch.setenv("GDAL_HTTP_USERPWD", USER + "!")
        assert predict_from(material, f"http://{server}/m.tif") == 2
        assert "401 Unauthorized; it was asked with GDAL_HTTP_USERPWD" in one_error(capsys)
        monkeypatch.setenv("GDAL_HTTP_USERPWD", USER)
        assert predict_from(material, f"http://{server}/none/m.tif") == 1
        err = one_error(capsys)
        assert f"cannot write http://{server}/none/m" in err
        assert "its folder is not there, and the server makes none (501" in err
        (kept,) = waiting.rglob("m.tif")
        assert f"kept in {kept.parents[3]}" in err
        assert predict_from(material, f"http://{server}/m.gpkg/../m.tif") == 2
        assert "names no object" in one_error(capsys)
        assert predict_from(material, f"http://{server}/m.tif?signature=a") == 2
        assert "nothing can be written" in one_error(capsys)
    assert predict_from(material, "http://127.0.0.1:9/m.tif") == 2
    assert "cannot write http://127.0.0.1:9/m.tif: the server does not answer (" in one_error(capsys)
    assert [path.name for path in tmp_path.iterdir() if path != waiting] == ["there.tif"]


def test_names() -> None:
    assert parse_http("https://a.org:8443/x/y.tif") == RemoteName("https", "a.org:8443", "x/y.tif")
    for none in (
        "https://a.org",
        "https://a.org/",
        "https://a.org/x?y",
        "https://ann@a.org/x",
        "ftp://a.org/x",
        "x.tif",
    ):
        assert parse_http(none) is None
