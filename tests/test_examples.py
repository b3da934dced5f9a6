"""The examples of the README and of the how-to pages run as printed, in one folder with stand-ins for their files; at
night those of reference and explanation too, and batch jobs. `test_api.py` runs the programs of the pages in OWN,
`test_site.py` the tutorials, `test_printed_plans.py` compares what is printed below a plan."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import shapely
import torch
import yaml

import tiledseg
from tests.comm.launching import MPIRUN, ROOT, clean_environment, mpirun
from tests.conftest import NIGHTLY
from tests.law.recipe_data import resnet
from tests.raster.polygons_drawn import write_vectors
from tests.small_files import touch, write_yaml
from tests.test_documents import command_lines
from tiledseg.cli import main
from tiledseg.commands.options import GROUPS

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted((DOCS / "how-to").glob("*.md"))]
if NIGHTLY:
    PAGES += sorted({*(DOCS / "reference").glob("*.md"), *(DOCS / "explanation").glob("*.md")})
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OWN = ("own-network", "own-loop", "python", "foreign-networks", "halos")  # test_api.py runs all but the last of a loop
NOT_RUN = {
    "make demo": "CI runs both",
    "python3 -m venv env": "installs: tests/test_packaging.py, and set-up of CI",
    "pip install '.[all]'": "installs: the same",
    "sampler = RandomGeoSampler(": "torchgeo, which needs torchvision",
    "windows = SemanticSegmentationSlidingWindowGeoDataset(": "raster-vision, which needs torchvision",
    "smp.Unet(": "tests/tracing has this network",
}
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
task = learner = SimpleNamespace(model=network)
means, deviations, uri, config = [90] * 3, [50] * 3, "scene.tif", range(5)
loss, x, y = torch.nn.functional.cross_entropy, torch.randn(1, 3, 32, 32), torch.zeros(1, 32, 32, dtype=torch.long)
"""
OTHERS = """
from torch.utils.data import DataLoader
from monai.inferers import sliding_window_inference
image, cross_entropy, PIXELS = torch.randn(1, 3, 64, 96), loss, 64 * 96
tiles = tiledseg.TileDataset("scene.tif", "map.tif", halo=tiledseg.halo(module), grid=2, classes=5)
loader = DataLoader([{"image": x[0], "mask": y[0]}])
class Yours(lightning.LightningModule):
    def __init__(self, module):
        super().__init__()
        self.module = module
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""
LIGHTNING = """
class Trainer:  # in place of Lightning, where it is not installed
    def __init__(self, **options): pass
    def fit(self, learner, loader=None):
        for index, item in enumerate(loader or learner.train_dataloader()):
            loader or learner.on_train_epoch_start()
            learner.training_step(item, index).backward()
            learner.configure_optimizers().step()
base = type("LightningModule", (torch.nn.Module,), {"current_epoch": 0})
lightning = SimpleNamespace(LightningModule=base, Trainer=Trainer)
"""
if importlib.util.find_spec("lightning"):
    LIGHTNING = "import lightning\n"
RANK = "import os, sys, tiledseg.cli as c; os.chdir(sys.argv[1]); sys.exit(c.main(sys.argv[2:]))"
CLASSES = ("other", "road", "building", "tree", "water")
SMALL = "--model.levels 2 --model.base_channels 2 --train.epochs 1"
STAND_INS = {"/scratch": "scratch", "bands=4": "bands=3", "mesh=(2, 2)": "mesh=(1, 1)"}
STAND_INS["--run.output runs/first"] = f"--run.output runs/new {SMALL}"
STAND_INS |= {"size: 512": "size: 32", "size: 256": "size: 32", "mynets:build": "mynets.unet:build"}
STAND_INS["images: images, labels: labels"] = "images: scenes/*.tif, labels: labels/*.tif"
STAND_INS["--data.images a.tif"] = f"{SMALL} --data.images a.tif"
STAND_INS['devices=4, strategy="ddp"'] = 'accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False'
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
    if page.stem == "from-other-libraries":
        pytest.importorskip("monai")
        names += LIGHTNING + OTHERS
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
        if language == "python" and (page.stem not in OWN or text.startswith("with")):
            exec(names + text, names_of_page)
        if NIGHTLY and language == "yaml" and settings_that_train(text):
            Path("block.yaml").write_text(text)
            shutil.rmtree("runs/block", ignore_errors=True)
            assert main(shlex.split(BLOCK_RUN)) == 0, text
        if NIGHTLY and text.startswith("def build(bands, classes):\n    return smp"):
            program = (
                f"import torch, segmentation_models_pytorch as smp\n{text}\nbuild(3, 5)(torch.zeros(2, 3, 64, 64))"
            )
            environ = clean_environment({"PYTHONPATH": f"{ROOT}:{DOCS}/stand_ins"})
            subprocess.run([sys.executable, "-c", program], env=environ, check=True, timeout=100)


def test_examples_that_do_not_run_are_named() -> None:
    """All other blocks are programs, commands, settings that `test_documents.py` reads, outputs, or drawings."""
    code = re.compile(r"^(?:make|pip|python3|export|\w+ = \w+\(|[a-z]+\.\w+\()", re.MULTILINE)
    texts = [
        text
        for page in {*PAGES, *DOCS.glob("*.md"), *(DOCS / "reference").glob("*.md"), *DOCS.glob("explanation/*.md")}
        for language, text in BLOCK.findall(page.read_text())
        if language == "text" or (not language and code.match(text) and not list(command_lines(f"```\n{text}```")))
    ]
    assert {next((name for name in NOT_RUN if text.startswith(name)), text) for text in texts} == {*NOT_RUN}


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


@pytest.mark.skipif(not NIGHTLY, reason="starts 12 processes: at night")
def test_a_batch_job_is_written_rehearsed_and_submitted_as_typed(place: Path, tmp_path: Path) -> None:
    """The commands of the page in one shell, for a machine of one rank; sbatch and bsub run the scripts at once."""
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tools").mkdir()
    for name, body in SCHEDULERS.items():
        tool = tmp_path / "tools" / name
        tool.write_text(f"#!/bin/bash\nset -e\n{body}\n")
        tool.chmod(0o755)
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
