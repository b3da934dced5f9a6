"""Exported networks, read back by the programs that they are for, against the map that predict makes."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from pystac import Item
from stac_model.schema import MLModelProperties
from torch import nn

import tiledseg
from tests.answers import refuse
from tests.crash.runs import Material
from tests.small_files import read_raster
from tiledseg.errors import ConfigError
from tiledseg.export import main
from tiledseg.inference import exports as exported
from tiledseg.inference.exports import TileAdvice
from tiledseg.predict import main as predict
from tiledseg.train import main as train

onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime has no wheel for this Python")
NAMES = ["water", "wood & field", "Straße"]


@pytest.fixture(scope="module")
def folder(material: Material) -> Path:
    """A run, its map of the held-out image, and the files of all kinds that one call writes."""
    root = material.root
    classes = f"--data.classes={json.dumps([{'name': name} for name in NAMES])}"
    more = ["--train.epochs", "1", "--model.norm", "batch", "--train.tiles_per_step", "1", "--tiling.grid", "1"]
    assert train([*material.train_command(root / "run")[1:], *more, classes]) == 0
    shares = ["--probabilities", str(root / "p.tif"), "--tiling.grid", "1"]
    assert predict([*material.predict_command(root / "run", root / "m.tif")[1:], *shares]) == 0
    files = [str(root / f"net.{kind}") for kind in ("onnx", "pt2", "json")]
    options = ["--checkpoint", str(root / "run"), "--resolution", "50", "--output"]
    assert main([*options, *files]) == 0
    return root


def test_onnx_gives_the_probabilities_of_the_map(folder: Path) -> None:
    """Of pixels over 255, as Deepness gives them; of any height and width, or of one size."""
    session = onnxruntime.InferenceSession(str(folder / "net.onnx"))
    (taken,) = session.get_inputs()
    x_BCHW = read_raster(folder / "held-out.tif")[None] / np.float32(255)
    np.testing.assert_allclose(
        session.run(None, {taken.name: x_BCHW})[0], read_raster(folder / "p.tif")[None], atol=1e-5
    )
    part_BCHW = np.concatenate([x_BCHW[:, :, :32, :48]] * 3)
    assert session.run(None, {taken.name: part_BCHW})[0].shape == (3, 3, 32, 48)
    assert main(["--checkpoint", str(folder / "run"), "--tile", "64", "--output", str(folder / "n.onnx")]) == 0
    (taken,) = onnxruntime.InferenceSession(str(folder / "n.onnx")).get_inputs()
    assert taken.shape[1:] == [3, 64, 64]


def test_onnx_has_the_keys_of_deepness(folder: Path) -> None:
    """JSON each; the overlap in percent of a tile, of both halos."""
    model = onnx.load(folder / "net.onnx")
    keys = {entry.key: json.loads(entry.value) for entry in model.metadata_props if entry.key != "pkg.torch.export"}
    assert keys["model_type"] == "Segmentor"
    assert keys["class_names"] == {str(k): name for k, name in enumerate(NAMES)}
    assert keys["resolution"] == 50
    assert keys["tile_size"] == keys["tiles_size"] == 512
    assert keys["tiles_overlap"] * 512 / 100 >= 2 * keys["tiledseg_halo"] > 0
    assert (keys["standardization_mean"], keys["standardization_std"]) == ([0, 0, 0], [1, 1, 1])


def test_a_program_of_torch_gives_the_probabilities_of_the_map(folder: Path) -> None:
    """Of pixels over 255, as in ONNX, and it says so, as ONNX does."""
    about = {"tiledseg.json": ""}
    program = torch.export.load(folder / "net.pt2", extra_files=about).module()
    keys = {key: json.loads(value) for key, value in json.loads(about["tiledseg.json"]).items()}
    assert (keys["tiledseg_pixels_over"], keys["tiledseg_tolerance"], keys["tiledseg_bands"]) == (255, 5e-5, [1, 2, 3])
    entries = {entry.key: entry.value for entry in onnx.load(folder / "net.onnx").metadata_props}
    assert {key: json.loads(entries[key]) for key in keys} == keys
    x_BCHW = torch.from_numpy(read_raster(folder / "held-out.tif"))[None] / 255
    with torch.inference_mode():
        np.testing.assert_allclose(program(x_BCHW).numpy(), read_raster(folder / "p.tif")[None], atol=1e-5)
        assert program(x_BCHW[:, :, :20, :34]).shape == (1, 3, 20, 34)


def test_the_card_is_a_stac_mlm_item(folder: Path, tmp_path: Path) -> None:
    """By stac-model's rules; of the file beside it, or of the checkpoint's weights."""
    card = json.loads((folder / "net.json").read_text())
    item = Item.from_dict(card)
    about = MLModelProperties.model_validate(item.properties)
    assert about.input[0].input.shape == [-1, 3, -1, -1]
    assert [scaling.model_dump()["value"] for scaling in about.input[0].value_scaling or []] == [255]
    assert [one.name for one in about.output[0].classes or []] == NAMES
    assert about.total_parameters > 100
    assert item.assets["model"].href == "net.onnx"
    assert main(["--checkpoint", str(folder / "run"), "--output", str(tmp_path / "alone.json")]) == 0
    alone = Item.from_dict(json.loads((tmp_path / "alone.json").read_text()))
    assert (tmp_path / alone.assets["model"].href).resolve().name == "model.safetensors"
    scaling = MLModelProperties.model_validate(alone.properties).input[0].value_scaling or []
    assert [one.model_dump()["type"] for one in scaling] == ["z-score"] * 3


def test_what_is_off_leaves_the_older_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that gives other numbers than the network, unless the user's tolerance takes them; the file has it. And a
    network that torch.export cannot express."""
    output = tmp_path / "net.pt2"
    output.write_bytes(b"old")
    options = ["--checkpoint", str(folder / "run"), "--output", str(output)]
    run = exported.run_program
    monkeypatch.setattr(exported, "run_program", lambda *a: run(*a) + 1e-3)
    refuse(lambda: main(options), "off by 1.0e-03, more than --tolerance 5e-05", code=1)
    assert output.read_bytes() == b"old"
    assert main([*options, "--tolerance", "0.002"]) == 0
    assert b"tiledseg_tolerance" in (newer := output.read_bytes())

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such operation\nand more")

    monkeypatch.setattr(torch.export, "export", fail)
    refuse(lambda: main(options), "no such operation")
    assert output.read_bytes() == newer
    assert [path.name for path in tmp_path.iterdir()] == ["net.pt2"]


class Resized(nn.Module):
    """Its weights are those of a place in the image, or it measures the image."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.norm = nn.InstanceNorm2d(4) if what == "norm" else nn.Identity()
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=what == "corners")
        self.gate = nn.AdaptiveAvgPool2d(1) if what == "mean" else None
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.down(x))
        return self.head(self.up(y if self.gate is None else y * self.gate(y).sigmoid()))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("corners", "'up.interpolate' depends on the position"),
        ("norm", "'norm' measures st"),
        ("mean", "'gate.mean' measures st"),
    ],
)
def test_networks_that_tiles_change_are_refused(what: str, words: str) -> None:
    graph = tiledseg.trace(Resized(what), 3)
    with pytest.raises(ConfigError, match=words):
        TileAdvice(SimpleNamespace(network=graph), 64)
    assert TileAdvice(SimpleNamespace(network=tiledseg.trace(Resized("none"), 3)), None).alignment == 2
