"""The examples of the README and of the how-to pages run as printed, in one folder with stand-ins for their files."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import shapely
import torch

import tiledseg
from tests.comm.launching import MPIRUN, ROOT, clean_environment, mpirun
from tests.conftest import NIGHTLY
from tests.law.recipe_data import resnet
from tests.raster.polygons_drawn import write_vectors
from tests.small_files import touch, write_yaml
from tests.test_documents import command_lines
from tiledseg.cli import main

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs/how-to").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OWN = ("own-network", "own-loop")  # pages whose programs run in test_api.py, but for the last one
MODELS = {"fine-tune": {}, "own-network": {"build": "mynets.unet:build", "arguments": {"width": 32}}}
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
RANK = "import os, sys, tiledseg.cli as c; os.chdir(sys.argv[1]); sys.exit(c.main(sys.argv[2:]))"
CLASSES = ("other", "road", "building", "tree", "water")
SMALL = "--model.levels 2 --model.base_channels 2 --train.epochs 1"
STAND_INS = {"/scratch": "scratch", "bands=4": "bands=3", "mesh=(2, 2)": "mesh=(1, 1)"}
STAND_INS["--run.output runs/first"] = f"--run.output runs/new {SMALL}"
LEFT_OUT = ["s3://", "--scaling"]  # test_s3.py, test_printed_plans.py
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_run(page: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    settle(page.stem)
    blocks = BLOCK.findall(page.read_text())
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
            exec(NAMES + text, {})
        for line in re.findall(r"^tiledseg\.predict.*$", "" if language else text, re.MULTILINE):
            exec(NAMES + line, {})
