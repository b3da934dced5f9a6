"""The picture of docs/how-to/augment.md: one tile of a synthetic scene, image and labels, under each augmentation.

    python -m benchmarks.augmentation_picture --output docs/augmentation.png

Read as training reads it: by `Dataset.load`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import pyplot
from numpy.typing import NDArray

from tiledseg.architecture.unet import UNet
from tiledseg.config.augmentation import augmentation
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.tiling import make_tiling
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.raster.reading.reader import open_raster
from tiledseg.raster.samples.dataset import Dataset, Sample
from tiledseg.raster.samples.draws import Drawer
from tiledseg.raster.statistics import Normalization
from tiledseg.synthetic.scene_files import write_scene

SIDE, TILE = 512, 5  # px of the scene; the tile's number of 16
SHOWN: list[tuple[str, list[Any], str]] = [
    ("as it is", [], "0"),
    ("reflect", [{"reflect": "col"}], "3"),
    ("turn", ["turn"], "1"),
    ("translate: 40", [{"translate": 40}], "2"),
    ("scale: [0.6, 1.6]", [{"scale": [0.6, 1.6]}], "5"),
    ("rotate: 30", [{"rotate": 30}], "2"),
    ("brightness: 0.8", [{"brightness": 0.8}], "1"),
    ("contrast: 0.6", [{"contrast": 0.6}], "4"),
    ("noise: 0.4", [{"noise": 0.4}], "0"),
    ("drop_bands: 0.4", [{"drop_bands": 0.4}], "2"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="docs/augmentation.png")
    matplotlib.use("Agg")
    with tempfile.TemporaryDirectory() as name:
        samples = [(title, load(Path(name), asked, words)) for title, asked, words in SHOWN]
    figure, axes = pyplot.subplots(2, len(samples), figsize=(1.7 * len(samples), 3.9), squeeze=False)
    for (title, sample), (upper, lower) in zip(samples, axes.T, strict=True):
        assert sample.y_HW is not None
        upper.imshow(colours(sample), interpolation="nearest")
        lower.imshow(np.ma.masked_equal(sample.y_HW, 255), vmin=0, vmax=4, cmap="Set2", interpolation="nearest")
        upper.set_title(title, fontsize=9)
        for each in (upper, lower):
            each.set_xticks([])
            each.set_yticks([])
    axes[0, 0].set_ylabel("core, image")
    axes[1, 0].set_ylabel("core, labels")
    figure.tight_layout()
    figure.savefig(parser.parse_args().output, dpi=100)


def load(folder: Path, asked: list[Any], words: str) -> Sample:
    """The tile that shows the same place in the changed scene. Draws are by `words`, so that the change is seen."""
    image, labels = folder / "image.tif", folder / "labels.tif"
    if not image.exists():
        write_scene(image, labels, (SIDE, SIDE), seed=4)
    tiling = make_tiling((SIDE, SIDE), (4, 4), network_footprint(UNet(3).graph()))
    readers = [open_raster(str(path)) for path in (image, labels)]
    normalization = Normalization((110.0,) * 4, (45.0,) * 4)
    data = Dataset(readers[:1], readers[1:], [tiling], LabelMap.from_config(5), normalization)
    draw = Drawer(augmentation(asked), ((SIDE, SIDE),), 4).draw(words, 0)
    tile = tiling.tiles[TILE]
    if draw is not None and draw.view is not None:
        middle = tile.core.row.start + tile.core.height / 2, tile.core.col.start + tile.core.width / 2
        tile = tiling.tile_at(*draw.view.find(*middle))
    sample = data.load(0, tile, draw=draw)
    data.close()
    return sample


def colours(sample: Sample) -> NDArray[np.float64]:
    """Red, green, blue of the core, 0 to 1; white where there is no data."""
    tile = sample.tile
    core_CHW = sample.x_CHW[:3, *tile.core.relative_to(tile.context).slices]
    core_HWC = np.clip(core_CHW.transpose(1, 2, 0) * 0.25 + 0.45, 0, 1).astype(np.float64)
    core_HWC[~sample.valid_HW] = 1
    return core_HWC


if __name__ == "__main__":
    main()
