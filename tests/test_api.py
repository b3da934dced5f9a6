"""What `import tiledseg` gives: every name has an example that runs, and does what its command does."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import shapely
import torch

import tiledseg
from tests.answers import output_of, refusal
from tests.comm.launching import MPIRUN, ROOT, clean_environment, mpirun, needs_mpirun
from tests.crash.runs import Material
from tests.raster.polygons_drawn import write_vectors
from tests.small_files import write_raster
from tiledseg.cli import main
from tiledseg.errors import CheckpointError, ConfigError, InputError, RasterError
from tiledseg.raster.statistics import Normalization, given_normalization

NAMES = "reference/python.md", "reference/foreign-networks.md", "how-to/own-network.md", "explanation/halos.md"
PAGES = {name: (ROOT / "docs" / name).read_text() for name in NAMES}
PAGE, LOOPS = PAGES["reference/python.md"], (ROOT / "docs/how-to/own-loop.md").read_text()
LONGEST = 10


@pytest.fixture(scope="module", autouse=True)
def _alone() -> None:
    """No launcher's variables, whoever started pytest."""
    with pytest.MonkeyPatch.context() as patch:
        kept = clean_environment()
        for name in [name for name in os.environ if name not in kept]:
            patch.delenv(name)
        yield


def test_the_names_are_those_of_the_page() -> None:
    listed = re.findall(r"^\.\. auto\w+:: (?:tiledseg\.)?(\w+)$", PAGE, re.MULTILINE)
    assert sorted([*listed, "__version__"]) == sorted(tiledseg.__all__)
    assert "`tiledseg.__version__`" in PAGE
    for name in tiledseg.__all__:
        assert getattr(tiledseg, name) is not None
    assert dir(tiledseg) == sorted(tiledseg.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tiledseg.nothing  # noqa: B018


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_command_and_the_function_of_its_name_do_not_hide_each_other(order: tuple[int, int]) -> None:
    """Whichever is used first; in a process of its own, which has imported neither."""
    lines = ["import inspect, tiledseg"]
    for name, first in (("plan", "size"), ("export", "checkpoint")):
        module = f"from tiledseg.{name} import main; assert main.__module__ == 'tiledseg.{name}'"
        call = f"assert list(inspect.signature(tiledseg.{name}).parameters)[0] == '{first}'"
        lines += [(module, call)[k] for k in (*order, 1)]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "flags",
    [
        {"size": 1000, "grid": 2, "levels": 3, "gpu_memory": "1GiB"},
        {"size": (1200, 800), "grid": (3, 2), "mesh": [3, 2], "machine": "v100", "precision": "bf16"},
        {"size": 600, "levels": 3, "stages": 2, "balance": [25, 24], "grid": 1, "recompute": ["always", "never"]},
    ],
)
def test_a_plan_is_that_of_the_command(flags: dict[str, Any]) -> None:
    words = []
    for name, value in flags.items():
        several = isinstance(value, list | tuple) and name in ("size", "grid", "mesh")
        listed = f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)
        words += [f"--{name.replace('_', '-')}", *(map(str, value) if several else [listed])]
    assert tiledseg.plan(**flags) == json.loads(output_of(lambda: main(["plan", *words, "--format", "json"])))


def test_an_export_is_that_of_the_command(run: Path, tmp_path: Path) -> None:
    tiledseg.export(run, [tmp_path / "a.json"], tile=32)
    assert main(["export", "--checkpoint", str(run), "--output", str(tmp_path / "b.json"), "--tile", "32"]) == 0
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


MODULE = torch.nn.Conv2d(3, 5, 3, padding=1)
WRONG: dict[str, Callable[[], Any]] = {
    "mesh is 2; give": lambda: tiledseg.parallelize(MODULE, 2),  # type: ignore[arg-type]
    "mesh is (1, 1, 1); give": lambda: tiledseg.parallelize(MODULE, (1, 1, 1)),  # type: ignore[arg-type]
    "fusion is 0; give a whole number, at least 1": lambda: tiledseg.parallelize(MODULE, (1, 1), fusion=0),
    "bands is 3; give": lambda: tiledseg.halo(MODULE, bands="3"),  # type: ignore[arg-type]
    "bands is True; give": lambda: tiledseg.trace(MODULE, True),
    "grid is 2.5; give": lambda: tiledseg.predict_raster(MODULE, "a", "b", grid=2.5),  # type: ignore[arg-type]
    "normalize is 5; give": lambda: tiledseg.predict_raster(MODULE, "a.tif", "b", bands=[1], normalize=5),  # type: ignore[arg-type]
    "prediction is 3; give": lambda: tiledseg.evaluate_map(3, "b"),  # type: ignore[arg-type]
    "build is 3; give": lambda: tiledseg.load("a", build=3),  # type: ignore[arg-type]
    "which is 'newest'; give one of latest, best": lambda: tiledseg.load("a", which="newest"),
    "bands is [1.5]; give": lambda: tiledseg.open_raster("a", [1.5]),  # type: ignore[list-item]
    "size is 5; give": lambda: tiledseg.write_scene("a", "b", 5),  # type: ignore[arg-type]
    "stages is 2; give": lambda: tiledseg.Pipeline(MODULE, "2"),  # type: ignore[arg-type]
    "halo is 2; give": lambda: tiledseg.TileDataset("a", halo="2"),  # type: ignore[arg-type]
    "dataset is 3; give": lambda: tiledseg.TileSampler(3),  # type: ignore[arg-type]
    "model is 3; give": lambda: tiledseg.large_model_support(3),  # type: ignore[arg-type]
    "data is 3; give a DataConfig": lambda: tiledseg.Config(data=3).check(),  # type: ignore[arg-type]
    "size is x; give": lambda: tiledseg.plan("x"),  # type: ignore[arg-type]
    "tiledseg plan has the unknown key 'grids'; give some of size": lambda: tiledseg.plan(1000, grids=3),
    "tiledseg plan: search is 1; give true or false": lambda: tiledseg.plan(1000, search=1),
    "emit is given, but only the command": lambda: tiledseg.plan(1000, emit="slurm"),
    "--tile: invalid int value: 'a'": lambda: tiledseg.export("a", "b.onnx", tile="a"),
    "network is unet; give nn.Module or a result of load, not str (tiledseg.halo)": lambda: tiledseg.halo("unet"),
    "Linear has no convolution to read its bands from": lambda: tiledseg.halo(torch.nn.Linear(3, 3)),
    "Conv2d'>; give nn.Module, not type": lambda: tiledseg.trace(torch.nn.Conv2d, 3),
    "the module returns (2, 18432)": lambda: tiledseg.trace(torch.nn.Flatten(), 3),
    "no checkpoint at nowhere": lambda: tiledseg.load("nowhere"),
    "tiling.grid is 0": lambda: tiledseg.predict_raster("r", "a.tif", "b.tif", grid=0),
    "the network is <built-in function len>": lambda: tiledseg.predict_raster(len, "a.tif", "b.tif"),
    "bands is 3; give a list": lambda: tiledseg.predict_raster("r", "a.tif", "b.tif", bands=3),
    "the configuration is None; give a map": lambda: tiledseg.train_network(None),
    "normalize is (90, 50); give (means, deviations)": lambda: given_normalization((90, 50), 2),
    "1 means and 1 deviations for 3": lambda: given_normalization(Normalization((100.0,), (50.0,), (0,)), 3),
    "checkpoint is given, but network is": lambda: tiledseg.predict_raster("r", "a.tif", "b.tif", checkpoint="r"),
    "tiledseg predict has the unknown key 'grids'": lambda: tiledseg.predict_raster("r", "a.tif", "b.tif", grids=3),
    "precision is 'fp8'": lambda: tiledseg.predict_raster("r", "a.tif", "b.tif", precision="fp8"),
    "the configuration has the unknown key 'dat'": lambda: tiledseg.train_network({"dat": {}}),
    "train.epochs": lambda: tiledseg.train_network({"train": {"epochs": "two"}}),
    "b.tif": lambda: tiledseg.evaluate_map("a.tif", "b.tif"),
    "train.epochs is <object object": lambda: tiledseg.train_network({"train": {"epochs": object()}}),
}


@pytest.mark.parametrize("words", WRONG)
def test_bad_input_is_raised_in_one_line(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ConfigError, where no file is at fault; and nothing is written."""
    monkeypatch.chdir(tmp_path)
    write_raster(tmp_path / "a.tif", np.ones((3, 32, 32), np.uint8))
    error = CheckpointError if "no checkpoint" in words else InputError if words == "b.tif" else ConfigError
    with refusal(error, words):
        WRONG[words]()
    assert [path.name for path in tmp_path.iterdir()] == ["a.tif"]


def test_arrays_and_numbers_of_numpy_are_arguments_too(tmp_path: Path) -> None:
    write_raster(tmp_path / "a.tif", np.ones((3, 32, 32), np.uint8))
    with tiledseg.open_raster(tmp_path / "a.tif", np.array([2, 1])) as reader:
        assert reader.info.bands == 2
    tiledseg.predict_raster(MODULE, tmp_path / "a.tif", tmp_path / "b.tif", grid=1, classes=np.int64(5))


def test_a_module_maps_an_image_of_two_times(tmp_path: Path) -> None:
    """It was refused: {time} stood in the name whose bands were counted."""
    for time in ("may", "june"):
        write_raster(tmp_path / f"{time}.tif", np.ones((2, 32, 32), np.uint8))
    module = torch.nn.Conv2d(4, 3, 3, padding=1)
    tiledseg.predict_raster(module, tmp_path / "{time}.tif", tmp_path / "map.tif", times=["may", "june"])
    assert (tmp_path / "map.tif").exists()


def test_a_halo_shows_its_numbers() -> None:
    assert repr(tiledseg.halo(MODULE)).startswith("Halo(minimum=1, halo=1, alignment=1, ")


def test_every_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the pages, in one empty folder."""
    monkeypatch.chdir(tmp_path)
    for name, page in PAGES.items():
        examples = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        assert examples
        for example in examples:
            lines = [line for line in example.splitlines() if line.strip()]
            assert len(lines) <= LONGEST, example
            exec(compile(example, f"docs/{name}", "exec"), {})
    tiles, *over_ranks = re.findall(r"^```python\n(.*?)^```$", LOOPS, re.MULTILINE | re.DOTALL)[:3]
    exec(compile(tiles, "docs/how-to/own-loop.md", "exec"), {})
    if MPIRUN is not None:
        assert mpirun(2, "-c", "".join(over_ranks), seconds=100).code == 0


@pytest.fixture(scope="module")
def run(material: Material) -> Path:
    folder = material.root / "run"
    return tiledseg.train_network({**material.config(), "run": {"output": str(folder), "verbosity": 0}})


def test_training_and_mapping_are_those_of_the_commands(material: Material, run: Path, tmp_path: Path) -> None:
    """The same weights, the same map (the mean over turns, of an area), the same scores."""
    other, image = tmp_path / "run", material.root / "held-out.tif"
    assert main(material.train_command(other)) == 0
    ours, theirs = (tiledseg.load(folder).network.state_dict() for folder in (run, other))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with rasterio.open(image) as file:
        left, bottom, right, top = file.bounds
        area = [shapely.box(left + (right - left) / 3, bottom, right, top - (top - bottom) / 4)]
        own = {"tta": "turns", "area": write_vectors(tmp_path / "area.gpkg", area, file.crs and file.crs.to_string())}
    tiledseg.predict_raster(run, image, tmp_path / "a.tif", grid=2, **own, probabilities=tmp_path / "a-p.tif")
    words = ["--tta", "turns", "--area", own["area"], "--probabilities", str(tmp_path / "b-p.tif")]
    assert main([*material.predict_command(other, tmp_path / "b.tif"), *words]) == 0
    for name in ("a.tif", "a-p.tif"):
        assert (tmp_path / name).read_bytes() == (tmp_path / name.replace("a", "b", 1)).read_bytes()
    labels = material.root / "held-out-labels.tif"
    words = ["evaluate", "--prediction", str(tmp_path / "b.tif"), "--labels", str(labels), "--classes", "3"]
    told = json.loads(output_of(lambda: main([*words, "--format", "json"])))
    scores = tiledseg.evaluate_map(tmp_path / "a.tif", labels, classes=3).to_json()
    assert {key: told[key] for key in scores} == scores


def test_one_rank_computes_a_grid_in_blocks_where_a_norm_sees_the_image(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image, target = tmp_path / "a.tif", tmp_path / "map.tif"
    write_raster(image, np.random.default_rng(0).integers(0, 255, (2, 96, 128), np.uint8))
    layers = torch.nn.Conv2d(2, 6, 3, padding=1), torch.nn.GroupNorm(3, 6), torch.nn.ReLU(), torch.nn.Conv2d(6, 3, 1)
    options: dict[str, Any] = {"precision": "fp64", "format": "gtiff"}
    expected = None
    for more, said in (
        ({"grid": 1}, ""),
        ({}, ""),
        ({"grid": (4, 3)}, "blocks: at most 4 x 3 a tile, .* in memory; memory.store, a folder"),
        ({"grid": 4, "memory": {"store": str(tmp_path)}}, "blocks: at most 4 x 4 a tile, .* in a file\n"),
        ({"memory": {"blocks": [2, 3]}}, "blocks: at most 2 x 3 a tile"),
        ({"grid": 2, "parallel": {"halo": "layer"}}, ""),
    ):
        tiledseg.predict_raster(torch.nn.Sequential(*layers), image, target, **options, **more)
        expected = expected or target.read_bytes()
        assert target.read_bytes() == expected, more
        err = capsys.readouterr().err
        assert re.search(said, err) if said else "blocks" not in err
        assert re.search(r"map\.tif \(.*\), .*map\.qml \(.*\), .*map\.tif\.aux\.xml \(.*\)\n$", err)
    tiledseg.predict_raster(torch.nn.Sequential(*layers), image, target, **options, grid=4, verbosity=0)
    assert capsys.readouterr().err == ""
    with pytest.raises(ConfigError, match="--transport is gloo, but the program's own process group"):
        tiledseg.predict_raster(torch.nn.Sequential(*layers), image, target, parallel={"transport": "gloo"})


def test_pixels_without_scores_are_no_class(material: Material, tmp_path: Path) -> None:
    """A fill value without a tag overflows: class 0 would be as good as any."""
    pixels_CHW = np.random.default_rng(3).random((2, 40, 50)).astype(np.float32)
    pixels_CHW[:, 30:34, 20:24] = 3.4e38
    write_raster(tmp_path / "a.tif", pixels_CHW)
    module = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3, padding=1), torch.nn.Conv2d(3, 2, 1))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(9)
    words = r"a\.tif: the network's scores of \d+ pixels are not finite, the first at row \d+, col \d+; "
    with pytest.raises(RasterError, match=words):
        tiledseg.predict_raster(module, tmp_path / "a.tif", tmp_path / "map.tif")
    assert not (tmp_path / "map.tif").exists()
    write_raster(tmp_path / "a.tif", pixels_CHW, nodata=3.4e38)
    tiledseg.predict_raster(module, tmp_path / "a.tif", tmp_path / "map.tif")


def test_a_map_has_the_weights_that_the_network_has_now(material: Material, run: Path, tmp_path: Path) -> None:
    """And the network stays as it was."""
    image, trained = material.root / "held-out.tif", tiledseg.load(run)
    last = list(trained.network.parameters())[-1]
    with torch.no_grad():
        last.copy_(torch.tensor([0.0, 0.0, 1e6], dtype=last.dtype))
    before = {name: value.clone() for name, value in trained.network.state_dict().items()}
    tiledseg.predict_raster(trained, image, tmp_path / "map.tif", grid=2)
    with tiledseg.open_raster(str(tmp_path / "map.tif")) as reader:
        from tiledseg.geometry.box import Box

        pixels_CHW, valid_HW = reader.read(Box.of_shape(reader.info.shape))
    assert (pixels_CHW[0][valid_HW] == 2).all()
    assert valid_HW.any()
    assert all(torch.equal(before[name], value) for name, value in trained.network.state_dict().items())


PROGRAM = """
import sys
import torch.distributed as dist
import tiledseg
from tiledseg.errors import RasterError

run, image, folder = sys.argv[1:]
trained = tiledseg.load(run)
tiledseg.predict_raster(trained, image, f"{folder}/first.tif", grid=4)
assert dist.is_initialized() and dist.get_world_size() == 2
try:
    tiledseg.predict_raster(trained, "nowhere.tif", f"{folder}/never.tif")
except RasterError as error:
    assert "nowhere.tif" in str(error)
else:
    raise AssertionError("it was not refused on this rank")
tiledseg.predict_raster(run, image, f"{folder}/second.tif", grid=2)
seen = [None, None]
dist.all_gather_object(seen, dist.get_rank())
assert seen == [0, 1], "the program's own group is as it was"
dist.destroy_process_group()
"""


@needs_mpirun
def test_ranks_of_a_program_share_a_map(material: Material, run: Path, tmp_path: Path) -> None:
    """The first call starts a process group, the others join it; an error is raised on every rank, and none hangs."""
    image = str(material.root / "held-out.tif")
    done = mpirun(2, "-c", PROGRAM, str(run), image, str(tmp_path))
    assert done.code == 0, done.err
    tiledseg.predict_raster(run, image, tmp_path / "alone.tif", grid=1)
    expected = (tmp_path / "alone.tif").read_bytes()
    assert (tmp_path / "first.tif").read_bytes() == (tmp_path / "second.tif").read_bytes() == expected
    assert sorted(path.name for path in tmp_path.glob("*.tif")) == ["alone.tif", "first.tif", "second.tif"]
    assert not list(tmp_path.glob(".*")), "nothing unfinished"
