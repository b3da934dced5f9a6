from __future__ import annotations

import pytest

from tiledseg.architecture.unet import UNet
from tiledseg.errors import ConfigError
from tiledseg.planning.question import Question
from tiledseg.units.quantities import parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("16GiB", 16 * 2**30),
        ("16 GiB", 16 * 2**30),
        ("16GB", 16 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5TiB", 3 * 2**39),
        ("2kB", 2000),
        ("2KiB", 2048),
        ("1234567", 1234567),
        ("12345B", 12345),
    ],
)
def test_sizes_of_memory(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "16XB", "16G", "-1GiB", "16 GiB free", "1e9", "16iB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no number of bytes; give 16GiB"):
        parse_bytes(text)


def test_an_automatic_grid_needs_memory_and_stride_1() -> None:
    with pytest.raises(ConfigError, match=r"--grid is auto.*--gpu-memory"):
        Question((100, 100), UNet())
    with pytest.raises(ConfigError, match=r"--grid is auto.*--stride 2"):
        Question((100, 100), UNet(), stride=2, gpu_memory=1)
