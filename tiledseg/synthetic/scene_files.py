"""The writing of a synthetic scene: image and labels, tiled GeoTIFFs, window by window in bounded memory."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from affine import Affine
from rasterio.crs import CRS

from tiledseg.config.checks import checked
from tiledseg.config.map_formats import BLOCK, Packing
from tiledseg.errors import ConfigError
from tiledseg.geometry.box import Box
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.labels.classes import ClassRecord
from tiledseg.raster.map_writer import RasterWriter, lay_out, pack_layout, publish, raster_output
from tiledseg.raster.mirrored_reader import prefetch
from tiledseg.synthetic.scene import BANDS, CLASS_COLOURS, CLASSES, IGNORED, METRES, NODATA, Scene
from tiledseg.system.outputs import check_outputs
from tiledseg.system.run_lock import claimed

WINDOW = (BLOCK, BLOCK)
"""Window that a thread renders at a time: one block of the file."""

_CRS, _TRANSFORM = "EPSG:32632", Affine(METRES, 0.0, 480000.0, 0.0, -METRES, 5420000.0)
_PACKING = Packing("gtiff", "zstd")
_MAX_SIDE = 2_000_000
_MAX_WORKERS = 256


@checked
def write_scene(
    image: str | Path,
    labels: str | Path,
    size: tuple[int, int],
    bands: int = 4,
    seed: int = 0,
    workers: int = 1,
) -> None:
    """Write the scene of `seed`: `image` (uint8, nodata 0) and `labels` (uint8, nodata 255), size (height, width).

    The bytes depend on seed, size, bands and GDAL's compressors, not on `workers` (threads). Existing files are
    replaced once both new ones are whole. Raises ConfigError for arguments out of range, OutputError or WriteError if a
    file cannot be written.
    """
    if max(size) > _MAX_SIDE or not 1 <= workers <= _MAX_WORKERS:
        raise ConfigError(
            f"size {size[0]} x {size[1]}, workers {workers}; give sides to {_MAX_SIDE}, workers from 1 to "
            f"{_MAX_WORKERS}"
        )
    scene = Scene(seed, size, bands)
    info = RasterInfo("the scene", *size, bands, "uint8", CRS.from_string(_CRS), _TRANSFORM)
    legend = [ClassRecord(name, colour) for name, colour in zip(CLASSES, CLASS_COLOURS, strict=True)]
    outputs = [raster_output("--image", image, info, bands, "uint8", _PACKING)]
    check_outputs([*outputs, raster_output("--labels", labels, info, 1, "uint8", _PACKING, legend=True)])
    with ExitStack() as stack:
        image_layout = lay_out(image, info, bands, "uint8", NODATA, (), BANDS[bands], _PACKING)
        stack.callback(image_layout.discard)
        label_layout = lay_out(labels, info, 1, "uint8", IGNORED, legend, packing=_PACKING)
        stack.callback(label_layout.discard)
        layouts = image_layout, label_layout
        for layout in layouts:
            stack.enter_context(claimed(layout.temporary, layout.path))
        with RasterWriter(image_layout) as image_file, RasterWriter(label_layout) as label_file:

            def write(box: Box) -> None:
                image_CHW, class_HW = scene.render(box)
                image_file.write(box, image_CHW)
                label_file.write(box, class_HW[None])

            for _ in prefetch(Box.of_shape(size).blocks(*WINDOW), write, workers, 2 * workers):
                pass
        for layout in layouts:
            pack_layout(layout, workers)
        for layout in layouts:
            publish(layout)
