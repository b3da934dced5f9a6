"""What an augmentation's draw shows of a whole raster, by numpy: every pixel of it looked up, beyond the raster no
data."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiledseg.raster.samples.draws import Draw, pixel_noise

NODATA = -99


def shown(image_CHW: NDArray, labels_HW: NDArray, draw: Draw | None) -> tuple[NDArray, NDArray]:
    if draw is None:
        return image_CHW, labels_HW
    if draw.view is not None:
        height, width = labels_HW.shape
        rows, cols = draw.view.to_raster @ np.indices(draw.view.shape).astype(float)
        beyond_HW = ~((rows > -0.5) & (rows < height - 0.5) & (cols > -0.5) & (cols < width - 0.5))
        rows, cols = np.clip(rows, 0, height - 1), np.clip(cols, 0, width - 1)
        labels_HW = labels_HW[np.floor(rows + 0.5).astype(int), np.floor(cols + 0.5).astype(int)]
        nodata_HW, total_CHW = np.zeros(rows.shape, bool), np.zeros((len(image_CHW), *rows.shape))
        for row_at, row_share in ((np.floor(rows), 1 - rows % 1), (np.ceil(rows), rows % 1)):
            for col_at, col_share in ((np.floor(cols), 1 - cols % 1), (np.ceil(cols), cols % 1)):
                corner_CHW = image_CHW[:, row_at.astype(int), col_at.astype(int)]
                share_HW = row_share * col_share
                total_CHW += corner_CHW * share_HW
                nodata_HW |= (corner_CHW[0] == NODATA) & (share_HW > 0)
        image_CHW = np.where(nodata_HW | beyond_HW, NODATA, total_CHW)
    if draw.photometry is not None:
        pixels_CHW = image_CHW * np.array(draw.photometry.factors)[:, None, None]
        pixels_CHW += np.array(draw.photometry.offsets)[:, None, None]
        noise_CHW = pixel_noise(draw.photometry.key, len(pixels_CHW), *map(np.arange, labels_HW.shape))
        pixels_CHW += noise_CHW * np.float32(draw.photometry.noise)
        pixels_CHW[~np.array(draw.photometry.kept)] = 0
        image_CHW = np.where(image_CHW[0] == NODATA, NODATA, pixels_CHW)
    return image_CHW, labels_HW
