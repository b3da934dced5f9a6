"""Rasters that are opened by their first read, reads that are refused for a while or for good, and loads ahead."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.small_files import write_raster
from tiledseg.errors import RasterError, ReadError
from tiledseg.geometry.box import Box, Interval
from tiledseg.raster import mirrored_reader
from tiledseg.raster.gdal_reader import GdalReader
from tiledseg.raster.mirrored_reader import prefetch
from tiledseg.raster.reader import KnownReader, open_raster

BOX = Box(Interval(-3, 9), Interval(4, 15))  # beyond the raster on two sides


def write(path: Path, height: int, width: int, **more: Any) -> None:
    pixels_CHW = np.random.default_rng(height).integers(0, 255, (2, height, width), np.uint8)
    write_raster(path, pixels_CHW, nodata=7, **more)


def test_nothing_is_opened_before_the_first_read_which_gives_the_rasters_own_pixels(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    write(path, 10, 12)
    with open_raster(str(path)) as plain:
        expected = plain.read(BOX)
        info = plain.info
    path.rename(tmp_path / "away.tif")
    with KnownReader(info, lambda: open_raster(str(path))) as reader:
        assert reader.info is info
        reader.release()
        with pytest.raises(ReadError, match=r"a\.tif"):
            reader.read(BOX)
        (tmp_path / "away.tif").rename(path)
        for _ in range(2):
            for found, wanted in zip(reader.read(BOX), expected, strict=True):
                np.testing.assert_array_equal(found, wanted)
            reader.release()


def test_a_file_that_has_become_another_is_refused_before_a_pixel_of_it_counts(tmp_path: Path) -> None:
    """Tell another file by its shape or its size. A rank reads one whose node has a folder of its own of that name."""
    path = tmp_path / "a.tif"
    for width, more, words in (
        (13, {}, "was 10 x 12 px, 2 bands of uint8 when the run began and is 10 x 13 px"),
        (12, {"compress": "deflate"}, r"was a file of \d+ bytes when the run began and is a file of \d+ bytes"),
    ):
        write(path, 10, 12)
        with open_raster(str(path)) as plain:
            info = plain.info
        write(path, 10, width, **more)
        with KnownReader(info, lambda: open_raster(str(path))) as reader, pytest.raises(ReadError, match=words):
            reader.read(Box.of_shape((2, 2)))


WINDOW = Box(Interval(20, 44), Interval(3, 30))


PIXELS_CHW = np.random.default_rng(3).integers(0, 256, (2, 48, 48)).astype(np.uint8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(write_raster(tmp_path / "a.tif", PIXELS_CHW, compress="deflate"))


@pytest.mark.parametrize("left", ["a part", "nothing"])
def test_a_file_that_comes_back_is_read(path: Path, monkeypatch: pytest.MonkeyPatch, left: str) -> None:
    """A raster is cut short, or gone, before it is read, and whole before the last try, as on a server that fails
    over."""
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            path.write_bytes(whole)

    monkeypatch.setattr(mirrored_reader, "PAUSES", (0.1, 0.5, 2.0))
    monkeypatch.setattr(mirrored_reader, "time", SimpleNamespace(sleep=pause))
    with GdalReader(str(path)) as reader:
        whole = path.read_bytes()
        path.write_bytes(whole[:500]) if left == "a part" else path.unlink()
        reader.release()
        found_CHW, valid_HW = reader.read(WINDOW)
    assert np.array_equal(found_CHW, PIXELS_CHW[:, 20:44, 3:30])
    assert valid_HW.all()
    assert pauses == [0.1, 0.5, 2.0]


def test_a_file_that_stays_cut_is_named_after_so_many_tries(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its window, what was said, and after so long."""
    monkeypatch.setattr(mirrored_reader, "PAUSES", (0.05, 0.1))
    began = time.monotonic()
    with GdalReader(str(path)) as reader:
        path.write_bytes(path.read_bytes()[:500])
        with pytest.raises(RasterError, match=r"^cannot read rows 20:44, columns 3:30 of .*; tried 3 times: the file"):
            reader.read(WINDOW)
        assert time.monotonic() - began >= 0.15
        tries: list[int] = []

        def fail(reader: GdalReader, box: Box) -> Any:
            tries.append(1)
            raise ValueError("nonsense")

        monkeypatch.setattr(GdalReader, "_read_inside", fail)
        with pytest.raises(RasterError, match="nonsense"):  # of itself: not tried again
            reader.read(WINDOW)
        assert len(tries) == 1


def alive() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@pytest.mark.parametrize(("threads", "depth"), [(0, 1), (1, 2), (3, 1), (3, 5)])
def test_keeps_the_order_whatever_the_loads_take(threads: int, depth: int) -> None:
    def load(item: int) -> int:
        time.sleep(0.002 * (item % 3))
        return item * item

    assert list(prefetch(range(20), load, threads, depth)) == [i * i for i in range(20)]
    assert not alive()


def test_draws_no_more_than_depth_ahead_from_endless_items() -> None:
    drawn = []

    def endless() -> Iterator[int]:
        while True:
            drawn.append(len(drawn))
            yield drawn[-1]

    loaded = prefetch(endless(), lambda item: item, threads=2, depth=3)
    assert [next(loaded) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert len(drawn) == 5 + 3 - 1
    loaded.close()
    assert not alive()
    meet = threading.Barrier(2, timeout=100)  # loads overlap
    assert list(prefetch(range(4), lambda item: meet.wait() < 2, threads=2, depth=2)) == [True] * 4


def test_an_error_surfaces_at_its_place() -> None:
    """An error of a load, or of the items, comes behind the loads before it."""

    def load(item: int) -> int:
        if item == 3:
            raise ValueError("item 3")
        return item

    def items() -> Iterator[int]:
        yield from range(3)
        raise ValueError("item 3")

    for drawn, loads in ((range(10), load), (items(), lambda item: item)):
        loaded = prefetch(drawn, loads, threads=2, depth=4)
        assert [next(loaded) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="item 3"):
            next(loaded)
        assert not alive()
        assert list(loaded) == []


def test_closing_early_drops_what_has_not_begun_and_ends_the_threads() -> None:
    """All of the fifty that are under way would take five seconds. An iterator that is dropped is closed."""
    begun = []

    def load(item: int) -> int:
        begun.append(item)
        time.sleep(0.1)
        return item

    loaded = prefetch(range(100), load, threads=1, depth=50)
    assert next(loaded) == 0
    loaded.close()
    assert not alive()
    assert len(begun) < 50
    loaded = prefetch(range(100), load, threads=1, depth=50)
    next(loaded)
    del loaded
    assert not alive()
