"""Tiles for other people's loops: the law, what an item says, workers of a DataLoader, and who takes which."""

import multiprocessing
import pickle
from typing import Any

import numpy as np
import pytest
import rasterio
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import tiledseg
from tests.answers import refusal
from tests.small_files import PLACE, write_raster
from tiledseg.architecture.unet import UNet
from tiledseg.errors import ConfigError, InputError
from tiledseg.foreign.spread import Halo
from tiledseg.models.network import build_modules
from tiledseg.raster.samples.sampling import Sampler

SIDES = ((50, 37), (44, 52))
ALIGNED = nn.Sequential(nn.AvgPool2d(2), nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    """Two images of different sizes with their labels; a corner of the first has no data."""
    root, draw = tmp_path_factory.mktemp("tiles"), np.random.default_rng(4)
    images, labels = [], []
    for i, shape in enumerate(SIDES):
        pixels_CHW = draw.integers(1, 200, (2, *shape)).astype(np.uint8)
        pixels_CHW[:, :5, :7] = 0
        write_raster(root / f"image{i}.tif", pixels_CHW, nodata=0)
        write_raster(root / f"labels{i}.tif", draw.integers(0, 3, (1, *shape)).astype(np.uint8))
        images.append(str(root / f"image{i}.tif"))
        labels.append(str(root / f"labels{i}.tif"))
    return images, labels


def tiles(files: tuple[list[str], list[str]], grid: int, unet: UNet) -> tiledseg.TileDataset:
    return tiledseg.TileDataset(*files, halo=Halo.of(unet.graph()), grid=grid, normalize=([90, 90], [50, 50]))


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_sums_over_tiles_are_those_of_the_rasters(files: tuple[list[str], list[str]], padding: str) -> None:
    """An ordinary loop, which crops nothing: the loss, and the gradient of each weight."""
    unet = UNet(2, 1, 3, 2, padding, bands=2, classes=3)
    found = []
    for grid in (1, 3):
        network = build_modules(unet, seed=1).double()
        loss = torch.zeros((), dtype=torch.float64)
        for item in DataLoader(tiles(files, grid, unet), batch_size=None):
            logits_BKHW = network(item["image"][None].double())
            assert logits_BKHW.shape[2:] == item["mask"].shape
            each = functional.cross_entropy(logits_BKHW, item["mask"][None], ignore_index=255, reduction="sum")
            each.backward()
            loss += each.detach()
        found.append([loss, *(p.grad for p in network.parameters())])
    for whole, tiled in zip(*found, strict=True):
        torch.testing.assert_close(tiled, whole, rtol=1e-12, atol=1e-11)


def test_an_item_says_where_it_lies(files: tuple[list[str], list[str]]) -> None:
    data = tiles(files, 2, UNet(2, 1, 3, 2, bands=2, classes=3))
    counted = 0
    for index, item in enumerate(data):
        image, tile = data.where(index)
        top, bottom, left, right = item["core"].tolist()
        assert (bottom - top, right - left) == tile.core.shape
        with rasterio.open(files[0][image]) as file:
            assert item["crs"] == file.crs.to_string() == "EPSG:32611"
            transform = rasterio.Affine(*item["transform"].tolist())
            assert (transform.c, transform.f) == PLACE @ (tile.context.col.start, tile.context.row.start)
            window = rasterio.windows.from_bounds(*item["bounds"].tolist(), file.transform)
            pixels_CHW = file.read(window=window)  # as far as the raster reaches
        valid_HW = pixels_CHW[0] != 0
        expected_CHW = np.where(valid_HW, (pixels_CHW.astype(np.float32) - 90) / 50, 0)
        found_CHW = item["image"][:, : pixels_CHW.shape[1], : pixels_CHW.shape[2]]
        torch.testing.assert_close(found_CHW, torch.from_numpy(expected_CHW), rtol=0, atol=0)
        counted += int((item["mask"] != 255).sum())
    assert counted == sum(height * width - 35 for height, width in SIDES)
    plain = tiledseg.TileDataset(files[0], halo=3, grid=(2, 1))
    assert "mask" not in plain[0]
    assert plain[0]["image"].max() > 100


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_share_no_handle(files: tuple[list[str], list[str]], context: str) -> None:
    """Also where this process has read before they start."""
    try:
        multiprocessing.Lock()
    except OSError:
        pytest.skip("torch's workers need semaphores: no /dev/shm that may be written")
    data = tiles(files, 3, UNet(2, 1, 3, 2, bands=2, classes=3))
    expected = [item["image"] for item in data]
    loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context=context)
    assert all(torch.equal(item["image"], image) for item, image in zip(loader, expected, strict=True))
    data.close()
    again = pickle.loads(pickle.dumps(data))
    assert all(torch.equal(item["image"], image) for item, image in zip(again, expected, strict=True))


def test_a_sampler_deals_one_order(files: tuple[list[str], list[str]]) -> None:
    data = tiles(files, 3, UNet(2, 1, 3, 2, bands=2, classes=3))

    def order(size: int, epoch: int = 0) -> list[list[int]]:
        samplers = [tiledseg.TileSampler(data, seed=7, rank=rank, size=size) for rank in range(size)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        assert [len(sampler) for sampler in samplers] == [18 // size] * size
        return [list(sampler) for sampler in samplers]

    (alone,) = order(1)
    assert sorted(alone) == list(range(18))
    assert order(1, epoch=1) != [alone] == order(1)
    for size in (2, 3):
        together = [index for step in zip(*order(size), strict=True) for index in step]
        assert together == alone
    ours = Sampler(tuple(map(range, data.tiles_per_image)), seed=7, tiles_per_step=6).steps(0)
    theirs = [sorted(data.where(i)[0] * 9 + data.where(i)[1].index for i in alone[k : k + 6]) for k in (0, 6, 12)]
    assert theirs == [[image * 9 + tile for image, tile, _ in step] for step in ours]


@pytest.mark.parametrize(
    ("labelled", "options", "words"),
    [
        (False, {"grid": (2, 2, 7)}, "grid is"),
        (False, {"grid": 2.0}, "grid is 2.0"),
        (False, {"halo": 2.5}, "halo is 2.5"),
        (False, {"halo": "3"}, "halo is 3"),
        (False, {"warp": True}, "warp is True, but labels are not given"),
        (False, {"classes": 3}, "classes is 3, but labels are not given"),
        (False, {"images": "/no.tif"}, "does not exist"),
        (True, {"grid": 0}, "tiling.grid is 0"),
        (True, {"grid": None}, "is no tile store"),
        (True, {"halo": -1}, "halo is -1"),
        (True, {"bands": [3]}, "band"),
        (True, {"normalize": ([1], [1])}, "1 means and 1 deviations for 2 bands"),
        (True, {"normalize": ([1, 1], [1, 0])}, "deviations above 0"),
        (True, {"classes": 1}, "1 classes"),
        (True, {"halo": ALIGNED}, "align_corners"),  # its author calls it on a tile, which says no place
    ],
)
def test_what_cannot_be_or_would_be_ignored_is_refused(
    files: tuple[list[str], list[str]], labelled: bool, options: dict[str, Any], words: str
) -> None:
    given = {"images": files[0], "labels": files[1] if labelled else None, "halo": 4, "grid": 2, **options}
    if given["halo"] is ALIGNED:
        given["halo"] = tiledseg.halo(ALIGNED, bands=2)
    with refusal(InputError, words):
        tiledseg.TileDataset(**given)


def test_samplers_of_no_rank_or_seed_are_refused(files: tuple[list[str], list[str]]) -> None:
    data = tiledseg.TileDataset(files[0], halo=4, grid=[2, 3])
    assert [tiling.grid for tiling in data.tilings] == [(2, 3)] * len(files[0])
    for options, words in (
        ({"seed": 1.5}, "whole number"),
        ({"seed": True}, "whole number"),
        ({"rank": 2, "size": 2}, "2 of 2"),
        ({"uneven": "some"}, "uneven is 'some'; give one of refuse, drop, differ"),
        ({"uneven": "drop", "size": 13, "rank": 0}, "uneven drop leaves none"),
    ):
        with pytest.raises(ConfigError, match=words):
            tiledseg.TileSampler(data, **options)


def test_uneven_shares(files: tuple[list[str], list[str]]) -> None:
    data = tiles(files, 3, UNet(2, 1, 3, 2, bands=2, classes=3))
    shares = {u: [list(tiledseg.TileSampler(data, 1, r, 4, u)) for r in range(4)] for u in ("drop", "differ")}
    assert [len(share) for share in shares["drop"]] == [4] * 4
    assert sorted(index for share in shares["differ"] for index in share) == list(range(18))
    with pytest.raises(ConfigError, match="18 tiles are dealt to 4 ranks, 2 of which"):
        tiledseg.TileSampler(data, 1, 0, 4)


class Squeezed(nn.Module):
    """A module whose outputs depend on the mean of the whole image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        y_BCHW: torch.Tensor = self.conv(x_BCHW)
        return y_BCHW * y_BCHW.mean((2, 3), keepdim=True)


@pytest.mark.parametrize(
    "network", [Squeezed(), nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.GroupNorm(2, 8))], ids=["mean", "group"]
)
def test_what_sees_the_whole_image_is_named_and_takes_no_tiles(
    files: tuple[list[str], list[str]], network: nn.Module
) -> None:
    halo = tiledseg.halo(network, bands=2)
    assert halo.whole_image
    with pytest.raises(ConfigError, match=f"'{halo.whole_image[0]}' needs values of the whole image"):
        tiledseg.TileDataset(files[0], files[1], grid=2, halo=halo)
    assert len(tiledseg.TileDataset(files[0], files[1], grid=2, halo=8)) == 8
    assert not tiledseg.halo(nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8)), bands=2).whole_image
