"""What the device makes of stored values has the bits of what NumPy makes of them, for every dtype and change."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tiledseg.execution.input.carrying import bytes_on_the_way, labels, network_input, sender
from tiledseg.geometry.box import Box, Interval
from tiledseg.geometry.halo import Footprint
from tiledseg.geometry.tiling import make_tiling
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.raster.prefetch import prefetch
from tiledseg.raster.samples.dataset import Dataset, Sample
from tiledseg.raster.samples.draws import Draw
from tiledseg.raster.samples.normalizer import Normalizer, Rule
from tiledseg.raster.samples.photometry import Photometry
from tiledseg.raster.samples.views import Line, View
from tiledseg.raster.statistics import Normalization

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
SHAPE = (60, 70)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU on this machine")
    return torch.device(request.param)


class Held(RasterReader):
    """A raster in memory."""

    def __init__(self, pixels_CHW: NDArray, valid_HW: NDArray[np.bool_]) -> None:
        self._held = pixels_CHW, valid_HW
        self.info = RasterInfo("held", *pixels_CHW.shape[1:], len(pixels_CHW), str(pixels_CHW.dtype))

    def _read_inside(self, box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        return self._held[0][:, *box.slices].copy(), self._held[1][box.slices].copy()

    def release(self) -> None: ...

    def close(self) -> None: ...


def held(dtype: str, bands: int, holes: bool) -> Held:
    draw = np.random.default_rng(bands)
    ends = np.iinfo(dtype)
    pixels_CHW = draw.integers(ends.min, ends.max, (bands, *SHAPE), dtype, endpoint=True)
    return Held(pixels_CHW, draw.random(SHAPE) > 0.3 if holes else np.ones(SHAPE, np.bool_))


def scale(bands: int) -> Normalization:
    draw = np.random.default_rng(5)
    return Normalization(tuple(draw.normal(90, 40, bands)), tuple(draw.uniform(0.1, 60, bands)))


CHANGES = {
    "none": lambda bands: None,
    "values": lambda bands: Photometry(
        (1.3,) * bands, tuple(0.1 * k for k in range(bands)), (True, *(False,) * (bands - 1))
    ),
    "noise": lambda bands: Photometry((0.7,) * bands, (0.0,) * bands, (True,) * bands, 0.3, 2**63 + 2**31 + 12345),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "int8"])
def test_the_bits_are_numpy_s(dtype: str, holes: bool, change: str, device: torch.device) -> None:
    for bands, out in ((1, "float32"), (3, "float32"), (4, "float64")):
        reader = held(dtype, bands, holes)
        photometry = CHANGES[change](bands)
        for box in (Box(Interval(3, 41), Interval(0, 70)), Box(Interval(-7, 66), Interval(-3, 74))):
            pixels_CHW, valid_HW = reader.read(box)
            rule = Rule(Normalizer(scale(bands), dtype, out), valid_HW if holes else None, box, reader.info, photometry)
            assert rule.normalize.leaves_stored(pixels_CHW)
            sample = Sample(0, None, pixels_CHW, None, valid_HW, rule=rule)  # type: ignore[arg-type]
            found_BCHW = network_input(sample, device)
            assert found_BCHW.is_contiguous(memory_format=torch.channels_last)
            assert found_BCHW.cpu().numpy()[0].tobytes() == sample.x_CHW.tobytes()


def test_samples_that_threads_have_sent_arrive_as_they_were(device: torch.device) -> None:
    """More of them than pinned buffers, each taken while others are on their way."""
    send, rule = sender(device), Normalizer(scale(4), "uint8", "float32")
    drawn = []
    for number in range(24):
        pixels_CHW = np.random.default_rng(number).integers(0, 256, (4, 300, 400), np.uint8)
        box, valid_HW = Box.of_shape((300, 400)), pixels_CHW[0] > 9
        info = RasterInfo("drawn", 300, 400, 4, "uint8")
        classes_HW = pixels_CHW[1] % 5
        drawn.append(Sample(0, None, pixels_CHW, classes_HW, valid_HW, rule=Rule(rule, valid_HW, box, info)))  # type: ignore[arg-type]
    found = list(prefetch(drawn, send, threads=3, depth=4))
    for sample, there in zip(drawn, found, strict=True):
        x_BCHW, y_HW = network_input(there, device), labels(there, device)
        assert x_BCHW.device.type == device.type
        assert x_BCHW.cpu().numpy()[0].tobytes() == sample.x_CHW.tobytes()
        assert (y_HW.cpu().numpy() == sample.y_HW).all()


@pytest.mark.parametrize("dtype", ["float32", "int32", "uint32", "float64"])
def test_wide_values_are_normalised_on_the_host(dtype: str) -> None:
    normalize = Normalizer(scale(2), dtype, "float32")
    assert not normalize.leaves_stored(np.zeros((2, 3, 3), dtype))


def test_values_that_a_tiny_deviation_makes_infinite_are_normalised_on_the_host_which_says_so() -> None:
    tiny = Normalization((0.0,), (1e-37,))
    assert not Normalizer(tiny, "uint16", "float32").leaves_stored(np.zeros((1, 3, 3), np.uint16))
    assert Normalizer(tiny, "uint16", "float64").leaves_stored(np.zeros((1, 3, 3), np.uint16))


@pytest.mark.parametrize(("dtype", "before", "after"), [("uint8", 17, 5), ("uint16", 17, 9), ("float32", 17, 17)])
def test_bytes_of_a_tile(dtype: str, before: int, after: int) -> None:
    """Four bands and a class: of each pixel 17 bytes as float32. A mask is one more, where a pixel is not valid."""
    for holes in (False, True):
        values = held("uint8", 4, holes)
        image = Held(values._held[0].astype(dtype), values._held[1])
        classes = Held(np.zeros((1, *SHAPE), np.uint8), np.ones(SHAPE, np.bool_))
        tiling = make_tiling(SHAPE, (1, 1), Footprint(1, 0, 0))
        data = Dataset([image], [classes], [tiling], LabelMap.from_config(2, 255), scale(4))
        sample = data.load(0, 0)
        assert (labels(sample, CPU).numpy() == sample.y_HW).all()
        masked = int(holes and dtype != "float32")
        area = SHAPE[0] * SHAPE[1]
        assert bytes_on_the_way(sample) == (after + masked) * area
        assert sample.x_CHW.nbytes + area == before * area


def test_a_resized_view_is_interpolated_and_travels_as_the_input() -> None:
    reader = held("uint8", 3, True)
    tiling = make_tiling(SHAPE, (1, 1), Footprint(1, 0, 0))
    data = Dataset([reader], None, [tiling], None, scale(3))
    noise = CHANGES["noise"](3)
    for view, stored in (
        (View(SHAPE, Line(59, -1), Line(0, 1)), True),
        (View(SHAPE, Line(0.2, 0.9), Line(0, 1)), False),
    ):
        sample = data.load(0, 0, draw=Draw(view, noise))
        assert (sample.rule is not None) == stored
        assert network_input(sample, CPU).numpy()[0].tobytes() == sample.x_CHW.tobytes()
