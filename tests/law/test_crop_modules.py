"""Modules that run on crops: run whole, planned, or refused in a line (`test_runs.py` trains one on windows)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tiledseg
from tests.law.cases import one_rank
from tests.law.fixed_size import BANDS, CLASSES, SIDE, Fickle, FixedSize, Spectral, fixed_size
from tests.law.runs import configuration, run
from tests.law.test_runs import CROPS
from tests.planning.allocated import measured, planned
from tests.small_files import read_raster, write_raster
from tiledseg.errors import ConfigError, InputError
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.layers.declared import CropGrid
from tiledseg.geometry.tiling import make_tiling
from tiledseg.models.layers.block import tile_places
from tiledseg.tracing.crops import CropModule, crops_network, kept_between_tiles


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("image") / "image.tif"
    write_raster(path, np.random.default_rng(2).integers(1, 256, (BANDS, 45, 67), np.uint8))
    return path


def test_the_whole_image_needs_no_tracing(image: Path, tmp_path: Path) -> None:
    module = Spectral(BANDS, CLASSES, 3, padding=1).eval()
    tiledseg.predict_raster(module, image, tmp_path / "map.tif", grid=1, classes=CLASSES)
    with torch.no_grad():
        wanted_HW = module(torch.from_numpy(read_raster(image)).float()[None])[0].argmax(0).numpy()
    np.testing.assert_array_equal(read_raster(tmp_path / "map.tif")[0], wanted_HW)
    message = r"fft.*in crops of one size \(window\), or mapped whole on one rank \(grid 1, and classes\)"
    with pytest.raises(ConfigError, match=message):
        tiledseg.predict_raster(module, image, tmp_path / "other.tif", grid=2, classes=CLASSES)


@pytest.mark.parametrize(
    ("module", "asked", "message"),
    [
        (FixedSize(), {"window": 0}, "window is 0; give a whole number, at least 1"),
        (FixedSize(), {"window": SIDE, "overlap": 1.0}, r"overlap is 1.0; give a number in \[0, 1\)"),
        (FixedSize(), {"window": SIDE, "overlap": -0.1}, "overlap is -0.1"),
        (FixedSize(), {"window": SIDE, "blend": "hann"}, "blend is 'hann'; give one of gaussian, cosine, mean, centre"),
        (FixedSize(), {"window": SIDE, "ends": "cut"}, "ends is 'cut'; give one of inside, mirrored"),
        (
            FixedSize(),
            {"blend": "mean"},
            "blend is mean, but --window is null; leave it out, or give --window the size of a crop",
        ),
        (FixedSize(), {"window": 16}, "does not run on 3 bands of 16 x 16 pixels: RuntimeError: .*; give the window"),
        (FixedSize(), {"window": SIDE, "classes": 7}, "gives 4 channels for 7 classes"),
        (FixedSize(classes=1), {"window": SIDE}, "gives 1 channels for 2 to 255 classes"),
        (nn.Conv2d(3, 4, 3), {"window": SIDE}, r"gives a tensor of \(1, 4, 10, 10\) for an input of"),
        (nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten()), {"window": SIDE}, r"gives a tensor of \(1, 576\)"),
        (Fickle("coarse"), {"window": SIDE}, r"gives a tensor of \(1, 4, 3, 3\) for an input of \(1, 3, 12, 12\)"),
        (Fickle("draws"), {"window": SIDE}, "gives other scores at its next call"),
        (Fickle("moves"), {"window": SIDE}, "changes its buffer 'moved' in eval"),
        (Fickle("counts"), {"window": SIDE}, "changes its attribute 'calls' at every call"),
        (Fickle("lists"), {"window": SIDE}, "changes its attribute 'seen' at every call"),
        (Fickle("counts for all"), {"window": SIDE}, "changes a class of it, or a global name, at every call"),
        (Fickle("remembers"), {"window": SIDE}, "let it draw and keep nothing"),
        (Fickle("seeds"), {"window": SIDE}, "let it draw and keep nothing"),
    ],
)
def test_what_has_no_such_map_is_refused_in_a_line(
    module: nn.Module, asked: dict[str, Any], message: str, image: Path, tmp_path: Path
) -> None:
    """Before anything is written."""
    with pytest.raises(InputError, match=message):
        tiledseg.predict_raster(module, image, tmp_path / "map.tif", **asked)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("seldom", "draws random numbers"),
        ("seldom, of its own", "changes 'own'"),
        ("counts bright", "changes 'calls'"),
        ("moves bright", "changes 'moved'"),
    ],
)
def test_a_change_for_some_crops_ends_the_map(how: str, message: str, image: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{message} in evaluation for some crops"):
        tiledseg.predict_raster(Fickle(how), image, tmp_path / "map.tif", window=SIDE)
    assert not list(tmp_path.iterdir())


class Keeping(FixedSize):
    """A module that keeps every tensor that it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.given = list[torch.Tensor]()

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        self.given.append(super().forward(x_BCHW))
        return self.given[-1]


def test_what_a_module_keeps_does_not_grow_with_the_map() -> None:
    module, x_BCHW = fixed_size(kind=Keeping), torch.randn(1, BANDS, 4 * SIDE, 2 * SIDE)
    network = crops_network(module, BANDS, CropGrid(SIDE)).eval()
    tiling = make_tiling((4 * SIDE, 2 * SIDE), (4, 1), network_footprint(network.graph))
    kept = []
    with torch.no_grad(), kept_between_tiles(network):
        for tile in tiling.tiles:
            network(x_BCHW[:, :, *tile.context.slices], tile_places(network.graph, tiling.whole, tile.context))
            kept.append(len(module.given))
    assert len(set(kept)) == 1


def test_a_map_leaves_later_threads_their_number(image: Path, tmp_path: Path) -> None:
    """torch gives the number of one thread to those that begin later. Inside, also where the module is looked at first,
    a kernel has one."""
    module, seen = fixed_size(), set()
    module.register_forward_pre_hook(lambda *_: seen.add(torch.get_num_threads()))
    torch.set_num_threads(2)
    tiledseg.predict_raster(module, image, tmp_path / "map.tif", window=SIDE)
    assert seen == {1}
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == 2


def test_a_compiled_module_is_mapped(image: Path, tmp_path: Path) -> None:
    """By torch.jit, with several threads too: as what it was made of."""
    module, maps = nn.Conv2d(BANDS, CLASSES, 3, padding=1).eval(), set()
    for each, number in ((module, 1), (torch.jit.script(module), 1), (torch.jit.script(module), 3)):
        torch.set_num_threads(number)
        tiledseg.predict_raster(each, image, tmp_path / "map.tif", window=SIDE)
        maps.add((tmp_path / "map.tif").read_bytes())
    assert len(maps) == 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"train.windows": {"size": 10, "per_step": 3, "halo": "none"}}, "is 12, but .* give train.windows {size: 12,"),
        ({"train.windows": {"size": 12, "per_step": 3}}, "model.window is 12, but .* halo: none"),
        ({"model.freeze_norm": True}, "model.freeze_norm is true, but model.window is 12"),
        ({"model.window": None}, "model.overlap is 0.4, but model.window is null"),
        ({"model.build": "tests.law.fixed_size:Normed"}, "'bn' of Normed takes statistics over windows"),
        ({"parallel.halo": "layer"}, "parallel.halo is layer, but the module is not traced"),
        ({"memory.blocks": 2}, "memory.blocks is given, but the module is not traced"),
    ],
)
def test_a_run_of_windows_refuses_in_a_line(
    keys: dict[str, Any], message: str, shared: Path, without_plots: None
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(configuration(shared, "refused", CROPS | keys), one_rank())


def test_a_run_maps_by_its_crops_or_by_others(
    shared: Path, tmp_path: Path, without_plots: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says so; exports no file without them; a network of ours is exact, and takes none."""
    folder = shared / "to map"
    run(configuration(shared, folder.name, CROPS), one_rank())
    build = "tests.law.fixed_size:FixedSize"
    assert f"{build}, crops of 12 px, overlap 0.4, blend cosine, ends inside" in (folder / "summary.json").read_text()
    trained = tiledseg.load(folder, build)
    tiledseg.predict_raster(trained, shared / "image.tif", tmp_path / "map.tif")
    tiledseg.predict_raster(
        trained, shared / "image.tif", tmp_path / "same.tif", window=SIDE, overlap=0.4, blend="cosine"
    )
    tiledseg.predict_raster(trained, shared / "image.tif", tmp_path / "other.tif", window=SIDE, overlap=0.1)
    own, same, other = ((tmp_path / f"{name}.tif").read_bytes() for name in ("map", "same", "other"))
    assert own == same != other
    assert "blended of crops of 12 px, overlap 0.1" in "".join(capsys.readouterr())
    with pytest.raises(ConfigError, match="runs on crops of one size"):
        tiledseg.export(str(folder), str(tmp_path / "net.pt2"), build=build)
    run(configuration(shared, "unet"), one_rank())
    with pytest.raises(ConfigError, match="window is 12, but this program's own networks map exactly"):
        tiledseg.predict_raster(shared / "unet", shared / "image.tif", tmp_path / "unet.tif", window=SIDE)


def test_a_plan_counts_crops_and_those_computed_twice(capsys: pytest.CaptureFixture[str]) -> None:
    """The plan says that a module cannot be traced."""
    build = {"build": "tests.law.fixed_size:FixedSize", "bands": BANDS, "classes": CLASSES, "grid": (3, 1)}
    part = tiledseg.plan((45, 67), window=SIDE, **build)["windows"]
    assert "warning: not traced: the module does not run on" in capsys.readouterr().err
    assert part["crops"].pop("bytes") > 4 * BANDS * SIDE**2
    assert part["crops"] == {"overlap": 0.5, "number": 7 * 11, "computed": (3 + 4 + 3) * 11, "twice": 0.4286}
    again = tiledseg.plan((45, 67), window=SIDE, overlap=0.5, **build)["windows"]["crops"]
    assert part["crops"].items() <= again.items()
    with pytest.raises(ConfigError, match=r"--overlap is 0\.5, but --build is not given"):
        tiledseg.plan(45, overlap=0.5)


class Normalised(nn.Conv2d):
    """With a batch norm that is a function, and loses digits where crops lie channels last on a CPU."""

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        x_BCHW = nn.functional.batch_norm(x_BCHW, None, None, training=True) if self.training else x_BCHW
        return super().forward(x_BCHW)


def test_crops_lie_in_training_as_a_module_keeps_its_digits() -> None:
    """In evaluation as is faster: patches do not overlap."""
    overlapping = Normalised(BANDS, CLASSES, 3, padding=1)
    patches = nn.Sequential(nn.Conv2d(BANDS, 8, 16, 16), nn.ConvTranspose2d(8, CLASSES, 16, 16))
    layouts = torch.channels_last, torch.contiguous_format, torch.contiguous_format
    for module, trains, layout in zip((overlapping, overlapping, patches), (False, True, False), layouts, strict=True):
        network = crops_network(module, BANDS, CropGrid(224), trains=trains)
        assert [each.layout for each in network.modules() if isinstance(each, CropModule)] == [layout]


def test_a_step_on_a_crop_is_planned_by_what_autograd_keeps_of_it() -> None:
    network = crops_network(fixed_size(width=40), BANDS, CropGrid(SIDE), trains=True)
    (kept, peak), known = measured(network, (SIDE, SIDE)), planned(network.graph, BANDS, (SIDE, SIDE))
    assert known[0] == kept
    assert known[1] >= peak
