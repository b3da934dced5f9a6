"""A network that somebody's function builds: trained, gone on with, mapped by, and refused in one line."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import torch
from rasterio.enums import ColorInterp
from safetensors.torch import load_file, save_file

import tiledseg
from tests.answers import output_of, refusal, refuse
from tests.crash.runs import Material, step_losses
from tests.foreign.modules import Somebody, build
from tests.small_files import write_raster
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.cli import main
from tiledseg.errors import CheckpointError, ConfigError
from tiledseg.execution.carrying import use_one_kernel

BUILD = "tests.foreign.modules:build"


def config(material: Material, folder: Path, **groups: dict[str, Any]) -> dict[str, Any]:
    """Two epochs of three steps."""
    whole = material.config()
    whole |= {"model": {"build": BUILD, "arguments": {"width": 3}}, "run": {"output": str(folder), "verbosity": 0}}
    whole["train"] |= {"epochs": 2}
    whole["optimizer"] = {**whole.get("optimizer", {}), "policy": "constant"}
    return whole | {name: {**whole.get(name, {}), **keys} for name, keys in groups.items()}


@pytest.fixture(scope="module")
def run(material: Material, without_plots: None) -> Path:
    return tiledseg.train_network(config(material, material.root / "run"))


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(find_checkpoint(run).path / "model.safetensors")


def test_a_checkpoint_has_the_names_of_the_author(run: Path) -> None:
    assert list(weights(run)) == sorted(build(3, 3, 3).state_dict())
    manifest = json.loads((find_checkpoint(run).path / "manifest.json").read_text())
    network = {"kind": "foreign", "build": BUILD, "arguments": '{"width": 3}', "bands": 3, "classes": 3}
    assert manifest["state"]["network"] == network
    assert step_losses(run)[-1] < step_losses(run)[0]
    assert f": {BUILD}, " in json.loads((run / "summary.json").read_text())["title"]


def test_a_run_goes_on_as_if_it_had_not_stopped(material: Material, run: Path, tmp_path: Path) -> None:
    half = tiledseg.train_network(config(material, tmp_path / "half", train={"epochs": 1}))
    tiledseg.train_network(config(material, half))
    ours, theirs = weights(half), weights(run)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with pytest.raises(CheckpointError, match="arguments is"):
        tiledseg.train_network(config(material, half, model={"arguments": {"width": 4}}))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_weight_that_no_layer_takes_stays(material: Material, run: Path, tmp_path: Path, name: str) -> None:
    """No gradient comes to it: torch's optimizers pass over it, and let no such weight decay. Nothing is kept of it."""
    decay = {"name": name, "weight_decay": 0.5, "lr": 0.05}
    decayed = tiledseg.train_network(config(material, tmp_path / "run", optimizer=decay))
    ours, theirs = weights(decayed), weights(run)
    assert torch.equal(ours["spare.weight"], theirs["spare.weight"])
    assert torch.equal(ours["spare.bias"], theirs["spare.bias"])
    assert not torch.equal(ours["head.weight"], theirs["head.weight"])
    numbers = {int(key.split(".")[0]) for key in load_file(find_checkpoint(decayed).path / "optimizer.safetensors")}
    assert len(numbers) == len([key for key in ours if not key.startswith(("spare", "shift"))])


def test_maps_are_those_of_the_module_on_the_whole_image(material: Material, run: Path, tmp_path: Path) -> None:
    """By Python, by the command, by a file of weights; a checkpoint's word alone imports nothing."""
    image = material.root / "held-out.tif"
    trained = tiledseg.load(run, BUILD)
    module = build(3, 3, 3).double()
    module.load_state_dict(weights(run))
    use_one_kernel(True)
    with tiledseg.open_raster(str(image)) as reader, torch.no_grad():
        from tiledseg.geometry.box import Box

        x_BCHW = trained.normalize(*reader.read(Box.of_shape(reader.info.shape)))
        expected_HW = module.eval()(x_BCHW)[0].argmax(0).numpy()
    maps = {name: tmp_path / f"{name}.tif" for name in ("python", "trained", "command", "weights")}
    norm = trained.normalization
    options = {"grid": 3, "precision": "fp64", "normalize": (norm.mean, norm.std)}
    tiledseg.predict_raster(module.train(), image, maps["python"], **options, classes=3)
    assert module.training
    tiledseg.predict_raster(trained, image, maps["trained"], grid=2, precision="fp64")
    words = ["predict", "--image", str(image), "--precision", "fp64", "--verbosity", "0"]
    checkpoint = ["--checkpoint", str(run)]
    assert main([*words, *checkpoint, "--build", BUILD, "--output", str(maps["command"])]) == 0
    torch.save({f"module.{name}": each for name, each in module.state_dict().items()}, tmp_path / "w.pth")  # as DDP's
    own = ["--build", BUILD, "--arguments", '{"width": 3}', "--weights", str(tmp_path / "w.pth"), "--classes", "3"]
    own += ["--mean", json.dumps(norm.mean), "--deviation", json.dumps(norm.std), "--tiling.grid", "2"]
    assert main([*words, *own, "--output", str(maps["weights"])]) == 0
    for path in maps.values():
        with rasterio.open(path) as file:
            np.testing.assert_array_equal(file.read(1), expected_HW)
    never = "--output", str(tmp_path / "never.tif")
    broken = {name: each.clone() for name, each in module.state_dict().items()}
    next(iter(broken.values())).view(-1)[1] = math.nan
    torch.save(broken, tmp_path / "broken.pth")
    for more, said in (
        (checkpoint, f"name it too: --build {BUILD}"),
        ([*checkpoint, "--build", "os:system"], "--build is os:system, but the network was built by"),
        ([*checkpoint, "--build", BUILD, "--classes", "3"], "--classes is 3, but the checkpoint has its own"),
        (["--build", BUILD, "--weights", "w.pth"], "--classes is not given"),
        ([], "give --checkpoint RUN, or --build and --weights FILE"),
        ([*own[:3], '{"width": 4}', *own[4:]], "other shapes have"),
        ([*own, "--mean", "[NaN, 0, 0]"], "normalize has means [nan, 0.0, 0.0]"),
        ([*own, "--deviation", "[1, Infinity, 1]"], "; give finite numbers"),
        ([*own, "--weights", str(tmp_path / "broken.pth")], "holds a value that is not finite; give another file"),
        ([*own, "--which", "best"], "--which is best, but --weights is one file"),
    ):
        refuse(lambda more=more: main([*words, *more, *never]), said)
    save_file({"head.weight": torch.zeros(1), "tail": torch.zeros(1)}, tmp_path / "other.safetensors")
    other = [str(tmp_path / "other.safetensors") if word.endswith(".pth") else word for word in own]
    refuse(lambda: main([*words, *other, *never]), "it lacks bottom.first.bias, ", "it has besides tail")
    assert not (tmp_path / "never.tif").exists()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"build": "somebody"}, "model.build is 'somebody'; give package.module:function"),
        ({"build": BUILD, "arguments": {"width": {1: 2}}}, "model.arguments has the key 1, which is no text"),
        ({"build": "nobody.knows:this"}, "cannot be imported: ModuleNotFoundError: No module named 'nobody'"),
        ({"build": "tests.foreign.modules:nothing"}, "'tests.foreign.modules' has no attribute 'nothing'"),
        ({"build": "tests.foreign.modules:__doc__"}, "is a str, no function"),
        ({"build": "tests.foreign.modules:text"}, "gives a str, no torch.nn.Module"),
        ({"build": "tests.foreign.modules:kind"}, "gives Somebody, no torch.nn.Module; return a module, built"),
        ({"build": "tests.foreign.modules:raising"}, "has failed with bands, classes: ValueError: no such luck"),
        ({"build": "tests.foreign.modules:Pair"}, "gives 2 outputs; return the scores of the classes alone"),
        ({"build": "tests.foreign.modules:flat"}, "cannot be computed exactly on tiles"),
        ({"build": BUILD, "arguments": {"depth": 3}}, "has failed with bands, classes, depth: TypeError"),
        ({"build": "tests.foreign.modules:four"}, "gives 4 channels for 3 classes"),
        ({"build": BUILD, "levels": 3}, "model.levels is 3, but tests.foreign.modules:build builds the network"),
        ({"arguments": {"width": 3}}, "model.arguments is {'width': 3}, but unet has no such choice"),
        ({"verify": False}, "verify is False, but unet has no such choice; leave the key out"),
    ],
)
def test_what_is_no_such_network_is_refused(material: Material, model: dict, words: str, tmp_path: Path) -> None:
    options = config(material, tmp_path / "never") | {"model": model}
    with refusal(ConfigError, words):
        tiledseg.train_network(options)
    assert list(tmp_path.iterdir()) == []


def test_a_module_that_gives_no_classes_maps_nothing(material: Material, tmp_path: Path) -> None:
    image = material.root / "held-out.tif"
    for module, words, more in (
        (Somebody(3, 1), "gives 1 channels, but a class map has 2 to 255", {}),
        (Somebody(3, 3), "gives 3 channels for 4 classes", {"classes": 4}),
        (Somebody(2, 3), "does not run on 3 bands", {}),
    ):
        with pytest.raises(ConfigError, match=words):
            tiledseg.predict_raster(module, image, tmp_path / "never.tif", **more)
    assert list(tmp_path.iterdir()) == []


def test_a_band_that_is_marked_as_alpha_is_named(tmp_path: Path) -> None:
    """Where a network takes four bands, and three are read."""
    image, never = str(tmp_path / "image.tif"), str(tmp_path / "never.tif")
    write_raster(tmp_path / "image.tif", np.full((4, 64, 96), 7, np.uint8))
    with rasterio.open(image, "r+") as file:
        file.colorinterp = [*file.colorinterp[:3], ColorInterp.alpha]
    write_raster(tmp_path / "labels.tif", np.ones((1, 64, 96), np.uint8))
    norm, said = ([1] * 4, [1] * 4), r"band 4 is marked as alpha .* name it: {} \[1,2,3,4\]"
    for more, words in (({}, "does not run on 3 bands"), ({"normalize": norm}, "4 means and 4 deviations for 3 bands")):
        with pytest.raises(ConfigError, match=f"{words}.*{said.format('bands')}"):
            tiledseg.predict_raster(Somebody(4, 3), image, never, **more)
    with pytest.raises(ConfigError, match=f"4 means.*{said.format('bands')}"):
        tiledseg.TileDataset(image, halo=0, grid=1, normalize=norm)
    data = {"images": image, "labels": str(tmp_path / "labels.tif"), "classes": 3}
    own = {"model": {"build": "tests.foreign.modules:of_four"}, "run": {"output": never}}
    with pytest.raises(ConfigError, match=f"does not run on 3 bands.*{said.format('data.bands')}"):
        tiledseg.train_network({"data": data, **own})
    torch.save(Somebody(4, 3).state_dict(), tmp_path / "w.pth")
    words = ["predict", "--image", image, "--output", never, "--weights", str(tmp_path / "w.pth"), "--classes", "3"]
    for more in ([], ["--mean", "[1,1,1,1]", "--deviation", "[1,1,1,1]"]):
        own = [*words, "--build", "tests.foreign.modules:of_four", *more]
        assert re.search(said.format("--bands"), refuse(lambda own=own: main(own)))
    tiledseg.predict_raster(Somebody(4, 3), image, tmp_path / "map.tif", bands=[1, 2, 3, 4], normalize=norm)


def test_a_plan_is_of_the_same_kind_as_others() -> None:
    words = ["plan", "--size", "640", "--grid", "4", "--bands", "3", "--classes", "5", "--format", "json"]
    own = ["--build", BUILD, "--arguments", '{"width": 6}', "--stages", "2"]
    ours = json.loads(output_of(lambda: main([*words, *own])))
    module = build(3, 5, 6)
    used = sum(p.numel() for name, p in module.named_parameters() if not name.startswith("spare"))
    assert ours["network"]["parameters"] == used + module.shift.numel()  # constants that it computes with, too
    assert ours["exact"]["halo_minimum"] == tiledseg.halo(module).minimum
    assert sum(ours["stages"]["balance"]) == ours["network"]["layers"]
    assert json.loads(output_of(lambda: main(words))).keys() == ours.keys() - {"stages"}
    for more, said in (
        (["--arguments", '{"width": 6}'], "unet has no such choice"),
        (["--build", BUILD, "--levels", "3"], "levels is 3"),
        (["--build", BUILD, "--arguments", "width"], "--arguments is width"),
        (["--build", "nobody:knows"], "No module named 'nobody'"),
    ):
        refuse(lambda more=more: main([*words, *more]), said)


def test_what_is_converted_or_loaded_is_what_the_graph_computes_with() -> None:
    """Weights and buffers that functions take, too."""
    module = build(2, 3)
    network, x_BCHW = tiledseg.trace(module, 2), torch.randn(1, 2, 16, 24, dtype=torch.float64)
    assert network.double() is network
    state = {name: value + 0.25 for name, value in module.state_dict().items()}
    network.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(network(x_BCHW), module(x_BCHW), rtol=1e-12, atol=1e-12)
        module.shift.fill_(7)
        torch.testing.assert_close(network(x_BCHW), module(x_BCHW), rtol=1e-12, atol=1e-12)
    spread = tiledseg.parallelize(build(2, 3), (1, 1)).double()
    spread.load_state_dict(state)
    module.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(spread(x_BCHW), module(x_BCHW), rtol=1e-12, atol=1e-12)
