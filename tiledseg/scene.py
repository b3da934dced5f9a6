"""`tiledseg scene`: writes a synthetic satellite scene and its labels."""

from __future__ import annotations

from tiledseg.commands.entry import enter

if __name__ == "__main__":
    enter("tiledseg.scene")

import os
from collections.abc import Sequence

from tiledseg.commands.parser import Parser, command
from tiledseg.synthetic.scene import CLASSES, IGNORED, write_scene
from tiledseg.system.console import answer


def _parser() -> Parser:
    names = ", ".join(f"{number} {name}" for number, name in enumerate(CLASSES))
    parser = Parser(
        "tiledseg scene",
        "--size 512 512 --image a.tif --labels b.tif",
        description="Write a synthetic satellite scene (uint8, 0.5 m, nodata 0) and its labels as tiled GeoTIFFs. "
        f"Classes: {names}, {IGNORED} nodata. The same seed gives the same bytes, whatever the number of workers.",
    )
    parser.add_argument("--size", type=int, nargs=2, required=True, metavar=("HEIGHT", "WIDTH"), help="pixels")
    parser.add_argument("--bands", type=int, default=4, help="1 panchromatic, 3 RGB, 4 RGB and near infrared (4)")
    parser.add_argument("--seed", type=int, default=0, help="which landscape (0)")
    parser.add_argument("--image", required=True, help="GeoTIFF to write")
    parser.add_argument("--labels", required=True, help="GeoTIFF of the classes to write")
    cores = min(len(os.sched_getaffinity(0)), 16)
    parser.add_argument("--workers", type=int, default=cores, help="threads (one a core, to 16)")
    return parser


@command
def main(words: Sequence[str]) -> None:
    """Write the scene."""
    options = _parser().parse_args(words)
    height, width = options.size
    write_scene(options.image, options.labels, (height, width), options.bands, options.seed, options.workers)
    answer(f"{options.image} and {options.labels}: {height} x {width} pixels, {options.bands} bands")
