"""Pictures as data URLs: photographs as JPEG, drawings of few colours as PNG with a palette. Needs Pillow."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tiledseg.reporting.page import Picture

_MOST_COLOURS = 256


def photograph(picture_HWC: NDArray[np.uint8]) -> Picture:
    """Red, green, blue as JPEG."""
    from PIL import Image

    data = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(picture_HWC)).save(data, "JPEG", quality=90)
    return _picture("image/jpeg", data.getvalue(), picture_HWC)


def drawing(picture_HWC: NDArray[np.uint8]) -> Picture:
    """Red, green, blue as PNG, no colour changed; a picture of more than 256 colours is a photograph."""
    from PIL import Image

    red, green, blue = np.moveaxis(picture_HWC.astype(np.uint32), -1, 0)
    colours, indices = np.unique(red << 16 | green << 8 | blue, return_inverse=True)
    if len(colours) > _MOST_COLOURS:
        return photograph(picture_HWC)
    image = Image.fromarray(indices.reshape(picture_HWC.shape[:2]).astype(np.uint8), "P")
    image.putpalette([int(colour) >> shift & 255 for colour in colours for shift in (16, 8, 0)])
    data = io.BytesIO()
    image.save(data, "PNG", optimize=True)
    return _picture("image/png", data.getvalue(), picture_HWC)


def read_picture(path: Path) -> NDArray[np.uint8]:
    """Red, green, blue (H, W, 3) of an image file. Raises OSError where it is none."""
    from PIL import Image

    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def _picture(kind: str, data: bytes, picture_HWC: NDArray[np.uint8]) -> Picture:
    url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return Picture(url, picture_HWC.shape[1], picture_HWC.shape[0])
