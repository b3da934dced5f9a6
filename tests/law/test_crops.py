"""Maps by crops of one size: the definition, written again in a loop, and its bits for any tiles, ranks and threads."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import torch
from numpy.typing import NDArray
from torch import nn

import tiledseg
from tests.law.cases import one_rank
from tests.law.runs import configuration, losses, run
from tests.law.test_steps import marks
from tests.small_files import write_raster
from tiledseg.comm.mesh import Mesh
from tiledseg.config.run import ModelConfig
from tiledseg.errors import ConfigError, InputError
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.layers.crops import CropGrid
from tiledseg.geometry.tiling import make_tiling
from tiledseg.inference.predictor import predict_all
from tiledseg.inference.request import Request
from tiledseg.inference.trained import module_mapper
from tiledseg.models.layers.block import tile_places
from tiledseg.planning.run.spread import Parallelism
from tiledseg.tracing import crops
from tiledseg.tracing.crops import crops_network

SIDE, BANDS, CLASSES = 12, 3, 4
SHAPE = (45, 67)


class FixedSize(nn.Module):
    """A transformer of patches with a learned place for each: of one input size, written for contiguous tensors."""

    def __init__(self, bands: int = BANDS, classes: int = CLASSES, side: int = SIDE, width: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(bands, width, 4, 4)
        self.places = nn.Parameter(torch.randn(1, (side // 4) ** 2, width))
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.2)
        self.head = nn.ConvTranspose2d(width, classes, 4, 4)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        batch, side = len(x_BCHW), x_BCHW.shape[2] // 4
        x = self.patches(x_BCHW).view(batch, -1, side * side).transpose(1, 2) + self.places
        x = self.norm(x + self.drop(self.attention(x, x, x)[0]))
        return self.head(x.transpose(1, 2).reshape(batch, -1, side, side))


def fixed_size(dtype: torch.dtype = torch.float32, **options: int) -> FixedSize:
    torch.manual_seed(4)
    return FixedSize(**options).to(dtype).eval()


def starts_of(size: int, grid: CropGrid) -> list[int]:
    step = max(1, int(grid.window * (1 - grid.overlap)))
    if grid.ends == "mirrored":
        first = -((grid.window - step) // 2)
        return [first + k * step for k in range(math.ceil(size / step))]
    if size <= grid.window:
        return [-((grid.window - size) // 2)]
    return [min(k * step, size - grid.window) for k in range(math.ceil((size - grid.window) / step) + 1)]


def weight_of(grid: CropGrid, place: tuple[int, int]) -> float:
    """The weight of a pixel by its place in a crop."""
    middle, side = (grid.window - 1) / 2, grid.window
    if grid.blend == "gaussian":
        return max(1e-3, math.prod(math.exp(-((at - middle) ** 2) / (2 * (side / 8) ** 2)) for at in place))
    if grid.blend == "cosine":
        return math.prod(math.sin(math.pi * (at + 0.5) / side) ** 2 for at in place)
    return 1.0


def defined(module: nn.Module, x_CHW: NDArray, grid: CropGrid) -> NDArray:
    """The scores as the documents define them: crop by crop, pixel by pixel, in float64."""
    _, height, width = x_CHW.shape
    more = 2 * grid.window
    padded = np.pad(x_CHW, ((0, 0), (more, more), (more, more)), "symmetric")
    corners = list(itertools.product(starts_of(height, grid), starts_of(width, grid)))
    middle = (grid.window - 1) / 2
    sums_KHW, total_HW = np.zeros((CLASSES, height, width)), np.zeros((height, width))

    def is_nearest(at: tuple[int, int], row: int, col: int) -> bool:
        each = zip((row, col), at, (starts_of(height, grid), starts_of(width, grid)), strict=True)
        return all(start == min(starts, key=lambda one: (abs(p - one - middle), one)) for p, start, starts in each)

    for at in corners:
        rows, cols = (slice(start + more, start + more + grid.window) for start in at)
        with torch.no_grad():
            scores = module(torch.from_numpy(padded[None, :, rows, cols].copy()))[0].double().numpy()
        covered = (range(max(0, a), min(n, a + grid.window)) for a, n in zip(at, (height, width), strict=True))
        for row, col in itertools.product(*covered):
            if grid.blend == "centre" and not is_nearest(at, row, col):
                continue
            weight = weight_of(grid, (row - at[0], col - at[1]))
            sums_KHW[:, row, col] += weight * scores[:, row - at[0], col - at[1]]
            total_HW[row, col] += weight
    return sums_KHW / total_HW


GRIDS = [
    CropGrid(SIDE),
    CropGrid(SIDE, 0.3, "cosine"),
    CropGrid(SIDE, 0.0, "mean"),
    CropGrid(SIDE, 0.6, "centre"),
    CropGrid(SIDE, 0.5, "gaussian", "mirrored"),
    CropGrid(SIDE, 0.45, "centre", "mirrored"),
    CropGrid(SIDE, 0.9, "mean", "mirrored"),
]


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid.blend}-{grid.overlap}-{grid.ends}")
@pytest.mark.parametrize("shape", [(29, 34), (7, 31), (12, 5)])
def test_scores_are_those_of_the_definition(grid: CropGrid, shape: tuple[int, int]) -> None:
    """Images smaller than a crop too."""
    module = fixed_size(torch.float64)
    x_CHW = np.random.default_rng(5).normal(size=(BANDS, *shape))
    network = crops_network(module, BANDS, grid)
    with torch.no_grad():
        scores_KHW = network(torch.from_numpy(x_CHW)[None])[0].numpy()
    np.testing.assert_allclose(scores_KHW, defined(module, x_CHW, grid), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("blend", "mode"), [("mean", "constant"), ("gaussian", "gaussian")])
@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.5, 0.8])
def test_scores_are_those_of_monai(blend: str, mode: str, overlap: float) -> None:
    inferers = pytest.importorskip("monai.inferers")
    module = fixed_size()
    x_BCHW = torch.randn(1, BANDS, *SHAPE)
    with torch.no_grad():
        ours = crops_network(module, BANDS, CropGrid(SIDE, overlap, blend))(x_BCHW)
        theirs = inferers.sliding_window_inference(x_BCHW, (SIDE, SIDE), 2, module, overlap=overlap, mode=mode)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid.blend}-{grid.overlap}-{grid.ends}")
def test_scores_of_tiles_have_the_bits_of_the_whole(grid: CropGrid) -> None:
    """In float64, where the order of a sum shows."""
    network = crops_network(fixed_size(torch.float64), BANDS, grid)
    x_BCHW = torch.randn(1, BANDS, *SHAPE, dtype=torch.float64)
    tiling = make_tiling(SHAPE, (4, 5), network_footprint(network.graph))
    with torch.no_grad():
        whole_KHW = network(x_BCHW)[0]
        for tile in tiling.tiles:
            places = tile_places(network.graph, tiling.whole, tile.context)
            part_KHW = network(x_BCHW[:, :, *tile.context.slices], places)[0]
            assert torch.equal(part_KHW[:, *tile.core_in_output.slices], whole_KHW[:, *tile.core.slices])


ROWS: dict[str, tuple[CropGrid, dict[str, Any]]] = {
    "gaussian": (CropGrid(SIDE), {}),
    "mirrored": (CropGrid(SIDE, 0.4, "cosine", "mirrored"), {"parallel": Parallelism(halo="exchange")}),
    "centre": (CropGrid(SIDE, 0.6, "centre"), {}),
    "turns": (CropGrid(SIDE, 0.5, "mean"), {"views": "turns"}),
}


@pytest.fixture(scope="module")
def image(meshes: dict[str, Mesh], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sides that no step divides, a corner without data; in a folder of all ranks. Collective."""
    mesh = meshes["gloo"]
    folder = Path(mesh.communicator.broadcast_object(str(tmp_path_factory.mktemp("crops"))))

    def made() -> None:
        pixels_CHW = np.random.default_rng(2).integers(1, 256, (BANDS, *SHAPE), np.uint8)
        pixels_CHW[:, :9, :13] = 0
        write_raster(folder / "image.tif", pixels_CHW, nodata=0)

    mesh.on_root(made)
    return folder / "image.tif"


def mapped(image: Path, name: str, row: str, grid: tuple[int, int], mesh: Mesh) -> tuple[bytes, bytes]:
    """The bytes of a map of classes and one of shares. Collective."""
    files = [image.with_name(f"{name}{end}.tif") for end in ("", "-shares")]
    cut, asked = ROWS[row]
    own = {key: value for key, value in asked.items() if key != "parallel" or mesh.size > 1}
    request = Request(str(image), *map(str, files), grid=grid, verbosity=0, **own)
    predict_all([request], module_mapper(fixed_size(), BANDS, crops=cut), 1 << 30, mesh)
    mesh.communicator.barrier()
    return files[0].read_bytes(), files[1].read_bytes()


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("row", "grid"),
    [
        pytest.param("gaussian", (1, 1), marks=marks((1, 3))),
        pytest.param("gaussian", (3, 3), marks=marks((1, 2, 9))),
        pytest.param("gaussian", (9, 5), marks=marks((1, 3, 9))),
        pytest.param("mirrored", (2, 4), marks=marks((1, 2))),
        pytest.param("centre", (4, 3), marks=marks((1, 2, 4))),
        pytest.param("turns", (3, 4), marks=marks((1, 3))),
    ],
)
def test_a_map_has_the_same_bits_for_any_ranks_and_tiles(
    row: str, grid: tuple[int, int], image: Path, meshes: dict[str, Mesh]
) -> None:
    """Classes and probabilities, byte for byte, of one rank and one tile."""
    mesh = meshes["gloo"]
    ours = mapped(image, f"{row}{grid}", row, grid, mesh)
    alone = mesh.on_root(lambda: mapped(image, f"{row} alone", row, (1, 1), one_rank()))
    assert ours == alone


def test_bits_do_not_depend_on_threads_or_batches(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of crops is always as large, whichever share it; how large shows in rounding alone."""
    wanted = mapped(image, "one", "gaussian", (1, 1), one_rank())
    threads = torch.get_num_threads()
    try:
        for number in (2, 5):
            torch.set_num_threads(number)
            assert mapped(image, f"{number} threads", "gaussian", (2, 2), one_rank()) == wanted
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setitem(crops.AT_ONCE, "cpu", 4)
    batches = [mapped(image, f"batches {grid}", "gaussian", grid, one_rank()) for grid in ((1, 1), (2, 3), (5, 4))]
    assert batches[0] == batches[1] == batches[2]


class Handing(FixedSize):
    """A module that hands a tensor on by an attribute."""

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        self.mean = x_BCHW.mean((2, 3), keepdim=True)
        y_BCHW = super().forward(x_BCHW) + self.mean.sum(1, keepdim=True)
        del self.mean
        return y_BCHW


def test_threads_share_no_attributes() -> None:
    torch.manual_seed(4)
    network, x_BCHW = crops_network(Handing().eval(), BANDS, CropGrid(SIDE, 0.8)), torch.randn(1, BANDS, *SHAPE)
    found, threads = [], torch.get_num_threads()
    try:
        for number in (1, 4):
            torch.set_num_threads(number)
            with torch.no_grad():
                found.append(network.eval()(x_BCHW))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


class Fickle(FixedSize):
    """A module with a sort of memory, or of chance."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls, self.last = kind, 0, None

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        y_BCHW = super().forward(x_BCHW)
        if self.kind == "counts":
            self.calls += 1
            return y_BCHW * (2 if self.calls > 60 else 1)
        if self.kind == "remembers":
            before, self.last = self.last, y_BCHW
            return y_BCHW if before is None or torch.equal(before, y_BCHW) else (before + y_BCHW) / 2
        if self.kind == "seeds":
            torch.manual_seed(0)
        return y_BCHW + torch.rand_like(y_BCHW) if self.kind == "seeds" or x_BCHW.max() > 100 else y_BCHW


def keys_of(folder: Path, module: str = "FixedSize", **more: Any) -> dict[str, Any]:
    """Return keys that train a module of one input size on windows, validated by crops."""
    windows = {"sampling": "windows", "window": SIDE, "windows_per_step": 3, "window_halo": "none", "epochs": 2}
    return {
        "model": ModelConfig(build=f"tests.law.test_crops:{module}", window=SIDE, overlap=0.4, blend="cosine"),
        "tiling.grid": "auto",
        **{f"train.{key}": value for key, value in windows.items()},
        "train.validate_every": 1,
        **more,
    }


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_a_run_of_windows_is_that_of_one_rank(shared: Path, meshes: dict[str, Mesh], without_plots: None) -> None:
    """Dropout draws by key, and the validation is that of the map."""
    mesh = meshes["gloo"]
    ours = run(configuration(shared, "windows", keys_of(shared)), mesh)
    mesh.on_root(lambda: run(configuration(shared, "windows alone", keys_of(shared)), one_rank()))
    theirs = [json.loads(line) for line in (shared / "windows alone" / "metrics.jsonl").read_text().splitlines()]
    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-9)
    assert len(set(losses(theirs))) > 2
    found, wanted = ([line["val"]["iou"] for line in lines if "val" in line] for lines in (ours, theirs))
    assert found == wanted


class Normed(FixedSize):
    """With a batch norm."""

    def __init__(self, bands: int, classes: int) -> None:
        super().__init__(bands, classes)
        self.bn = nn.BatchNorm2d(bands)


class Drawing(FixedSize):
    """Random in evaluation too."""

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return super().forward(x_BCHW + torch.rand_like(x_BCHW))


class Moving(FixedSize):
    """A buffer moves in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x_BCHW)


class Spectral(nn.Conv2d):
    """A module that no tracing takes, of any size."""

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        y_BCHW = super().forward(x_BCHW)
        return y_BCHW * torch.fft.fft2(y_BCHW).abs().mean()


def test_the_whole_image_needs_no_tracing(image: Path, tmp_path: Path) -> None:
    module = Spectral(BANDS, CLASSES, 3, padding=1).eval()
    tiledseg.predict_raster(module, image, tmp_path / "map.tif", grid=1, classes=CLASSES)
    with rasterio.open(image) as file, rasterio.open(tmp_path / "map.tif") as found, torch.no_grad():
        pixels_CHW, valid_HW = torch.from_numpy(file.read()).float(), file.dataset_mask() > 0
        wanted_HW = module(pixels_CHW[None])[0].argmax(0).numpy()
        np.testing.assert_array_equal(found.read(1), np.where(valid_HW, wanted_HW, 255))
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
        (Drawing(), {"window": SIDE}, "gives other scores when it is run again"),
        (Moving(), {"window": SIDE}, "changes its buffer 'calls' in eval"),
        (Fickle("counts"), {"window": SIDE}, "changes its attribute 'calls' at every call"),
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


def test_a_draw_for_some_crops_ends_the_map(image: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="draws random numbers in eval"):
        tiledseg.predict_raster(Fickle("seldom"), image, tmp_path / "map.tif", window=SIDE)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"train.window": 10}, "model.window is 12, but .* give train.sampling windows, train.window 12"),
        ({"train.window_halo": "exact"}, "model.window is 12, but .* train.window_halo none"),
        ({"model.freeze_norm": True}, "model.freeze_norm is true, but model.window is 12"),
        ({"model.window": None}, "model.overlap is 0.4, but model.window is null"),
        ({"model.build": "tests.law.test_crops:Normed"}, "'bn' of Normed takes statistics over windows"),
        ({"parallel.halo": "layer"}, "parallel.halo is layer, but the module is not traced"),
        ({"memory.blocks": 2}, "memory.blocks is given, but the module is not traced"),
    ],
)
def test_a_run_of_windows_refuses_in_a_line(
    keys: dict[str, Any], message: str, shared: Path, without_plots: None
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(configuration(shared, "refused", keys_of(shared, **keys)), one_rank())


def test_a_run_maps_by_its_crops_or_by_others(
    shared: Path, tmp_path: Path, without_plots: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says so; exports no file without them; a network of ours is exact, and takes none."""
    folder = shared / "to map"
    run(configuration(shared, folder.name, keys_of(shared)), one_rank())
    build = "tests.law.test_crops:FixedSize"
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
    with pytest.raises(ConfigError, match="window is 12, but the network is one of this program's"):
        tiledseg.predict_raster(shared / "unet", shared / "image.tif", tmp_path / "unet.tif", window=SIDE)
