"""The examples of all pages run as printed, in one folder with stand-ins for their files; at night on all ranks, and
installations. `test_api.py` runs the programs of the pages
in OWN, `test_site.py` the tutorials, `test_printed_plans.py` compares what is printed below a plan."""

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import shapely
import torch
import yaml

import tiledseg
from tests.checkpoint.published import resnet
from tests.comm.launching import MPIRUN, ROOT, clean_environment, mpirun
from tests.conftest import NIGHTLY
from tests.raster.polygons_drawn import write_vectors
from tests.small_files import touch, write_yaml
from tests.test_documents import command_lines
from tests.test_job_runs import fake
from tiledseg.cli import main
from tiledseg.commands.options import GROUPS

DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *(page for kind in ("how-to", "reference", "explanation") for page in sorted((DOCS / kind).glob("*.md"))),
]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OWN = ("own-network", "own-loop", "python", "foreign-networks", "halos")  # test_api.py runs all but the last of a loop
MODELS = {
    "fine-tune": {},
    "networks": {},
    "from-other-libraries": {},
    "own-network": {"build": "mynets.unet:build", "arguments": {"width": 32}},
}
NETWORK = """from torch import nn
def build(bands, classes, width=4):
    return nn.Sequential(nn.Conv2d(bands, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, classes, 1))
"""
NAMES = """from types import SimpleNamespace
import torch, tiledseg
from mynets.unet import build
module = network = build(3, 5)
means, deviations = [90] * 3, [50] * 3
loss, x, y = torch.nn.functional.cross_entropy, torch.randn(1, 3, 32, 32), torch.zeros(1, 32, 32, dtype=torch.long)
"""
OTHERS = """
import rasterio
from torch.utils.data import DataLoader
from tests.other_libraries import *
from tests.other_libraries import lightning, smp
from monai.inferers import sliding_window_inference
image, cross_entropy, PIXELS = torch.randn(1, 3, 64, 96), loss, 64 * 96
tiles = tiledseg.TileDataset("scene.tif", "map.tif", halo=tiledseg.halo(module), grid=2, classes=5)
loader = validation = DataLoader([{"image": x[0], "mask": y[0]}])
pixels, classes_HW = (torch.from_numpy(rasterio.open(f"{name}.tif").read()) for name in ("scene", "map"))
images, labels = GeoDataset(image=pixels.float()), GeoDataset(mask=classes_HW[0].long())
scene, learner = SimpleNamespace(pixels=pixels, extent=(0, 0, 64, 96)), Learner(model=module)
uri, config = "scene.tif", range(5)
class Yours(lightning.LightningModule):
    def __init__(self, module):
        super().__init__()
        self.module = module
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""
RANK = "import os, sys, tiledseg.cli as c; os.chdir(sys.argv[1]); sys.exit(c.main(sys.argv[2:]))"
CLASSES = ("other", "road", "building", "tree", "water")
SMALL = "--model.levels 2 --model.base_channels 2 --train.epochs 1"
STAND_INS = {"/scratch": "scratch", "bands=4": "bands=3", "mesh=(2, 2)": "mesh=(1, 1)"}
STAND_INS["--run.output runs/first"] = f"--run.output runs/new {SMALL}"
STAND_INS |= {"size=512, length=1000": "size=32, length=8", "size=512, stride=512": "size=32, stride=32"}
STAND_INS |= {
    "in_channels=4": "in_channels=3",
    "size: 512": "size: 32",
    "size: 256": "size: 32",
    "mynets:build": "mynets.unet:build",
}
STAND_INS["images: images, labels: labels"] = "images: scenes/*.tif, labels: labels/*.tif"
STAND_INS["--data.images a.tif"] = f"{SMALL} --data.images a.tif"
STAND_INS['devices=4, strategy="ddp"'] = STAND_INS["max_epochs=20"] = (
    'accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False'
)
LEFT_OUT = ["s3://", "--scaling"]  # test_s3.py, test_printed_plans.py
BLOCK_RUN = "train --config run.yaml --config block.yaml --run.output runs/block --tiling.grid 2 --train.epochs 1"
BLOCK_RUN += " --data.val_images scenes/d.tif --data.val_labels labels/d.tif"
MADE_ELSEWHERE = "CamVid|colour: |share: |items.json|zarr|landuse|series"  # tests/raster, tests/tracing
if not (NIGHTLY and MPIRUN):  # by day one process runs what mpirun starts
    LEFT_OUT += [
        "--calibrate",
        "--tiling.grid 2",
        "--site summit",
        "--memory.blocks 8",
        "--tiling.grid 16",
        "resnet34",
        "--parallel.",
    ]
for library in ("matplotlib", "onnxruntime", "onnxscript", "pyogrio"):
    pytest.importorskip(library)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scenes, labels, weights, and trained runs, by the names that the pages give them."""
    folder = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        touch(*(f"{name}/.x" for name in ("scenes", "labels", "more", "maps", "areas", "scratch", "mynets")))
        for name, labels in {"city": "new-labels", "scenes/d": "labels/d", "scenes/e": "labels/e", "a": "map"}.items():
            tiledseg.write_scene(f"{name}.tif", f"{labels}.tif", size=(64, 96), bands=3)
        for name in ("new", "scene", "more/c"):
            shutil.copy("city.tif", f"{name}.tif")
        shutil.copy("map.tif", "b.tif")
        for name, width in (("unet", 32), ("vit", 4)):
            Path(f"mynets/{name}.py").write_text(NETWORK)
            names: dict[str, Any] = {}
            exec(NETWORK, names)
            torch.save(names["build"](3, 5, width).state_dict(), f"{name}.pth")
        if NIGHTLY:
            torch.save(resnet((3, 4, 6, 3), bottleneck=False, width=64), "resnet34.pth")
        with tiledseg.open_raster("scene.tif") as file:
            x, y, crs = file.info.transform.c, file.info.transform.f, file.info.crs.to_string()
        write_vectors(Path("parcels.gpkg"), [shapely.box(x, y - 9, x + 9, y)], crs, kind=["shed"])  # names the layer
        Path("parcels.gpkg").rename("landuse.gpkg")
        rows = [f"{name},{name},{name}\n" for name in CLASSES]
        Path("classes.csv").write_text("".join(["name,value,class\n", *rows, "shed,shed,building\n"]))
        for run, page in (("demo", ""), ("mine", "own-network")):
            settle(page, f"runs/{run}")
            assert main(["train", "--config", "run.yaml"]) == 0
        shutil.copytree("runs/demo", "runs/first")
    return folder


def settle(page: str, output: str = "runs/run") -> None:
    data = {"images": "scenes/*.tif", "labels": "labels/*.tif", "classes": [{"name": name} for name in CLASSES]}
    model, run = MODELS.get(page, {"levels": 2, "base_channels": 2}), {"output": output, "verbosity": 0}
    write_yaml(
        Path("run.yaml"),
        {
            "data": data,
            "model": model,
            "train": {"epochs": 1},
            "run": run,
            "tiling": {"grid": 2} if page == "pipeline" else {},
        },
    )


def settings_that_train(text: str) -> bool:
    """Settings of a run, but those whose inputs tests of their own make."""
    return set(yaml.safe_load(text)) <= set(GROUPS) and not re.search(MADE_ELSEWHERE, text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_run(page: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    settle(page.stem)
    blocks = BLOCK.findall(page.read_text())
    names, names_of_page = NAMES, {}
    if "smp." in page.read_text():
        pytest.importorskip("monai")  # CI installs smp beside it
        names += OTHERS
    Path("node.yaml").write_text("".join(text for _, text in blocks if text.startswith("name: A100")))
    for language, text in blocks:
        for old, new in STAND_INS.items():
            text = text.replace(old, new)
        for ranks, words in command_lines(f"```\n{text}```"):
            if any(each in " ".join(words) for each in LEFT_OUT):
                continue
            shutil.rmtree("runs/run", ignore_errors=True)
            if NIGHTLY and MPIRUN and ranks:
                environ = clean_environment({"PYTHONPATH": f"{ROOT}:{tmp_path}"})
                assert mpirun(int(ranks), "-c", RANK, str(tmp_path), *words, environ=environ).code == 0, words
            else:
                assert main(words) == 0, words
        if language == "python" and (page.stem not in OWN or text.startswith("with") or "smp." in text):
            exec(names + text, names_of_page)
            if "return smp." in text:
                assert names_of_page["build"](3, 5).eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 5, 64, 64)
        if NIGHTLY and language == "yaml" and settings_that_train(text):
            Path("block.yaml").write_text(text)
            shutil.rmtree("runs/block", ignore_errors=True)
            assert main(shlex.split(BLOCK_RUN)) == 0, text


def installing(page: Path) -> list[str]:
    return [text for language, text in BLOCK.findall(page.read_text()) if re.match(r"(make|pip|python3) ", text)]


def test_other_blocks_install_or_are_no_code() -> None:
    """All others are programs, commands, settings that `test_documents.py` reads, outputs, or drawings."""
    code = re.compile(r"^(?:make|pip|python3|export|\w+ = \w+\(|[a-z]+\.\w+\()", re.MULTILINE)
    extras = configparser.ConfigParser()
    extras.read(ROOT / "setup.cfg")
    for page in {*PAGES, *DOCS.glob("*.md"), *(DOCS / "reference").glob("*.md"), *DOCS.glob("explanation/*.md")}:
        for text in installing(page):
            named = ",".join(re.findall(r"'\.\[([\w,]+)\]'", text)).split(",")
            assert {*named} <= {"", *extras["options.extras_require"]}
            for target in re.findall(r"^make (\w+)", text, re.MULTILINE):
                subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True, timeout=30)
        for language, text in BLOCK.findall(page.read_text()):
            assert language != "text"
            assert language or not code.match(text) or text in installing(page) or [*command_lines(f"```\n{text}```")]


@pytest.mark.skipif(not (NIGHTLY and MPIRUN), reason="installs four times, and trains the demo: at night")
@pytest.mark.timeout(1200)
def test_a_clone_is_installed_and_shows_its_demo_as_typed(tmp_path: Path) -> None:
    """Pip finds the packages of this Python, and make this environment. `make test` runs this test."""
    subprocess.run(["git", "clone", "--quiet", ROOT, tmp_path], check=True, timeout=60)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    for name in ("setup.cfg", "pyproject.toml", "constraints.txt", "benchmarks/foreign-packages.txt"):
        os.utime(tmp_path / name, (0, 0))  # older than .venv/ready
    tools = {"PATH": f"{sys.prefix}/bin:{os.environ['PATH']}", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    for text in [
        text
        for page in ("README", "docs/how-to/install", "docs/how-to/batch-jobs")
        for text in installing(ROOT / f"{page}.md")
    ]:
        script = text.replace("make test", "make --dry-run test")
        if not text.startswith("make"):
            script = f"python3 -m venv env && . env/bin/activate\n{script}\ncd env && tiledseg doctor"
        packages = ROOT if text.startswith("make") else sysconfig.get_path("purelib")
        environ = clean_environment({**tools, "PYTHONPATH": str(packages)})
        words = ["bash", "-ec", script]
        done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs/demo/report.html").exists()


SCHEDULERS = {
    "sbatch": """while [[ "$1" == --* ]]; do shift; done
export SLURM_JOB_ID=7 SLURM_NTASKS=1 SLURM_NTASKS_PER_NODE=1 SLURM_JOB_NUM_NODES=1 SLURM_JOB_END_TIME=9999999999
exec bash "$@\"""",
    "bsub": """cat >submitted; rm -r runs/first
LSB_JOBID=8 exec bash submitted""",
    "srun": """while [[ "$1" == --* ]]; do shift; done
exec "$@\"""",
    "jsrun": """while [[ "$1" == --* ]]; do shift 2; done
exec "$@\"""",
    "tiledseg": f'exec {sys.executable} -m tiledseg "$@"',
    "python": f'exec {sys.executable} "$@"',
}
ONE_RANK = """--size 10000 --bands 4 > --size 64 --bands 3
--levels 5 --base-channels 64 > --levels 2 --base-channels 2
--gpus 256 > --gpus 1
--gpus-per-node 4 > --gpus-per-node 1
--gpus 192 > --gpus 1 --gpus-per-node 1
levels: 5, base_channels: 64 > levels: 2, base_channels: 2
epochs: 20 > epochs: 1"""


def test_a_batch_job_is_written_rehearsed_and_submitted_as_typed(place: Path, tmp_path: Path) -> None:
    """The commands of the page in one shell, for a machine of one rank; sbatch and bsub run the scripts at once."""
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    fake(tmp_path / "tools", **SCHEDULERS)
    text = (DOCS / "how-to/batch-jobs.md").read_text()
    for old, new in (line.split(" > ") for line in ONE_RANK.splitlines()):
        assert old in text
        text = text.replace(old, new)
    blocks = BLOCK.findall(text)
    (tmp_path / "run.yaml").write_text(next(text for language, text in blocks if language == "yaml"))
    typed = "".join(text for language, text in blocks if not language and "pip install" not in text)
    environ = clean_environment({"PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}/tools:{os.environ['PATH']}"})
    words = ["bash", "-ec", typed]
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("launcher") == 3, "each job begins with doctor"
    assert [(tmp_path / "runs" / name / "report.html").exists() for name in ("try", "first", "small")] == [True] * 3
